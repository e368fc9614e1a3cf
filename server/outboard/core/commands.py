"""What the engine tells its driver to do. Plain values; the driver acts on them in order."""

from __future__ import annotations

from dataclasses import dataclass

from outboard.core.state import Coded, Picture, Shape


@dataclass(slots=True, frozen=True)
class Fill:
    """Decode this frame now: write its rows to the slab from `offset` on, side by side or as its layout says, then call `filled`. `coded`:
    a device decodes it, so write its bytes behind the place of its rows instead. It may have to be decoded here after that."""

    frame: int
    offset: int
    coded: bool = False


@dataclass(slots=True, frozen=True)
class Dispatch:
    """Send a batch to a device's worker. `offsets` are slab offsets of the rows, in batch order; those inside one of `pictures` are cut
    out of it, and those of one of `coded` are decoded there first."""

    device: str
    generation: int
    batch: int
    network: str
    shape: Shape
    offsets: list[int]
    pictures: tuple[Picture, ...] = ()
    coded: tuple[Coded, ...] = ()


@dataclass(slots=True, frozen=True)
class RowDone:
    """Row `index` of the batch that just ended is row `row` of this frame; `last`: the frame is now answered."""

    frame: int
    row: int
    index: int
    device: str
    degraded: bool
    last: bool


@dataclass(slots=True, frozen=True)
class Refuse:
    """The frame ends without an answer. `slug` is a row of `problems.PROBLEMS`."""

    frame: int
    slug: str
    detail: str
    retry_after: float | None = None


@dataclass(slots=True, frozen=True)
class Start:
    """Start a worker for the device; its generation marks everything that it will say."""

    device: str
    generation: int


@dataclass(slots=True, frozen=True)
class Kill:
    """End the worker of this generation at once and do not wait; call `worker_gone` when the process has ended."""

    device: str
    generation: int


@dataclass(slots=True, frozen=True)
class Load:
    device: str
    generation: int
    network: str


@dataclass(slots=True, frozen=True)
class GiveUp:
    """Load the network there no more: tell its owner, and call `load_failed`."""

    device: str
    generation: int
    network: str
    why: str


@dataclass(slots=True, frozen=True)
class Unload:
    device: str
    generation: int
    network: str


@dataclass(slots=True, frozen=True)
class CheckGolden:
    """Compare the device's golden answer with the CPU's, then call `golden_checked`."""

    device: str
    generation: int
    network: str


@dataclass(slots=True, frozen=True)
class Ping:
    device: str
    generation: int
    n: int


@dataclass(slots=True, frozen=True)
class StateChanged:
    """For logs, metrics and streams: a device's state and the reason."""

    device: str
    state: str
    why: str


@dataclass(slots=True, frozen=True)
class Starved:
    """For logs: a device has no memory for a network now; others serve it."""

    device: str
    network: str
    why: str


@dataclass(slots=True, frozen=True)
class Retired:
    """No frame uses this network any more: every device has been told to unload it."""

    network: str


Command = Fill | Dispatch | RowDone | Refuse | Start | Kill | Load | GiveUp | Unload | CheckGolden | Ping | StateChanged | Starved | Retired
