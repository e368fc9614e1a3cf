"""The machine that a plan is made for: its host, its link and what a network costs on its card. Bytes and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outboard.core.costs import BatchCost, Costs, batch_sizes
from outboard.core.decoding import Decoder
from outboard.core.link import Link
from outboard.core.state import PIPELINE
from outboard.devices.simulated import LATENCY, LINKS

#: Where the figures of `--link` names come from (devices/simulated.py has the figures).
LINK_SOURCES: dict[str, str] = {
    "thunderbolt3": "secondary source, 19-22 Gb/s in many set-ups (unanswered.io/guide/egpu-bandwidth-requirements)",
    "thunderbolt4": "secondary source, 19-22 Gb/s in many set-ups (unanswered.io/guide/egpu-bandwidth-requirements)",
    "usb4": "secondary source, 19-22 Gb/s in many set-ups (unanswered.io/guide/egpu-bandwidth-requirements)",
    "thunderbolt5": "measured with an RTX 5070 Ti by Tom's Hardware",
    "oculink": "measured with an RTX 5070 Ti by Tom's Hardware",
    "pcie4x16": "measured, NVIDIA/nvbandwidth issue 15",
}


@dataclass(frozen=True, slots=True)
class Host:
    """`cores` are shared by the decode threads and the event loop; a frame occupies the loop for `receive` before it is admitted and for
    `respond` after its answer has come. `handover`, a mean, passes without use of a core whenever one thread or process wakes another: for
    decoding, after it, with a batch, and with the answer."""

    cores: int
    decode_threads: int
    receive: float
    receive_byte: float
    respond: float
    slab_bytes: int = 2 << 30
    handover: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """A network as the link and the engine see it. `compute` are (rows, seconds) on the card; between them the cost is linear."""

    shape: tuple[int, ...]
    row_bytes: int
    answer_bytes: int
    max_rows: int
    compute: Sequence[tuple[int, float]]
    fixed_rows: int = 0
    max_delay: float = 0.0

    def seconds(self, rows: int) -> float:
        return Costs(self.compute).expected(rows)


@dataclass(frozen=True, slots=True)
class Machine:
    host: Host
    link: Link
    model: Model
    decoder: Decoder | None = None  #: the card's own, for JPEGs
    wake: float = 0.0  #: seconds by which a simulated card's threads are late for each batch, on average, where no core is busy

    def batch(self, rows: int) -> tuple[float, float, float]:
        """Seconds of a batch: upload, compute, download."""
        rows = max(rows, self.model.fixed_rows)
        model = self.model
        return self.link.upload(rows * model.row_bytes), model.seconds(rows), self.link.download(rows * model.answer_bytes)

    def costs(self) -> list[BatchCost]:
        """What a worker would have measured on this card behind this link."""
        found = []
        for rows in batch_sizes(self.model.max_rows):
            upload, compute, download = self.batch(rows)
            alone = upload + compute + download
            found.append(BatchCost(rows, max(upload, compute, download, alone / PIPELINE), alone, upload))
        return found


def link(name: str) -> Link:
    """The link of that name, or of so many GB/s each way: "2.1". Raises ValueError with what was expected."""
    if name in LINKS:
        h2d, d2h = LINKS[name]
    else:
        try:
            h2d = d2h = float(name.lower().removesuffix("gb/s").strip()) * 1e9
        except ValueError:
            h2d = d2h = 0.0
        if not 1e3 <= h2d <= 1e12:
            raise ValueError(f"{name!r} is no link: expected one of {', '.join(LINKS)}, or a measured rate in GB/s such as 2.1")
    return Link(h2d, d2h, LATENCY, LATENCY, h2d, d2h)
