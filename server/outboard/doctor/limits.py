"""What the system allows the server: open files, locked memory, disk."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from outboard.doctor.facts import Facts
from outboard.doctor.findings import Check, Finding
from outboard.doctor.machine import read

FILES = Check(
    "few-open-files",
    "warning",
    "This process may open fewer files than the server needs for the requests that it takes at once.",
    "Each connection is an open file. When they run out, new connections are refused.",
    ("ulimit -n {needed}   # or LimitNOFILE={needed} in the systemd unit, nofile in docker-compose.yml",),
)
LOCKED = Check(
    "little-locked-memory",
    "note",
    "This process may lock very little memory.",
    "Some drivers count the memory that is pinned for copies to the card as locked. NVIDIA's own does not need it; where pinning fails "
    "nevertheless, copies go through unpinned memory and are slower.",
    ("ulimit -l unlimited   # or LimitMEMLOCK=infinity in the systemd unit, memlock in docker-compose.yml",),
)
CACHE = Check(
    "cache-not-writable",
    "warning",
    "The cache folder cannot be written.",
    "Compiled models and measurements are not kept: each start compiles and measures again, which takes minutes instead of seconds.",
    ("mkdir --parents {folder} && sudo chown $USER {folder}", "Or another one: OUTBOARD_CACHE=/path outboard serve"),
)
DISK = Check(
    "disk-nearly-full",
    "warning",
    "Little disk space is left for the cache or the spool.",
    "Compiled models take hundreds of megabytes each. A station's spool fills at the rate of its camera while the uplink is down, and what "
    "does not fit is lost.",
    ("df -h {folder}   # then delete, or choose another folder",),
)
CHECKS = (FILES, LOCKED, CACHE, DISK)

#: Open files beside one for each request: libraries, models, workers' sockets.
_OTHERS = 512
_LOCKED = 1 << 20
_CACHE_FREE = 2 << 30
_SPOOL_FREE = 10 << 30  #: the spool's default limit


def look(facts: Facts) -> Iterator[Finding]:
    machine = facts.machine
    text = read(machine.path("/proc/self/limits"))
    needed = machine.requests + _OTHERS
    if (files := _soft(text, "Max open files")) is not None and files < needed:
        yield FILES.found("open files", f"{files} files; {needed} are needed for {machine.requests} requests at once.", needed=needed)
    if facts.cards and (locked := _soft(text, "Max locked memory")) is not None and locked < _LOCKED:
        yield LOCKED.found("locked memory", f"{locked >> 10} KiB may be locked.")
    parent = _nearest(machine.cache)
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        yield CACHE.found(str(machine.cache), f"{parent} is not a folder that this user can write.", folder=machine.cache)
    else:
        yield from _space(facts, machine.cache, parent, _CACHE_FREE)
    if machine.spool is not None:
        yield from _space(facts, machine.spool, _nearest(machine.spool), _SPOOL_FREE)


def _space(facts: Facts, folder: Path, existing: Path, needed: int) -> Iterator[Finding]:
    free = facts.machine.free(existing)
    if free < needed:
        yield DISK.found(str(folder), f"{free / 2**30:.1f} GiB are free, {needed >> 30} GiB are sensible.", folder=existing)


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _soft(limits: str, name: str) -> int | None:
    """A soft limit of /proc/self/limits; None: there is none, or it is not known."""
    match = re.search(rf"^{name}\s+(\d+)\s", limits, re.M)
    return int(match[1]) if match else None
