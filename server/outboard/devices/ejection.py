"""After the worker has let go of a device: who else holds it, and what root must run before the cable may be pulled.

The kernel's removal blocks until every user of the device has closed it, monitors included, so the holders are named. Detaching
needs root and is never done by the server: the exact commands are given.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outboard.devices import probe


def report(kind: str, uuid: str, released: bool) -> dict[str, Any]:
    """{"safe", "say", "holders": [{"pid", "command"}], "commands": […]} for an ejected device. Reads /proc: call it in a thread."""
    if not released:
        say = "its worker does not end: it is stuck in the kernel. The cable may be pulled, but the driver will need a reload afterwards"
        return {"safe": False, "say": say, "holders": [], "commands": []}
    if kind == "sim":
        return {"safe": True, "say": "safe to unplug (simulated)", "holders": [], "commands": []}
    pci = next((gpu["pci"] for gpu in probe.gpus() if gpu["uuid"] == uuid), None)
    if pci is None:
        return {"safe": True, "say": "safe to unplug: the driver does not show the device any more", "holders": [], "commands": []}
    found = holders()
    commands = [f"nvidia-smi drain -p {pci} -m 1", f"echo 1 > /sys/bus/pci/devices/{pci}/remove"]
    if found:
        say = "not yet safe to unplug: end the processes above, then run the commands as root"
    else:
        say = "nobody holds the device: safe to unplug once the commands above have run as root"
    return {"safe": False, "say": say, "holders": found, "commands": commands}


def holders(proc: Path = Path("/proc"), prefix: str = "/dev/nvidia") -> list[dict[str, Any]]:
    """Processes that have a device file of the driver open. Without root only one's own are seen."""
    found = []
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            links = [os.readlink(link) for link in (folder / "fd").iterdir()]
            command = (folder / "comm").read_text().strip()
        except OSError:
            continue
        if any(link.startswith(prefix) for link in links):
            found.append({"pid": int(folder.name), "command": command})
    return found
