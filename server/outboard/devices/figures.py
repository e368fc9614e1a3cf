"""What NVML says of the GPUs in use, as the process that asks it (worker/nvml.py) prints it."""

from __future__ import annotations

import msgspec

#: Why a card's clocks are held down, by dcgm-exporter's names: bits of NVML's clocks event reasons (nvml.h). Not all are bad: an idle card
#: is "gpu_idle", one at its power limit "power_cap".
REASONS = {
    0x01: "gpu_idle",
    0x02: "clocks_setting",
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}


class Figures(msgspec.Struct, frozen=True):
    """Of one GPU. What a card does not tell is None."""

    uuid: str
    pci_bus_id: str  #: as NVML writes it, "00000000:52:00.0"
    name: str
    temperature_c: float | None = None
    power_w: float | None = None
    limit_w: float | None = None  #: enforced now
    utilisation: float | None = None  #: percent of the last sample period in which a kernel ran
    used_bytes: int | None = None
    free_bytes: int | None = None
    reasons: list[str] | None = None  #: of REASONS
    pcie_generation: int | None = None  #: now: an idle link goes down to 1
    pcie_width: int | None = None


class Answer(msgspec.Struct, frozen=True):
    gone: dict[str, str] = {}  #: by UUID: why a GPU cannot be used any more
    figures: list[Figures] = []  #: of those that can
