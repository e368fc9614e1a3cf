"""POST /v1/models/{model}/predict."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.datastructures import Headers, QueryParams
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outboard.http import body as bodies
from outboard.http import options, parameters
from outboard.http.problems import respond, unexpected
from outboard.http.watch import unless_left
from outboard.predictor import Predictor
from outboard.problems import Problem
from outboard.registry import Registry
from outboard.runtime import Runtime
from outboard.telemetry import metrics

ROUTE = "/v1/models/{model}/predict"
_BEFORE, _AFTER = ROUTE.split("{model}")
JSON = "application/json"
JPEG = "image/jpeg"
_encode = msgspec.json.Encoder().encode

_DOCS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            JPEG: {"schema": {"type": "string", "format": "binary"}},
            "image/png": {"schema": {"type": "string", "format": "binary"}},
            "image/webp": {"schema": {"type": "string", "format": "binary"}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                    "required": ["image"],
                }
            },
        },
    },
    "parameters": parameters.query(options.KNOWN),
}


class PredictRoute:
    """The route as an ASGI application of its own.

    The framework's way to an endpoint (seven layers of middleware, dependencies, an exit stack) costs more than everything else that
    the front does for a small picture, so `http/app.py` sends requests for ROUTE here directly; `router` only documents it.
    """

    def __init__(self, runtime: Runtime, registry: Registry):
        self._runtime = runtime
        self._registry = registry
        self._predictor = Predictor(runtime)
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        limit = self._runtime.settings.limits.requests
        self._in_progress += 1
        try:
            if self._in_progress > limit:
                raise Problem("overloaded", f"{limit} requests are in progress, no more are taken", retry_after=1.0)
            response = await self._answer(scope, receive)
        except Problem as e:
            response = respond(e)
        except Exception as e:
            response = unexpected(scope["method"], scope["path"], e)
        finally:
            self._in_progress -= 1
        metrics.request(ROUTE, response.status_code, time.perf_counter() - began)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        runtime = self._runtime
        arrived = runtime.now()
        limits = runtime.settings.limits
        headers = Headers(scope=scope)
        model = model_of(scope["path"])
        self._registry.serving(model)  # refused before a byte of the body is read
        wanted = accepted(headers.get("accept"))
        with bodies.Held(runtime) as held:
            raw = await bodies.read(headers, receive, limits.body, held)
            found = bodies.submission(headers.get("content-type"), raw, scope["path"], limits.images)
            given = found.fields
            if scope["query_string"]:
                given = {**given, **QueryParams(scope["query_string"])}
            asked = options.parse(given, arrived=arrived, received=runtime.now() - arrived, default_deadline=limits.deadline)
            if len(found.images) > 1 and wanted == JPEG:
                raise Problem(
                    "not_acceptable", "image/jpeg is one picture and several images were sent; send one, or accept application/json"
                )
            with self._registry.use(model) as version:
                if len(found.images) > 1:
                    results = await unless_left(receive, self._predictor.several(version, found.images, asked))
                    return Response(_encode({"results": results}), media_type=JSON)
                one = await unless_left(receive, self._predictor.predict(version, found.images[0], asked))
            timing = {"Server-Timing": ", ".join([f"{k};dur={v}" for k, v in one["timing_ms"].items()])}
            if wanted == JPEG:
                return Response(await self._predictor.picture(found.images[0], one), headers=timing, media_type=JPEG)
            return Response(_encode(one), headers=timing, media_type=JSON)


def model_of(path: str) -> str:
    """The {model} of a path that ROUTE matches, or ""."""
    name = path[len(_BEFORE) : -len(_AFTER)]
    return name if path.startswith(_BEFORE) and path.endswith(_AFTER) and "/" not in name else ""


def router() -> APIRouter:
    """ROUTE for the OpenAPI document."""
    routes = APIRouter()

    @routes.post(
        ROUTE,
        tags=["predict"],
        summary="Answer one image, or several",
        openapi_extra=_DOCS,
        responses={200: {"content": {JSON: {}, JPEG: {}}, "description": "The answer, or the picture with the answer drawn on"}},
    )
    async def predict(request: Request, model: parameters.ModelName) -> Response:
        """An image as raw body or as multipart field `image` (several: `{"results": […]}` in their order). `Accept: image/jpeg`
        returns the picture with the answer drawn on it."""
        raise AssertionError("http/app.py serves this route")

    return routes


def accepted(header: str | None) -> str:
    """Which of JSON and JPEG the client prefers; JSON where it does not care. Raises Problem not_acceptable."""
    if not header or header == "*/*":
        return JSON
    ranges: dict[str, float] = {}
    for item in header.split(","):
        name, *params = (x.strip().lower() for x in item.split(";"))
        quality = next((p[2:] for p in params if p.startswith("q=")), "1")
        try:
            ranges[name] = float(quality)
        except ValueError:
            ranges[name] = 0.0

    def quality_of(kind: str) -> float:
        group = kind.split("/")[0] + "/*"
        return next((ranges[name] for name in (kind, group, "*/*") if name in ranges), 0.0)

    json, jpeg = quality_of(JSON), quality_of(JPEG)
    if max(json, jpeg) <= 0:
        raise Problem("not_acceptable", f"Accept: {header[:80]} cannot be met; expected application/json or image/jpeg")
    return JPEG if jpeg > json or (jpeg == json and JPEG in ranges and JSON not in ranges) else JSON
