"""The link between host and device: what a copy costs, found by copies of several sizes.

Nothing here copies or reads a clock: `measure` is told how, so the same procedure runs on a GPU, on a simulated device and in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Direction = Literal["h2d", "d2h"]

#: Bytes of the copies. The small ones show the latency, the largest the rate: it lasts more than a millisecond on any cable.
SIZES = (64 << 10, 512 << 10, 4 << 20, 32 << 20)
REPEATS = 6
MOST_REPEATS = 30  #: where no two copies agree
#: Seconds of copying after which each size is only tried twice: a link that slow needs no more to be known.
PATIENCE = 0.3
#: Two measurements of one link differ by less than this.
ALIKE = 1.25


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes a second and seconds, host to device (h2d) and back (d2h). `both_…`: while copies run in both directions at once.
    `pageable_…`: from and to memory that is not pinned, 0 where it makes no difference or was not measured."""

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_latency: float
    d2h_latency: float
    both_h2d_bytes_per_s: float
    both_d2h_bytes_per_s: float
    pageable_h2d_bytes_per_s: float = 0.0
    pageable_d2h_bytes_per_s: float = 0.0

    def upload(self, nbytes: int) -> float:
        """Seconds to bring `nbytes` to the device in one copy."""
        return self.h2d_latency + nbytes / self.h2d_bytes_per_s

    def download(self, nbytes: int) -> float:
        return self.d2h_latency + nbytes / self.d2h_bytes_per_s

    def resembles(self, other: Link) -> bool:
        """The same cable at the same speed, as far as measurements can tell."""
        pairs = ((self.h2d_bytes_per_s, other.h2d_bytes_per_s), (self.d2h_bytes_per_s, other.d2h_bytes_per_s))
        return all(1 / ALIKE < a / b < ALIKE for a, b in pairs)


def measure(
    copy: Callable[[Direction, int], float],
    both: Callable[[int], tuple[float, float]],
    pageable: Callable[[Direction, int], float] | None = None,
) -> Link:
    """`copy(direction, nbytes)` copies and returns its seconds, `both(nbytes)` copies so much each way at the same time and returns the
    seconds of each."""
    up, down = (_samples(lambda n, d=d: copy(d, n), SIZES) for d in ("h2d", "d2h"))  # type: ignore[misc]
    largest = SIZES[-1]
    h2d, d2h = fit(up), fit(down)
    both_up, both_down = _together(both, max(n for n, seconds in up if seconds < PATIENCE / 10 or n == SIZES[0]))
    unpinned = {"h2d": 0.0, "d2h": 0.0}
    if pageable is not None:
        for direction in unpinned:
            unpinned[direction] = largest / _samples(lambda n, d=direction: pageable(d, n), (largest,))[0][1]  # type: ignore[misc]
    return Link(
        h2d_bytes_per_s=h2d[0],
        d2h_bytes_per_s=d2h[0],
        h2d_latency=h2d[1],
        d2h_latency=d2h[1],
        both_h2d_bytes_per_s=both_up,
        both_d2h_bytes_per_s=both_down,
        pageable_h2d_bytes_per_s=unpinned["h2d"],
        pageable_d2h_bytes_per_s=unpinned["d2h"],
    )


def _samples(copy: Callable[[int], float], sizes: Sequence[int]) -> list[tuple[int, float]]:
    """(bytes, seconds) of the quickest of some copies of each size. An idle link's clock rises with the first of them, and whatever else
    the machine does makes a copy longer, never shorter."""
    found, spent = [], 0.0
    for nbytes in sizes:
        seconds: list[float] = []
        while len(seconds) < (REPEATS if spent < PATIENCE else 2) or (len(seconds) < MOST_REPEATS and not _agree(*sorted(seconds)[:2])):
            seconds.append(copy(nbytes))
            spent += seconds[-1]
        found.append((nbytes, min(seconds)))
    return found


def _together(both: Callable[[int], tuple[float, float]], nbytes: int) -> tuple[float, float]:
    """Bytes a second each way of the quickest copies of `nbytes` in both directions at once."""
    up: list[float] = []
    down: list[float] = []
    while len(up) < 3 or (len(up) < MOST_REPEATS and not all(_agree(*sorted(seconds)[:2]) for seconds in (up, down))):
        for seconds, took in zip((up, down), both(nbytes), strict=True):
            seconds.append(took)
    return nbytes / min(up), nbytes / min(down)


def _agree(quickest: float, next_one: float) -> bool:
    """No host that is busy delays two copies equally."""
    return next_one < 1.02 * quickest


def fit(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(bytes a second, latency) from (bytes, seconds), small copies first: the rate from the two largest, by what the larger takes more;
    the latency from the others, by what is left of them at that rate."""
    (smaller, less), (larger, more) = samples[-2:]
    rate = (larger - smaller) / (more - less) if more > less else larger / more
    return rate, max(0.0, min(seconds - nbytes / rate for nbytes, seconds in samples[:-1]))
