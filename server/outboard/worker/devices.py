"""The device that a worker serves: its name, its memory, its link, and how rows get from the slab to it.

`gather` is the one place where pixels leave the slab, and where they cross the link. It gives what both backends take as a batch: on the
CPU an array (a view of the slab where the rows lie side by side, so nothing is copied), on a GPU memory of the device.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outboard import resources
from outboard.core.link import Link
from outboard.core.state import Coded, Picture
from outboard.devices import slab
from outboard.devices.protocol import Slot
from outboard.worker import pictures
from outboard.worker.environment import is_gpu
from outboard.worker.slots import adjacent, gather

if TYPE_CHECKING:
    from outboard.repository import Input
    from outboard.worker.decoding import Decoded


class Allocator(Protocol):
    """A runtime's own count of the device memory that it takes."""

    def watch(self) -> None:
        """From now on `grown` counts."""

    def grown(self) -> int:
        """Bytes beyond those of `watch`, at their peak."""


class Crossed(threading.local):
    """Bytes that the calling thread's batch has sent over the link."""

    nbytes = 0


class Timeline(threading.local):
    """When the calling thread's batch had passed its stages, by `time.perf_counter` (on Linux the front's clock); 0: not yet."""

    gathered = 0.0  #: its first rows lay on the device
    computed = 0.0  #: its last answers lay on the host

    def begin(self) -> None:
        self.gathered = self.computed = 0.0


class Device:
    """What every device has. `spec` is the string of `Start.device`."""

    provider = "CPUExecutionProvider"  #: ONNX Runtime's name of what runs a graph here
    torch_device = "cpu"
    keeps_memory = False  #: allocators keep what batches have needed once
    parallel = False  #: batches run side by side, each on a core of its own; else they are a pipeline
    shared = False  #: it computes on the host's processor, which others use at the same time
    driver = ""  #: its version, where what was measured depends on one
    link: Link | None = None  #: as measured when the device was opened; None: there is none
    allocator: Allocator | None = None  #: of a runtime that counts what it takes of the device's memory
    decoded: Decoded[Any]  #: frames that it has decoded itself; only where it decodes

    def __init__(self, spec: str, name: str, uuid: str):
        self.spec, self.name, self.uuid = spec, name, uuid
        self.memory_total = 0  #: bytes, 0 where it is not the device's own
        self.h2d_bytes_per_s = 0.0  #: 0 where there is no link
        self.d2h_bytes_per_s = 0.0
        self.power_limit_w = 0.0  #: watts, 0 where unknown
        self.uploaded = Crossed()
        self.timeline = Timeline()

    @property
    def identity(self) -> str:
        """What a profile of this device is found by."""
        return self.uuid

    def memory_free(self) -> int:
        return 0

    def load(self, nbytes: int) -> None:
        """Before a network with weights of so many bytes is loaded: a modelled memory takes them, or raises as a full one does."""

    def unload(self, nbytes: int) -> None:
        """After it is gone."""

    def memory_held(self) -> int:
        """The part of what is not free that batches use and will use again."""
        return 0

    def watch_memory(self) -> None:
        """From now on `memory_grown` counts."""

    def memory_grown(self) -> int:
        """Bytes that batches have needed, at their peak, beyond what was in use at `watch_memory`; 0 where it cannot be told."""
        return 0

    def attach(self, memory: np.ndarray) -> None:
        """The slab is `memory`: a device may pin it."""

    def gather(self, memory: np.ndarray, rows: Sequence[int], shape: tuple[int, ...], total: int, cut_from: Sequence[Picture] = ()) -> Any:
        """Rows of `shape` at byte offsets `rows` of `memory` as one uint8 batch of `total` rows, the surplus black. Those that begin inside
        one of the pictures `cut_from` are cut out of it.

        The batch is valid until the calling thread's next `gather`. Raises ValueError for a row outside the memory.
        """
        raise NotImplementedError

    def decodes(self, provider: str) -> bool:
        """Whether it can decode JPEGs for what runs a network here."""
        return False

    def gather_coded(
        self,
        memory: np.ndarray,
        rows: Sequence[int],
        shape: tuple[int, ...],
        total: int,
        cut_from: Sequence[Picture],
        coded: Sequence[Coded],
        input: Input,
    ) -> Any:
        """As `gather`, for rows of frames that are decoded here for a network's `input`. Raises NotDecoded."""
        raise NotImplementedError

    def to_host(self, batch: Any) -> np.ndarray:
        """A gathered batch as an array."""
        return batch

    def gather_slots(self, memory: np.ndarray, rows: Sequence[int], slots: Sequence[Slot]) -> list[Any]:
        """A tensor model's rows at byte offsets `rows` of `memory`: one batch [rows, *shape] for each slot, of its dtype, strings and
        bfloat16 always on the host (worker/slots.py). Valid until the calling thread's next gathering."""
        raise NotImplementedError

    def batch(self) -> AbstractContextManager[None]:
        """Around each batch that the front has asked for, its answer's way back included."""
        return nullcontext()

    def run(self, compute: Callable[[], Any], rows: int, row_bytes: int) -> Any:
        """What `compute()` gives for a gathered batch; a modelled device adds its own memory and time."""
        return compute()

    def download(self, nbytes: int) -> None:
        """Called before a batch's answers are sent."""

    def ping(self) -> None:
        """Called before each ping is answered: a modelled hang keeps the answer back."""

    def fault(self, fault: str, phase: str = "") -> None:
        """Play a fault, when `phase` is entered if one is given: simulated devices only. Raises ValueError."""
        raise ValueError(f"{self.spec} is a real device: it plays no faults ({fault!r})")


