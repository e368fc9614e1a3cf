"""The trace that a request belongs to: W3C Trace Context (https://www.w3.org/TR/trace-context/), without any library.

`CURRENT` holds it while the request is answered (http/traced.py, oip/grpc_traced.py), so that log lines name it and the runtime notes where
the time of its frames went. It is None for nearly every request: then nothing is noted. Each frame of a stream has a trace of its own
(telemetry/frame_traces.py): a link may last for days.
"""

from __future__ import annotations

import re
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any

#: Version, trace id, the caller's span, flags. Later versions may append more.
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
#: Frames of one request whose times are kept: a large picture in tiles has hundreds.
FRAMES_KEPT = 32


@dataclass(frozen=True, slots=True)
class Parent:
    """What a valid `traceparent` says, in lower-case hexadecimal."""

    trace_id: str
    span_id: str
    flags: str
    state: str = ""  #: the header `tracestate`, as it came

    @property
    def sampled(self) -> bool:
        return bool(int(self.flags, 16) & 1)


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Where one frame's time went. Points in time are seconds of the event loop's clock, the others seconds."""

    model: str
    device: str  #: "": it was refused
    outcome: str  #: "answered", or the problem's slug
    degraded: bool
    arrived: float
    filled: float  #: its pixels lay in frame memory; 0: they never did
    ended: float
    decode: float
    infer: float  #: of the worker: link and compute


@dataclass(slots=True)
class Trace:
    """A request under way, or a stream's frame. All empty where the client sent no `traceparent` and no spans are made: then only logs
    want it."""

    trace_id: str = ""
    span_id: str = ""
    flags: str = "00"
    parent: Parent | None = None  #: what came
    span: Any = None  #: OpenTelemetry's, where one is made (telemetry/spans.py)
    request_ids: list[str] = field(default_factory=list)  #: of its answers
    frames: list[FrameTimes] = field(default_factory=list)
    count: int = 0  #: frames, kept or not
    ended: bool = False  #: what outlives the request (a timer, a task) is not part of it

    @property
    def header(self) -> str:
        """`traceparent`, as it is passed on."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    def frame(self, times: FrameTimes) -> None:
        self.count += 1
        if self.count <= FRAMES_KEPT:
            self.frames.append(times)

    def fields(self) -> dict[str, Any]:
        """Members of a log line."""
        found: dict[str, Any] = {"trace_id": self.trace_id, "span_id": self.span_id} if self.trace_id else {}
        if self.request_ids:
            found["request_id"] = self.request_ids[0] if len(self.request_ids) == 1 else list(self.request_ids)
        return found

    def last_frame(self) -> dict[str, Any]:
        """Members of a request's own log line: how its last frame ended, and where."""
        if not self.frames:
            return {}
        last = self.frames[-1]
        return {"device": last.device, "outcome": last.outcome, "degraded": last.degraded}

    def attributes(self) -> dict[str, Any]:
        """Of a request's span: which model its last frame was for, and where it ran."""
        if not self.frames:
            return {}
        last = self.frames[-1]
        return {"outboard.model": last.model, "outboard.device": last.device, "outboard.degraded": last.degraded}


CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)


def of(parent: Parent | None) -> Trace:
    """A trace that is passed on as it came; of nothing, one that only logs want."""
    return Trace(parent.trace_id, parent.span_id, parent.flags, parent) if parent is not None else Trace()


def context_of(trace: Trace | None) -> Context | None:
    """For a task that belongs to `trace`; None: it would anyway."""
    if CURRENT.get() is trace:
        return None
    context = copy_context()
    context.run(CURRENT.set, trace)
    return context


def current() -> Trace | None:
    """The trace of the request that is being answered here."""
    trace = CURRENT.get()
    return trace if trace is not None and not trace.ended else None


def parse(header: bytes, state: bytes = b"") -> Parent | None:
    """Of the headers `traceparent` and `tracestate`. None for what the specification calls invalid: it is ignored, as if it had not been
    sent."""
    found = _TRACEPARENT.fullmatch(header.strip(b" \t"))
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == b"ff" or (version == b"00" and more) or not trace_id.strip(b"0") or not span_id.strip(b"0"):
        return None
    return Parent(trace_id.decode(), span_id.decode(), flags.decode(), state.decode("latin-1"))
