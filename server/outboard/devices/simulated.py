"""What `--device sim:thunderbolt4,vram=8GiB,compute=4+2` means: a modelled link, memory and compute time.

A simulated eGPU computes for real on the CPU; only the link, the memory and (with `compute=`) the time are modelled, and every
answer and metric says that it is simulated.
"""

from __future__ import annotations

import math

import msgspec

from outboard.settings import size

#: Bytes per second, host to device and back, by cable (design.md section 4). thunderbolt3, thunderbolt4 and usb4 rest on secondary
#: sources, the others on published measurements; a real link is measured, never looked up.
LINKS: dict[str, tuple[float, float]] = {
    "thunderbolt3": (2.4e9, 2.4e9),
    "thunderbolt4": (2.75e9, 2.75e9),
    "usb4": (2.75e9, 2.75e9),
    "thunderbolt5": (5.6e9, 5.8e9),
    "oculink": (6.6e9, 6.7e9),
    "pcie4x16": (25e9, 26e9),
}

#: Seconds before the first byte of a copy arrives. No measurement of a Thunderbolt link's latency was found; a driver's call
#: and one tunnelled round trip are of this order.
LATENCY = 20e-6

#: Faults that `POST /v1/devices/{id}/fault` takes (design.md section 4).
FAULTS = ("unplug", "replug", "hang", "sticky", "oom", "slow-link", "hot", "wrong-answers", "flap", "clear")
#: Faults that the worker itself plays.
WORKER_FAULTS = ("hang", "sticky", "oom", "slow-link", "hot", "wrong-answers", "clear")
#: Faults of the card or the cable, not of the process: the next worker has them too, until `clear`.
LASTING_FAULTS = ("slow-link", "hot")
#: What a device does when a fault strikes, for faults that are to strike then: its worker starts; a model is loaded there; no batch is in
#: progress; a batch's rows are on their way there, are computed, or their answers are on their way back.
PHASES = ("starting", "warming", "idle", "uploading", "computing", "returning")
#: Faults that can be told to wait for a phase.
PHASED_FAULTS = ("unplug", "hang", "sticky", "oom", "slow-link", "hot")
#: Exit status of a worker whose cable was pulled in the phase that was asked for.
EXIT_UNPLUGGED = 4


class SimSpec(msgspec.Struct, frozen=True):
    """A simulated device. `compute` is (seconds a batch, seconds a row), or None: as fast as this machine's CPU is."""

    link: str
    vram: int = 8 << 30  #: bytes
    compute: tuple[float, float] | None = None
    decode: float | None = None  #: seconds of a hardware JPEG decoder for a megapixel; None: the device takes pixels only
    power: float = 0.0  #: the card's power limit in watts; 0: none is told
    faults: tuple[tuple[str, str], ...] = ()  #: (fault, phase that it waits for, or "": on from the worker's start)

    @property
    def h2d(self) -> float:
        return LINKS[self.link][0]

    @property
    def d2h(self) -> float:
        return LINKS[self.link][1]


def parse(spec: str) -> SimSpec:
    """ "sim:LINK[,vram=SIZE][,compute=MS_PER_BATCH+MS_PER_ROW][,decode=MS_PER_MEGAPIXEL][,power=WATTS]" -> SimSpec. Raises ValueError with
    what was expected.

    The server adds `,fault=F` and `,fault=F@PHASE` for the worker that it starts.
    """
    link, *options = spec.removeprefix("sim:").split(",")
    if link not in LINKS:
        raise ValueError(f"{spec!r}: {link!r} is no link, expected one of {', '.join(LINKS)}")
    vram, compute, decode, power, faults = 8 << 30, None, None, 0.0, []
    for option in options:
        key, _, value = option.partition("=")
        if key == "vram":
            try:
                vram = size(value)
            except ValueError:
                vram = 0
            if not vram:
                raise ValueError(f"{spec!r}: vram is {value!r}, expected a size such as vram=8GiB")
        elif key == "compute":
            try:
                batch, row = (float(x) / 1e3 for x in value.split("+"))
            except ValueError:
                batch = row = -1.0
            if not (0 <= batch < math.inf and 0 <= row < math.inf):
                raise ValueError(f"{spec!r}: compute is {value!r}, expected milliseconds a batch + a row, such as compute=4+2")
            compute = (batch, row)
        elif key == "decode":
            try:
                decode = float(value) / 1e3
            except ValueError:
                decode = -1.0
            if not 0 <= decode < math.inf:
                raise ValueError(f"{spec!r}: decode is {value!r}, expected a JPEG decoder's milliseconds for a megapixel, such as decode=2")
        elif key == "power":
            power = float(value) if value.isdecimal() else 0.0
            if not power:
                raise ValueError(f"{spec!r}: power is {value!r}, expected the card's power limit in watts, such as power=170")
        elif key == "fault" and _is_fault(*(played := value.partition("@")[::2])):
            faults.append(played)
        else:
            raise ValueError(f"{spec!r}: {option!r} is unknown, expected vram=SIZE, compute=MS+MS, decode=MS or power=WATTS")
    return SimSpec(link, vram, compute, decode, power, tuple(faults))


def _is_fault(fault: str, phase: str) -> bool:
    return phase in PHASES and fault in PHASED_FAULTS if phase else fault in WORKER_FAULTS or memory_taken(fault) is not None


def memory_taken(fault: str) -> int | None:
    """Of the fault "vram=SIZE", the bytes of the card's memory that another program takes; None: it is no such fault."""
    key, _, value = fault.partition("=")
    try:
        return size(value) if key == "vram" else None
    except ValueError:
        return None
