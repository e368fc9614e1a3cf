"""What this machine lets us use: cores and memory, within affinity and cgroup limits."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
#: glibc's mallopt(3): parameters, and the largest values that its own rule for them reaches.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 << 20


def cores() -> int:
    """Cores that this process may use: the lesser of its affinity and its cgroup's quota (rounded up), at least 1."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        if quota != "max":
            allowed = min(allowed, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, allowed)


def memory() -> int:
    """Bytes of memory that this process may use: the lesser of the machine's and its cgroup's limit."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            total = min(total, int(limit))
    except (OSError, ValueError):
        pass
    return total


def frame_memory(setting: int) -> int:
    """Bytes of the slab: the setting, else the lesser of 2 GiB and an eighth of the memory."""
    return setting or min(2 << 30, memory() // 8)


def keep_freed_memory() -> None:
    """Have malloc give buffers of megabytes from memory that the process holds: up to 64 MiB of it stay when they are freed.

    By itself glibc comes to this only as larger buffers are freed. Until then each message of some megabytes is new memory in all of its
    copies, and its pages cost more than what is done with it (5.8 MB of a bundle read and unmasked: 14 ms, so 2).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another libc
        mallopt(_MMAP_THRESHOLD, _MOST_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, 2 * _MOST_MMAP_THRESHOLD)
