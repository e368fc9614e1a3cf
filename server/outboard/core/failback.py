"""When a lost device is looked for again, and when it is kept away: pure rules, no clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FailbackPolicy:
    """Times in seconds. More than `max_losses` losses within `window` quarantine the device for `quarantine`, doubling up to
    `quarantine_max`; a device that then serves for `window` without a loss starts afresh."""

    first_retry: float = 0.5
    max_retry: float = 30.0
    jitter: float = 0.2
    max_losses: int = 3
    window: float = 600.0
    quarantine: float = 60.0
    quarantine_max: float = 3600.0


class LossHistory:
    """Losses of one device, and the two delays that follow from them."""

    def __init__(self, policy: FailbackPolicy, rng: random.Random):
        self._policy = policy
        self._rng = rng
        self._recent: deque[tuple[float, float]] = deque()  # when lost, and the same on a clock that stands still in quarantine
        self._quarantined = 0.0
        self._quarantines = 0
        self._attempts = 0
        self.total = 0
        self.last: tuple[float, str] | None = None

    def lost(self, now: float, why: str) -> None:
        self.total += 1
        self.last = (now, why)
        at = now - self._quarantined
        self._recent.append((now, at))
        self._attempts = 0
        while self._recent[0][1] <= at - self._policy.window:
            self._recent.popleft()
        if len(self._recent) == 1:
            self._quarantines = 0

    def forgive(self, at: float, quarantined: bool) -> None:
        """The loss at `at` was a frame's fault, not the device's: it does not count, nor does the quarantine that it led to."""
        for entry in self._recent:
            if entry[0] == at:
                self._recent.remove(entry)
                self._quarantines -= quarantined
                return

    def quarantine_due(self) -> bool:
        return len(self._recent) > self._policy.max_losses

    def quarantine(self) -> float:
        """Seconds to keep the device away, from now."""
        seconds = min(self._policy.quarantine * 2**self._quarantines, self._policy.quarantine_max)
        self._quarantines += 1
        self._quarantined += seconds
        return seconds

    def retry(self) -> float:
        """Seconds until the next attempt: doubling from `first_retry`, with jitter."""
        delay = min(self._policy.first_retry * 2**self._attempts, self._policy.max_retry)
        self._attempts += 1
        return delay * (1 + self._rng.uniform(-self._policy.jitter, self._policy.jitter))

    def reset(self) -> None:
        """An operator vouches for the device."""
        self._recent.clear()
        self._quarantines = 0
        self._attempts = 0
