"""OpenTelemetry spans of requests and of streams' frames, sent by OTLP over HTTP. The standard OTEL_* variables say where to, how many and
under which name.

A span has a child for each part of its frames' time: `queue` (waiting for a decode thread, then for a device), `decode`, and
`infer` (the worker's: link and compute). They are made from what the runtime measures anyway, when the answer is out: nothing is started or
stopped on the way of a frame. Needs the extra `otel`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Literal

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from outboard import __version__
from outboard.telemetry.tracing import FrameTimes, Parent, Trace

#: Seconds that the end of the server waits for a collector that does not answer.
PATIENCE = 2.0


class Spans:
    """Makes and sends them. Every method returns at once: a thread of the SDK sends, and drops what a collector does not take in time."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """`exporter`: instead of OTLP."""
        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
            resource = resource.merge(Resource({SERVICE_NAME: "outboard"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("outboard", __version__)

    def begin(self, name: str, parent: Parent | None, *, kind: Literal["server", "consumer"]) -> Trace:
        """Of a request, or of a stream's frame, that has just come."""
        context = None
        if parent is not None:
            remote = SpanContext(
                int(parent.trace_id, 16),
                int(parent.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(int(parent.flags, 16)),
                trace_state=TraceState.from_header([parent.state]) if parent.state else None,
            )
            context = set_span_in_context(NonRecordingSpan(remote))
        span = self._tracer.start_span(name, context, SpanKind[kind.upper()])
        made = span.get_span_context()
        return Trace(f"{made.trace_id:032x}", f"{made.span_id:016x}", f"{made.trace_flags:02x}", parent, span)

    def end(self, trace: Trace, attributes: Mapping[str, str | int | float | bool], *, name: str = "", error: str = "") -> None:
        """The answer is out. `attributes` as OpenTelemetry names them; `name`: what the span is called now that its route is known;
        `error`: what went wrong here, not at the sender's. On the event loop, whose clock the frames' times are on."""
        span = trace.span
        if span.is_recording():
            loop, ended = asyncio.get_running_loop().time(), time.time_ns()
            if name:
                span.update_name(name)
            span.set_attributes({**attributes, "outboard.frames": trace.count})
            if error:
                span.set_attribute("error.type", error)
                span.set_status(StatusCode.ERROR)
            parent = set_span_in_context(span)

            def at(seconds: float) -> int:
                # The two clocks are not read at one moment: a part that began with its request must not begin before it.
                return min(max(ended - round((loop - seconds) * 1e9), span.start_time), ended)

            for frame in trace.frames:
                about = {"outboard.model": frame.model, "outboard.device": frame.device, "outboard.outcome": frame.outcome}
                for part, began, done in parts(frame):
                    self._tracer.start_span(part, parent, attributes=about, start_time=at(began)).end(at(done))
        span.end()

    def close(self) -> None:
        """Send what is left, and wait for that no longer than PATIENCE."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(PATIENCE)


def parts(frame: FrameTimes) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of what happened to a frame, in order."""
    if not frame.filled:  # refused, or its picture cannot be decoded
        yield "queue", frame.arrived, frame.ended - frame.decode
        if frame.decode:
            yield "decode", frame.ended - frame.decode, frame.ended
        return
    began = max(frame.arrived, frame.filled - frame.decode)  # the loop's clock stands still while it copies a small tensor itself
    yield "queue", frame.arrived, began
    yield "decode", began, frame.filled
    yield "queue", frame.filled, max(frame.filled, frame.ended - frame.infer)
    if frame.infer:
        yield "infer", max(frame.filled, frame.ended - frame.infer), frame.ended
