"""The dashboard at `/`, and the `/v1/events` that keep it live.

`/v1/events` is a server-sent event stream. Once a second it sends an event `snapshot`: {"devices": as in /v1/devices, "models": as in
/v1/models, "streams": as in /v1/streams, "degraded": why or null, "rates": {"devices", "models"}: frames a second and so on, "second":
{"fps": {device: frames a second}}}; the first one has "history" with the last minutes of "second".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from outboard.http.listings import device_entries, model_entries
from outboard.registry import Registry
from outboard.runtime import Runtime
from outboard.streams import Hub
from outboard.telemetry.rates import Rates

EVERY_S = 1.0

_FILES = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
#: Nothing from elsewhere is loaded or asked; photographs that are tried are shown from memory (blob:).
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class Live:
    """What every open page shows, gathered once a second for all of them."""

    def __init__(self, runtime: Runtime, registry: Registry, hub: Hub):
        self._runtime, self._registry, self._hub = runtime, registry, hub
        self._rates = Rates()
        self._news = asyncio.Condition()
        self._pages = 0
        self._event = b""  #: what every open page is told next

    async def run(self) -> None:
        """Runs as long as the server: the history has to be there before somebody looks."""
        while True:
            self._rates.tick(self._runtime.now())
            async with self._news:
                if self._pages:
                    self._event = _event(self._gather())
                self._news.notify_all()
            await asyncio.sleep(EVERY_S)

    def _gather(self) -> dict[str, Any]:
        return {
            "devices": device_entries(self._runtime),
            "models": model_entries(self._runtime, self._registry),
            "streams": self._hub.entries(),
            "degraded": self._runtime.engine.away() or None,
            "rates": {"devices": self._rates.devices, "models": self._rates.models},
            "second": self._rates.history[-1] if self._rates.history else {"fps": {}},
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Server-sent events for one viewer. A slow one misses snapshots; it never holds them back."""
        self._pages += 1
        try:
            yield _event(self._gather() | {"history": list(self._rates.history)})
            while True:
                async with self._news:
                    await self._news.wait()
                    event = self._event
                yield event
        finally:
            self._pages -= 1


def _event(snapshot: dict[str, Any]) -> bytes:
    return b"event: snapshot\ndata: " + msgspec.json.encode(snapshot) + b"\n\n"


def router(live: Live) -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    page = resources.files("outboard.dashboard")
    files = {name: page.joinpath(name).read_bytes() for name in _FILES}

    @routes.get("/")
    async def index() -> Response:
        return Response(files["index.html"], media_type=_FILES["index.html"], headers=HEADERS)

    for name, kind in _FILES.items():
        if name != "index.html":
            routes.add_api_route(f"/dashboard/{name}", _static(files[name], kind), methods=["GET"])

    @routes.get("/v1/events")
    async def events() -> Response:
        # A proxy that buffers would deliver them all at the end (nginx).
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(live.events(), media_type="text/event-stream", headers=headers)

    return routes


def _static(body: bytes, kind: str) -> Any:
    async def static() -> Response:
        return Response(body, media_type=kind, headers=HEADERS)

    return static
