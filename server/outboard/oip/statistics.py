"""A model's statistics in the shape of the protocol's statistics extension (JSON of REST, fields of gRPC's ModelStatistics)."""

from __future__ import annotations

from typing import Any

from outboard.registry import Version
from outboard.runtime import Runtime
from outboard.telemetry.statistics import Duration, ModelStatistics


def model_stats(runtime: Runtime, version: Version) -> dict[str, Any]:
    """Of every route together. A pipeline's parts are added up: its inferences are those of its networks."""
    members = [runtime.networks[i].statistics for i in version.ids.values() if i in runtime.networks]
    batches: dict[int, Duration] = {}
    for member in members:
        for rows, runs in member.batches.items():
            merged = batches.setdefault(rows, Duration())
            merged.count += runs.count
            merged.seconds += runs.seconds
    none = {"count": 0, "ns": 0}
    return {
        "name": version.spec.name,
        "version": version.spec.version,
        "last_inference": int(max((m.last for m in members), default=0.0) * 1e3),
        "inference_count": sum(m.inferences for m in members),
        "execution_count": sum(m.executions for m in members),
        "inference_stats": {
            **{name: _sum(members, name) for name in ("success", "fail", "queue", "compute_input", "compute_infer")},
            "compute_output": none,
            "cache_hit": none,
            "cache_miss": none,
        },
        "batch_stats": [
            {"batch_size": rows, "compute_input": none, "compute_infer": _ns(runs.count, runs.seconds), "compute_output": none}
            for rows, runs in sorted(batches.items())
        ],
        "memory_usage": [],
    }


def _sum(members: list[ModelStatistics], name: str) -> dict[str, int]:
    durations: list[Duration] = [getattr(m, name) for m in members]
    return _ns(sum(d.count for d in durations), sum(d.seconds for d in durations))


def _ns(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": int(seconds * 1e9)}
