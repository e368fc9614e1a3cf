"""What a model has done since it was loaded, in the terms of the Open Inference Protocol's statistics extension."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Duration:
    """How often, and seconds in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds


@dataclass(slots=True)
class ModelStatistics:
    """Requests by outcome, and where their time went; batches by size. Every route counts; of a picture's request each picture."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    compute_input: Duration = field(default_factory=Duration)  #: decoding, or copying into frame memory
    compute_infer: Duration = field(default_factory=Duration)
    batches: dict[int, Duration] = field(default_factory=dict)  #: rows -> runs, and the worker's seconds for them
    last: float = 0.0  #: when the last frame was answered, seconds since the epoch

    def executed(self, rows: int, seconds: float) -> None:
        self.batches.setdefault(rows, Duration()).add(seconds)

    def answered(self, total: float, queue: float, fill: float, infer: float, whole: bool = True) -> None:
        """`whole`: false for the frames of a request after its first."""
        for duration, seconds in ((self.success, total), (self.queue, queue), (self.compute_input, fill), (self.compute_infer, infer)):
            duration.add(seconds, whole)
        self.last = time.time()

    def failed(self, total: float, whole: bool = True) -> None:
        self.fail.add(total, whole)

    @property
    def inferences(self) -> int:
        """Rows that were run."""
        return sum(rows * runs.count for rows, runs in self.batches.items())

    @property
    def executions(self) -> int:
        """Batches that were run."""
        return sum(runs.count for runs in self.batches.values())
