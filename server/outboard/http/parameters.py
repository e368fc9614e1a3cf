"""What the OpenAPI document says of parameters that several routes have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Path

MODEL = "the model's name: its folder in the repository"

ModelName = Annotated[str, Path(description=MODEL)]
DeviceId = Annotated[str, Path(description="the device's id, as `/v1/devices` lists it: `cuda:0`, `cpu`, `sim:0`")]
StreamId = Annotated[str, Path(description="the stream's id, as `/v1/streams` lists it: `{station}.{model}`")]

#: A JSON schema, and what it is.
Described = tuple[dict[str, Any], str]


def query(options: Mapping[str, Described]) -> list[dict[str, Any]]:
    """For `openapi_extra`: what routes that read their query by themselves take there."""
    return [
        {"name": name, "in": "query", "required": False, "description": text, "schema": schema} for name, (schema, text) in options.items()
    ]
