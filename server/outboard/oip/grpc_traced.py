"""Inferences over gRPC in traces, as http/traced.py has HTTP's requests: `traceparent` is taken from a call's metadata and passed on in its
trailing metadata, log lines name it, spans are made of it, and each inference may be a log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from outboard.oip.grpc_status import code_of_failure
from outboard.telemetry import tracing

if TYPE_CHECKING:
    from outboard.telemetry.spans import Spans

log = logging.getLogger(__name__)

T = TypeVar("T")
#: Errors of the server, by OpenTelemetry's conventions; the others are the caller's.
_OURS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


class Traced:
    """An inference that none of this concerns costs a look at its call's metadata."""

    def __init__(self, service: str, spans: Spans | None, log_requests: bool):
        """`service`: its full name."""
        self._service = service
        self._spans = spans
        self._always = spans is not None or log_requests
        self._log_requests = log_requests

    async def infer(self, work: Awaitable[T], context: grpc.aio.ServicerContext, method: str, model: str) -> T:
        """The result of `work`, an inference for `model` that came by `method`."""
        parent = _parent(context)
        if parent is None and not self._always:
            return await work
        began = time.perf_counter()
        if self._spans is not None:
            trace = self._spans.begin(f"{self._service}/{method}", parent, kind="server")
        else:
            trace = tracing.of(parent)
        if trace.trace_id and method == "ModelInfer":  # in a stream, which has one set of trailing metadata, each inference has its own
            context.set_trailing_metadata((("traceparent", trace.header),))
        token = tracing.CURRENT.set(trace)
        status = grpc.StatusCode.OK
        try:
            return await work
        except BaseException as e:
            status = code_of_failure(e)
            raise
        finally:
            if self._log_requests:
                _log(method, model, trace, status, time.perf_counter() - began)
            if self._spans is not None:
                self._end(trace, method, status)
            trace.ended = True
            tracing.CURRENT.reset(token)

    def _end(self, trace: tracing.Trace, method: str, status: grpc.StatusCode) -> None:
        assert self._spans is not None
        about: dict[str, Any] = {"rpc.system": "grpc", "rpc.service": self._service, "rpc.method": method}
        about["rpc.grpc.status_code"] = status.value[0]
        self._spans.end(trace, about | trace.attributes(), error=status.name if status.name in _OURS else "")


def _parent(context: grpc.aio.ServicerContext) -> tracing.Parent | None:
    """Nothing where it was sent twice."""
    metadata = context.invocation_metadata() or ()
    found = [value for name, value in metadata if name == "traceparent"]
    if len(found) != 1:
        return None
    states = [value for name, value in metadata if name == "tracestate"]
    return tracing.parse(_bytes(found[0]), _bytes(states[0]) if len(states) == 1 else b"")


def _bytes(value: str | bytes) -> bytes:
    return value.encode("latin-1", "replace") if isinstance(value, str) else value


def _log(method: str, model: str, trace: tracing.Trace, status: grpc.StatusCode, seconds: float) -> None:
    about: dict[str, Any] = {"method": method, "model": model[:100], "status": status.name, "seconds": round(seconds, 6)}
    about |= trace.last_frame()
    log.info("%s of %s %s in %.1f ms", method, ascii(model[:100])[1:-1], status.name, seconds * 1e3, extra=about)
