"""Suspects and poison: what waits to be tried alone after a worker's unexplained death, and what is known to kill.

The isolation worker itself is a device like others; the engine starts it, feeds it and ends it by what is said here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from outboard.core.state import Frame


class Suspects:
    """Rows that wait for the isolation worker, in the order in which they came under suspicion.

    A worker that dies before it could run one is tried `tries` times, first after `retry` seconds, later each time by a factor of two.
    """

    def __init__(self, tries: int, retry: float):
        self._tries, self._retry = tries, retry
        self._rows: deque[tuple[Frame, int]] = deque()
        self._deaths = 0  # of workers in succession that ran no row
        self.not_before = 0.0  #: no worker is started earlier

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[Frame, int]]:
        return iter(self._rows)

    def add(self, frame: Frame, row: int) -> None:
        self._rows.append((frame, row))

    def head(self) -> tuple[Frame, int] | None:
        """The row to try next. Those that were answered or refused meanwhile are dropped here."""
        while self._rows:
            frame, row = self._rows[0]
            if not frame.finished and row in frame.waiting:
                return frame, row
            self._rows.popleft()
        return None

    def take(self) -> None:
        """The head runs, or is refused: its worker did come up."""
        self._rows.popleft()
        self._deaths = 0

    def worker_died(self, now: float, loading: list[str]) -> list[Frame]:
        """It had no row. Returns the frames that are to be refused after the last try: of the networks it was `loading`, or else all."""
        self._deaths += 1
        if self._deaths < self._tries:
            self.not_before = now + self._retry * 2 ** (self._deaths - 1)
            return []
        self._deaths = 0
        self.not_before = now + self._retry
        return list({f.id: f for f, _ in self._rows if not f.finished and (not loading or f.network in loading)}.values())


class Poison:
    """Digests of inputs that killed a worker alone with them, each remembered for `memory` seconds, at most `kept` of them."""

    def __init__(self, memory: float, kept: int):
        self._memory, self._kept = memory, kept
        self._until: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def remember(self, now: float, digest: bytes) -> None:
        self._until.pop(digest, None)  # so that they lie in the order in which they end
        if len(self._until) >= self._kept:
            self._until.pop(next(iter(self._until)))
        self._until[digest] = now + self._memory

    def seconds_left(self, now: float, digest: bytes) -> float:
        """For how long this input is refused; 0: it is not.

        What has ended is forgotten here: while one is remembered, each body is hashed.
        """
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        return max(0.0, self._until.get(digest, now) - now)
