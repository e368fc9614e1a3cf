"""Prometheus metrics. Label values come from closed lists: loaded models, devices, slugs of `problems.PROBLEMS`, route templates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

REGISTRY = CollectorRegistry()
STATES = ("starting", "warming", "serving", "standby", "suspect", "lost", "quarantined", "ejected", "off")

_frames = Counter(
    "outboard_frames", "Frames by outcome (answered, or the problem's slug)", ["model", "device", "outcome"], registry=REGISTRY
)
_batches = Histogram(
    "outboard_batch_size", "Rows of a batch", ["device", "model"], buckets=(1, 2, 4, 8, 16, 32, 64, 128), registry=REGISTRY
)
_decoded = Counter("outboard_decoded_images", "Images by where they were decoded: host, or a device", ["model", "where"], registry=REGISTRY)
_link = Counter(
    "outboard_link_bytes", "Bytes of rows (h2d) and answers (d2h) over a device's link", ["device", "direction"], registry=REGISTRY
)
_ratio = Histogram(
    "outboard_batch_seconds_ratio",
    "What batches took, as a multiple of what was predicted",
    ["device", "model"],
    buckets=(0.25, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 4),
    registry=REGISTRY,
)
_predicted = Counter("outboard_batch_predicted_seconds", "What batches should have taken", ["device", "model"], registry=REGISTRY)
_observed = Counter("outboard_batch_observed_seconds", "What they took", ["device", "model"], registry=REGISTRY)
_recompilations = Counter(
    "outboard_recompilations", "Times that compiled code was compiled anew while it served", ["device", "model"], registry=REGISTRY
)
_state = Gauge("outboard_device_state", "1 for the state that the device is in", ["device", "state"], registry=REGISTRY)
QUARANTINE_REASONS = ("losses", "wrong_answers")
_quarantined = Gauge(
    "outboard_device_quarantined", "1 while the device is quarantined for the reason", ["device", "reason"], registry=REGISTRY
)
_counted_losses: dict[str, int] = {}
_lost = Counter("outboard_device_lost", "Times that a device was lost", ["device"], registry=REGISTRY)
_requests = Counter("outboard_http_requests", "HTTP requests", ["route", "status"], registry=REGISTRY)
_seconds = Histogram(
    "outboard_http_request_seconds",
    "Seconds from the request's first byte to its answer",
    ["route"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    registry=REGISTRY,
)
aborted = Counter("outboard_uploads_aborted", "Requests whose client left before the body was complete", registry=REGISTRY)
unread = Counter("outboard_answers_unread", "Answers that were cut off because their client did not take them", registry=REGISTRY)
frame_memory = Gauge("outboard_frame_memory_bytes", "Frame memory in use", registry=REGISTRY)
frame_memory_limit = Gauge("outboard_frame_memory_limit_bytes", "Frame memory in all", registry=REGISTRY)
loop_lag = Gauge("outboard_loop_lag_seconds", "How late the event loop ran its last timer", registry=REGISTRY)

# Looking labels up costs more than counting: the children are kept. The keys are closed lists, so the caches stay small.
_frame_child = lru_cache(4096)(lambda model, device, outcome: _frames.labels(model, device, outcome))
_decoded_child = lru_cache(1024)(lambda model, where: _decoded.labels(model, where))
_batch_child = lru_cache(1024)(lambda device, model: _batches.labels(device, model))
_link_child = lru_cache(256)(lambda device, direction: _link.labels(device, direction))
_prediction_children = lru_cache(1024)(lambda device, model: [m.labels(device, model) for m in (_ratio, _predicted, _observed)])
_request_child = lru_cache(1024)(lambda route, status: _requests.labels(route, status))
_seconds_child = lru_cache(256)(lambda route: _seconds.labels(route))


def frame(network: str, device: str, outcome: str) -> None:
    """One frame has ended. `network` is the engine's id."""
    _frame_child(network.rpartition("@")[0], device, outcome).inc()


def decoded(network: str, where: str) -> None:
    """One image that was answered has been decoded: "host", or a device's id."""
    _decoded_child(network.rpartition("@")[0], where).inc()


def batch(device: str, model: str, rows: int) -> None:
    _batch_child(device, model).observe(rows)


def predicted(device: str, model: str, expected: float, seconds: float) -> None:
    """A batch of which `expected` seconds were predicted has taken `seconds`."""
    if expected > 0:
        ratio, should, did = _prediction_children(device, model)
        ratio.observe(seconds / expected)
        should.inc(expected)
        did.inc(seconds)


def recompiled(device: str, model: str, times: int) -> None:
    """Compiled code of a model serves, and was compiled anew `times` since the last call."""
    _recompilations.labels(device, model).inc(times)


def link(device: str, direction: str, nbytes: int) -> None:
    """`direction`: "h2d" or "d2h"."""
    _link_child(device, direction).inc(nbytes)


def flowing() -> Iterator[Metric]:
    """The families that count what flows: frames, batches, bytes over links."""
    for family in (_frames, _batches, _link):
        yield from family.collect()


def device_state(device: str, state: str, losses: int, quarantined_for: str) -> None:
    """A device has entered a state. It has been lost `losses` times since the start, its last quarantine is for `quarantined_for`.

    (Not each "lost" is a loss: a look for a device that is still away ends in that state again, and the loss that leads to a quarantine
    does not.)
    """
    for name in STATES:
        _state.labels(device, name).set(name == state)
    for reason in QUARANTINE_REASONS:
        _quarantined.labels(device, reason).set(state == "quarantined" and reason == quarantined_for)
    _lost.labels(device).inc(losses - _counted_losses.get(device, 0))
    _counted_losses[device] = losses


def request(route: str, status: int, seconds: float) -> None:
    _request_child(route, str(status)).inc()
    _seconds_child(route).observe(seconds)


def exposition() -> bytes:
    return generate_latest(REGISTRY)
