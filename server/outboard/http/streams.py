"""/v1/streams: what streams there are, and watching one. A viewer that is slow misses frames; it never holds the stream back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response, StreamingResponse

from outboard.http.parameters import StreamId
from outboard.problems import Problem
from outboard.streams import Hub, Newest, OpenStream

#: Seconds between two signs of life, at most: proxies cut a stream of events that is silent for a minute (H18).
BEAT_S = 15.0
BOUNDARY = "frame"
_LIVE = {"Cache-Control": "no-cache, no-store", "X-Accel-Buffering": "no"}
_encode = msgspec.json.encode


def _json(value: Any) -> Response:
    return Response(_encode(value), media_type="application/json")


async def _drawn(hub: Hub, newest: Newest, width: int) -> bytes:
    """With its answer drawn on, once for all who watch; at most about `width` wide, 0: as large as it is."""
    task = newest.drawn.get(width)
    if task is None:
        if len(newest.drawn) >= 16:  # widths that viewers make up
            newest.drawn.clear()
        task = newest.drawn[width] = asyncio.create_task(hub.predictor.picture(newest.frame.image, newest.answer, width))
    return await asyncio.shield(task)


async def _plain(hub: Hub, newest: Newest) -> bytes:
    """As it was sent, if that was JPEG."""
    if bytes(newest.frame.image[:3]) == b"\xff\xd8\xff":
        return bytes(newest.frame.image)
    return await hub.predictor.picture(newest.frame.image, {"image": newest.answer["image"]})


def router(hub: Hub) -> APIRouter:
    routes = APIRouter(tags=["streams"])

    @routes.get("/v1/streams", summary="Every stream, with its figures")
    async def streams() -> Response:
        return _json({"streams": hub.entries()})

    @routes.get("/v1/streams/{id}", summary="One stream")
    async def stream(id: StreamId) -> Response:
        return _json(hub.get(id).entry())

    @routes.get("/v1/streams/{id}/events", summary="Results, drops and states as server-sent events")
    async def events(id: StreamId) -> Response:
        return StreamingResponse(_events(hub.get(id)), media_type="text/event-stream", headers=_LIVE)

    @routes.get("/v1/streams/{id}/latest.jpg", summary="The newest answered frame")
    async def latest(id: StreamId, draw: Annotated[bool, Query(description="with the answer drawn on it")] = False) -> Response:
        stream = hub.get(id)
        newest = stream.newest
        if newest is None:
            raise Problem("not_found", f"no frame of stream {id[:100]!r} has been answered yet")
        body = await (_drawn(hub, newest, 0) if draw else _plain(hub, newest))
        age = newest.age + hub.now() - newest.at
        return Response(
            body, media_type="image/jpeg", headers=_LIVE | {"X-Outboard-Seq": str(newest.seq), "X-Outboard-Age-Ms": f"{age * 1e3:.0f}"}
        )

    @routes.get("/v1/streams/{id}/preview.mjpeg", summary="A moving picture with the answers drawn on")
    async def preview(
        id: StreamId,
        fps: Annotated[float, Query(gt=0, le=60, description="pictures a second, at most")] = 10.0,
        width: Annotated[int, Query(ge=64, le=8192, description="of the picture, at most, in pixels")] = 960,
    ) -> Response:
        stream = hub.get(id)
        media_type = f"multipart/x-mixed-replace;boundary={BOUNDARY}"
        return StreamingResponse(_preview(hub, stream, fps, width), media_type=media_type, headers=_LIVE)

    return routes


async def _events(stream: OpenStream) -> AsyncIterator[bytes]:
    with stream.watched() as viewer:
        yield _event("state", 0, _encode({"type": "state", **stream.where()}))
        while not (viewer.ended and viewer.empty):
            texts = await viewer.get(min(BEAT_S, stream.hub.runtime.settings.streams.heartbeat))
            yield b"".join([_event(*text) for text in texts]) or b": still here\n\n"
    yield _event("end", 0, b"{}")


def _event(kind: str, seq: int, text: bytes) -> bytes:
    return (b"id: %d\n" % seq if seq else b"") + b"event: " + kind.encode() + b"\ndata: " + text + b"\n\n"


async def _preview(hub: Hub, stream: OpenStream, fps: float, width: int) -> AsyncIterator[bytes]:
    """The newest frame, each time the viewer has taken the one before."""
    news = asyncio.Event()
    stream.watchers.add(news)
    shown = 0
    try:
        while not stream.ended:
            began = hub.now()
            news.clear()
            if (newest := stream.newest) is not None and newest.seq != shown:
                shown = newest.seq
                body = await _drawn(hub, newest, width)
                yield b"--%s\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\nX-Outboard-Seq: %d\r\n\r\n%s\r\n" % (
                    BOUNDARY.encode(),
                    len(body),
                    shown,
                    body,
                )
            await asyncio.sleep(began + 1 / fps - hub.now())
            await news.wait()
    finally:
        stream.watchers.discard(news)
