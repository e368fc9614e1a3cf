"""Rows of a tensor model out of the slab: one array for each input, gathered on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outboard.devices import slab
from outboard.devices.protocol import Slot
from outboard.devices.rows import BFLOAT16, BYTES, aligned, unpack
from outboard.worker.errors import InputRefused


def gather(memory: np.ndarray, rows: Sequence[int], slots: Sequence[Slot], staging: Callable[[int], np.ndarray]) -> list[np.ndarray]:
    """One array [len(rows), *slot.shape] for each slot, of its dtype: bfloat16 as float32, strings as objects (str).

    `rows` are byte offsets into `memory`. What lies side by side is used where it lies; the rest is copied into `staging(bytes)`.
    Raises ValueError for a row outside the memory, InputRefused for strings that are not UTF-8.
    """
    n = len(rows)
    apart = [slot for slot in slots if not adjacent(rows, slot.nbytes)]
    buffer, at = (staging(sum(aligned(n * slot.nbytes) for slot in apart)), 0) if apart else (memory, 0)
    arrays = []
    for slot in slots:
        if slot not in apart:
            raw = slab.view(memory, rows[0] + slot.offset, (n * slot.nbytes,), "uint8")
        else:
            raw = buffer[at : at + n * slot.nbytes]
            at += aligned(n * slot.nbytes)
            for i, row in enumerate(rows):
                raw[i * slot.nbytes : (i + 1) * slot.nbytes] = slab.view(memory, row + slot.offset, (slot.nbytes,), "uint8")
        arrays.append(_typed(raw, n, slot))
    return arrays


def adjacent(rows: Sequence[int], nbytes: int) -> bool:
    return all(b - a == nbytes for a, b in zip(rows, rows[1:], strict=False))


def _typed(raw: np.ndarray, rows: int, slot: Slot) -> np.ndarray:
    if slot.dtype == BYTES:
        strings = [unpack(raw[i * slot.nbytes : (i + 1) * slot.nbytes], slot.shape).reshape(-1) for i in range(rows)]
        try:
            decoded = [[s.decode() for s in row] for row in strings]
        except UnicodeDecodeError as e:
            raise InputRefused(f"input {slot.name!r}: a string is not UTF-8 ({e.reason}), and the model takes text") from None
        return np.array(decoded, object).reshape(rows, *slot.shape)
    if slot.dtype == BFLOAT16:  # numpy and ONNX Runtime compute with none: its bits are the upper half of a float32's
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(rows, *slot.shape)
    return raw.view(slot.dtype).reshape(rows, *slot.shape)
