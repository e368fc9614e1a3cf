"""How a tensor model's inputs lie in a row of the slab, and how strings do.

A row holds one array for each input, without the batch axis. The only input of a model begins where the row does and rows follow each
other without a gap, so that rows of one request are one array and nothing is gathered; several inputs begin at multiples of ALIGN.

Strings (dtype "bytes") are packed as the Open Inference Protocol packs them on the wire: each element is its length (uint32,
little-endian) and its bytes. A row's place for them is rounded up, so that rows of similar length share a batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from outboard.devices.protocol import Slot

ALIGN = 64
#: numpy's name of what it has no dtype for.
BYTES = "bytes"
#: numpy's name, once ml_dtypes is imported.
BFLOAT16 = "bfloat16"

_LENGTH = struct.Struct("<I")


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def lay_out(inputs: Sequence[tuple[str, str, tuple[int, ...], int]]) -> tuple[tuple[Slot, ...], int]:
    """The slots of a row and its size in bytes. `inputs`: (name, dtype, shape without the batch axis, bytes)."""
    slots, at = [], 0
    for name, dtype, shape, nbytes in inputs:
        slots.append(Slot(name, dtype, shape, at, nbytes))
        at += nbytes if len(inputs) == 1 else aligned(nbytes)
    return tuple(slots), max(at, 1)


def room_for(nbytes: int) -> int:
    """The place that a row gets for `nbytes` of packed strings: the next power of two."""
    return max(ALIGN, 1 << (nbytes - 1).bit_length()) if nbytes else ALIGN


def pack(strings: Iterable[bytes]) -> bytes:
    """Each string behind its length."""
    return b"".join([piece for s in strings for piece in (_LENGTH.pack(len(s)), s)])


def spans(packed: Any, count: int) -> list[tuple[int, int]]:
    """(start, end) of each of `count` packed strings. Raises ValueError where `packed` (a bytes-like) ends before them."""
    found, at, end = [], 0, len(packed)
    for i in range(count):
        if at + 4 > end:
            raise ValueError(f"{count} strings are expected, the bytes end after {i}")
        (length,) = _LENGTH.unpack_from(packed, at)
        at += 4
        if at + length > end:
            raise ValueError(f"string {i} is said to have {length} bytes, {end - at} are left")
        found.append((at, at + length))
        at += length
    return found


def unpack(packed: Any, shape: Sequence[int]) -> np.ndarray:
    """Packed strings as an object array of bytes. Raises ValueError."""
    array = np.empty(prod(shape), object)
    view = memoryview(packed)
    for i, (start, end) in enumerate(spans(view, array.size)):
        array[i] = bytes(view[start:end])
    return array.reshape(tuple(shape))
