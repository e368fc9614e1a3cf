"""Which rows a device takes where not all that wait can be answered in time: as many as possible are. Pure arithmetic on what they cost.

In the order of their deadlines the most urgent row bounds its batch. Under load that is a trap: the queue grows until each batch is as
small as the little time that its first row has left, the device then answers fewer than it could, and in the end almost every row that it
runs is late (seen in virtual time: 9 % of what can be answered in time). So rows that cannot be answered in time any more make room, and so
do those that would keep a batch small at the cost of more others (the early drop of Nexus, Shen and others, SOSP 2019).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from outboard.core.costs import Costs

#: Batches of waiting rows that are looked at.
CONSIDERED = 8


def choose(left: Sequence[float], costs: Costs, most: int, *, idle: bool) -> tuple[int, int]:
    """(how many of the most urgent rows are given up, rows of the next batch, 0: none).

    `left`: seconds that each row has from when the device can begin, ascending; `most`: rows of a batch; `idle`: the device runs nothing.
    """
    if costs.largest_within(left[0], most) >= min(most, len(left)):
        return 0, most
    first = bisect_left(left, costs.latency(1))
    if first == len(left):
        # All are late, if what is known of the costs is right. Where no batch runs from which that is seen, one row is to show it.
        return (len(left) - 1, 1) if idle else (len(left), 0)
    starts = {first}
    rows = 2
    while rows <= most:
        starts.add(bisect_left(left, costs.latency(rows)))
        rows *= 2
    # Of equally good ones the one that is through first.
    start = max((s for s in starts if s < len(left)), key=lambda s: (*_answered(left, s, costs, most), -s))
    return start, max(1, costs.largest_within(left[start], most))


def _answered(left: Sequence[float], start: int, costs: Costs, most: int) -> tuple[int, float]:
    """How many from `start` on are answered in time, batch after batch in their order, and the negative of the seconds that it takes."""
    now, answered, i = 0.0, 0, start
    while (i := max(i, bisect_left(left, now + costs.latency(1)))) < len(left):
        rows = min(costs.largest_within(left[i] - now, most), len(left) - i)
        answered += rows
        now += costs.expected(rows)
        i += rows
    return answered, -now


def too_many(left: Sequence[float], rows: Sequence[int], seconds: Callable[[int], float]) -> list[int]:
    """Of frames that count only whole, the fewest that make way so that all others are answered in time: their indices, ascending.

    `left`: seconds that each frame has, ascending; `rows`: how many of its rows wait; `seconds(n)`: until n rows are answered. One after
    the other, and whenever one would be late the largest so far makes way (Moore, Management Science 1968; the fewest where `seconds` is
    linear).
    One that was begun has fewer rows left than one that was not, so of equal ones it stays.
    """
    kept: list[tuple[int, int]] = []  # a heap: the largest first, of equal ones the latest
    late: list[int] = []
    total = 0
    for i, (each, n) in enumerate(zip(left, rows, strict=True)):
        heappush(kept, (-n, -i))
        total += n
        while kept and seconds(total) > each:
            largest, latest = heappop(kept)
            total += largest
            late.append(-latest)
    return sorted(late)
