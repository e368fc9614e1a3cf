"""Which NVIDIA GPUs the driver knows: run as a process of its own, since files of a lost GPU's driver can hang their reader.

`python -m outboard.devices.probe` prints a JSON list. It reads /proc and /sys only: no CUDA context, no NVML, nothing that
would hold the device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
PCI = Path("/sys/bus/pci/devices")


def gpus(driver: Path = DRIVER, pci: Path = PCI) -> list[dict[str, object]]:
    """One dict for each GPU: uuid, name, pci (address), external and the rule that says so; in order of PCI address."""
    found: list[dict[str, object]] = []
    for folder in sorted(driver.iterdir()) if driver.is_dir() else []:
        facts = {}
        for line in (folder / "information").read_text().splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
        uuid = facts.get("GPU UUID", "")
        if not uuid.startswith("GPU-") or "?" in uuid:
            continue  # the driver has it, but cannot talk to it
        external, rule = is_external(folder.name, pci)
        found.append({"uuid": uuid, "name": facts.get("Model", "NVIDIA GPU"), "pci": folder.name, "external": external, "rule": rule})
    return found


def is_external(address: str, pci: Path = PCI) -> tuple[bool, str]:
    """Whether a PCI device sits outside the box. The kernel's `removable` is set only below ports that the firmware marks as
    external-facing, so OCuLink reads as internal; a Thunderbolt controller among the ancestors says it otherwise."""
    device = pci / address
    try:
        if (device / "removable").read_text().strip() == "removable":
            return True, "sysfs removable"
    except OSError:
        pass
    for ancestor in device.resolve().parents:
        if any(ancestor.glob("domain[0-9]*")):
            return True, "a Thunderbolt domain above it"
    return False, ""


if __name__ == "__main__":
    json.dump(gpus(), sys.stdout)
