"""One stream: the order of its outcomes, its accounting, and what must be told again after a lost link. Sans-IO, like the engine.

Theory of operation. A frame is *taken* once: its `seq` must be above every one before it. It waits until it is *settled* with one outcome,
a result or a drop. Frames settle in any order, outcomes leave in that of `seq`: an outcome waits for those of all frames before it, then it
is *kept* until the client has acknowledged it, or until the bounds make the stream forget it. A link *attaches* with the last outcome that
its client holds, and is *told* every outcome above it, each once. So `received == answered + dropped + waiting` at any time.

The outcomes that nobody was told yet are never forgotten while a link is attached: `full` says that the client must read first.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["live", "lossless"]
Status = Literal["receiving", "offline", "stopped"]
#: Why a frame has no answer: a closed list (docs/stream-protocol.md).
Reason = Literal["superseded", "stale", "memory_full", "undecodable", "failed", "unavailable", "stopped"]

#: Ages and times of the newest answers, of which percentiles and rates are made.
RECENT = 256
#: Seconds over which frames a second are counted.
RATE_OVER = 5.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Counts, bytes and seconds."""

    window: int = 256  #: lossless: frames without an outcome
    window_bytes: int = 64 << 20
    kept: int = 10_000  #: outcomes that are not acknowledged
    kept_bytes: int = 8 << 20
    offline: float = 3.0  #: without a frame


@dataclass(slots=True)
class Outcome:
    seq: int
    text: bytes  #: the message
    reason: Reason | None  #: None: a result


@dataclass(slots=True)
class _Waiting:
    nbytes: int
    outcome: Outcome | None = None  #: settled, but a frame before it is not


class Clock:
    """How far a client's clock is ahead of ours, from exchanges of heartbeats: the quickest of the last few is the most exact one."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=8)  # (round trip, offset), seconds

    def exchanged(self, sent: float, theirs: float, now: float) -> None:
        """We sent at `sent`, they answered at `theirs` by their clock, we heard it at `now`. An impossible exchange is ignored."""
        if 0 <= now - sent <= 60:
            self._samples.append((now - sent, theirs - (sent + now) / 2))

    @property
    def offset(self) -> float | None:
        """Seconds; None: not known."""
        return min(self._samples)[1] if self._samples else None

    def age(self, captured: float, now: float) -> float:
        """Seconds since `captured`, which is their time."""
        return max(0.0, now + (self.offset or 0.0) - captured)


@dataclass(slots=True)
class Figures:
    """What people look at when they debug a camera."""

    received: int = 0
    answered: int = 0
    dropped: Counter[Reason] = field(default_factory=Counter)
    ages: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))  #: seconds, of the newest answers
    answered_at: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def rate(self, now: float) -> float:
        """Answers a second, lately."""
        recent = sum(at > now - RATE_OVER for at in self.answered_at)
        if recent == len(self.answered_at) == RECENT:  # more of them than are remembered
            return RECENT / max(now - self.answered_at[0], 1e-3)
        return recent / RATE_OVER

    def age(self, share: float) -> float | None:
        """The percentile of the newest answers' ages, 0 to 1; seconds."""
        ages = sorted(self.ages)
        return ages[min(int(share * len(ages)), len(ages) - 1)] if ages else None


