"""The page at `/docs`: every route, from the OpenAPI document, as plain HTML.

Swagger's page would load its script from another host, and a server in the field has no network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from outboard.http.dashboard import HEADERS

#: The groups in the order in which somebody meets them; tags of the routes -> titles.
GROUPS = {
    "predict": "Images",
    "streams": "Streams",
    "models": "Models",
    "devices": "Devices",
    "health": "Health and metrics",
    "Open Inference Protocol": "Open Inference Protocol (KServe v2, Triton)",
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """`place` is path or query; `values` is the type, with its bounds and its default where it has them."""

    name: str
    place: str
    values: str
    description: str


@dataclass(frozen=True, slots=True)
class Route:
    group: str
    method: str
    path: str
    summary: str
    description: str
    parameters: tuple[Parameter, ...]
    bodies: tuple[str, ...]
    answers: tuple[str, ...]


def routes(document: dict[str, Any]) -> Iterator[Route]:
    """Every route of an OpenAPI document, by group."""
    found = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found.append(
                Route(
                    group=operation["tags"][0],
                    method=method.upper(),
                    path=path,
                    summary=operation["summary"],
                    description=" ".join(operation.get("description", "").split()),
                    parameters=tuple(_parameters(operation.get("parameters", ()))),
                    bodies=tuple(operation.get("requestBody", {}).get("content", ())),
                    answers=tuple(operation["responses"].get("200", {}).get("content", ())),
                )
            )
    order = list(GROUPS)
    return iter(sorted(found, key=lambda route: order.index(route.group)))


def _parameters(given: Iterable[dict[str, Any]]) -> Iterator[Parameter]:
    for parameter in given:
        yield Parameter(parameter["name"], parameter["in"], _values(parameter["schema"]), parameter.get("description", ""))


def _values(schema: dict[str, Any]) -> str:
    """What may stand there, in words, and the default."""
    kinds = [kind for kind in schema.get("anyOf", [schema]) if kind.get("type") != "null"]
    words = " or ".join(_kind(kind) for kind in kinds)
    default = schema.get("default")
    return words if default in (None, "") else f"{words}; default {str(default).lower()}"


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(str(value) for value in schema["enum"])
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    if least is None or most is None:
        return str(schema["type"])
    above = "above " if "exclusiveMinimum" in schema else ""
    return f"{schema['type']}, {above}{least} to {most}"


def page(document: dict[str, Any]) -> str:
    """The HTML page."""
    parts = []
    group = ""
    for route in routes(document):
        if route.group != group:
            parts += ["</section>" if group else "", f'<section class="wide"><h2>{escape(GROUPS[route.group])}</h2>']
            group = route.group
        parts.append(_entry(route))
    listed = "\n".join(parts)
    info = document["info"]
    return f"""<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>Outboard: HTTP API</title>
  <link rel="icon" href="/dashboard/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/dashboard/dashboard.css">
</head>
<body>
  <header>
    <h1>Outboard {escape(info["version"])}: HTTP API</h1>
    <nav><a href="/">Dashboard</a> <a href="/openapi.json">OpenAPI document</a> <a href="/metrics">Metrics</a></nav>
  </header>
  <main>
  <section class="wide"><p>Refusals under <code>/v1</code> are RFC 9457 problems: <code>type</code> is a stable word,
  <code>detail</code> says what was wrong, what was expected and what to do.</p></section>
{listed}
  </section></main>
</body>
</html>
"""


def _entry(route: Route) -> str:
    rows = "".join(
        f'<tr><th scope="row"><code>{p.name}</code></th><td>{p.place}</td><td>{p.values}</td><td>{escape(p.description)}</td></tr>'
        for p in route.parameters
    )
    table = f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>' if rows else ""
    sent = f"<p>Body: {escape(', '.join(route.bodies))}</p>" if route.bodies else ""
    return (
        f'<article class="card route"><h3><code>{route.method} {escape(route.path)}</code></h3><p>{escape(route.summary)}. '
        f"{escape(route.description)}</p>{sent}{table}</article>"
    )


def router(app: FastAPI) -> APIRouter:
    """`/docs` for the routes that `app` has when it is first asked for."""
    own = APIRouter(include_in_schema=False)

    @own.get("/docs")
    async def docs() -> Response:
        return Response(page(app.openapi()), media_type="text/html; charset=utf-8", headers=HEADERS)

    return own