class Staging(threading.local):
    """A buffer for each thread that grows to the largest batch and is used again."""

    def __init__(self) -> None:
        self.buffer = np.empty(0, np.uint8)

    def array(self, nbytes: int) -> np.ndarray:
        if self.buffer.nbytes < nbytes:
            self.buffer = np.empty(nbytes, np.uint8)
        return self.buffer[:nbytes]


class CpuDevice(Device):
    """The host's processor: rows are used where they lie if they lie side by side."""

    parallel = True
    shared = True

    def __init__(self, spec: str = "cpu"):
        super().__init__(spec, cpu_name(), "cpu")
        self._staging = Staging()

    @property
    def identity(self) -> str:
        return f"{cpu_name()}, {resources.cores()} cores"

    def gather(
        self, memory: np.ndarray, rows: Sequence[int], shape: tuple[int, ...], total: int, cut_from: Sequence[Picture] = ()
    ) -> np.ndarray:
        nbytes = int(np.prod(shape, dtype=np.int64))
        if total == len(rows) and not cut_from and adjacent(rows, nbytes):
            return slab.view(memory, rows[0], (total, *shape), "uint8")
        batch = self._staging.array(total * nbytes).reshape(total, *shape)
        for i, offset in enumerate(rows):
            batch[i] = pictures.cut(memory, offset, shape, cut_from)
        batch[len(rows) :] = 0
        return batch

    def gather_slots(self, memory: np.ndarray, rows: Sequence[int], slots: Sequence[Slot]) -> list[Any]:
        return gather(memory, rows, slots, self._staging.array)


def cpu_name() -> str:
    """The processor's name for people."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def open_device(spec: str) -> Device:
    """The device of `Start.device`. Raises ValueError for a name that is none, RuntimeError where the device does not answer."""
    if spec == "cpu":
        return CpuDevice()
    if is_gpu(spec):
        from outboard.worker.cuda import CudaDevice

        return CudaDevice(spec)
    if spec.startswith("sim:"):
        from outboard.worker.simulated import SimulatedDevice

        return SimulatedDevice(spec)
    raise ValueError(f'{spec!r} is no device: expected "cpu", a GPU\'s UUID ("GPU-…") or "sim:…"')
