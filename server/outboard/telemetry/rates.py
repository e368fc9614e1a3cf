"""What flows each second, by device and by model, and the last minutes of it: differences of the Prometheus counters.

One source of truth: the dashboard and a Prometheus scrape can never disagree.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from outboard.telemetry import metrics

#: Seconds of history that a page shows when it is opened.
HISTORY_S = 300

_COUNTED = ("outboard_frames_total", "outboard_batch_size_sum", "outboard_batch_size_count", "outboard_link_bytes_total")


@dataclass(slots=True)
class Rates:
    """Call `tick` about once a second."""

    devices: dict[str, dict[str, float]] = field(default_factory=dict)  #: device -> fps, rows (mean of a batch), h2d_bytes_per_s
    models: dict[str, dict[str, float]] = field(default_factory=dict)  #: model -> fps, rows
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=HISTORY_S))  #: {"fps": {device: frames a second}}
    _before: dict[tuple[str, ...], float] = field(default_factory=dict)
    _at: float = 0.0

    def tick(self, now: float) -> None:
        """Take what was counted since the last call, `now` in seconds of any steady clock."""
        counted = self._read()
        seconds = now - self._at
        if self._at and seconds > 0:
            self._differences({key: (value - self._before.get(key, 0.0)) / seconds for key, value in counted.items()})
        self._before, self._at = counted, now

    @staticmethod
    def _read() -> dict[tuple[str, ...], float]:
        """(sample, device, model, outcome or direction) -> value."""
        return {
            (s.name, s.labels["device"], s.labels.get("model", ""), s.labels.get("outcome") or s.labels.get("direction", "")): s.value
            for family in metrics.flowing()
            for s in family.samples
            if s.name in _COUNTED
        }

    def _differences(self, rates: dict[tuple[str, ...], float]) -> None:
        devices: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        models: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (name, device, network, kind), rate in rates.items():
            model = models[network.partition("/")[0]]
            if name == "outboard_frames_total":
                if kind == "answered":
                    devices[device]["fps"] += rate
                    model["fps"] += rate
            elif name == "outboard_link_bytes_total":
                devices[device][f"{kind}_bytes_per_s"] += rate
            else:
                for entry in (devices[device], model):
                    entry[name] += rate
        for entry in (*devices.values(), *models.values()):
            rows, batches = entry.pop("outboard_batch_size_sum", 0.0), entry.pop("outboard_batch_size_count", 0.0)
            if batches:
                entry["rows"] = rows / batches
        self.devices, self.models = {k: dict(v) for k, v in devices.items()}, {k: dict(v) for k, v in models.items()}
        self.history.append({"fps": {device: entry.get("fps", 0.0) for device, entry in devices.items() if device}})
