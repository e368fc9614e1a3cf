"""uvicorn's HTTP protocol with bodies handed over in large pieces.

uvicorn wakes the application for every 64 KiB that arrives and hands it a copy of them, so a 4K JPEG of 1.55 MB costs 24 turns of the
event loop and one more copy to join the pieces. Here a body is handed over when it is complete, or in pieces of `PIECE`, so that
what is too large is still refused while it comes.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Bytes of a body that are collected before the application sees them.
PIECE = 4 << 20


class Protocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=…)`."""

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if (self.parser.should_upgrade() and self._should_upgrade()) or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > PIECE:
            self.flow.pause_reading()
            cycle.message_event.set()
