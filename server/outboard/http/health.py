"""/livez, /readyz, /metrics."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from starlette.responses import Response

from outboard.registry import Registry
from outboard.runtime import Runtime
from outboard.telemetry import metrics

Strict = Annotated[bool, Query(description="503 also while the device that was asked for does not serve")]


def router(runtime: Runtime, registry: Registry) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.get("/livez", summary="The event loop turns")
    async def livez() -> Response:
        return Response(b'{"alive": true}', media_type="application/json")

    @routes.get("/readyz", summary="Every model is served by some worker")
    async def readyz(strict: Strict = False) -> Response:
        ready, why = registry.ready()
        degraded = runtime.engine.degraded()
        body: dict[str, object] = {"ready": ready, "degraded": degraded}
        if degraded:
            why = why or runtime.engine.away()
        if why:
            body["why"] = why
        if not_served := registry.not_served():
            body["not_served"] = not_served
        return Response(msgspec.json.encode(body), 200 if ready and not (strict and degraded) else 503, media_type="application/json")

    @routes.get("/metrics", summary="Prometheus metrics")
    async def prometheus() -> Response:
        metrics.frame_memory.set(runtime.engine.memory.used)
        metrics.frame_memory_limit.set(runtime.engine.memory.size)
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    for path, answer in (("/livez", livez), ("/readyz", readyz), ("/metrics", prometheus)):
        routes.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    return routes
