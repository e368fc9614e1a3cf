"""Requests that the framework answers, counted by the template of their route; what matches none is `unmatched`. So whatever somebody asks
for, it makes no new time series. (predict, streams and /v2 pass beside the framework, and count themselves.)"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outboard.telemetry import metrics

UNMATCHED = "unmatched"
#: Of requests that were not let in: a page elsewhere, an unknown name, no key.
REFUSED = "refused"


class Counted:
    """ASGI middleware. The seconds are those until an answer begins: a stream of events may last for days."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", UNMATCHED)
                metrics.request(route, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, counting)
