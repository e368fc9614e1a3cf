"""Shared memory that one side owns and writes, and the other maps read-only.

A slab is a memfd: it has no name, so nothing is left behind after kill -9, and it does not live in a container's 64 MiB
/dev/shm. Pages are only backed once touched.
"""

from __future__ import annotations

import mmap
import os
from math import prod

import ml_dtypes  # noqa: F401  (its import is what makes numpy know "bfloat16")
import numpy as np


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
    nbytes = kind.itemsize * prod(shape)
    if offset < 0 or nbytes < 0 or offset + nbytes > memory.nbytes:
        raise ValueError(f"{shape} {dtype} at {offset} leaves a memory of {memory.nbytes} bytes")
    return memory[offset : offset + nbytes].view(kind).reshape(shape)
