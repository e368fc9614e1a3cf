"""Traces of a stream's frames. Each frame has one of its own, under what the request that opened the link said; a link whose request had no
`traceparent` has none, and its frames pass by all of this."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from outboard.telemetry import tracing

if TYPE_CHECKING:
    from outboard.telemetry.spans import Spans


def parent_of_link() -> tracing.Parent | None:
    """What the request that is being answered here said."""
    trace = tracing.current()
    return trace.parent if trace is not None else None


def begin(parent: tracing.Parent, spans: Spans | None) -> tracing.Trace:
    """A frame has come. It has a span where its sender samples: nobody else would look at millions of them."""
    if spans is None or not parent.sampled:
        return tracing.of(parent)
    return spans.begin("frame", parent, kind="consumer")


def end(trace: tracing.Trace, spans: Spans | None, about: Mapping[str, str | int | float | bool], *, failed: bool) -> None:
    """It has its outcome."""
    if spans is not None and trace.span is not None:
        spans.end(trace, about, error="failed" if failed else "")
    trace.ended = True
