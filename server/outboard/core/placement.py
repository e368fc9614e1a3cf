"""Which of several devices takes rows that wait: the one that answers them first. Pure arithmetic on what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor

#: Another device is preferred if it answers within this share of the time: a smaller difference is noise, and work that goes to and fro
#: between devices helps nobody.
CLEARLY = 0.9


@dataclass(frozen=True, slots=True)
class Offer:
    """What a device can do for rows of one network. Times in seconds from now."""

    free_in: float  #: when it can begin
    seconds: float  #: from there to the answers of its next batch
    interval: float  #: from one batch's end to the next one's, when it is busy
    rows: int  #: of a batch

    @property
    def first(self) -> float:
        """When its next batch is answered."""
        return self.free_in + self.seconds

    def answered_by(self, seconds: float) -> int:
        """Rows that it can have answered by then, given enough of them."""
        if seconds < self.first:
            return 0
        return self.rows * (1 + floor((seconds - self.first) / max(self.interval, 1e-6)))


def surplus(own: Offer, others: Iterable[Offer], waiting: int) -> int:
    """How many of `waiting` rows a device should take: those that the others, where they are clearly quicker, cannot have answered by
    the time that it would have. Of all devices the quickest always takes what there is, so no row waits for nobody."""
    quicker = (o.answered_by(own.first) for o in others if o.first < CLEARLY * own.first)
    return max(0, waiting - sum(quicker))
