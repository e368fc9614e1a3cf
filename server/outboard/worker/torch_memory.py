"""What torch's allocator on a GPU says that batches need: the card's free memory shows it only where nothing had been kept before."""

from __future__ import annotations

import torch


class TorchAllocator:
    """torch's caching allocator, which all networks of the process share."""

    def watch(self) -> None:
        """From now on `grown` counts."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._allocated, self._reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    def grown(self) -> int:
        """Bytes beyond those of `watch`: of tensors that lived at the same time, or reserved on the card, whichever is more."""
        allocated = torch.cuda.max_memory_allocated() - self._allocated
        return max(0, allocated, torch.cuda.max_memory_reserved() - self._reserved)
