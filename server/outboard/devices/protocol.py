"""What the front and a worker say to each other: one file, typed, versioned.

Messages are msgspec structs in MessagePack, one per datagram of a `SOCK_SEQPACKET` Unix socket pair, so a message is whole or
absent. Pixels and tensors never travel in them: a `Run` names byte offsets in the front's slab (which the worker maps
read-only), a `Tensor` names an offset in the worker's answer region (which the front maps read-only).

Theory of operation. The front starts a worker with one end of the socket pair; the first datagram from the front is
`Start` and carries two file descriptors, the slab and the answer region. The worker answers `Hello`. After that the front may send `Load`,
`Unload`, `Run`, `Ping` at any time, and the worker sends `Loaded`/`LoadFailed` for each `Load`, `Done`/`Failed` for each
`Run`, `Pong` for each `Ping`, in any order. Answer memory named by a `Done` stays valid until a later `Run` lists that batch in
`freed`. End of file on the socket means that the other side is gone.
"""

from __future__ import annotations

import msgspec

from outboard.core.costs import BatchCost
from outboard.core.decoding import Decoder
from outboard.core.link import Link
from outboard.core.state import Coded, Picture

VERSION = 1


class Tensor(msgspec.Struct, array_like=True, frozen=True):
    """An array in the worker's answer region. `dtype` is numpy's name, or "bytes" (devices/rows.py); `offset` in bytes; the first axis is
    the batch."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Slot(msgspec.Struct, array_like=True, frozen=True):
    """One input of a tensor model within a row: an array of numpy's `dtype` and `shape` (without the batch axis), `nbytes` long,
    `offset` bytes from the row's start. Strings have dtype "bytes" (devices/rows.py)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


# ---- front to worker


class Start(msgspec.Struct, tag="start", frozen=True):
    """First message; its datagram carries the file descriptors of (slab, answer region), in this order."""

    protocol: int
    device: str  #: the device's specification: "cpu", a GPU's UUID, "sim:thunderbolt4,vram=8GiB"
    slab_bytes: int
    answer_bytes: int
    concurrency: int  #: batches that run at once
    threads: int  #: threads inside one batch
    cache_dir: str  #: compiled artifacts are kept here


class Load(msgspec.Struct, tag="load", frozen=True):
    """Load one network. `model` is the engine's key: the model's name, or "name/part" for a part of a pipeline."""

    model: str
    version: str  #: "sha256:…" of the files; the worker refuses files that no longer match
    directory: str
    part: str = ""
    backend: str = "onnx"  #: as model.toml says: what the runtimes load beside each other
    anew: bool = False  #: measure thoroughly, whatever a stored profile says


class Unload(msgspec.Struct, tag="unload", frozen=True):
    model: str
    version: str


class Run(msgspec.Struct, tag="run", frozen=True):
    """Run a batch. Each row is uint8, `shape` = (height, width, 3), C order, at `rows[i]` bytes into the slab. A row that begins inside one
    of `pictures` is cut out of it: from one of its lines to the next are the picture's `pitch` bytes. Where a row lies in the memory of one
    of `coded`, nothing is there: the device decodes what would be (imaging/coded.py). For a tensor model each row holds `inputs`, and
    `shape` is empty."""

    batch: int
    model: str
    version: str
    shape: tuple[int, ...]
    rows: list[int]
    freed: list[int]  #: batches whose answers the front has copied out
    inputs: tuple[Slot, ...] = ()
    pictures: tuple[Picture, ...] = ()
    coded: tuple[Coded, ...] = ()


