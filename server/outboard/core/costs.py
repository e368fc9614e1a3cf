"""What a batch costs, and the batch size that follows: measured at start, corrected as work flows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

#: The knee is the smallest batch whose throughput is within 5 % of the best (design rule 4): 4 % of the best that was measured, and one
#: for the error of the measurement.
KNEE_TOLERANCE = 0.04
#: Weight of a new observation in the level of all costs. 1/16: some twenty batches until a changed speed is believed.
LEARNING = 1 / 16
#: Weight of a new observation in the cost of its size against the others'. Slow: the knee follows from it, and what is seen under
#: load is noisy.
SHAPE_LEARNING = 1 / 128
#: What is learned from is the median of so many observations: two page faults in a row are no trend, three are.
RECENT = 5
#: And it counts at most this many times more (or less) than what was expected.
OUTLIER = 3.0


@dataclass(frozen=True, slots=True)
class BatchCost:
    """Batches of `rows` rows, as measured. Times in seconds.

    `seconds` is what a batch takes from a busy device: on the CPU while every core runs one, in a pipeline from one batch's end to the
    next one's. `alone`: from taking a batch up to having its answers, on a device that does nothing else (0: as `seconds`); `upload` is
    the part of it in which the rows cross the link. `memory`: bytes of device memory beyond those of the loaded network.
    """

    rows: int
    seconds: float
    alone: float = 0.0
    upload: float = 0.0
    memory: int = 0


def batch_sizes(most: int) -> list[int]:
    """Rows of the batches that are measured: 1, 2, 4, 8 … and `most`."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    return sizes


def knee(rates: Iterable[tuple[int, float]]) -> int:
    """Of (rows, rows a second), smaller batches first, the smallest that is close to the best; 1 of none."""
    known = list(rates)
    best = max((rate for _, rate in known), default=0.0)
    return next((rows for rows, rate in known if rate >= best * (1 - KNEE_TOLERANCE)), 1)


class Costs:
    """Seconds a batch takes against its rows, for one network on one device.

    Between measured sizes the cost is linear, beyond the largest it grows like its last segment (at least proportionally to
    the smallest measured cost a row).

    Two things are learned from observations: the level, common to all sizes (a throttled card, cores shared with decode), and,
    slowly, the shape. Were each size corrected by itself, the sizes that nobody runs would keep the costs of the quiet machine
    they were measured on, look cheap, and draw the knee to themselves.
    """

    def __init__(self, measured: Sequence[BatchCost | tuple[int, float]]):
        assert measured, "a cost model needs at least one measurement"
        batches = {c.rows: c for c in (m if isinstance(m, BatchCost) else BatchCost(*m) for m in measured)}
        self._rows = sorted(batches)
        self._seconds = [batches[rows].seconds for rows in self._rows]
        self._alone = [batches[rows].alone or batches[rows].seconds for rows in self._rows]
        self._level = 1.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._knees: dict[int, int] = {}  # most -> knee; forgotten with each observation
        self.observations = 0

    def expected(self, rows: int) -> float:
        """Seconds that a batch of `rows` takes from a busy device."""
        return self._level * self._between(self._seconds, rows)

    def latency(self, rows: int) -> float:
        """Seconds until the answers of a batch of `rows` are there, on a device that does nothing else."""
        return self._level * self._between(self._alone, rows)

    def _between(self, seconds: Sequence[float], rows: int) -> float:
        r, s = self._rows, seconds
        if rows <= r[0]:
            return s[0]
        for i in range(1, len(r)):
            if rows <= r[i]:
                return s[i - 1] + (s[i] - s[i - 1]) * (rows - r[i - 1]) / (r[i] - r[i - 1])
        return s[-1] * rows / r[-1]

    def observe(self, rows: int, seconds: float, alone: bool = False) -> None:
        """Correct the level, and the sizes around `rows`, by what a batch really took. `alone`: there was no other batch before it, so it
        is to be compared with `latency`."""
        before = self.latency(rows) if alone else self.expected(rows)
        if before <= 0:
            return
        self.observations += 1
        self._recent.append(seconds / before * self._level)
        ratio = min(max(median(self._recent) / self._level, 1 / OUTLIER), OUTLIER)
        self._level *= 1 + LEARNING * (ratio - 1)
        ratio = min(max(seconds / before, 1 / OUTLIER), OUTLIER)
        r = self._rows
        above = next((i for i, n in enumerate(r) if n >= rows), len(r) - 1)
        near = (above,) if r[above] == rows or above == 0 or rows > r[-1] else (above - 1, above)
        for i in near:
            self._seconds[i] *= 1 + SHAPE_LEARNING * (ratio - 1)
            self._alone[i] *= 1 + SHAPE_LEARNING * (ratio - 1)
        # Sizes that are never run are corrected by their neighbours only: no batch may come out cheaper than a smaller one.
        self._seconds = list(accumulate(self._seconds, max))
        self._alone = list(accumulate(self._alone, max))
        self._knees.clear()

    def knee(self, most: int) -> int:
        """The smallest batch of those measured and `most`, and at most that large, whose throughput is close to the best of them."""
        if (known := self._knees.get(most)) is not None:
            return known
        found = self._knees[most] = knee((n, n / s) for n in self.sizes(most) if (s := self._between(self._seconds, n)) > 0)
        return found

    def sizes(self, most: int) -> list[int]:
        """Rows of the batches that were measured, and `most`, as far as they are at most that large."""
        found = [n for n in self._rows if n <= most]
        return [*found, most] if most < self._rows[-1] and most not in found else found

    def largest_within(self, seconds: float, most: int) -> int:
        """The largest batch of at most `most` rows whose answers are there within `seconds`; 0: none is."""
        if self.latency(most) <= seconds:
            return most
        low, high = 0, most  # `low` fits, `high` does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.latency(middle) <= seconds else (low, middle)
        return low

    def table(self) -> list[tuple[int, float]]:
        """(rows, seconds) of the measured sizes, as they are believed now."""
        return [(rows, self._level * seconds) for rows, seconds in zip(self._rows, self._seconds, strict=True)]
