"""What a model has done since it was loaded, in the terms of the Open Inference Protocol's statistics extension."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Duration:
    """How often, and seconds in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass(slots=True)
class ModelStatistics:
    """Frames by outcome, and where their time went; batches by size. Every route counts."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)  #: decoding, or copying into frame memory
    compute_infer: Duration = field(default_factory=Duration)
    batches: dict[int, Duration] = field(default_factory=dict)  #: rows -> runs, and the worker's seconds for them
    last: float = 0.0  #: when the last frame was answered, seconds since the epoch

    def executed(self, rows: int, seconds: float) -> None:
        self.batches.setdefault(rows, Duration()).add(seconds)

    def answered(self, total: float, queue: float, fill: float, infer: float) -> None:
        self.success.add(total)
        self.queue.add(queue)
        self.compute_input.add(fill)
        self.compute_infer.add(infer)
        self.last = time.time()

    def failed(self, total: float) -> None:
        self.fail.add(total)

    @property
    def inferences(self) -> int:
        """Rows that were run."""
        return sum(rows * runs.count for rows, runs in self.batches.items())

    @property
    def executions(self) -> int:
        """Batches that were run."""
        return sum(runs.count for runs in self.batches.values())