class Ping(msgspec.Struct, tag="ping", frozen=True):
    n: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End after the running batches."""


class Fault(msgspec.Struct, tag="fault", frozen=True):
    """Simulated devices only: one of `simulated.WORKER_FAULTS`, or with a phase of `simulated.PHASED_FAULTS`."""

    fault: str
    phase: str = ""  #: wait until the device enters this phase


# ---- worker to front


class Hello(msgspec.Struct, tag="hello", frozen=True):
    protocol: int
    pid: int
    name: str  #: the device's name for people, e.g. "AMD EPYC" or "NVIDIA GeForce RTX 3060"
    uuid: str
    memory_total: int = 0  #: bytes, 0 where unknown
    memory_free: int = 0
    h2d_bytes_per_s: float = 0.0  #: measured; 0 where there is no link
    d2h_bytes_per_s: float = 0.0
    power_limit_w: float = 0.0  #: 0 where unknown
    link: Link | None = None  #: measured when the device was opened; None: there is none


class Loaded(msgspec.Struct, tag="loaded", frozen=True):
    """The network serves."""

    model: str
    version: str
    provider: str  #: what really runs it: "CPUExecutionProvider", "CUDAExecutionProvider", "torch eager", "torch compiled", …
    fixed_rows: int  #: the batch size frozen into the graph; 0: free. The worker pads up to it.
    inputs: list[tuple[str, str, list[int | str]]]  #: (name, dtype, shape), free axes by name
    outputs: list[tuple[str, str, list[int | str]]]
    costs: list[BatchCost]
    golden: list[Tensor]  #: the outputs for the golden input (batch of 1)
    golden_batch: int  #: the pseudo batch id under which `golden` is freed
    memory_bytes: int = 0  #: device memory that the network holds, 0 where unknown
    whole: bool = False  #: tensor models: the first axis is no batch axis, so each request is one row and runs as it was sent
    labels: dict[str, list[str]] = {}  #: by output: what its last axis means, where the graph says so
    measuring: float = 0.0  #: seconds that finding `costs`, or seeing that they are still true, took
    stored: bool = False  #: `costs` are those of a stored profile
    decoder: Decoder | None = None  #: what the device decodes JPEGs with for it, as measured; None: it takes pixels only


class LoadFailed(msgspec.Struct, tag="load_failed", frozen=True):
    """The network cannot be served: which file, which key of model.toml (or part of the graph), what was expected."""

    model: str
    version: str
    file: str
    key: str
    expected: str
    message: str
    #: "files"; "answers": found in what the network answers, so this device is wrong where others accept the files; or as `Failed.kind`
    kind: str = "files"


class Took(msgspec.Struct, frozen=True):
    seconds: float  #: from taking the batch up, or from having decoded it, to having its answer
    own: float  #: those of them in which the batch before it had ended: what a pipeline needs for one batch more
    idle: float = 0.0  #: those of them in which the device had computed the batch before it, and not yet the rows of this one
    computed: float = 0.0  #: when the device had computed it, by the machine's monotonic clock; 0: unknown


class Done(msgspec.Struct, tag="done", frozen=True):
    batch: int
    outputs: list[Tensor]
    took: Took
    provider: str = ""
    uploaded: int = 0  #: bytes that crossed the link for it
    recompilations: int = 0  #: of compiled code since the last batch of this network
    decoding: float = 0.0  #: seconds of the device's decoder for it


#: Failed.kind: "input" (the model refuses the rows: nobody's fault but theirs), "oom", "sticky" (the device's context is
#: lost, every later call fails too), "decode" (of the rows whose indexes are `undecoded`, the device cannot decode the JPEG), "unknown".
class Failed(msgspec.Struct, tag="failed", frozen=True):
    batch: int
    kind: str
    message: str
    undecoded: list[int] = []


class Pong(msgspec.Struct, tag="pong", frozen=True):
    n: int
    memory_free: int = 0
    memory_held: int = 0  #: of what is not free: what batches use and will use again


ToWorker = Start | Load | Unload | Run | Ping | Stop | Fault
ToFront = Hello | Loaded | LoadFailed | Done | Failed | Pong

_encoder = msgspec.msgpack.Encoder()
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
encode = _encoder.encode

#: Largest datagram that either side sends; the socket buffers are set to hold several.
MAX_DATAGRAM = 128 * 1024
