"""Options of a prediction: query parameters, or form fields of the same name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from outboard import tasks
from outboard.http.parameters import Described
from outboard.imaging.tiles import LARGEST, MOST_OVERLAP, SMALLEST, Tiling
from outboard.predictor import Request
from outboard.problems import Problem

KNOWN: dict[str, Described] = {
    "min_score": ({"type": "number", "minimum": 0, "maximum": 1}, "answer nothing that scores less; unless given, what the model says"),
    "top_k": ({"type": "integer", "minimum": 1, "maximum": 10_000}, "answer at most so many"),
    "tile": (
        {"anyOf": [{"enum": ["auto"]}, {"type": "integer", "minimum": SMALLEST, "maximum": LARGEST}]},
        "detection: look at tiles of the picture too, and how wide they are, in its pixels; `auto`: as wide as the model's input",
    ),
    "overlap": (
        {"type": "number", "minimum": 0, "maximum": MOST_OVERLAP, "default": 0.2},
        "the share of a tile that the next one shows again",
    ),
    "merge": (
        {"enum": ["nmm", "nms"], "default": "nmm"},
        "how an object's boxes in several tiles become one: `nmm`, their union, or `nms`, the best one",
    ),
    "whole": (
        {"type": "boolean", "default": True},
        "with `tile`: whether the whole picture is looked at as well, for what is larger than a tile",
    ),
    "deadline_ms": (
        {"type": "number", "minimum": 1, "maximum": 3_600_000},
        "milliseconds from arrival after which the answer is worthless; unless given, `[limits] deadline`",
    ),
    "strict_device": ({"type": "boolean", "default": False}, "refuse rather than answer from another device than the one asked for"),
}


def parse(given: Mapping[str, str], *, arrived: float, received: float, default_deadline: float) -> Request:
    """Check what was given. An unknown option is refused, not ignored. Raises Problem bad_option."""
    for name in given:
        if name not in KNOWN:
            raise Problem("bad_option", f"unknown option {name[:60]!r}; known: {', '.join(KNOWN)}")
    min_score = number(given, "min_score", 0.0, 1.0)
    top_k = number(given, "top_k", 1, 10_000, whole=True)
    deadline = number(given, "deadline_ms", 1, 3_600_000)
    return Request(
        options=tasks.Options(min_score=min_score, top_k=None if top_k is None else int(top_k)),
        deadline=arrived + (default_deadline if deadline is None else deadline / 1e3),
        tiling=_tiling(given),
        strict_device=_flag(given, "strict_device"),
        received=received,
    )


def number(given: Mapping[str, str], name: str, low: float, high: float, whole: bool = False) -> float | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if "_" in text:  # a number in Python only
        value = math.nan
    if not low <= value <= high:
        raise Problem(
            "bad_option", f"{name} is {text[:60]!r}, expected {'a whole number' if whole else 'a number'} from {low} to {high}"
        )
    return value


def _tiling(given: Mapping[str, str]) -> Tiling | None:
    if "tile" not in given:
        if alone := [name for name in ("overlap", "merge", "whole") if name in given]:
            raise Problem("bad_option", f"{alone[0]} is about tiles, and none are asked for; add tile=auto")
        return None
    size = 0
    if given["tile"] != "auto":
        try:
            size = int(number(given, "tile", SMALLEST, LARGEST, whole=True) or 0)
        except Problem as e:
            raise Problem("bad_option", f"{e.detail}, or auto") from None
    overlap = number(given, "overlap", 0.0, MOST_OVERLAP)
    merge = given.get("merge", "nmm")
    if merge not in ("nmm", "nms"):
        raise Problem("bad_option", f"merge is {merge[:60]!r}, expected nmm or nms")
    return Tiling(size=size, overlap=0.2 if overlap is None else overlap, merge=merge, whole=_flag(given, "whole", "true"))


def _flag(given: Mapping[str, str], name: str, default: str = "false") -> bool:
    text = given.get(name, default).lower()
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise Problem("bad_option", f"{name} is {text[:60]!r}, expected true or false")
