"""Write the tables of the manual that come out of the code: docs/errors.md, docs/settings.md, docs/model-toml.md, docs/doctor.md.

`python scripts/make_docs.py` writes them; a test fails when one of them is out of date.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import msgspec

from outboard import repository, settings
from outboard.doctor.areas import CHECKS
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


PAGES = {"errors.md": errors, "settings.md": settings_table, "model-toml.md": model_toml, "doctor.md": doctor}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
