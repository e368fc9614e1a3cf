"""What is on its way to the server and has not been read there yet. No I/O, no clock.

Outcomes come in the frames' order, so while one frame runs nobody says what became of those behind it: the server may have them, and have
dropped them for newer ones, or they may wait in a buffer on the way (the kernel's take megabytes) and grow old. To a live stream the
difference is everything. Behind each frame goes a WebSocket ping: its pong means that the server has read what came before.
"""

from __future__ import annotations

import math
from collections import deque

#: Frames that may be on their way however long they take: one that the link carries, and the next one.
_ALWAYS = 2
#: Seconds beyond the quickest round trip after which a frame that was not read is taken to wait in a buffer.
_PATIENCE = 0.1


class Transit:
    """Bounds how much older a live frame grows on its way, whatever the buffers there hold."""

    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque()  # (seq, when it was handed over), not read yet
        self._quickest = math.inf  # round trip

    def __len__(self) -> int:
        return len(self._sent)

    def sent(self, seq: int, now: float) -> None:
        """Frame `seq` is handed to the link, at `now` in seconds, and a ping behind it."""
        self._sent.append((seq, now))

    def read(self, seq: int, now: float) -> None:
        """The pong behind `seq`, or an outcome of it: the server has the frames up to there."""
        while self._sent and self._sent[0][0] <= seq:
            self._quickest = min(self._quickest, now - self._sent.popleft()[1])

    def room(self, now: float) -> bool:
        """Another frame would not wait behind others. It stays False until something is read: nobody needs to look again before that."""
        if len(self._sent) < _ALWAYS:
            return True
        patience = _PATIENCE + (self._quickest if self._quickest < math.inf else 0.0)
        return now - self._sent[0][1] < patience

    def cut(self) -> None:
        """The link broke, and the next one may be another."""
        self._sent.clear()
        self._quickest = math.inf
