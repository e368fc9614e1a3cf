"""Prometheus metrics of streams. Figures of one stream are in /v1/streams: stations are no labels."""

from __future__ import annotations

from functools import lru_cache

from prometheus_client import Counter, Gauge, Histogram

from outboard.telemetry.metrics import REGISTRY

_open = Gauge("outboard_streams", "Streams with a link", ["policy"], registry=REGISTRY)
_frames = Counter("outboard_stream_frames", "Frames of streams: answered, or why dropped", ["model", "outcome"], registry=REGISTRY)
_age = Histogram(
    "outboard_frame_age_seconds",
    "Seconds from a frame's capture until its answer",
    ["model"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
memory = Gauge("outboard_stream_memory_bytes", "Bytes of frames that streams hold", registry=REGISTRY)
resumed = Counter("outboard_stream_resumes", "Links that went on with the session of a lost one", registry=REGISTRY)

_frame_child = lru_cache(1024)(lambda model, outcome: _frames.labels(model, outcome))
_age_child = lru_cache(256)(lambda model: _age.labels(model))


def opened(policy: str, by: int) -> None:
    """A stream has got a link (`by` 1) or lost it (-1)."""
    _open.labels(policy).inc(by)


def outcome(model: str, reason: str | None, age: float | None) -> None:
    _frame_child(model, reason or "answered").inc()
    if age is not None:
        _age_child(model).observe(age)
