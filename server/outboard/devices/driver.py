"""Which NVIDIA driver is loaded, without asking it: a lost GPU may hang whatever asks."""

from __future__ import annotations

from pathlib import Path

LOADED = Path("/proc/driver/nvidia/version")


def version(loaded: Path = LOADED) -> tuple[int, ...]:
    """ "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build" -> (595, 45, 4); () where there is none."""
    try:
        text = loaded.read_text("utf-8", "replace")
    except OSError:
        return ()
    for word in text.split():
        parts = word.split(".")
        if len(parts) in (2, 3) and all(part.isdecimal() for part in parts):
            return tuple(map(int, parts))
    return ()


def as_text(version: tuple[int, ...]) -> str:
    """As NVIDIA writes it: 595.45.04."""
    return ".".join(str(part) if i == 0 else f"{part:02d}" for i, part in enumerate(version))
