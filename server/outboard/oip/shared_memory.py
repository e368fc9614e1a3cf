"""The system shared memory extension: regions of /dev/shm that a client on this machine has named.

A region is read with `preadv` straight into frame memory and written with `pwrite`, never mapped: a client that truncates its region
while it is mapped would end the server by SIGBUS, and what it changes while a batch runs would change the batch.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from functools import lru_cache
from typing import Any

from outboard.problems import Problem

FOLDER = "/dev/shm"
MAX_REGIONS = 1024
_KEY = re.compile(r"/?([^/\0]{1,250})\Z")
CUDA_REFUSED = (
    "CUDA shared memory is not supported: the server's front process touches no GPU (a lost one would take it along); "
    "use system shared memory or the binary tensor extension"
)


class Region:
    """A part of a shared memory object, open for as long as somebody refers to it."""

    def __init__(self, name: str, key: str, offset: int, nbytes: int):
        self._fd = -1
        match = _KEY.match(key)
        if not match or match[1] in (".", ".."):
            raise Problem("bad_option", f"shared memory key {key[:80]!r}, expected a name as shm_open takes it, such as '/my_region'")
        if offset < 0 or nbytes <= 0:
            raise Problem("bad_option", f"region {name!r}: offset {offset} and byte_size {nbytes}, expected 0 or more and above 0")
        self.name, self.key, self.offset, self.nbytes = name, key, offset, nbytes
        try:
            self._fd = os.open(f"{FOLDER}/{match[1]}", os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(self._fd)
        except OSError as e:
            raise Problem(
                "bad_option", f"shared memory {key[:80]!r} cannot be opened: {e.strerror}; create it before it is registered"
            ) from e
        if not stat.S_ISREG(found.st_mode):
            raise Problem("bad_option", f"shared memory {key[:80]!r} is no shared memory object")
        if found.st_size < offset + nbytes:
            raise Problem(
                "bad_option", f"region {name!r} would end at byte {offset + nbytes}, shared memory {key[:80]!r} has {found.st_size}"
            )

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def status(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.nbytes}

    def read_into(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            n = os.preadv(self._fd, [target[done:]], self.offset + offset + done)
            if n == 0:
                raise Problem("bad_input", f"shared memory region {self.name!r} ends before its registered size: it was truncated")
            done += n

    def write(self, data: bytes | memoryview, offset: int) -> None:
        if os.fstat(self._fd).st_size < self.offset + offset + len(data):  # writing would make it longer
            raise Problem("bad_input", f"shared memory region {self.name!r} ends before its registered size: it was truncated")
        os.pwrite(self._fd, data, self.offset + offset)


class Span:
    """Bytes of a region that one tensor takes or gets: a request's `Source` and `Target`."""

    def __init__(self, region: Region, offset: int, nbytes: int):
        self._region, self._offset, self.nbytes = region, offset, nbytes

    def read_into(self, target: memoryview, at: int = 0) -> None:
        self._region.read_into(target, self._offset + at)

    def write(self, data: bytes | memoryview) -> None:
        if len(data) > self.nbytes:
            raise Problem(
                "bad_input", f"the output has {len(data)} bytes, its place in shared memory region {self._region.name!r} has {self.nbytes}"
            )
        self._region.write(data, self._offset)

    def parameters(self, nbytes: int) -> dict[str, Any]:
        said: dict[str, Any] = {"shared_memory_region": self._region.name, "shared_memory_byte_size": nbytes}
        return said | {"shared_memory_offset": self._offset} if self._offset else said


class Regions:
    """Every registered region, by name."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._regions: dict[str, Region] = {}

    def check(self, peer: str) -> None:
        """Raises Problem shared_memory_refused unless `peer`, an IP address, may use shared memory."""
        if not self.enabled:
            raise Problem(
                "shared_memory_refused", "system shared memory is off; set [oip] shared_memory = true where every local user is trusted"
            )
        if not is_loopback(peer):
            raise Problem(
                "shared_memory_refused", "system shared memory is for clients on this machine that connect through 127.0.0.1 or ::1"
            )

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        if name in self._regions:
            raise Problem("bad_option", f"shared memory region {name[:80]!r} is registered already; unregister it first")
        if not name or len(self._regions) >= MAX_REGIONS:
            raise Problem("bad_option", f"a region needs a name, and at most {MAX_REGIONS} are kept")
        self._regions[name] = Region(name, key, offset, nbytes)

    def unregister(self, name: str = "") -> None:
        """One, or all; a name that is not registered is no error, as with Triton."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        if name and name not in self._regions:
            raise Problem("not_found", f"no shared memory region {name[:80]!r} is registered")
        return [region.status() for region in self._regions.values() if not name or region.name == name]

    def span(self, parameters: dict[str, Any], peer: str) -> Span:
        """Of a tensor's parameters `shared_memory_region`, `_offset`, `_byte_size`."""
        self.check(peer)
        name = parameters["shared_memory_region"]
        offset, nbytes = parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size")
        region = self._regions.get(name) if isinstance(name, str) else None
        if region is None:
            raise Problem("bad_input", f"no shared memory region {str(name)[:80]!r} is registered")
        if type(offset) is not int or type(nbytes) is not int or offset < 0 or nbytes < 0 or offset + nbytes > region.nbytes:
            raise Problem(
                "bad_input",
                f"shared memory region {name!r} has {region.nbytes} bytes: offset {offset!r} and byte size {nbytes!r} lie outside",
            )
        return Span(region, offset, nbytes)


@lru_cache(1024)  # asked for each tensor, of few clients; parsing an address takes 20 us
def is_loopback(peer: str) -> bool:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
