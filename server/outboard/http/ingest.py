"""POST /v1/models/{model}/stream: frames as `multipart/x-mixed-replace`, outcomes as lines of JSON while they come.

A client that accepts `application/x-ndjson` by name gets them while it sends; the lines that it does not take in time are missed, and
said to be. Any other gets them when its body has ended: ffmpeg never reads, and ends the connection with what it was sent unread. Then
its kernel sends a reset and throws away the last frames.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outboard.frames import Frame
from outboard.http import parameters, stream_query
from outboard.http.mixed_replace import MixedReplace, Part
from outboard.http.problems import respond, unexpected
from outboard.http.stream import ROUTE
from outboard.problems import Problem
from outboard.streams import Hub, OpenStream, Viewer
from outboard.telemetry import metrics

_BEFORE, _AFTER = ROUTE.split("{model}")
#: Seconds that a sender may take to read the last lines.
LAST_LINES = 30.0
NDJSON = "application/x-ndjson"
_encode = msgspec.json.Encoder().encode


def model_of(path: str) -> str:
    """The {model} of a path that ROUTE matches, or ""."""
    name = path[len(_BEFORE) : -len(_AFTER)]
    return name if path.startswith(_BEFORE) and path.endswith(_AFTER) and "/" not in name else ""


class IngestRoute:
    """The route as an ASGI application of its own: the framework's responses do not read a body while they are sent."""

    def __init__(self, hub: Hub):
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            stream, parts = self._open(scope)
            link = stream.attach(None)
            try:
                with stream.watched() as viewer:
                    at_once = NDJSON in Headers(scope=scope).get("accept", "").lower()
                    await _Ingest(self._hub, stream, parts, viewer, receive, send).run(at_once)
            finally:
                stream.detach(link)
        except Problem as e:
            response = respond(e)
        except Exception as e:
            response = unexpected(scope["method"], scope["path"], e)
        else:
            metrics.request(ROUTE, 200, 0.0)
            return
        metrics.request(ROUTE, response.status_code, 0.0)
        await response(scope, receive, send)

    def _open(self, scope: Scope) -> tuple[OpenStream, MixedReplace]:
        kind, parameters = parse_options_header(Headers(scope=scope).get("content-type") or "")
        name = kind.decode("latin-1").lower()
        if name and not name.startswith("multipart/") and name not in ("application/octet-stream", "application/x-www-form-urlencoded"):
            raise Problem(
                "unsupported_media_type",
                f"{name} is not taken here; expected multipart/x-mixed-replace, for example ffmpeg -i VIDEO -c:v mjpeg -f mpjpeg URL",
                accepted=["multipart/x-mixed-replace"],
            )
        limits = self._hub.runtime.settings.limits
        query = stream_query.parse(QueryParams(scope["query_string"]), limits.images, link=False)
        boundary = parameters.get(b"boundary")
        parts = MixedReplace(boundary.decode("latin-1") if boundary else None, limits.message)
        return self._hub.open(model_of(scope["path"]), query.asked, resumable=False), parts


class _Ingest:
    """One request."""

    def __init__(self, hub: Hub, stream: OpenStream, parts: MixedReplace, viewer: Viewer, receive: Receive, send: Send):
        self._hub = hub
        self._stream = stream
        self._parts = parts
        self._viewer = viewer
        self._receive = receive
        self._send = send
        self._left = False
        self._all_settled = False
        self._problem: Problem | None = None

    async def run(self, at_once: bool) -> None:
        """Raises Problem as long as nothing has been answered."""
        first = await self._next()
        tasks = [asyncio.create_task(self._read(first))]
        try:
            if at_once:
                tasks.append(asyncio.create_task(self._write()))
            await tasks[0]
            if not at_once:
                tasks.append(asyncio.create_task(self._write()))
            async with asyncio.timeout(LAST_LINES):
                await tasks[1]
        except TimeoutError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # ---------------------------------------------------------------- in

    async def _next(self) -> list[Part]:
        """The next parts; none: the body has ended, or the client left. Raises Problem."""
        while not self._parts.ended:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._left = True
                return []
            found = self._parts.feed(message.get("body", b""))
            if not message.get("more_body", False):
                found += self._parts.end()
                self._parts.ended = True
                if not found and not self._stream.books.last:
                    raise Problem("bad_multipart", "there is no part in the body; expected multipart/x-mixed-replace")
            if found:
                return found
        return []

    async def _read(self, parts: list[Part]) -> None:
        """Until every frame of the body has its outcome, or the client has left."""
        try:
            while parts:
                for part in parts:
                    await self._stream.offer(self._frame(part))
                parts = await self._next()
        except Problem as e:
            self._problem = e.with_traceback(None)
        while self._stream.books.waiting and not self._left:
            self._stream.news.clear()
            await self._stream.news.wait()
        self._all_settled = True
        self._viewer.wake()

    def _frame(self, part: Part) -> Frame:
        try:
            captured = float(part.headers.get("x-timestamp", "")) or None
        except ValueError:
            captured = None
        return Frame(self._stream.books.last + 1, len(part.body), captured=captured, image=part.body)

    # ---------------------------------------------------------------- out

    async def _write(self) -> None:
        headers = [(b"content-type", NDJSON.encode()), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        stream, every = self._stream, self._hub.runtime.settings.streams.heartbeat
        await self._line({"type": "hello", "stream": stream.id, "policy": stream.asked.policy})
        await self._line({"type": "state", **stream.state})
        while not (self._all_settled and self._viewer.empty):
            texts = await self._viewer.get(every)
            if texts:
                lines = b"".join([text + b"\n" for _, _, text in texts])
                await self._send({"type": "http.response.body", "body": lines, "more_body": True})
            elif not self._all_settled:
                await self._line({"type": "hb", "queue": stream.books.waiting})
        figures = stream.books.figures
        end: dict[str, Any] = {"type": "end", "received": figures.received, "answered": figures.answered, "dropped": dict(figures.dropped)}
        if self._problem is not None:
            end["problem"] = self._problem.body()
        await self._send({"type": "http.response.body", "body": _encode(end) + b"\n", "more_body": False})

    async def _line(self, message: dict[str, Any]) -> None:
        await self._send({"type": "http.response.body", "body": _encode(message) + b"\n", "more_body": True})


def router() -> APIRouter:
    """ROUTE for the OpenAPI document."""
    routes = APIRouter()

    @routes.post(
        ROUTE,
        tags=["streams"],
        summary="Frames in, one outcome for each",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"multipart/x-mixed-replace": {"schema": {"type": "string", "format": "binary"}}},
            },
            "parameters": parameters.query(stream_query.POSTED),
        },
        responses={200: {"content": {NDJSON: {}}, "description": "hello, then results and drops, one a line"}},
    )
    async def stream(request: Request, model: parameters.ModelName) -> Response:
        """What `ffmpeg -f mpjpeg` and MJPEG cameras send (docs/stream-protocol.md). A WebSocket at the same address can do more."""
        raise AssertionError("http/app.py serves this route")

    return routes
