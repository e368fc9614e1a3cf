"""Options of a prediction: query parameters, or form fields of the same name."""

from __future__ import annotations

import math
from collections.abc import Mapping

from outboard import tasks
from outboard.predictor import Request
from outboard.problems import Problem

KNOWN = {
    "min_score": "answer nothing that scores less, 0 to 1",
    "top_k": "answer at most so many, 1 to 10000",
    "deadline_ms": "milliseconds from arrival after which the answer is worthless, 1 to 3600000",
    "strict_device": "true: refuse rather than answer from another device than the one asked for",
}


def parse(given: Mapping[str, str], *, arrived: float, received: float, default_deadline: float) -> Request:
    """Check what was given. An unknown option is refused, not ignored. Raises Problem bad_option."""
    for name in given:
        if name not in KNOWN:
            raise Problem("bad_option", f"unknown option {name[:60]!r}; known: {', '.join(KNOWN)}")
    min_score = _number(given, "min_score", 0.0, 1.0)
    top_k = _number(given, "top_k", 1, 10_000, whole=True)
    deadline = _number(given, "deadline_ms", 1, 3_600_000)
    return Request(
        options=tasks.Options(min_score=min_score, top_k=None if top_k is None else int(top_k)),
        deadline=arrived + (default_deadline if deadline is None else deadline / 1e3),
        strict_device=_flag(given, "strict_device"),
        received=received,
    )


def _number(given: Mapping[str, str], name: str, low: float, high: float, whole: bool = False) -> float | None:
    text = given.get(name)
    if text is None:
        return None
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise Problem(
            "bad_option", f"{name} is {text[:60]!r}, expected {'a whole number' if whole else 'a number'} from {low:g} to {high:g}"
        )
    return value


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise Problem("bad_option", f"{name} is {text[:60]!r}, expected true or false")
