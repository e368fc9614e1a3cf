"""POST /v1/models/{model}/predict."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from outboard.http import body as bodies
from outboard.http import options
from outboard.http.problems import respond
from outboard.http.watch import unless_left
from outboard.predictor import Predictor
from outboard.problems import Problem
from outboard.registry import Registry
from outboard.runtime import Runtime
from outboard.telemetry import metrics

ROUTE = "/v1/models/{model}/predict"
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
    "parameters": [
        {"name": name, "in": "query", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in options.KNOWN.items()
    ],
}


def router(runtime: Runtime, registry: Registry) -> APIRouter:
    routes = APIRouter()
    predictor = Predictor(runtime)
    in_progress = 0

    @routes.post(
        ROUTE,
        tags=["predict"],
        summary="Answer one image, or several",
        openapi_extra=_DOCS,
        responses={200: {"content": {JSON: {}, JPEG: {}}, "description": "The answer, or the picture with the answer drawn on"}},
    )
    async def predict(request: Request, model: str) -> Response:
        """An image as raw body or as multipart field `image` (several: `{"results": […]}` in their order). `Accept: image/jpeg`
        returns the picture with the answer drawn on it."""
        nonlocal in_progress
        began = time.perf_counter()
        in_progress += 1
        try:
            if in_progress > runtime.settings.limits.requests:
                raise Problem(
                    "overloaded", f"{in_progress - 1} requests are in progress, at most {in_progress - 1} are taken", retry_after=1.0
                )
            response = await answer(request, model)
        except Problem as e:
            response = respond(e)
        finally:
            in_progress -= 1
        metrics.request(ROUTE, response.status_code, time.perf_counter() - began)
        return response

    async def answer(request: Request, model: str) -> Response:
        arrived = runtime.now()
        limits = runtime.settings.limits
        registry.serving(model)  # refused before a byte of the body is read
        wanted = accepted(request.headers.get("accept"))
        with bodies.reserved(runtime) as taken:
            raw = await bodies.read(request, runtime, taken)
            found = bodies.submission(request.headers.get("content-type"), raw, request.url.path, limits.images)
            asked = options.parse(
                {**found.fields, **request.query_params},
                arrived=arrived,
                received=runtime.now() - arrived,
                default_deadline=limits.deadline,
            )
            if len(found.images) > 1 and wanted == JPEG:
                raise Problem(
                    "not_acceptable", "image/jpeg is one picture and several images were sent; send one, or accept application/json"
                )
            with registry.use(model) as version:
                if len(found.images) > 1:
                    results = await unless_left(request, predictor.several(version, found.images, asked))
                    return Response(_encode({"results": results}), media_type=JSON)
                one = await unless_left(request, predictor.predict(version, found.images[0], asked))
            headers = {"Server-Timing": ", ".join(f"{k};dur={v}" for k, v in one["timing_ms"].items())}
            if wanted == JPEG:
                return Response(await predictor.picture(found.images[0], one), headers=headers, media_type=JPEG)
            return Response(_encode(one), headers=headers, media_type=JSON)

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
