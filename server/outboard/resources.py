"""What this machine lets us use: cores and memory, within affinity and cgroup limits."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


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
