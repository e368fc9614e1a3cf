"""Rows that wait for a device, of one network and shape, decoded or to be decoded there. Stations take turns; a station's rows leave by due
time."""

from __future__ import annotations

from outboard.core.fair import FairQueue
from outboard.core.state import Frame, Shape


class ReadyQueue:
    """Rows of equal shape for one network. An entry counts while its row is in `frame.queued`. `coded`: whoever takes them
    decodes them; what the host was to decode after all counts no more."""

    def __init__(self, network: str, shape: Shape, coded: bool = False):
        self.network = network
        self.shape = shape
        self.coded = coded
        self._rows: FairQueue[Frame] = FairQueue(lambda frame, row: row in frame.queued and frame.coded == coded)
        self._live = 0
        self._frames: dict[int, Frame] = {}  # of which rows wait

    def __len__(self) -> int:
        return self._live

    def push(self, frame: Frame, row: int) -> None:
        if row not in frame.queued:
            frame.queued.add(row)
            self._frames[frame.id] = frame
            self._rows.push(frame.sender.station, frame.due, frame.seq, frame, sub=row)
            self._live += 1

    def withdraw(self, frame: Frame, row: int) -> None:
        """The row was answered by a late batch, or its frame is finished."""
        frame.queued.remove(row)
        self._live -= 1
        if not frame.queued:
            del self._frames[frame.id]

    def frames(self) -> list[Frame]:
        """Those of which rows wait."""
        return list(self._frames.values())

    def frames_of_rows(self) -> bool:
        """Of some frame several rows wait."""
        return len(self._frames) < self._live

    def head(self) -> Frame | None:
        """The frame that is due first."""
        return self._rows.urgent()

    def urgent(self, most: int) -> list[Frame]:
        """The frames of up to `most` rows, those first that are due first."""
        return self._rows.most_urgent(most)

    def take(self, most: int, urgent_first: bool = False) -> list[tuple[Frame, int]]:
        """Up to `most` rows, in turns, or those first that are due first."""
        taken: list[tuple[Frame, int]] = []
        while len(taken) < most and (found := self._rows.first_due() if urgent_first else self._rows.first()) is not None:
            frame, row = self._rows.pop(found[0])
            self.withdraw(frame, row)
            taken.append((frame, row))
        return taken
