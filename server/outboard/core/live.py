"""Live streams: the newest frame wins, and what is decoded is young.

Of each stream at most one frame waits undecoded: a newer one takes its place. Decoding begins when a device is about to take the rows, by
the expected ends of the batches that it runs; earlier would make the answer older by as much, and later would leave the device idle.
Where rows are cheaper together, one batch may be decoded ahead, but only as large as can be run in a moment (`most_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf

from outboard.core.costs import Costs
from outboard.core.state import Device, Frame


class LiveStreams:
    """The unfinished frames of every live stream, oldest first."""

    def __init__(self) -> None:
        self._frames: dict[str, list[Frame]] = {}

    def enter(self, frame: Frame) -> list[Frame]:
        """Returns the frames whose place it takes."""
        replaced = self.undecoded(frame.sender.live)
        self._frames.setdefault(frame.sender.live, []).append(frame)
        return replaced

    def undecoded(self, live: str) -> list[Frame]:
        """The stream's frames that have not begun to be decoded: a newer one takes their place."""
        return [f for f in self._frames.get(live, ()) if not f.filling and not f.filled]

    def leave(self, frame: Frame) -> None:
        frames = self._frames[frame.sender.live]
        frames.remove(frame)
        if not frames:
            del self._frames[frame.sender.live]

    def surplus(self, most: Callable[[str], int]) -> list[Frame]:
        """Of each stream, those that wait decoded behind newer ones of `most(network)` rows: a lost device gives back many at once."""
        found: list[Frame] = []
        for frames in self._frames.values():
            if len(frames) > 1:
                rows = 0  # of newer ones
                for f in reversed(frames):
                    again = f.to_fill and f.offset >= 0  # its device was to decode it
                    if again or (f.filled and f.queued == f.waiting):
                        if rows and rows >= most(f.network):
                            found.append(f)
                        rows += len(f.waiting)
        return found


def most_rows(costs: Costs, cap: int, moment: float) -> int:
    """The largest batch, at most `cap`, that takes no longer than `moment` seconds, or 1."""
    while cap > 1 and costs.expected(cap) > moment:
        cap //= 2
    return cap


def room(now: float, devices: Iterable[tuple[Device, int, float]], lead: float) -> tuple[int, float]:
    """How many rows may be in decoding, or decoded and waiting, and when that will be more. `devices`: those that serve the network, with
    the rows of a batch there and its seconds; `lead`: seconds before a device can take rows that decoding should begin."""
    rows, later = 0, inf
    for device, most, seconds in devices:
        ends = [b.sent + b.expected - lead for b in device.running.values()]
        if device.parallel:
            soon = max(device.free_slots(), 0) + sum(end <= now for end in ends)
        else:
            # In a pipeline a row would wait behind the batches that run (measured at 5 fps: answers 0.43 s old instead of 0.23).
            ends = [max(ends)] if ends else []
            soon = int(not ends or ends[0] <= now)
        batches = soon * (1 + int(lead / seconds)) if seconds > 0 else soon  # so many are run while one is decoded
        rows += most * max(batches, most > 1)
        later = min([later, *(end for end in ends if end > now)])
    return rows, later
