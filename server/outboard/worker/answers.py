"""The worker's answer region: where outputs are written, and when their memory is used again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping

import numpy as np

from outboard.core.memory import Allocator, OutOfSlab
from outboard.devices import rows, slab
from outboard.devices.protocol import Tensor

ALIGN = 64


class RegionFull(Exception):
    """The answers do not fit beside those that the front has not freed yet. Not a MemoryError: the device is not short of memory."""


class Answers:
    """Outputs of batches in the shared region, one block a batch. Safe from several threads."""

    def __init__(self, memory: np.ndarray):
        self._memory = memory
        self._allocator = Allocator(memory.nbytes, ALIGN)
        self._blocks: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        return self._allocator.used

    def put(self, batch: int, outputs: Mapping[str, np.ndarray]) -> list[Tensor]:
        """Write the outputs of `batch`, whole; arrays of objects are strings. Raises RegionFull."""
        contents = [_packed(array) if array.dtype.kind == "O" else array for array in outputs.values()]
        starts, total = [], 0
        for array in contents:
            starts.append(total)
            total += -(-array.nbytes // ALIGN) * ALIGN
        with self._lock:
            assert batch not in self._blocks, f"batch {batch} already has answers"
            try:
                block = self._allocator.alloc(max(total, 1))
            except OutOfSlab as e:
                raise RegionFull(f"the answer region is full: {e}, in {len(self._blocks)} batches that the front has not freed") from None
            self._blocks[batch] = block
        tensors = []
        for start, (name, array), content in zip(starts, outputs.items(), contents, strict=True):
            target = slab.view(self._memory, block + start, content.shape, content.dtype.name)
            np.copyto(target, content, casting="no")
            tensors.append(Tensor(name, array.dtype.name if content is array else rows.BYTES, array.shape, block + start))
        return tensors

    def free(self, batches: Iterable[int]) -> None:
        """The front has copied these out. A batch without answers (it failed) is passed over."""
        with self._lock:
            for batch in batches:
                block = self._blocks.pop(batch, None)
                if block is not None:
                    self._allocator.free(block)


def _packed(strings: np.ndarray) -> np.ndarray:
    return np.frombuffer(rows.pack(s if isinstance(s, bytes) else str(s).encode() for s in strings.reshape(-1)), np.uint8)
