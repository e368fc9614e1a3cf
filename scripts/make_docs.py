"""Write the pages of the manual that come out of the code: tables of errors, settings, model.toml and doctor's checks, and the
references of the HTTP API and of the Python client.

`python scripts/make_docs.py` writes them; a test fails when one of them is out of date.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec

import outboard_client
from outboard import repository, settings
from outboard.doctor.areas import CHECKS
from outboard.http import reference
from outboard.http.app import create
from outboard.problems import PROBLEMS

DOCS = Path(__file__).resolve().parent.parent / "docs"
_FIELD = re.compile(r"^    (?P<name>\w+): .*?(?:#: (?P<text>.*))?$", re.M)


def errors() -> str:
    lines = [
        "# Errors",
        "",
        "Every refusal under `/v1` is an RFC 9457 problem (`application/problem+json`). `type` is one of these slugs, `detail` says what",
        "was wrong, what was expected and what to do. The same slugs are the `outcome` label of `outboard_frames_total`.",
        "",
        "| type | status | title |",
        "|---|---|---|",
    ]
    lines += [f"| `{slug}` | {status} | {title} |" for slug, (status, title) in sorted(PROBLEMS.items(), key=lambda x: (x[1][0], x[0]))]
    return "\n".join(lines) + "\n"


def _rows(struct: type[msgspec.Struct], prefix: str = "") -> list[str]:
    """A table row for each field: name, default, the `#:` comment beside it."""
    texts = {m["name"]: m["text"] or "" for m in _FIELD.finditer(inspect.getsource(struct))}
    rows = []
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct) and field.type.__module__ == struct.__module__:
            continue  # a table of its own
        default: Any = field.default
        if default is msgspec.NODEFAULT:
            default = "required" if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        shown = str(default) if isinstance(default, Path) else repr(list(default) if isinstance(default, tuple) else default)
        rows.append(f"| `{prefix}{field.name}` | {'required' if default == 'required' else f'`{shown}`'} | {texts.get(field.name, '')} |")
    return rows


def settings_table() -> str:
    lines = [
        "# Settings",
        "",
        "Flags over `OUTBOARD_*` variables over `outboard.toml` over the defaults. `limits.body` is `[limits] body` in the file and",
        "`OUTBOARD_LIMITS_BODY` in the environment. Sizes take bytes or `64MiB`; times are seconds.",
        "",
        "| setting | default | what |",
        "|---|---|---|",
        *_rows(settings.Settings),
        *_rows(settings.Limits, "limits."),
        *_rows(settings.Devices, "devices."),
        *_rows(settings.Failback, "failback."),
        *_rows(settings.Streams, "streams."),
        *_rows(settings.Http, "http."),
        *_rows(settings.Oip, "oip."),
    ]
    return "\n".join(lines) + "\n"


def model_toml() -> str:
    lines = [
        "# model.toml",
        "",
        "One beside each model's weights, in `models/NAME/`. An unknown key, a missing file or a shape that does not fit is refused",
        "with the file, the key and what was expected; the other models go on serving. How to write one:",
        "[my own model](my-own-model.md).",
        "",
    ]
    tables: list[tuple[str, str, type[msgspec.Struct]]] = [
        ("the file itself", "", repository.ModelFile),
        ("[input]", "input.", repository.Input),
        ("[output]", "output.", repository.Output),
        ("[batching]", "batching.", repository.Batching),
        ("[run]", "run.", repository.Run),
        ("[golden]", "golden.", repository.Golden),
        (
            "[parts.NAME]: one network of a pipeline, with its own [parts.NAME.input] and [parts.NAME.batching]",
            "parts.NAME.",
            repository.Part,
        ),
    ]
    for title, prefix, struct in tables:
        lines += [f"## {title}", "", "| key | default | what |", "|---|---|---|", *_rows(struct, prefix), ""]
    decoders = ", ".join(f"`{name}` ({task})" for name, task in repository.DECODERS.items())
    lines += ["Decoders: " + decoders + ".", ""]
    return "\n".join(lines)


def doctor() -> str:
    lines = [
        "# outboard doctor",
        "",
        "Everything to check before you blame the software:",
        "",
        "```",
        "outboard doctor",
        "```",
        "",
        "It needs no server and no GPU, changes nothing, and asks the driver only in a process that it gives up after a while. Each",
        "finding says what it is, why it matters and which command mends it. Lines that begin with `>` are there to be copied; those with",
        "`sudo` need root. `--json` prints the same for programs, `--spool DIR` looks at a station's disk as well.",
        "",
        "| severity | means |",
        "|---|---|",
        "| problem | something does not work |",
        "| warning | something works badly, or will fail |",
        "| note | nothing is wrong, and one should know it |",
        "",
        "Exit code 0: no problem and no warning; 1: there is one; 2: wrong usage.",
        "",
        "What it believes, and what not: an idle PCIe link goes down to 2.5 GT/s, and the ports of a Thunderbolt or USB4 tunnel say 2.5",
        "GT/s x1 whatever passes through them, so a speed counts only while the card works, and measured bandwidth (`outboard profile`)",
        "counts most. A card is external when the firmware says so (`removable`) or when a Thunderbolt or USB4 controller's tunnel leads",
        "to it; OCuLink has no sign of its own.",
        "",
    ]
    for area, checks in CHECKS.items():
        lines += [f"## {area}", ""]
        for check in checks:
            lines += [f"### {check.name}", "", f"*{check.severity[0].upper()}{check.severity[1:]}.* {check.means} {check.why}", ""]
            lines += ["```", *(re.sub(r"{(\w+)}", lambda name: name[1].upper(), step) for step in check.mend), "```", ""]
    return "\n".join(lines)


async def _openapi() -> dict[str, Any]:
    """The OpenAPI document of a server that is not started."""
    transport = httpx.ASGITransport(create(settings.Settings()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return (await client.get("/openapi.json")).json()


def http_api() -> str:
    lines = [
        "# The HTTP API",
        "",
        "A running server shows the same at `/docs`, without anything from the network, and gives it to programs at `/openapi.json`.",
        "Refusals under `/v1` are RFC 9457 problems ([errors](errors.md)); under `/v2` they are what the Open Inference Protocol says",
        "([Triton and KServe clients](triton-clients.md)). `WS /v1/models/{model}/stream` is [the stream protocol](stream-protocol.md).",
        "",
    ]
    group = ""
    for route in reference.routes(asyncio.run(_openapi())):
        if route.group != group:
            group = route.group
            lines += [f"## {reference.GROUPS[group]}", ""]
        lines += [f"### `{route.method} {route.path}`", "", f"{route.summary}. {route.description}".strip(), ""]
        if route.bodies:
            lines += [f"Body: {', '.join(f'`{kind}`' for kind in route.bodies)}", ""]
        if route.parameters:
            lines += ["| parameter | in | values | what |", "|---|---|---|---|"]
            lines += [f"| `{p.name}` | {p.place} | {p.values} | {p.description} |" for p in route.parameters]
            lines.append("")
    return "\n".join(lines)


def python_api() -> str:
    lines = [
        "# Reference of `outboard_client`",
        "",
        "Everything that `outboard_client` exports, from its docstrings. How to use it: [the Python client](python-client.md).",
        "",
    ]
    for name in sorted(outboard_client.__all__, key=str.lower):
        thing = getattr(outboard_client, name)
        lines += [f"## `{name}`", ""]
        if inspect.isclass(thing):
            lines += _class(name, thing)
        else:
            text = f"`{thing!r}`" if isinstance(thing, outboard_client.Encoding) else f"One of {_union(thing)}"
            lines += [f"{text}.", ""]
    return "\n".join(lines)


def _union(thing: Any) -> str:
    return ", ".join(f"`{getattr(member, '__name__', member)}`" for member in thing.__args__)


def _class(name: str, cls: type) -> Iterator[str]:
    """How it is made, what it is, and its methods and properties."""
    bases = [base.__name__ for base in cls.__mro__[1:-1] if base.__name__ in outboard_client.__all__]
    if bases:
        yield from [f"Is an `{bases[0]}`.", ""]
    if not issubclass(cls, Exception):  # those are caught, not made
        yield from ["```python", f"{name}{_signature(cls)}", "```", ""]
    if cls.__doc__ and not cls.__doc__.startswith(f"{name}("):  # else dataclass has written it
        yield from [inspect.cleandoc(cls.__doc__), ""]
    for member, value in vars(cls).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            yield from _member(f"{name}.{member}", value.fget)
        elif inspect.isfunction(value):
            yield from _member(f"{name}.{member}{_signature(value)}", value)


def _member(shown: str, function: Any) -> Iterator[str]:
    text = inspect.cleandoc(function.__doc__).replace("\n\n", "\n") if function.__doc__ else ""
    yield from [f"- `{shown}`" + (f": {' '.join(text.split())}" if text else ""), ""]


def _signature(thing: Any) -> str:
    """As it is called: without self, types as they are written; one parameter a line where one line would be long."""
    signature = inspect.signature(thing)
    shown, named = [], False
    for parameter in signature.parameters.values():
        if parameter.name.startswith("_") or parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not named:
            shown.append("*")
            named = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown.append(f"{stars}{parameter.name}: {_type(parameter.annotation)}{_default(parameter.default)}")
    gives = "" if inspect.isclass(thing) or signature.return_annotation is None else f" -> {_type(signature.return_annotation)}"
    line = f"({', '.join(shown)}){gives}"
    if inspect.isclass(thing) and len(line) > 110:
        line = "(\n" + "".join(f"    {parameter},\n" for parameter in shown) + ")"
    return line


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return ""
    for name in outboard_client.__all__:
        if getattr(outboard_client, name) is value:
            return f" = {name}"
    made = "factory" in repr(value)  # for each instance
    return f" = {'…' if made else repr(value)}"


PAGES = {
    "errors.md": errors,
    "settings.md": settings_table,
    "model-toml.md": model_toml,
    "doctor.md": doctor,
    "http-api.md": http_api,
    "python-api.md": python_api,
}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
