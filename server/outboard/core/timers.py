"""Named timers on a clock that somebody else reads."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heapify, heappop, heappush


class Timers:
    """Each key has at most one time. Cancelled entries stay in the heap until they come up or outnumber the living: most timers
    here are deadlines that are never reached."""

    def __init__(self) -> None:
        self._at: dict[Hashable, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Hashable]] = []
        self._n = 0

    def set(self, key: Hashable, at: float) -> None:
        self._n += 1
        self._at[key] = (at, self._n)
        heappush(self._heap, (at, self._n, key))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [e for e in self._heap if self._at.get(e[2]) == (e[0], e[1])]
            heapify(self._heap)

    def cancel(self, key: Hashable) -> None:
        self._at.pop(key, None)

    def next(self) -> float | None:
        """The earliest time set, or None."""
        while self._heap:
            at, n, key = self._heap[0]
            if self._at.get(key) == (at, n):
                return at
            heappop(self._heap)
        return None

    def due(self, now: float) -> Hashable | None:
        """Take one key whose time has come, or None."""
        at = self.next()
        if at is None or at > now:
            return None
        key = heappop(self._heap)[2]
        del self._at[key]
        return key
