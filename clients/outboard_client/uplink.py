"""What the way to the server carries, and the JPEG quality that fits it. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

#: Share of the measured rate that frames may use: the rest is for what the link does next.
SHARE = 0.8
#: A send that returned faster than this was not held up by the link, so it says nothing about the link.
_FREE = 0.003


@dataclass(slots=True)
class Uplink:
    """Measures each send, and keeps the quality where `fps` frames a second fit.

    The socket holds only a little unsent data (`stream.py` sees to it), so the time that a send takes is the time that the link took.
    When even the lowest quality does not fit, frames are sent as the link takes them: the rate falls, and the age does not grow.
    """

    fps: float = 15.0
    lowest: int = 40
    highest: int = 90
    quality: int = 0  #: starts at the highest
    bytes_per_s: float = 0.0  #: 0: never held up yet

    def __post_init__(self) -> None:
        if not 1 <= self.lowest <= self.highest <= 95:
            raise ValueError(f"quality goes from {self.lowest} to {self.highest}, expected 1 <= lowest <= highest <= 95")
        self.quality = self.quality or self.highest

    def sent(self, nbytes: int, seconds: float) -> None:
        """A message of `nbytes` was handed to the link in `seconds`."""
        if seconds < _FREE:
            self._raise()  # nothing held it up: there is room
            return
        rate = nbytes / seconds
        # Down at once, up slowly: a link that got worse makes every frame late, one that got better only makes pictures worse.
        weight = 0.5 if rate < self.bytes_per_s else 0.1
        self.bytes_per_s = rate if not self.bytes_per_s else (1 - weight) * self.bytes_per_s + weight * rate
        wanted = nbytes * self.fps / (SHARE * self.bytes_per_s)  # above 1: too much
        if wanted > 1:
            # A JPEG's size falls about as its quality does, in the range that is used here.
            self.quality = max(self.lowest, min(self.quality - 1, round(self.quality / min(wanted, 2.0))))
        elif wanted < 0.8:
            self._raise()

    def _raise(self) -> None:
        self.quality = min(self.highest, self.quality + 1)
