"""How long to wait before the next attempt."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """1, 2, 4 ... 30 seconds, each ±20 %, so that many stations that lost the same server don't come back in the same instant."""

    first: float = 1.0
    most: float = 30.0
    jitter: float = 0.2
    rng: random.Random = field(default_factory=random.Random, repr=False)
    failures: int = 0

    def next(self) -> float:
        """Seconds to wait after one more failure."""
        # The exponent is bounded: 2.0 ** 1100 is an error, and a station may fail for weeks.
        delay = min(self.most, self.first * 2.0 ** min(self.failures, 40))
        self.failures += 1
        return delay * self.rng.uniform(1 - self.jitter, 1 + self.jitter)

    def worked(self) -> None:
        """Start again from the first delay."""
        self.failures = 0
