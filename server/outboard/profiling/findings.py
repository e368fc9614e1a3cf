"""What follows from measured costs: which batch sizes fit, meet the deadline and pay."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import msgspec

from outboard import resources
from outboard.core.costs import Costs
from outboard.core.device_memory import MemoryNeed
from outboard.core.pipeline import HAND_OVER, choose, sharing
from outboard.core.state import PIPELINE
from outboard.profiling.run import Measured


@dataclass(frozen=True, slots=True)
class Findings:
    """Rows of a batch. The server runs `batch`, what pays of those that the caps leave, and `at_once` of them."""

    vram_cap: int | None  #: None: memory is not the device's own
    deadline_cap: int | None  #: None: no deadline was given; 0: not even one row meets it
    most: int  #: the least of the caps and of the model's own maximum
    batch: int
    at_once: int


def find(measured: Measured, max_rows: int, deadline: float | None) -> Findings:
    """`deadline` in seconds, for a batch that the device runs alone."""
    costs = Costs(measured.loaded.costs)
    need = MemoryNeed.fit([(c.rows, c.memory) for c in measured.loaded.costs])
    vram = need.rows(measured.memory.for_batches(), max_rows) if need and measured.memory.total else None
    late = costs.largest_within(deadline, max_rows) if deadline else None
    most = max(1, min(n for n in (max_rows, vram, late) if n is not None))
    fixed = measured.loaded.fixed_rows if measured.loaded.fixed_rows > 1 else 0
    if measured.hello.link is None:
        return Findings(vram, late, most, fixed or costs.knee(most), resources.cores())
    free = measured.memory.for_batches() if measured.memory.total else inf
    chosen = choose(costs, PIPELINE, HAND_OVER, sharing(need, free, most), fixed)
    return Findings(vram, late, most, chosen.rows, chosen.depth)


def as_dict(measured: Measured, found: Findings) -> dict[str, Any]:
    """For programs. Seconds and bytes."""
    hello, loaded = measured.hello, measured.loaded
    need = MemoryNeed.fit([(c.rows, c.memory) for c in loaded.costs])
    return {
        "model": loaded.model,
        "version": loaded.version,
        "device": hello.name,
        "uuid": hello.uuid,
        "provider": loaded.provider,
        "link": msgspec.to_builtins(hello.link),
        "memory": {
            "total_bytes": measured.memory.total or None,
            "free_bytes": measured.memory.free or None,
            "headroom_bytes": measured.memory.headroom or None,
            "network_bytes": loaded.memory_bytes or None,
            "batch_bytes": {"fixed": need.fixed, "per_row": need.per_row} if need else None,
        },
        "decoder": {
            "seconds_per_picture": loaded.decoder.per_picture,
            "seconds_per_megapixel": 1e6 * loaded.decoder.per_pixel,
            "slows_computing": loaded.decoder.slows,
        }
        if loaded.decoder
        else None,
        "batches": [msgspec.to_builtins(c) | {"rows_per_s": c.rows / c.seconds} for c in loaded.costs],
        "vram_cap": found.vram_cap,
        "deadline_cap": found.deadline_cap,
        "batch": found.batch,
        "at_once": found.at_once,
    }
