"""What the way to the server carries, and the JPEG quality that fits it. No I/O, no clock."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: Share of the measured rate that frames may use: the rest is for what the link does next.
SHARE = 0.8
#: How much of the past counts on, with each frame that the link held up: the last five or so decide.
_MEMORY = 0.8
#: Seconds of what a full link carries that may be on their way: more would only wait in its buffers, and grow old.
_AHEAD = 0.5
#: After so many frames in a row that the link did not hold up, what it carried before is forgotten.
_FREE = 20


@dataclass(slots=True)
class Uplink:
    """Measures what the link carries, and keeps the JPEG quality where `fps` frames a second fit.

    How long a send takes says little: buffers on the way take megabytes at once, and a sender that waits for answers never fills them. So
    it is the arrivals that are measured: the server says how long it had a frame, so what is left of the time until its answer was here
    is the way. A frame that was handed over before the one in front of it arrived has waited for the link, and then the bytes between
    the two arrivals, by the time between them, are what the link carries. A server that is slow does not look like a slow link.

    When even the lowest quality does not fit, frames are sent as the link takes them: the rate falls, and the age does not grow.
    """

    fps: float = 15.0
    lowest: int = 40
    highest: int = 90
    quality: int = 0  #: starts at the highest
    _bytes: float = 0.0
    _seconds: float = 0.0
    _total: int = 0  # bytes sent
    _sent: dict[int, tuple[float, int]] = field(default_factory=dict)  # seq on its way -> when, and the total behind it
    _last: tuple[float, int] | None = None  # the newest arrival: when, and the total behind it
    _free: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest <= 95:
            raise ValueError(f"quality goes from {self.lowest} to {self.highest}, expected 1 <= lowest <= highest <= 95")
        self.quality = self.quality or self.highest

    @property
    def bytes_per_s(self) -> float:
        """What the link carried when it was full; 0: it was not, lately."""
        return self._bytes / self._seconds if self._seconds else 0.0

    @property
    def room(self) -> float:
        """Bytes that may be on their way at once; infinite while the link is not what limits."""
        return _AHEAD * self.bytes_per_s or math.inf

    def sent(self, seq: int, nbytes: int, began: float) -> None:
        """A message of `nbytes` began to be handed to the link at `began`, in seconds."""
        self._total += nbytes
        self._sent[seq] = began, self._total

    def arrived(self, seq: int, at: float | None) -> None:
        """The frame's outcome is here; it was at the server at `at`, as far as that is known."""
        sent = self._sent.pop(seq, None)
        if sent is None or at is None:
            return
        began, total = sent
        last, self._last = self._last, (at, total)
        if last is None:
            return
        nbytes, seconds = total - last[1], at - last[0]
        if nbytes <= 0 or seconds <= 0:
            return
        if began < last[0]:
            self._free = 0
            self._bytes = _MEMORY * self._bytes + nbytes
            self._seconds = _MEMORY * self._seconds + seconds
        else:
            self._free += 1
            if self._free >= _FREE:
                self._bytes = self._seconds = 0.0
        self._choose(nbytes)

    def cut(self) -> None:
        """The link broke: what was on its way tells nothing, and the next link may be another one."""
        self._sent.clear()
        self._last = None

    def _choose(self, nbytes: int) -> None:
        needed = nbytes * self.fps / (SHARE * self.bytes_per_s) if self._seconds else 0.0  # above 1: too much
        # Down at once, up slowly: a link that got worse makes every frame late, one that got better only makes pictures worse.
        if needed > 1:  # a JPEG's size falls about as its quality does, in the range that is used here
            self.quality = max(self.lowest, min(self.quality - 1, round(self.quality / min(needed, 2.0))))
        elif needed < 0.8:
            self.quality = min(self.highest, self.quality + 1)
