"""WS /v1/models/{model}/stream: frames in, one outcome for each (docs/stream-protocol.md).

One task reads, all the time: pongs and messages lie behind frames, and a link whose reader waits for the model is taken for dead. It stops
only where back-pressure is wanted, and then no pong is expected (http/protocol.py). Another task writes what the stream says.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketDisconnected

from outboard.frames import Frame
from outboard.http import framing, stream_query
from outboard.http.framing import SUBPROTOCOL, ProtocolError
from outboard.http.problems import respond
from outboard.problems import Problem
from outboard.streams import Hub, OpenStream

ROUTE = "/v1/models/{model}/stream"
#: Outcomes that are handed to the socket before it is looked at what else is to be said.
AT_ONCE = 16
#: Close codes.
STOPPED, TAKEN_OVER, VIOLATION = 1000, 4001, 1008

_encode = msgspec.json.Encoder().encode


class _Said(msgspec.Struct):
    """A text message of the client's. Times in µs."""

    type: str
    seq: int = 0
    at: int = 0
    clock: int = 0


_said = msgspec.json.Decoder(_Said).decode


def router(hub: Hub) -> APIRouter:
    routes = APIRouter()

    @routes.websocket(ROUTE)
    async def stream(websocket: WebSocket, model: str) -> None:
        limits = hub.runtime.settings.limits
        try:
            query = stream_query.parse(websocket.query_params, limits.images, link=True)
            hub.registry.get(model)
            found = hub.resume(query.session, model, query.asked.policy, query.after) if query.session else None
            opened = found or hub.open(model, query.asked, resumable=True)
        except Problem as e:
            await websocket.send_denial_response(respond(e))
            return
        taken_over = opened.attach(query.after if found else 0)
        framed = SUBPROTOCOL in websocket.scope["subprotocols"]
        link = _Link(hub, opened, websocket, framed, resumed=found is not None)
        try:
            await websocket.accept(SUBPROTOCOL if framed else None)
            await link.run(taken_over)
        except (WebSocketDisconnect, WebSocketDisconnected):
            pass  # the client has gone while something was sent to it
        finally:
            opened.detach(taken_over)

    return routes


class _Link:
    """One connection of a stream."""

    def __init__(self, hub: Hub, stream: OpenStream, websocket: WebSocket, framed: bool, *, resumed: bool):
        self._hub = hub
        self._stream = stream
        self._websocket = websocket
        self._framed = framed
        self._resumed = resumed
        self._settings = hub.runtime.settings

    async def run(self, taken_over: asyncio.Future[None]) -> None:
        """Until one side ends it."""
        reading, writing = asyncio.create_task(self._read(taken_over)), asyncio.create_task(self._write(taken_over))
        try:
            await asyncio.wait({reading, writing, taken_over}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended = [task for task in (reading, writing) if task.done()]
            for task in (reading, writing):
                task.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
        if taken_over.done():
            await self._websocket.close(TAKEN_OVER, "another connection took the stream over")
            return
        for task in ended:
            try:
                task.result()
            except ProtocolError as e:
                await self._websocket.close(VIOLATION, str(e)[:120])
        if writing in ended:
            await self._websocket.close(STOPPED)

    # ---------------------------------------------------------------- in

    async def _read(self, taken_over: asyncio.Future[None]) -> None:
        """Returns when the client has gone, or another connection has the stream. Raises ProtocolError."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect" or taken_over.done():
                return
            data = message.get("bytes")
            if data is None:
                self._hear(message["text"])
            else:
                await self._stream.offer(self._frame(data))

    def _frame(self, data: bytes) -> Frame:
        if self._framed:
            return framing.read(data, self._settings.limits.images)
        return Frame(self._stream.books.last + 1, len(data), image=data)

    def _hear(self, text: str) -> None:
        try:
            said = _said(text)
        except (msgspec.MsgspecError, UnicodeEncodeError) as e:
            raise ProtocolError(f"a text message cannot be read: {str(e)[:80]}") from e
        match said.type:
            case "ack":
                self._stream.books.acknowledge(said.seq)
            case "hb":
                self._stream.clock.exchanged(said.at / 1e6, said.clock / 1e6, time.time())
            case "stop":
                self._stream.stop()
            case _:
                raise ProtocolError(f"a text message has type {said.type[:40]!r}, expected ack, hb or stop")

    # ---------------------------------------------------------------- out

    async def _write(self, taken_over: asyncio.Future[None]) -> None:
        """Returns when the stream has stopped and every outcome was sent, or when another connection has it: what would be told here now
        would count as told, and be missed there."""
        stream = self._stream
        await self._send(_encode(self._hello()))
        told: dict[str, Any] = {}
        beat_at = 0.0
        while not (stream.books.done or taken_over.done()):
            stream.news.clear()
            if stream.state != told:
                told = stream.state
                await self._send(_encode({"type": "state", **told}))
            if (now := self._hub.now()) >= beat_at:
                beat_at = now + self._settings.streams.heartbeat
                await self._send(_encode(self._heartbeat()))
            if taken_over.done():  # while something was sent
                break
            outcomes = stream.tell(AT_ONCE)
            for outcome in outcomes:
                await self._send(outcome.text)
            if len(outcomes) < AT_ONCE:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, beat_at - self._hub.now())):
                        await stream.news.wait()

    async def _send(self, text: bytes) -> None:
        await self._websocket.send({"type": "websocket.send", "text": text.decode()})

    def _hello(self) -> dict[str, Any]:
        stream, settings = self._stream, self._settings.streams
        limits = {"message": self._settings.limits.message, "window": settings.window, "window_bytes": settings.window_bytes}
        limits |= {"kept": settings.kept, "kept_bytes": settings.kept_bytes, "kept_seconds": settings.kept_seconds}
        return {
            "type": "hello",
            "stream": stream.id,
            "session": stream.session,
            "resumed": self._resumed,
            "last": stream.books.last,
            "policy": stream.asked.policy,
            "limits": limits | {"heartbeat_seconds": settings.heartbeat},
        }

    def _heartbeat(self) -> dict[str, Any]:
        offset = self._stream.clock.offset
        return {
            "type": "hb",
            "at": time.time_ns() // 1000,
            "queue": self._stream.books.waiting,
            "clock_offset_ms": round(offset * 1e3, 3) if offset is not None else None,
        }
