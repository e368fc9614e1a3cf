"""What can go wrong, as exceptions. All of them are `OutboardError`s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class OutboardError(Exception):
    """Base of every error of this package."""


class Problem(OutboardError):
    """The server refused, and says why (RFC 9457).

    `slug` is stable and listed in docs/errors.md, `detail` says what was wrong, what was expected and what to do, `retry_after` is in
    seconds where the server named a time. `fields` holds further members (for a model: file, key, expected).
    """

    def __init__(self, slug: str, detail: str, *, status: int = 0, title: str = "", retry_after: float | None = None, **fields: Any):
        super().__init__(f"{slug}: {detail}" if detail else slug)
        self.slug = slug
        self.detail = detail
        self.status = status
        self.title = title
        self.retry_after = retry_after
        self.fields = fields

    def members(self) -> dict[str, Any]:
        """The members of the problem+json object that it came as."""
        return {"type": self.slug, "title": self.title, "status": self.status, "detail": self.detail, **self.fields}

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.slug, self.detail, self.status, self.title, self.retry_after, self.fields)


class Unreachable(OutboardError):
    """No answer came: nothing listens there, the link broke, or it took too long."""


class StreamLost(OutboardError):
    """The stream cannot go on: no link within the time that was given, another connection took its session, or the server ended it.

    The frames named by `unanswered` have no outcome.
    """

    def __init__(self, message: str, unanswered: list[int]):
        super().__init__(message)
        self.unanswered = unanswered


class SourceFailed(OutboardError):
    """A source of frames cannot be opened, or has stopped for good."""


def problem_of(status: int, headers: Mapping[str, str], body: bytes) -> Problem:
    """The problem that a response with an error status carries; `http_STATUS` where it is not one of Outboard's (a proxy's page)."""
    try:
        members = msgspec.json.decode(body)
    except msgspec.DecodeError:
        members = None
    if not isinstance(members, dict):
        members = {}
    detail = members.get("detail") or body[:200].decode("utf-8", "replace")
    return problem_in({"type": f"http_{status}", **members, "status": status, "detail": detail}, _seconds(headers.get("retry-after")))


def problem_in(members: Mapping[str, Any], retry_after: float | None = None) -> Problem:
    """The problem that these members make."""
    rest = {k: v for k, v in members.items() if k not in ("type", "title", "status", "detail")}
    return Problem(
        str(members["type"]),
        str(members.get("detail", "")),
        status=int(members.get("status", 0)),
        title=str(members.get("title", "")),
        retry_after=retry_after,
        **rest,
    )


def _seconds(header: str | None) -> float | None:
    """Retry-After as seconds; the form with a date is not one that Outboard sends."""
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:
        return None


def _rebuild(slug: str, detail: str, status: int, title: str, retry_after: float | None, fields: dict[str, Any]) -> Problem:
    return Problem(slug, detail, status=status, title=title, retry_after=retry_after, **fields)
