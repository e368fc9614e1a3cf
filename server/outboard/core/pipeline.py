"""The depth of an accelerator's pipeline: how many batches it holds at once, and how many rows each of them has.

While one batch is computed, the rows of the next cross the link, the answers of the one before cross it back, and messages pass between
two processes. How many batches that takes follows from what was measured: a batch by itself; from one batch's end to the next one's with as
many under way as there may be; and the hand-over between the processes. Where the card computes for long and the link is quick, a second
batch gives nothing and only needs memory; where the link takes as long as the card, a third one keeps both busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outboard.core.costs import Costs

#: One batch more at once must answer more rows a second by this share.
PAYS = 0.01
#: Seconds between front and worker for one batch, there and back, as long as nothing was observed.
HAND_OVER = 1.5e-3
#: Weight of a new observation of it, which counts at most so many times what was expected.
LEARNING, OUTLIER = 1 / 16, 4.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    depth: int  #: batches at once
    rows: int  #: of a batch at most


def choose(costs: Costs, most: int, hand_over: float, rows: Callable[[int], int]) -> Pipeline:
    """The shallowest pipeline of at most `most` batches that a deeper one would not clearly beat. `rows(depth)`: the rows of each of so
    many batches, 0 where so many do not fit the memory together; one always does."""
    best = Pipeline(1, max(1, rows(1)))
    for depth in range(2, most + 1):
        each = rows(depth)
        if each < 1:
            break
        if _rate(costs, each, depth, hand_over) > (1 + PAYS) * _rate(costs, best.rows, best.depth, hand_over):
            best = Pipeline(depth, each)
    return best


def interval(costs: Costs, rows: int, depth: int, hand_over: float = 0.0) -> float:
    """Seconds from one batch's end to the next one's: of what every batch passes through, either the slowest part is always busy, or
    `depth` batches at once are too few for that."""
    return max(costs.expected(rows), (costs.latency(rows) + hand_over) / depth)


def observed(hand_over: float, seconds: float) -> float:
    """The hand-over, now that one was seen to take `seconds`."""
    return hand_over + LEARNING * (min(max(seconds, 0.0), OUTLIER * hand_over) - hand_over)


def _rate(costs: Costs, rows: int, depth: int, hand_over: float) -> float:
    return rows / max(interval(costs, rows, depth, hand_over), 1e-9)
