"""Where the doctor looks. Everything that it reads hangs on this object, so a tree written by hand is as good as a machine."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Commands that print the kernel log of this boot; the first that prints anything is believed.
LOGS = (("journalctl", "--dmesg", "--boot", "--no-pager", "--output=short-iso"), ("dmesg",))
#: Prints what NVML says as JSON.
NVML = (sys.executable, "-m", "outboard.worker.health")


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, or a tree that looks like one."""

    cache: Path  #: the server's cache folder
    spool: Path | None = None  #: the station's, where it has one
    requests: int = 1024  #: that the server takes at once
    root: Path = Path("/")  #: of /sys, /proc, /dev and /etc
    logs: Sequence[Sequence[str]] = LOGS
    nvml: Sequence[str] = NVML
    nvml_limit: float = 15.0  #: seconds after which it counts as hung
    libraries: Sequence[str] | None = None  #: where Python distributions are looked for; None: where this interpreter finds them
    free: Callable[[Path], int] = free_bytes

    def path(self, name: str) -> Path:
        """`name` is absolute: /sys/bus/pci/devices."""
        return self.root / name.lstrip("/")

    @property
    def pci(self) -> Path:
        return self.path("/sys/bus/pci/devices")


def read(path: Path) -> str:
    """A small file's text without blanks around it; "" where it cannot be read: attributes come and go with devices and kernels."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
