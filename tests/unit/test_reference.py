"""The page of routes at /docs: complete, and without anything from another host."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from outboard.http.app import create
from outboard.settings import Settings

Get = Callable[[str], httpx.Response]


@pytest.fixture(scope="module")
def get(tmp_path_factory: pytest.TempPathFactory) -> Get:
    """GET from a server that is not started."""
    folder: Path = tmp_path_factory.mktemp("empty")
    transport = httpx.ASGITransport(create(Settings(models=folder, cache=folder)))

    async def asked(path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get(path)

    return lambda path: asyncio.run(asked(path))


def test_every_route_of_the_openapi_document_is_on_the_page(get: Get) -> None:
    page = get("/docs").text
    paths = get("/openapi.json").json()["paths"]
    assert len(paths) > 30
    for path, operations in paths.items():
        for method, operation in operations.items():
            assert f"<code>{method.upper()} {path}</code>" in page
            for parameter in operation.get("parameters", []):
                assert f"<code>{parameter['name']}</code>" in page


def test_every_parameter_says_what_it_is_and_a_number_its_range(get: Get) -> None:
    seen = 0
    for path, operations in get("/openapi.json").json()["paths"].items():
        for operation in operations.values():
            described = {p["name"]: p for p in operation.get("parameters", [])}
            assert set(re.findall(r"{(\w+)}", path)) == {name for name, p in described.items() if p["in"] == "path"}, path
            for name, parameter in described.items():
                seen += 1
                assert len(parameter.get("description", "")) > 10, f"{path} {name}"
                for schema in parameter["schema"].get("anyOf", [parameter["schema"]]):
                    if schema.get("type") in ("number", "integer"):
                        assert {"minimum", "exclusiveMinimum"} & schema.keys() and "maximum" in schema, f"{path} {name}"
    assert seen > 40


def test_the_page_asks_nothing_of_another_host(get: Get) -> None:
    answer = get("/docs")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r'(?:src|href)="(?!/)[^"]*"', answer.text)
    for local in set(re.findall(r'(?:src|href)="(/[^"]*)"', answer.text)):
        assert get(local).status_code == 200, local
