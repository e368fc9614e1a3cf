"""The kernel log, and what NVIDIA's driver says in it."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict

from outboard.doctor.machine import Machine

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
#: Some drivers say it over three lines: "The NVIDIA GPU 0000:b3:00.0", "(PCI ID: …) installed in this system has", "fallen off the bus …".
_FALLEN = re.compile(r"The NVIDIA GPU ([0-9a-fA-F:.]+)(?:.*\n){1,3}?.*fallen off the bus")
#: Seconds for a command that prints the log.
LIMIT = 20.0


def read_log(machine: Machine) -> str | None:
    """The kernel's messages of this boot; None where none of the commands may read them."""
    for command in machine.logs:
        try:
            done = subprocess.run(command, capture_output=True, timeout=LIMIT, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.decode("utf-8", "replace")
    return None


def xids(log: str) -> dict[tuple[str, int], list[str]]:
    """(PCI address without function, number) -> the lines, in order."""
    seen: dict[tuple[str, int], list[str]] = defaultdict(list)
    for line in log.splitlines():
        if match := _XID.search(line):
            seen[match[1].lower(), int(match[2])].append(line.strip())
    return dict(seen)


def fallen(log: str) -> list[str]:
    """PCI addresses of cards that were not responding when the driver started."""
    return sorted({match[1].lower() for match in _FALLEN.finditer(log)})
