"""The books of a stream: which frame has which outcome. No I/O, no clock.

Rules
-----
* Every frame that was registered gets exactly one outcome, and outcomes are handed on in the order of the frames.
* The first outcome of a frame counts. Another one for it (the server sends again what was not acknowledged) is counted and discarded.
* A frame is queued, then in flight, then settled. When the link breaks, nobody knows whether what is in flight has arrived. The server
  says so on the next link: what it has stays in flight, the rest is queued again. In a new session it has nothing.
* Policy `live` keeps one queued frame, the newest: what it displaces is dropped here. `lossless` drops nothing.

An outcome may come before its frame is registered: a station that was restarted resumes its session, and the server sends the outcomes
that it kept before the spool has been read again.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace

from outboard_client.frames import Drop, Frame, Outcome

#: Why a frame was dropped before the server had it.
NEWER = "newer_frame"
LINK_LOST = "link_lost"
TOO_LARGE = "too_large"
NOT_AN_IMAGE = "not_an_image"


class Ledger:
    """`after`: the last outcome that is held from before; frames are numbered from there."""

    def __init__(self, *, live: bool, after: int = 0):
        self.live = live
        self.last = after  #: the highest seq registered
        self.held = after  #: the caller has the outcomes up to here
        self.acknowledged = after  #: the last of these that came from the server, which knows nothing of frames dropped here
        self.registered = 0
        self.answered = 0
        self.dropped: Counter[str] = Counter()
        self.doubles = 0
        self._order: deque[int] = deque()  # registered, outcome not handed on
        self._frames: dict[int, Frame] = {}  # registered, without an outcome
        self._queue: deque[int] = deque()  # of those, the ones to send
        self._outcomes: dict[int, Outcome] = {}  # not handed on
        self._theirs: deque[int] = deque()  # handed on, not held yet, from the server's present session
        self._foreign: set[int] = set()  # outcomes of an earlier one
        self._kept: deque[int] = deque()  # live: sent, and their bytes are still here
        self.nbytes = 0  #: of the encoded images among them

    @property
    def unsettled(self) -> int:
        return len(self._frames)

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        return len(self._frames) - len(self._queue)

    @property
    def open(self) -> int:
        """Frames whose outcome has not been handed on."""
        return len(self._order)

    def unanswered(self) -> list[int]:
        return list(self._frames)

    def frame(self, seq: int) -> Frame | None:
        """The frame, while it has no outcome."""
        return self._frames.get(seq)

    def register(self, frame: Frame) -> int:
        """Take a frame in and return its seq."""
        seq = frame.seq or self.last + 1
        if seq <= self.last:
            raise ValueError(f"seq {seq} follows {self.last}: the numbers of frames must grow")
        self.last = seq
        self.registered += 1
        self._order.append(seq)
        if seq in self._outcomes:
            self._count(self._outcomes[seq])
            return seq
        self._frames[seq] = frame
        self.nbytes += _size(frame)
        self._queue.append(seq)
        if self.live:
            self._only_newest(NEWER)
        return seq

    def take(self) -> tuple[int, Frame] | None:
        """The next frame to send; it is in flight from now on."""
        if not self._queue:
            return None
        seq = self._queue.popleft()
        if self.live:
            self._kept.append(seq)
        return seq, self._frames[seq]

    def replace(self, seq: int, frame: Frame) -> None:
        """Keep this one (encoded) instead, should it have to be sent again."""
        if seq in self._frames:
            self.nbytes += _size(frame) - _size(self._frames[seq])
            self._frames[seq] = frame

    def read(self, seq: int) -> None:
        """The server has the frames up to `seq`. In `live` only the newest would ever be sent again: the bytes of the others may go."""
        if not self.live:
            return
        while self._kept and self._kept[0] < seq:
            old = self._kept.popleft()
            if (frame := self._frames.get(old)) is not None:
                self.replace(old, replace(frame, image=b""))

    def settle(self, outcome: Outcome) -> bool:
        """Enter an outcome. False: there was one already, this one is discarded."""
        seq = outcome.seq
        if seq in self._outcomes or (seq <= self.last and seq not in self._frames):
            self.doubles += 1
            return False
        self._outcomes[seq] = outcome
        if (frame := self._frames.pop(seq, None)) is not None:
            self.nbytes -= _size(frame)
            if seq in self._queue:
                self._queue.remove(seq)
            self._count(outcome)
        return True

    def link_up(self, received: int, *, resumed: bool) -> None:
        """A new link. `resumed`: the server goes on with the session, in which it has the frames up to `received`."""
        if not resumed:
            # What the last session told is none of this one's business.
            self.acknowledged = 0
            self._theirs.clear()
            self._foreign = set(self._outcomes)
        waiting = set(self._queue)
        lost = [seq for seq in self._frames if seq not in waiting and not (resumed and seq <= received)]
        queued = [seq for seq in self._queue if not (resumed and seq <= received)]  # a restarted station: its server has them already
        self._queue = deque([*lost, *queued])
        if self.live:
            self._only_newest(LINK_LOST if lost else NEWER)

    def pop(self) -> Outcome | None:
        """The next outcome in the frames' order, if it is there."""
        if not self._order or self._order[0] not in self._outcomes:
            return None
        outcome = self._outcomes.pop(self._order.popleft())
        if outcome.seq not in self._foreign and not (isinstance(outcome, Drop) and outcome.here):
            self._theirs.append(outcome.seq)
        return outcome

    def keep(self, seq: int) -> None:
        """The caller has what `pop` gave it up to `seq`, and need not get it again."""
        self.held = max(self.held, seq)
        while self._theirs and self._theirs[0] <= seq:
            self.acknowledged = self._theirs.popleft()

    def _only_newest(self, reason: str) -> None:
        while len(self._queue) > 1:
            self.settle(Drop(self._queue[0], reason, here=True))

    def _count(self, outcome: Outcome) -> None:
        if isinstance(outcome, Drop):
            self.dropped[outcome.reason] += 1
        else:
            self.answered += 1
        total = self.answered + self.dropped.total() + len(self._frames)
        assert self.registered == total, f"{self.registered} frames, {total} accounted for"


def _size(frame: Frame) -> int:
    return len(frame.image) if isinstance(frame.image, bytes) else 0
