"""Prometheus gauges of real GPUs, with the labels of NVIDIA's dcgm-exporter (UUID, pci_bus_id, modelName), so that its dashboards and
joins work, and `device`, as everywhere else here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from outboard.devices.figures import REASONS, Figures
from outboard.telemetry.metrics import REGISTRY

LABELS = ("device", "UUID", "pci_bus_id", "modelName")
#: Name, what it says, and where it comes from.
GAUGES: tuple[tuple[str, str, Callable[[Figures], float | None]], ...] = (
    ("temperature_celsius", "Temperature of the GPU", lambda f: f.temperature_c),
    ("power_watts", "Power that the card draws", lambda f: f.power_w),
    ("power_limit_watts", "Power that the card may draw", lambda f: f.limit_w),
    ("utilization_ratio", "Share of the time in which a kernel ran", lambda f: None if f.utilisation is None else f.utilisation / 100),
    ("memory_used_bytes", "Device memory in use, by whomever", lambda f: f.used_bytes),
    ("memory_free_bytes", "Device memory that is free", lambda f: f.free_bytes),
    ("pcie_link_generation", "PCIe generation of the card's link now (an idle link goes down to 1)", lambda f: f.pcie_generation),
    ("pcie_link_width", "PCIe lanes of the card's link now", lambda f: f.pcie_width),
)


class _Gpus(Collector):
    """What was seen last: a card that is gone has no figures, rather than old ones."""

    def __init__(self) -> None:
        self.seen: dict[str, Figures] = {}

    def collect(self) -> Iterator[Metric]:
        if not self.seen:
            return
        for name, text, value in GAUGES:
            family = GaugeMetricFamily(f"outboard_gpu_{name}", text, labels=LABELS)
            for device, figures in self.seen.items():
                if (known := value(figures)) is not None:
                    family.add_metric(_labels(device, figures), known)
            yield family
        text = "1 while the clocks are held down for the reason"
        reasons = GaugeMetricFamily("outboard_gpu_throttle_reason", text, labels=(*LABELS, "reason"))
        for device, figures in self.seen.items():
            for reason in REASONS.values() if figures.reasons is not None else ():
                reasons.add_metric((*_labels(device, figures), reason), reason in (figures.reasons or ()))
        yield reasons


def _labels(device: str, figures: Figures) -> tuple[str, ...]:
    return (device, figures.uuid, figures.pci_bus_id, figures.name)


COLLECTOR = _Gpus()
REGISTRY.register(COLLECTOR)


def show(seen: Mapping[str, Figures]) -> None:
    """The figures of each GPU in use, by device; they replace those before."""
    COLLECTOR.seen = dict(seen)