class Stream:
    """See the head of this file. Times are the driver's seconds."""

    def __init__(self, policy: Policy, bounds: Bounds, now: float):
        self.policy = policy
        self.bounds = bounds
        self.figures = Figures()
        self.last = 0  #: seq of the last frame taken
        self.stopped = False
        self.attached = False
        self.since = now  #: when it began, or its last link was lost
        self._last_frame = now
        self._waiting: dict[int, _Waiting] = {}  # by seq, ascending
        self._waiting_bytes = 0
        self._kept: deque[Outcome] = deque()  # by seq, ascending
        self._kept_bytes = 0
        self._untold = 0  # of those kept: the newest so many
        self._untold_bytes = 0
        self._forgotten = 0  # acknowledged or beyond the bounds: outcomes up to this seq cannot be told again

    # ---------------------------------------------------------------- frames

    @property
    def waiting(self) -> int:
        """Frames without an outcome, or whose outcome waits for that of one before it."""
        return len(self._waiting)

    def full(self) -> bool:
        """No frame should be taken now."""
        if self.attached and (self._untold >= self.bounds.kept or self._untold_bytes >= self.bounds.kept_bytes):
            return True
        if self.policy == "live":
            return False
        return len(self._waiting) >= self.bounds.window or self._waiting_bytes >= self.bounds.window_bytes

    def take(self, now: float, seq: int, nbytes: int) -> bool:
        """A frame has come; False: the stream has it already, or has stopped, and there is nothing to do."""
        assert seq > 0, seq
        self._last_frame = now
        if seq <= self.last or self.stopped:
            return False
        self.last = seq
        self.figures.received += 1
        self._waiting[seq] = _Waiting(nbytes)
        self._waiting_bytes += nbytes
        return True

    def settle(self, now: float, seq: int, text: bytes, *, age: float | None = None, reason: Reason | None = None) -> list[Outcome]:
        """The frame's outcome. Returns those that may leave now: this one and what waited for it, or nothing."""
        entry = self._waiting[seq]
        assert entry.outcome is None, f"frame {seq} has two outcomes"
        entry.outcome = Outcome(seq, text, reason)
        if reason is None:
            self.figures.answered += 1
            self.figures.answered_at.append(now)
            if age is not None:
                self.figures.ages.append(age)
        else:
            self.figures.dropped[reason] += 1
        ready: list[Outcome] = []
        while self._waiting and (outcome := (head := next(iter(self._waiting.values()))).outcome) is not None:
            del self._waiting[outcome.seq]
            self._waiting_bytes -= head.nbytes
            ready.append(outcome)
        for outcome in ready:
            self._kept.append(outcome)
            self._kept_bytes += len(outcome.text)
            self._untold += 1
            self._untold_bytes += len(outcome.text)
        self._forget()
        return ready

    def stop(self) -> list[int]:
        """No more frames are taken. Returns those to be dropped: the seqs without an outcome, ascending."""
        self.stopped = True
        return [seq for seq, entry in self._waiting.items() if entry.outcome is None]

    # ---------------------------------------------------------------- links

    def can_resume(self, after: int) -> bool:
        """Every outcome above `after` is still there, or yet to come."""
        return self._forgotten <= after <= self.last

    def attach(self, after: int) -> None:
        """A link whose client holds every outcome up to `after`."""
        assert self.can_resume(after), (self._forgotten, after, self.last)
        self.attached = True
        self.acknowledge(after)
        self._untold, self._untold_bytes = len(self._kept), self._kept_bytes

    def detach(self, now: float) -> None:
        self.attached = False
        self.since = now
        self._forget()

    def acknowledge(self, seq: int) -> None:
        """The client holds every outcome up to `seq`."""
        while self._kept and self._kept[0].seq <= seq:
            self._drop_oldest()

    def tell(self, most: int = 1 << 30) -> list[Outcome]:
        """Up to `most` outcomes that the link was not told yet, in order; they count as told from now on."""
        untold = [self._kept[-i] for i in range(self._untold, max(0, self._untold - most), -1)]
        self._untold -= len(untold)
        self._untold_bytes -= sum(len(outcome.text) for outcome in untold)
        self._forget()
        return untold

    @property
    def done(self) -> bool:
        """It has stopped, and its last outcome was told."""
        return self.stopped and not self._waiting and not self._untold

    def status(self, now: float) -> Status:
        if self.stopped:
            return "stopped"
        return "offline" if now - self._last_frame >= self.bounds.offline else "receiving"

    def _forget(self) -> None:
        """Keep to the bounds. What an attached link was not told yet stays."""
        while (len(self._kept) > self.bounds.kept or self._kept_bytes > self.bounds.kept_bytes) and (
            len(self._kept) > self._untold or not self.attached
        ):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        if self._untold == len(self._kept):
            self._untold -= 1
            self._untold_bytes -= len(self._kept[0].text)
        outcome = self._kept.popleft()
        self._kept_bytes -= len(outcome.text)
        self._forgotten = outcome.seq
