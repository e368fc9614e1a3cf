"""What a batch costs, and the batch size that follows: measured at start, corrected as work flows."""

from __future__ import annotations

#: The knee is the smallest batch whose throughput is within this share of the best (design rule 4).
KNEE_TOLERANCE = 0.05
#: Weight of a new observation in the level of all costs. 1/16: some twenty batches until a changed speed is believed.
LEARNING = 1 / 16
#: Weight of a new observation in the cost of its size against the others'. Slow: the knee follows from it, and what is seen under
#: load is noisy.
SHAPE_LEARNING = 1 / 128
#: An observation counts at most this many times more (or less) than what was expected, so one page fault is not a trend.
OUTLIER = 3.0


class Costs:
    """Seconds a batch takes against its rows, for one network on one device.

    Between measured sizes the cost is linear, beyond the largest it grows like its last segment (at least proportionally to
    the smallest measured cost a row).

    Two things are learned from observations: the level, common to all sizes (a throttled card, cores shared with decode), and,
    slowly, the shape. Were each size corrected by itself, the sizes that nobody runs would keep the costs of the quiet machine
    they were measured on, look cheap, and draw the knee to themselves.
    """

    def __init__(self, measured: list[tuple[int, float]]):
        assert measured, "a cost model needs at least one measurement"
        self._rows = sorted({rows for rows, _ in measured})
        cost = dict(measured)
        self._seconds = [cost[rows] for rows in self._rows]
        self._level = 1.0
        self._knees: dict[int, int] = {}  # most -> knee; forgotten with each observation

    def expected(self, rows: int) -> float:
        """Seconds for a batch of `rows`."""
        return self._level * self._shape(rows)

    def _shape(self, rows: int) -> float:
        r, s = self._rows, self._seconds
        if rows <= r[0]:
            return s[0]
        for i in range(1, len(r)):
            if rows <= r[i]:
                return s[i - 1] + (s[i] - s[i - 1]) * (rows - r[i - 1]) / (r[i] - r[i - 1])
        return s[-1] * rows / r[-1]

    def observe(self, rows: int, seconds: float) -> None:
        """Correct the level, and the sizes around `rows`, by what a batch really took."""
        before = self.expected(rows)
        if before <= 0:
            return
        ratio = min(max(seconds / before, 1 / OUTLIER), OUTLIER)
        self._level *= 1 + LEARNING * (ratio - 1)
        r = self._rows
        above = next((i for i, n in enumerate(r) if n >= rows), len(r) - 1)
        near = (above,) if r[above] == rows or above == 0 or rows > r[-1] else (above - 1, above)
        for i in near:
            self._seconds[i] *= 1 + SHAPE_LEARNING * (ratio - 1)
        self._knees.clear()

    def knee(self, most: int) -> int:
        """The smallest measured batch, at most `most`, within 5 % of the best throughput."""
        if (known := self._knees.get(most)) is not None:
            return known
        sizes = [(n, n / s) for n, s in zip(self._rows, self._seconds, strict=True) if n <= most and s > 0]
        if not sizes:
            return 1
        best = max(rate for _, rate in sizes)
        knee = self._knees[most] = next(n for n, rate in sizes if rate >= best * (1 - KNEE_TOLERANCE))
        return knee

    def table(self) -> list[tuple[int, float]]:
        """(rows, seconds) of the measured sizes, as they are believed now."""
        return [(rows, self._level * seconds) for rows, seconds in zip(self._rows, self._seconds, strict=True)]
