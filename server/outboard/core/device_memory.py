"""Memory of a device: what a batch needs, and how many rows fit beside what others hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes of a batch beyond the loaded network: `fixed`, and `per_row` for each row."""

    fixed: float
    per_row: float

    def of(self, rows: int) -> int:
        return int(self.fixed + rows * self.per_row)

    def rows(self, free: float, most: int) -> int:
        """The largest batch of at most `most` rows that needs no more than `free` bytes; 0: none does."""
        if self.per_row <= 0:
            return most if self.fixed <= free else 0
        return max(0, min(most, int((free - self.fixed) / self.per_row)))

    @classmethod
    def fit(cls, measured: Sequence[tuple[int, int]]) -> MemoryNeed | None:
        """From (rows, bytes): the least line through the origin's side that no measurement lies above; None where nothing was measured.

        Allocators take memory in large pieces, so a line through the middle of the measurements would promise what half of them contradict.
        """
        points = sorted((rows, nbytes) for rows, nbytes in measured if nbytes > 0)
        if not points:
            return None
        if len(points) == 1:
            return cls(0.0, points[0][1] / points[0][0])
        (first, least), (last, peak) = points[0], points[-1]
        per_row = max(0.0, (peak - least) / (last - first))
        fixed = max(nbytes - per_row * rows for rows, nbytes in points)
        return cls(max(0.0, fixed), per_row)


@dataclass(slots=True)
class DeviceMemory:
    """What a device's worker last reported. `held`: the part of what is not free that the worker's own batches use, and use again."""

    total: int = 0  #: 0: not the device's own memory, or unknown
    free: int = 0
    held: int = 0
    headroom: int = 0  #: left to other programs

    @classmethod
    def reported(cls, total: int, free: int, held: int, headroom: int) -> DeviceMemory:
        """`headroom` as it is set: of a small memory no more than an eighth is left."""
        return cls(total, free, held, min(headroom, total // 8))

    def for_batches(self, running: int = 0) -> int:
        """Bytes that another batch may take beside those that need `running` bytes."""
        return self.free + self.held - self.headroom - running

    def describe(self) -> str:
        """For people."""
        if not self.total:
            return "how much is free is unknown"
        free, total, headroom = (n >> 20 for n in (self.free + self.held, self.total, self.headroom))
        return f"{free} MiB of {total} MiB are free, {headroom} MiB of them left to other programs ([devices] headroom)"
