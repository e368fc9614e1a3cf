"""/v2 for the OpenAPI document; `oip/rest.py` serves it."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

_MODEL = "/v2/models/{model}"
_ROUTES = (
    ("GET", "/v2", "Server metadata"),
    ("GET", "/v2/health/live", "The server lives"),
    ("GET", "/v2/health/ready", "Every model is served"),
    ("GET", _MODEL, "A model's inputs and outputs"),
    ("GET", f"{_MODEL}/versions/{{version}}", "The same, of a named version"),
    ("GET", f"{_MODEL}/ready", "The model is served"),
    ("GET", f"{_MODEL}/config", "The model's configuration, in Triton's words"),
    ("GET", f"{_MODEL}/stats", "What the model has done"),
    ("GET", "/v2/models/stats", "What every model has done"),
    ("POST", f"{_MODEL}/infer", "Inference: JSON, or JSON and binary tensors"),
    ("POST", "/v2/repository/index", "Every model of the repository"),
    ("POST", "/v2/repository/models/{model}/load", "Read the model again and load it"),
    ("POST", "/v2/repository/models/{model}/unload", "Take the model out of service"),
    ("GET", "/v2/systemsharedmemory/status", "Every registered region of shared memory"),
    ("GET", "/v2/systemsharedmemory/region/{region}/status", "One region"),
    ("POST", "/v2/systemsharedmemory/region/{region}/register", "Name a region of shared memory"),
    ("POST", "/v2/systemsharedmemory/region/{region}/unregister", "Forget a region"),
    ("POST", "/v2/systemsharedmemory/unregister", "Forget every region"),
)


def router() -> APIRouter:
    routes = APIRouter(tags=["Open Inference Protocol"])

    async def elsewhere() -> Response:
        raise AssertionError("http/app.py sends /v2 to oip/rest.py")

    for method, path, summary in _ROUTES:
        routes.add_api_route(path, elsewhere, methods=[method], summary=summary, name=summary)
    return routes
