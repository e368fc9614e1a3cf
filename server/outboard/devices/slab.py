"""Shared memory that one side owns and writes, and the other maps read-only.

A slab is a memfd: it has no name, so nothing is left behind after kill -9, and it does not live in a container's 64 MiB
/dev/shm. Pages are only backed once touched, and the allocator always gives the lowest free place, so the memory really used
follows the peak of what was in flight, not the slab's size.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, insort

import numpy as np

PAGE = 4096


class OutOfSlab(MemoryError):
    """No free stretch of this size."""


class Allocator:
    """First-fit allocation of byte ranges in [0, size), aligned to `align`; adjacent free ranges are merged.

    `used` is the sum of the allocated (rounded) lengths: it returns to 0 when everything was freed.
    """

    def __init__(self, size: int, align: int = PAGE):
        self.size = size // align * align
        self.align = align
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, self.size)]  # (offset, length), sorted
        self._held: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        """The offset of a free stretch of `nbytes`. Raises OutOfSlab."""
        assert nbytes > 0, nbytes
        need = -(-nbytes // self.align) * self.align
        for i, (offset, length) in enumerate(self._free):
            if length >= need:
                if length == need:
                    del self._free[i]
                else:
                    self._free[i] = (offset + need, length - need)
                self._held[offset] = need
                self.used += need
                return offset
        raise OutOfSlab(f"{nbytes} bytes wanted, {self.size - self.used} free of {self.size}")

    def free(self, offset: int) -> None:
        length = self._held.pop(offset)
        self.used -= length
        i = bisect_left(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + length:
            length += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == offset:
            before = self._free.pop(i - 1)
            offset, length = before[0], before[1] + length
        insort(self._free, (offset, length))


class Slab:
    """A memfd of `size` bytes, mapped writable by its owner. Hand `readonly_fd()` to the other side."""

    def __init__(self, size: int, name: str = "outboard"):
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self.size = size
        self.map = mmap.mmap(self.fd, size)
        self.bytes = np.frombuffer(self.map, np.uint8)

    def readonly_fd(self) -> int:
        """A new descriptor of the same memory that cannot be mapped writable; the caller closes it."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def view(self, offset: int, shape: tuple[int, ...], dtype: str = "uint8") -> np.ndarray:
        return view(self.bytes, offset, shape, dtype)

    def close(self) -> None:
        # Arrays handed out may outlive the slab; the mapping then lives as long as they do.
        os.close(self.fd)


def attach(fd: int, size: int, writable: bool = False) -> np.ndarray:
    """Map another process's slab: a uint8 array of `size` bytes (read-only unless asked). Closes `fd`."""
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    array = np.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED, prot), np.uint8)
    os.close(fd)
    return array


def view(memory: np.ndarray, offset: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A typed array of `shape` at `offset` bytes, no copy. Raises ValueError where it would leave the memory."""
    kind = np.dtype(dtype)
    nbytes = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    if offset < 0 or nbytes < 0 or offset + nbytes > memory.nbytes:
        raise ValueError(f"{shape} {dtype} at {offset} leaves a memory of {memory.nbytes} bytes")
    return memory[offset : offset + nbytes].view(kind).reshape(shape)
