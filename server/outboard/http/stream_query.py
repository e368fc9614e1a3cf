"""What the query of a stream asks for (docs/stream-protocol.md, Connecting)."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from outboard.http import options
from outboard.http.parameters import Described
from outboard.problems import Problem
from outboard.streams import Asked

POLICIES = ("live", "lossless")
_STATION = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_SESSION = re.compile(r"[0-9a-f]{1,64}\Z")
#: Options of a prediction that a stream has in another form.
_OTHERWISE = {"deadline_ms"}
_ANY: dict[str, Described] = {
    "policy": ({"enum": list(POLICIES), "default": "live"}, "`live`: the newest frame wins; `lossless`: back-pressure, nothing is dropped"),
    "station": ({"type": "string"}, "the sender's name, 1 to 64 of `A-Z a-z 0-9 . _ -`; unless given, a made-up one"),
    "max_age_ms": (
        {"type": "number", "minimum": 1, "maximum": 3_600_000},
        "`live`: a frame that is more milliseconds old, from its capture, when it could be answered is dropped",
    ),
}
_LINK_ONLY = ("session", "after", "expect")
_KNOWN = (*_ANY, *_LINK_ONLY)
#: What a stream by POST takes.
POSTED = _ANY | {name: described for name, described in options.KNOWN.items() if name not in _OTHERWISE}


@dataclass(frozen=True, slots=True)
class Query:
    asked: Asked
    session: str  #: "": a new one
    after: int


def parse(given: Mapping[str, str], max_parts: int, *, link: bool) -> Query:
    """`link`: a WebSocket, which can be resumed and takes bundles. Raises Problem bad_option."""
    taken = [name for name in _KNOWN if link or name not in _LINK_ONLY]
    predicting = {k: v for k, v in given.items() if k not in _KNOWN}
    known = [*taken, *(name for name in options.KNOWN if name not in _OTHERWISE)]
    for name in given:
        if name not in known:
            raise Problem("bad_option", f"unknown option {name[:60]!r}; known: {', '.join(known)}")
    policy = given.get("policy", "live")
    if policy not in POLICIES:
        raise Problem("bad_option", f"policy is {policy[:60]!r}, expected live or lossless")
    max_age = options.number(given, "max_age_ms", 1, 3_600_000)
    if max_age is not None and policy == "lossless":
        raise Problem("bad_option", "max_age_ms drops what is too old, and lossless drops nothing; leave one of them out")
    session = given.get("session", "")
    after = options.number(given, "after", 0, 2**63, whole=True)
    if "session" in given and not _SESSION.match(session):
        raise Problem("bad_option", f"session is {session[:80]!r}, expected the one that hello gave")
    if after is not None and not session:
        raise Problem("bad_option", "after comes with session: together they resume a stream")
    asked = Asked(
        policy=policy,  # type: ignore[arg-type]
        station=_station(given.get("station")),
        max_age=None if max_age is None else max_age / 1e3,
        expect=_expect(given.get("expect", ""), max_parts),
        request=options.parse(predicting, arrived=0.0, received=0.0, default_deadline=0.0),
    )
    return Query(asked, session, int(after or 0))


def _station(given: str | None) -> str:
    if given is None:
        return f"client-{secrets.token_hex(3)}"
    if not _STATION.match(given):
        raise Problem("bad_option", f"station is {given[:80]!r}, expected 1 to 64 of A-Z a-z 0-9 . _ -")
    return given


def _expect(given: str, most: int) -> tuple[str, ...]:
    names = tuple(name for name in given.split(",") if name)
    if len(names) > most or len(set(names)) < len(names):
        raise Problem("bad_option", f"expect names {len(names)} parts, expected at most {most}, each once, separated by commas")
    return names
