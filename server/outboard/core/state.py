"""The engine's nouns: frames, batches, networks and devices. Data only; `engine.py` alone changes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from outboard.core.costs import Costs
from outboard.core.decoding import Decoder
from outboard.core.device_memory import DeviceMemory, MemoryNeed
from outboard.core.failback import LossHistory
from outboard.core.link import Link
from outboard.core.pipeline import HAND_OVER, LEAD, Pipeline

DeviceState = Literal["starting", "warming", "serving", "standby", "suspect", "lost", "quarantined", "ejected", "off"]
#: starved: loaded and proved, but not one row fits the device's memory now.
NetworkState = Literal["loading", "checking", "ready", "failed", "starved"]
#: What the rows of a batch have in common: (height, width, channels) of uint8 pixels, or the inputs of a tensor model as
#: `devices/rows.py` lays them out. The engine only compares it.
Shape = tuple[Any, ...]

#: Among frames a deadline further away than this counts as this far: who can wait for ever is not put off for ever.
PATIENCE = 30.0

#: States in which a device's worker lives and may take batches.
LIVE = ("warming", "serving", "standby")

#: Batches that an accelerator holds at once at most: the upload of one and the download of another under the compute of a third. How many
#: it really holds follows from what they cost (core/pipeline.py).
PIPELINE = 3


@dataclass(slots=True, frozen=True)
class Sender:
    """Whose frame it is. Stations take turns; of a live stream a newer frame takes the place of one that has not begun to be decoded."""

    station: str = ""  #: "": single requests, which together are one station
    live: str = ""  #: id of the live stream
    strict: bool = False  #: not to be answered by the CPU while an accelerator serves


ANYBODY = Sender()


@dataclass(slots=True, frozen=True)
class Layout:
    """Rows that are cut out of one picture where they are used. It lies once at the start of their frame's memory, and rows that are no
    part of it, such as the whole picture in small, lie behind it one by one. Sizes in bytes."""

    nbytes: int  #: of the frame's memory
    picture: int  #: of the picture
    pitch: int  #: from one of its lines to the next
    starts: tuple[int, ...]  #: of each row, from the start of the frame's memory; those below `picture` are cut out of it


@dataclass(slots=True, frozen=True)
class Picture:
    """A picture in the slab that rows of a batch are cut out of. `id` names its pixels for ever: a device that has them needs no other
    copy. Sizes in bytes."""

    id: int
    offset: int
    nbytes: int
    pitch: int


@dataclass(slots=True, frozen=True)
class Jpeg:
    """What a device can decode itself: `nbytes` of frame memory for the compressed bytes and what to make of them, and the picture's
    pixels."""

    nbytes: int
    pixels: int


@dataclass(slots=True, frozen=True)
class Coded:
    """A frame whose rows the device decodes. A row at an offset between `offset` and `offset + nbytes` is where the host would have written
    it; nothing is there, but `length` bytes at `source` say what would be (imaging/coded.py). `id` names its pixels for ever."""

    id: int
    offset: int
    nbytes: int
    source: int
    length: int


@dataclass(slots=True)
class Network:
    """One loadable network in one version. `id` is opaque to the engine: the driver makes it of key and version."""

    id: str
    max_rows: int
    max_delay: float = 0.0  #: seconds an idle device waits for more rows
    standby: str = "hot"
    current: bool = True  #: new frames may be admitted; False once a newer version has taken over
    frames: int = 0  #: unfinished frames
    strict: int = 0  #: those of them that must not spill over
    deaths: dict[str, int] = field(default_factory=dict)  #: device -> workers that died in succession while they loaded it
    decoded: dict[int, int] = field(default_factory=dict)  #: live frames that are being decoded, or are and wait: id -> rows that wait
    copying: int = 0  #: rows of frames that a device will decode, while their bytes are copied into frame memory
    coded: dict[int, float] = field(default_factory=dict)  #: frames that a device is to decode, and was not sent: id -> expected seconds


@dataclass(slots=True)
class Frame:
    """One image (or one tensor of n rows) between its arrival and its outcome. Times are the driver's seconds."""

    id: int
    network: str
    shape: Shape
    rows: int
    row_bytes: int  #: of each row, where they lie side by side
    arrived: float
    deadline: float
    seq: int
    fill_cost: float  #: expected seconds of a decode thread
    sender: Sender = ANYBODY
    layout: Layout | None = None  #: None: rows lie side by side
    jpeg: Jpeg | None = None  #: None: the host decodes it
    coded: bool = False  #: a device decodes it; its memory has room for what the host would make of it all the same
    ready: float = 0.0  #: when its rows were filled
    offset: int = -1  #: of its rows in the slab, -1 while it has none
    to_fill: bool = False  #: it waits to be decoded, or copied for a device's decoder
    filling: bool = False
    filled: bool = False
    finished: bool = False
    waiting: set[int] = field(default_factory=set)  #: rows without an answer yet
    queued: set[int] = field(default_factory=set)  #: rows in a ready queue
    batches: int = 0  #: batches that hold its rows, those of lost but living workers included
    suspect: bool = False  #: its worker died unexplained, or could not run it alone: its rows run alone, in the isolation worker
    deaths: list[tuple[str, float]] = field(default_factory=list)  #: (device, when): unexplained deaths of workers that held it
    failed_on: str = ""  #: the accelerator that could not run it alone, until the isolation worker's second opinion

    @property
    def due(self) -> float:
        """What it is ordered by among others."""
        return min(self.deadline, self.arrived + PATIENCE)

    @property
    def pixel_bytes(self) -> int:
        """Of the slab, for what the host makes of it."""
        return self.layout.nbytes if self.layout else self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Of the slab."""
        return self.pixel_bytes + (self.jpeg.nbytes if self.coded and self.jpeg else 0)

    def source(self) -> Coded | None:
        """What a device decodes; None: its pixels are in the slab."""
        if not self.coded or self.jpeg is None:
            return None
        return Coded(self.id, self.offset, self.pixel_bytes, self.offset + self.pixel_bytes, self.jpeg.nbytes)

    def place(self, row: int) -> int:
        """Where the row begins in the slab."""
        return self.offset + (self.layout.starts[row] if self.layout else row * self.row_bytes)

    def picture(self) -> Picture | None:
        """What rows of it are cut out of; None: they lie whole."""
        return Picture(self.id, self.offset, self.layout.picture, self.layout.pitch) if self.layout else None


@dataclass(slots=True)
class Batch:
    id: int
    device: str
    generation: int
    network: str
    rows: list[tuple[Frame, int]]
    sent: float
    alone: bool  #: the device had no other batch when it was sent
    cost: float  #: expected seconds of the batch by itself
    expected: float  #: seconds from `sent` to its end: a pipeline runs those before it first
    overdue: bool = False  #: its rows were queued again elsewhere; a late answer may still win
    degraded: bool = False  #: when it was sent, the device stood in for an accelerator
    held: bool = False  #: its rows waited for company, until a pipeline had to be sent it lest it fall idle
    decode: float = 0.0  #: expected seconds of the device's decoder for it, which come before `cost`
    decodes: tuple[int, ...] = ()  #: pixels of the pictures that it has to decode
    decoded: float = 0.0  #: when that is expected to be done; 0: there is nothing to decode


@dataclass(slots=True)
class OnDevice:
    """A network on a device."""

    state: NetworkState = "loading"
    asked: bool = False  #: its golden answer is being compared
    costs: Costs | None = None
    fixed_rows: int = 0
    need: MemoryNeed | None = None  #: of device memory for a batch; None: unknown, or not the device's own
    cap: int = 0  #: learned from out of memory; 0: none
    patience: float = 0.0  #: seconds from the last out of memory to the next larger try; it doubles
    why: str = ""
    pipeline: tuple[object, Pipeline] | None = None  #: of an accelerator, and what it was chosen for
    decoder: Decoder | None = None  #: None: it takes pixels only


@dataclass(slots=True)
class Device:
    """`rank` orders placement: a network goes to the lowest rank on which it is ready. `parallel`: its slots are cores that
    run batches side by side (CPU); otherwise they are the depth of one pipeline (GPU)."""

    id: str
    kind: Literal["cpu", "gpu", "sim", "isolation"]
    slots: int
    rank: int
    history: LossHistory
    memory: DeviceMemory = field(default_factory=DeviceMemory)
    state: DeviceState = "off"
    why: str = ""
    until: float | None = None  #: end of a quarantine
    quarantined_for: Literal["losses", "wrong_answers"] = "losses"  #: what the last quarantine was for
    generation: int = 0
    up: bool = False  #: the worker of this generation has said hello
    networks: dict[str, OnDevice] = field(default_factory=dict)
    running: dict[int, Batch] = field(default_factory=dict)
    since: float = 0.0  #: when it entered its state
    heard: float = 0.0  #: when its worker was last heard
    ended: float = 0.0  #: when its last batch did
    failures: int = 0  #: rows in succession that it could not run
    hand_over: float = HAND_OVER  #: seconds of messages between front and worker for one batch, as observed
    lead: float = LEAD  #: seconds by which its next batch is sent too early, beyond what is expected: as learned
    link: Link | None = None  #: as measured; None: there is none, or it is unknown
    decoder_free: float = 0.0  #: when its decoder is expected to be through with what it was sent
    distrusted: bool = False  #: its worker died unexplained while it decoded: the host does that, until an operator resets the device
    zombies: dict[int, list[Batch]] = field(default_factory=dict)  #: batches of lost generations whose process still lives

    @property
    def parallel(self) -> bool:
        return self.kind in ("cpu", "isolation")

    def ahead(self, now: float) -> float:
        """Expected seconds until a pipeline is through with the batches that it runs.

        Counted from the end of the batch before them: what is left of expected ends would carry every overestimate on to the next batch for
        as long as the pipeline is full (seen: 30 ms expected in 546).
        """
        computing = self.computing(now)
        if self.parallel or not computing:
            return 0.0
        first, *others = computing
        return max(0.0, self._ends(first) - now) + sum(b.cost for b in others)

    def computing(self, now: float) -> list[Batch]:
        """The batches that are not still being decoded there: others pass those by."""
        return [b for b in self.running.values() if b.decoded <= now]

    def late(self, now: float) -> bool:
        """The batch that a pipeline computes should have ended by now, so `ahead` does not shrink until it has."""
        computing = self.computing(now)
        return bool(computing) and now >= self._ends(computing[0])

    def _ends(self, first: Batch) -> float:
        """When the first of the batches that a pipeline computes is expected to end."""
        return max(first.sent, first.decoded, self.ended) + first.cost

    def free_slots(self) -> int:
        return self.slots - len(self.running)
