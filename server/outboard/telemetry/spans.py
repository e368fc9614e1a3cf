"""OpenTelemetry spans of requests, sent by OTLP over HTTP. The standard OTEL_* variables say where to, how many and under which name.

A request's span has a child for each part of its frames' time: `queue` (waiting for a decode thread, then for a device), `decode`, and
`infer` (the worker's: link and compute). They are made from what the runtime measures anyway, when the answer is out: nothing is started or
stopped on the way of a frame. Needs the extra `otel`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
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

    def begin(self, method: str, parent: Parent | None, state: str) -> tuple[Span, Trace]:
        """The span of a request that has just come, and the trace as its answer passes it on. `state` is the `tracestate` header."""
        context = None
        if parent is not None:
            remote = SpanContext(
                int(parent.trace_id, 16),
                int(parent.span_id, 16),
                is_remote=True,
                trace_flags=TraceFlags(int(parent.flags, 16)),
                trace_state=TraceState.from_header([state]) if state else None,
            )
            context = set_span_in_context(NonRecordingSpan(remote))
        span = self._tracer.start_span(method, context, SpanKind.SERVER, attributes={"http.request.method": method})
        made = span.get_span_context()
        return span, Trace(f"{made.trace_id:032x}", f"{made.span_id:016x}", f"{made.trace_flags:02x}")

    def end(self, span: Span, trace: Trace, attributes: Mapping[str, str | int | bool], now: float) -> None:
        """The answer is out. `attributes` as OpenTelemetry names them; `now` of the event loop's clock, which the frames' times are on."""
        if span.is_recording():
            route, status = attributes.get("http.route"), int(attributes["http.response.status_code"])
            if route:
                span.update_name(f"{attributes['http.request.method']} {route}")
            span.set_attributes({**attributes, "outboard.frames": trace.count})
            if status >= 500:
                span.set_attribute("error.type", str(status))
                span.set_status(StatusCode.ERROR)
            epoch = time.time_ns() - round(now * 1e9)
            parent = set_span_in_context(span)
            for frame in trace.frames:
                about = {"outboard.model": frame.model, "outboard.device": frame.device, "outboard.outcome": frame.outcome}
                for name, began, ended in parts(frame):
                    child = self._tracer.start_span(name, parent, attributes=about, start_time=epoch + round(began * 1e9))
                    child.end(epoch + round(ended * 1e9))
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
    yield "queue", frame.arrived, frame.filled - frame.decode
    yield "decode", frame.filled - frame.decode, frame.filled
    yield "queue", frame.filled, max(frame.filled, frame.ended - frame.infer)
    if frame.infer:
        yield "infer", max(frame.filled, frame.ended - frame.infer), frame.ended
