"""uvicorn's protocols, as a server of images needs them: HTTP bodies in large pieces, WebSockets that outlive a stall.

uvicorn appends every 64 KiB that arrive to a growing bytearray, wakes the application for them and hands it a copy, so a 4K JPEG of
1.55 MB costs 24 turns of the event loop and three copies. Here the pieces are kept as they came and joined once, when the body is
complete or `PIECE` bytes of it are there, so that what is too large is still refused while it comes. A stream of frames by POST is
handed over as it comes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from outboard.http.connection import Connection
from outboard.http.message_reader import read_in_pieces

#: Bytes of a body that are collected before the application sees them.
PIECE = 4 << 20
#: Seconds of silence, and in all, for which a client that broke the protocol is still listened to, so that it hears why.
LINGER, LINGER_MOST = 0.5, 10.0


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


class Protocol(Connection):
    """For `uvicorn.Config(http=…)`, by way of `connection.limited`."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None and not self.cycle.body:
            self.cycle.body = Pieces()  # type: ignore[assignment]
        self._at_once = self.endless
        if self._at_once and self.cycle is not None:
            self.cycle.receive = partial(_receive_to_the_end, self.cycle)  # type: ignore[method-assign]

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        cycle = self.cycle
        if (self.parser.should_upgrade() and self._should_upgrade()) or cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > PIECE:
            self.flow.pause_reading()
            cycle.message_event.set()
        elif self._at_once:
            cycle.message_event.set()


async def _receive_to_the_end(cycle: RequestResponseCycle) -> ASGIReceiveEvent:
    """As `cycle.receive`, but what came before the connection ended is handed over first: ffmpeg sends its last frame and is gone."""
    message = await RequestResponseCycle.receive(cycle)
    if message["type"] == "http.disconnect" and len(cycle.body) and not cycle.response_complete:
        message = {"type": "http.request", "body": bytes(cycle.body), "more_body": cycle.more_body}
        cycle.body = bytearray()
    return message


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """For `uvicorn.Config(ws=…)`."""

    _heard = 0.0  #: when something was last read

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        read_in_pieces(self.conn)

    def keepalive_timeout(self) -> None:
        """No pong has come. It may well be on its way: this side does not read for a while, which is how back-pressure works, or what was
        sent before it is still coming. Only silence means that nobody is there."""
        if self.ping_timeout is not None and (self.read_paused or self._heard > self.ping_sent_at):
            self.ping_sent_at = self.loop.time()
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
        else:
            super().keepalive_timeout()

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        if self.conn.parser_exc is None:
            super().data_received(data)
        elif self.close_timer is not None:
            self.close_timer.cancel()
            self.close_timer = self.loop.call_later(LINGER if self.loop.time() < self._linger_until else 0.0, self.transport.close)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # Not a handshake that websockets can read: it has written what it says to that, and uvicorn waits for ever.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if self.close_sent and self.initial_response is not None:
            self.handshake_complete = True  # refused with an answer; uvicorn 0.54 forgets it and logs an error

    def handle_parser_exception(self) -> None:
        """A message too large, or no WebSocket message at all. Its rest is still on the way: closed at once, with bytes unread, the kernel
        would reset the connection, and the client see neither code nor reason (1006 instead of 1009)."""
        close = self.conn.close_sent
        assert close is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code, "reason": close.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        self._linger_until = self.loop.time() + LINGER_MOST
        self.close_timer = self.loop.call_later(LINGER, self.transport.close)
