"""Turns between senders: start-time fair queueing (Goyal, Vin and Cheng, 1996), earliest due first for each sender.

Every sender has a tag, the virtual time at which its next item may begin. The least tag is served; it then grows by what the item
costs. A sender that comes back after a pause begins at the present virtual time: it is served next, and saves nothing up. So whoever
asks for less than its share waits for nobody, and the others share the rest, however much they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from heapq import heappop, heappush, nsmallest
from typing import Generic, TypeVar

T = TypeVar("T")


class Turn(Generic[T]):
    """What one sender has waiting."""

    __slots__ = ("key", "tag", "heap")

    def __init__(self, key: Hashable, tag: float):
        self.key = key
        self.tag = tag
        self.heap: list[tuple[float, int, int, float, T]] = []  # (due, seq, sub, cost, item)


class FairQueue(Generic[T]):
    """Items are dropped when they come to the head and are not `alive(item, sub)` any more; nothing is searched for.

    With a single sender this is a plain queue by due time.
    """

    def __init__(self, alive: Callable[[T, int], bool]):
        self._alive = alive
        self._turns: dict[Hashable, Turn[T]] = {}
        self._virtual = 0.0

    def __len__(self) -> int:
        """Entries, those included that are dead and have not come to a head."""
        return sum(len(turn.heap) for turn in self._turns.values())

    def push(self, key: Hashable, due: float, seq: int, item: T, *, sub: int = 0, cost: float = 1.0) -> None:
        """`key` names the sender; at equal `due` the lower `seq` goes first, then the lower `sub`."""
        turn = self._turns.get(key)
        if turn is None:
            turn = self._turns[key] = Turn(key, self._virtual)
        elif self._head(turn) is None:
            turn.tag = max(turn.tag, self._virtual)
        heappush(turn.heap, (due, seq, sub, cost, item))

    def _head(self, turn: Turn[T]) -> tuple[float, int, int, float, T] | None:
        heap = turn.heap
        while heap:
            if self._alive(heap[0][4], heap[0][2]):
                return heap[0]
            heappop(heap)
        return None

    def urgent(self) -> T | None:
        """The item that is due first, whoever's turn it is."""
        heads = [head for turn in self._turns.values() if (head := self._head(turn)) is not None]
        return min(heads, key=lambda head: head[:2])[4] if heads else None

    def first_due(self) -> tuple[Turn[T], T] | None:
        """Like `first`, but what is due first, whoever's turn it is."""
        heads = [(head[:2], turn) for turn in self._turns.values() if (head := self._head(turn)) is not None]
        if not heads:
            return None
        _, turn = min(heads, key=lambda found: found[0])
        return turn, turn.heap[0][4]

    def most_urgent(self, most: int) -> list[T]:
        """Up to `most` items, those first that are due first."""
        alive = (entry for turn in self._turns.values() for entry in turn.heap if self._alive(entry[4], entry[2]))
        return [entry[4] for entry in nsmallest(most, alive, key=lambda entry: entry[:3])]

    def first(self, allowed: Callable[[Hashable], bool] | None = None) -> tuple[Turn[T], T] | None:
        """Whose turn it is, of the senders that are allowed, and what it has; None: nothing."""
        best: Turn[T] | None = None
        best_rank: tuple[float, float, int] = (0.0, 0.0, 0)
        idle: list[Hashable] = []
        for turn in self._turns.values():
            head = self._head(turn)
            if head is None:
                if turn.tag <= self._virtual:
                    idle.append(turn.key)  # it would begin at the present time anyway
                continue
            rank = (turn.tag, head[0], head[1])
            if (best is None or rank < best_rank) and (allowed is None or allowed(turn.key)):
                best, best_rank = turn, rank
        for key in idle:
            del self._turns[key]
        return (best, best.heap[0][4]) if best is not None else None

    def pop(self, turn: Turn[T]) -> tuple[T, int]:
        """Serve the head of the turn that `first` gave: (item, sub)."""
        _, _, sub, cost, item = heappop(turn.heap)
        self._virtual = max(self._virtual, turn.tag)
        turn.tag += cost
        return item, sub
