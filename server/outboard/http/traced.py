"""Requests in traces: `traceparent` is taken and passed on, log lines name it, spans are made of it, and each request may be a log line.

A request that none of this concerns passes without another layer around it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outboard.http import predict
from outboard.oip import rest
from outboard.telemetry import tracing

if TYPE_CHECKING:
    from outboard.telemetry.spans import Spans

log = logging.getLogger(__name__)

#: What begins an answer, and may carry headers.
_STARTS = ("http.response.start", "websocket.accept")


class Traced:
    """ASGI middleware in front of everything. Spans are for POST requests that end, not for scrapes and pages; streams have theirs by the
    frame (telemetry/frame_traces.py)."""

    def __init__(self, app: ASGIApp, spans: Spans | None, log_requests: bool):
        self._app = app
        self._spans = spans
        self._always = spans is not None or log_requests
        self._log_requests = log_requests

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self._app(scope, receive, send)
        if not self._always:
            for name, _ in scope["headers"]:
                if name == b"traceparent":
                    break
            else:
                return self._app(scope, receive, send)
        return self._traced(scope, receive, send)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        parent = _parent(scope)
        if self._spans is not None and scope["type"] == "http" and scope["method"] == "POST" and not scope["path"].endswith("/stream"):
            trace = self._spans.begin("POST", parent, kind="server")
        else:
            trace = tracing.of(parent)
        status = 499  # the client left: no answer began

        async def passing_on(message: Message) -> None:
            nonlocal status
            if message["type"] in _STARTS:
                status = message.get("status", 101)
                if trace.trace_id:
                    message = {**message, "headers": [*message.get("headers", ()), (b"traceparent", trace.header.encode())]}
            elif message["type"] == "websocket.http.response.start":
                status = message["status"]
            await send(message)

        token = tracing.CURRENT.set(trace)
        try:
            await self._app(scope, receive, passing_on)
        finally:
            if self._log_requests:
                self._log(scope, trace, status, time.perf_counter() - began)
            if self._spans is not None and trace.span is not None:
                route = _route(scope)
                name, error = f"{scope['method']} {route}".rstrip(), str(status) if status >= 500 else ""
                self._spans.end(trace, _attributes(scope, route, trace, status), name=name, error=error)
            trace.ended = True
            tracing.CURRENT.reset(token)

    def _log(self, scope: Scope, trace: tracing.Trace, status: int, seconds: float) -> None:
        method, path = scope.get("method", "WebSocket"), scope["path"][:200]
        about: dict[str, Any] = {"method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
        if model := _model(scope):
            about["model"] = model
        log.info("%s %s %d in %.1f ms", method, ascii(path)[1:-1], status, seconds * 1e3, extra=about | trace.last_frame())


def _header(scope: Scope, wanted: bytes) -> bytes:
    """b"" where it is absent or was sent twice."""
    found = [value for name, value in scope["headers"] if name == wanted]
    return found[0] if len(found) == 1 else b""


def _parent(scope: Scope) -> tracing.Parent | None:
    header = _header(scope, b"traceparent")
    return tracing.parse(header, _header(scope, b"tracestate")) if header else None


def _model(scope: Scope) -> str:
    parts = scope["path"].split("/")
    return parts[3][:100] if len(parts) > 4 and parts[1] in ("v1", "v2") and parts[2] == "models" else ""


def _route(scope: Scope) -> str:
    """The template that the path matches; "" where there is none."""
    if predict.model_of(scope["path"]):
        return predict.ROUTE
    if rest.matches(scope["path"]):
        return rest.INFER if scope["path"].endswith("/infer") else rest.OTHER
    return getattr(scope.get("route"), "path", "")


def _attributes(scope: Scope, route: str, trace: tracing.Trace, status: int) -> dict[str, str | int | bool]:
    """Of the request's span, by OpenTelemetry's names where it has one."""
    found: dict[str, str | int | bool] = {
        "http.request.method": scope["method"],
        "url.path": scope["path"][:200],
        "http.response.status_code": status,
    }
    if route:
        found["http.route"] = route
    if trace.request_ids:
        found["outboard.request_id"] = trace.request_ids[0]
    return found | trace.attributes()
