"""Rows that are decoded and wait for a device: one queue for each network and shape, earliest deadline first."""

from __future__ import annotations

from heapq import heappop, heappush

from outboard.core.state import Frame


class ReadyQueue:
    """Rows of equal shape for one network. An entry counts while its row is in `frame.queued`; others are dropped when they
    come to the head, not searched for."""

    def __init__(self, network: str, shape: tuple[int, int, int]):
        self.network = network
        self.shape = shape
        self._heap: list[tuple[float, int, int, Frame]] = []  # (deadline, seq, row, frame)
        self._live = 0

    def __len__(self) -> int:
        return self._live

    def push(self, frame: Frame, row: int) -> None:
        if row not in frame.queued:
            frame.queued.add(row)
            heappush(self._heap, (frame.deadline, frame.seq, row, frame))
            self._live += 1

    def withdraw(self, frame: Frame, row: int) -> None:
        """The row was answered by a late batch, or its frame is finished."""
        frame.queued.remove(row)
        self._live -= 1

    def head(self) -> Frame | None:
        """The frame of the earliest deadline."""
        while self._heap:
            _, _, row, frame = self._heap[0]
            if row in frame.queued:
                return frame
            heappop(self._heap)
        return None

    def take(self, most: int) -> list[tuple[Frame, int]]:
        """Up to `most` rows, earliest deadline first."""
        taken: list[tuple[Frame, int]] = []
        while len(taken) < most and self.head() is not None:
            _, _, row, frame = heappop(self._heap)
            self.withdraw(frame, row)
            taken.append((frame, row))
        return taken
