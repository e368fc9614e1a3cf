"""The depth of an accelerator's pipeline: how many batches it holds at once, and how many rows each of them has.

While one batch is computed, the rows of the next cross the link, the answers of the one before cross it back, and messages pass between
two processes. How many batches that takes follows from what was measured: a batch by itself; from one batch's end to the next one's with
as many under way as there may be; and the hand-over between the processes, which also makes larger batches pay. Where the card computes for
long and the link is quick, a second batch gives nothing and only needs memory; where the link takes as long as the card, a third one keeps
both busy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from outboard.core.costs import Costs, knee
from outboard.core.device_memory import MemoryNeed

#: One batch more at once must answer more rows a second by this share.
PAYS = 0.01
#: So many batches are observed until it is chosen anew: the choice takes as long as a batch's other bookkeeping.
EVERY = 8
#: Seconds between front and worker for one batch, there and back, as long as nothing was observed.
HAND_OVER = 1.5e-3
#: Weight of a new observation of it, which counts at most so many times what was expected.
LEARNING, OUTLIER = 1 / 16, 4.0
#: Of the batches that are sent just in time this share may come late; and the seconds between which the lead for that is sought.
LATE, LEADS = 0.2, (0.5e-3, 20e-3)
#: The first one: it grows four times as quickly as it shrinks.
LEAD = 0.7e-3


@dataclass(frozen=True, slots=True)
class Pipeline:
    depth: int  #: batches at once
    rows: int  #: of a batch at most


def sharing(need: MemoryNeed | None, free: float, most: int) -> Callable[[int], int]:
    """For `choose`: the rows, at most `most`, that each of so many batches may have where they share `free` bytes (inf: unknown)."""
    return lambda depth: most if need is None or free == inf else need.rows(free / depth, most)


def choose(costs: Costs, most: int, hand_over: float, fits: Callable[[int], int], fixed_rows: int = 0) -> Pipeline:
    """The shallowest pipeline of at most `most` batches that a deeper one would not clearly beat, each batch the smallest that does not
    lose much. `fits(depth)`: the rows that so many batches may have each; where it is 0 so many do not fit the memory together, but one
    always does. `fixed_rows`: of every batch, where the network has no choice."""
    best, best_rate = Pipeline(1, 1), 0.0
    for depth in range(1, most + 1):
        room = fits(depth)
        if depth > 1 and room < max(1, fixed_rows):
            break
        sizes = [fixed_rows] if fixed_rows else costs.sizes(max(1, room))
        rates = [(n, n / max(interval(costs, n, depth, hand_over), 1e-9)) for n in sizes]
        rows = knee(rates)
        rate = dict(rates).get(rows, 0.0)
        if rate > (1 + PAYS) * best_rate:
            best, best_rate = Pipeline(depth, rows), rate
    return best


def interval(costs: Costs, rows: int, depth: int, hand_over: float = 0.0) -> float:
    """Seconds from one batch's end to the next one's: of what every batch passes through, either the slowest part is always busy, or
    `depth` batches at once are too few for that."""
    return max(costs.expected(rows), (costs.latency(rows) + hand_over) / depth)


def observed(hand_over: float, seconds: float) -> float:
    """The hand-over, now that one was seen to take `seconds`."""
    return hand_over + LEARNING * (min(max(seconds, 0.0), OUTLIER * hand_over) - hand_over)


def lead(seconds: float, late: bool) -> float:
    """How much earlier than by the expected times the next batch is sent, now that one came late (the pipeline was idle), or in time.

    What is expected are averages. How far cores that others use as well stray from them is not known beforehand, so it is tried out
    (a quantile's stochastic approximation): settled, one batch in `1 / LATE` is late. Fewer would cost more than they give: what is sent
    earlier leaves more rows behind for another batch.
    """
    changed = seconds * (1 + LEARNING * (1 - LATE if late else -LATE))
    return min(max(changed, LEADS[0]), LEADS[1])
