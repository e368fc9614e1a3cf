"""Where a JPEG is decoded: by a thread of the host, whose pixels then cross the link, or on the device, to which its bytes cross.

Pure arithmetic on what was measured. Each frame goes where its rows are ready first, so the two share the work as soon as one of them
has as much as it can do, and neither waits for the other. Where the network's own computing is what everything waits for, earlier rows
win nothing: then the device decodes if its decoder takes nothing of the computing, which spares the host; else the host does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Setting = Literal["auto", "host", "device"]

#: The device must have the rows ready within this share of the host's time: a smaller difference is noise.
CLEARLY = 0.9
#: The link is what a device waits for where the rows cross it for more than this share of the time that they take there.
LINK_BOUND = 0.5
#: A decoder is beside a device's computing where a frame's decoding slows its computing by less than this share.
BESIDE = 0.05
#: Weight of a new observation, which counts at most so many times more (or less) than what was expected.
LEARNING, OUTLIER = 1 / 16, 3.0


@dataclass(frozen=True, slots=True)
class Decoder:
    """What decoding costs a device: seconds for a picture, and for each of its pixels. The rows are made of it in the same time. `slows`:
    seconds of computing that a second of decoding costs; 0: it is a part of the device that computes nothing, 1: they take turns."""

    per_picture: float
    per_pixel: float
    slows: float = 1.0

    def seconds(self, pixels: int) -> float:
        return self.per_picture + pixels * self.per_pixel

    def observed(self, pixels: Sequence[int], seconds: float) -> Decoder:
        """The costs, now that pictures of so many `pixels` each took `seconds` together."""
        expected = sum(map(self.seconds, pixels))
        if expected <= 0 or seconds <= 0:
            return self
        factor = 1 + LEARNING * (min(max(seconds / expected, 1 / OUTLIER), OUTLIER) - 1)
        return replace(self, per_picture=self.per_picture * factor, per_pixel=self.per_pixel * factor)

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> Decoder:
        """From (pixels, seconds) of two pictures."""
        per_pixel = max(0.0, (large[1] - small[1]) / (large[0] - small[0])) or large[1] / large[0]
        return cls(max(0.0, small[1] - small[0] * per_pixel), per_pixel)


@dataclass(frozen=True, slots=True)
class Way:
    """One way from a JPEG to rows on the device, in seconds."""

    wait: float  #: until the decoder is free
    decode: float
    link: float  #: for what crosses it: rows of pixels, or the JPEG

    @property
    def ready(self) -> float:
        """From now until the rows are on the device."""
        return self.wait + self.decode + self.link


def on_device(setting: Setting, host: Way, device: Way, compute: float = 0.0, behind: float = 0.0, slows: float = 1.0) -> bool:
    """Whether the device decodes the frame. `compute`: seconds that its rows take there, one batch after the other, their crossing
    included; `behind`: seconds until the device has computed what waits there already; `slows` as a decoder's."""
    if setting != "auto":
        return setting == "device"
    if device.ready >= CLEARLY * host.ready:
        return False
    if host.link > LINK_BOUND * compute:  # fewer bytes are what makes the device faster, however long its queue is
        return True
    return host.ready > behind or slows * device.decode < BESIDE * compute


def thread_free(filling: float, busy: int, threads: int) -> float:
    """Expected seconds until one of the host's decode threads is free, where `busy` of them decode what takes `filling` seconds in all,
    each begun at any time before now."""
    return 0.0 if busy < threads else filling / max(busy, 1) / (threads + 1)


def together(backlog: float, threads: int, host: float, device: float) -> float:
    """Seconds until `backlog` seconds of the host's decoding are done, where a device helps: `host` and `device` seconds a frame (0: it
    does not help)."""
    return backlog / (threads + host / device if device > 0 and host > 0 else threads)
