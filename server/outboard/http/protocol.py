"""uvicorn's HTTP protocol with bodies handed over in large pieces.

uvicorn appends every 64 KiB that arrive to a growing bytearray, wakes the application for them and hands it a copy, so a 4K JPEG of
1.55 MB costs 24 turns of the event loop and three copies. Here the pieces are kept as they came and joined once, when the body is
complete or `PIECE` bytes of it are there, so that what is too large is still refused while it comes.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a body that are collected before the application sees them.
PIECE = 4 << 20


class Pieces:
    """What uvicorn needs of a request's body: `+=`, `len`, `bytes`."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0

    def __iadd__(self, piece: bytes) -> Pieces:
        self._pieces.append(piece)
        self._length += len(piece)
        return self

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)


class Protocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=…)`."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and not self.cycle.body:
            self.cycle.body = Pieces()  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if (self.parser.should_upgrade() and self._should_upgrade()) or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > PIECE:
            self.flow.pause_reading()
            cycle.message_event.set()
