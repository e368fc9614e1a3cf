"""/v2 for the OpenAPI document; `oip/rest.py` serves it."""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from outboard.http.parameters import MODEL

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
_IN_PATH = {
    "model": MODEL,
    "version": "what the model's metadata calls so: `sha256:` and 12 digits; one serves at a time",
    "region": "a name that the client makes up for its region of shared memory",
}
_INFER: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {}, "application/octet-stream": {}}}}


def router() -> APIRouter:
    routes = APIRouter(tags=["Open Inference Protocol"])

    async def elsewhere() -> Response:
        raise AssertionError("http/app.py sends /v2 to oip/rest.py")

    for method, path, summary in _ROUTES:
        extra = {"parameters": [_in_path(name) for name in re.findall(r"{(\w+)}", path)]}
        if path.endswith("/infer"):
            extra |= _INFER
        routes.add_api_route(path, elsewhere, methods=[method], summary=summary, name=summary, openapi_extra=extra)
    return routes


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "description": _IN_PATH[name], "schema": {"type": "string"}}
