"""The device behind `sim:`: the CPU computes, a link, a memory and a clock are modelled, and faults are played on demand."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np

from outboard.core import link
from outboard.core.state import Coded, Picture
from outboard.devices.protocol import Slot
from outboard.devices.simulated import EXIT_UNPLUGGED, LATENCY, SimSpec, memory_taken, parse
from outboard.repository import Input
from outboard.worker import decoding, pictures
from outboard.worker.decoding import Decoded
from outboard.worker.devices import CpuDevice

#: Modelled working memory of a row: its float32 input held this many times over (input, output and workspace of the widest layer).
ACTIVATION_COPIES = 6
#: A throttled card's clock: what `hot` does to compute time, and to the power limit of a card that starts hot.
HOT = 3.0
_PR_SET_TIMERSLACK = 29
#: A cable that trained at a lower rate: what `slow-link` does to bandwidth.
SLOW = 10.0


class _Serving(threading.local):
    """Whether this thread runs a batch for the front: what it does otherwise is warming."""

    now = False


class SimulatedDevice(CpuDevice):
    """See the module's head."""

    parallel = False

    def __init__(self, spec: str):
        super().__init__(spec)
        self.sim: SimSpec = parse(spec)
        self.shared = self.sim.compute is None
        self.name = f"simulated eGPU over {self.sim.link}, {self.sim.vram / (1 << 30):g} GiB"
        self.uuid = f"SIM-{spec.split(',fault=')[0]}"
        self.memory_total = self.sim.vram
        self._fault = ""
        self._waiting: dict[str, str] = {}  # phase -> the fault that waits for it
        self._batches = 0
        self._serving = _Serving()
        self._sticky = False
        self._used = 0
        self._held = 0  # of what is used, by batches
        self._others = 0  # by another program
        self._ledger = threading.Lock()
        self._wires = {"h2d": threading.Lock(), "d2h": threading.Lock()}  # copies in one direction take turns, the two do not share
        self._grown_from, self._peak = 0, 0
        self._engine = threading.Lock()  # one processor: batches take turns
        self._pictures = pictures.Kept(
            int(self.sim.vram * pictures.SHARE), self._reserve_picture, lambda nbytes: self.release(nbytes, "picture")
        )
        self.decoded = Decoded(int(self.sim.vram * pictures.SHARE), self._reserve_decoded, self._release_decoded)
        self._never = threading.Event()
        for fault, phase in self.sim.faults:
            self.fault(fault, phase)
        self.power_limit_w = self.sim.power / (HOT if self._fault == "hot" else 1.0)
        self._enter("starting")
        _wake_on_time()
        self.link = link.measure(self._timed_copy, self._timed_both)
        self.h2d_bytes_per_s, self.d2h_bytes_per_s = self.link.h2d_bytes_per_s, self.link.d2h_bytes_per_s

    @property
    def identity(self) -> str:
        """With its faults, and of the CPU that computes."""
        return f"{self.spec}, {super().identity}"

    # ---- memory

    def memory_free(self) -> int:
        with self._ledger:
            return max(0, self.sim.vram - self._others - self._used)

    def reserve(self, nbytes: int, what: str) -> None:
        """Take modelled memory. Raises RuntimeError with the text that torch's allocator uses."""
        with self._ledger:
            free = self.sim.vram - self._others - self._used
            if self._fault == "oom" and what == "batch" or nbytes > free:
                raise RuntimeError(
                    f"CUDA out of memory. Tried to allocate {nbytes / (1 << 20):.0f} MiB. {self.name} has a total capacity of "
                    f"{self.sim.vram / (1 << 30):.2f} GiB of which {max(0, free) / (1 << 20):.0f} MiB is free."
                )
            self._used += nbytes
            self._peak = max(self._peak, self._used)
            if what == "batch":
                self._held += nbytes

    def release(self, nbytes: int, what: str) -> None:
        with self._ledger:
            self._used -= nbytes
            if what == "batch":
                self._held -= nbytes

    def _reserve_picture(self, nbytes: int) -> int:
        self.reserve(nbytes, "picture")
        return nbytes

    def _reserve_decoded(self, nbytes: int) -> np.ndarray:
        self.reserve(nbytes, "decoded")
        return np.empty(nbytes, np.uint8)

    def _release_decoded(self, buffer: np.ndarray) -> None:
        self.release(buffer.nbytes, "decoded")

    def load(self, nbytes: int) -> None:
        self.reserve(nbytes, "weights")

    def unload(self, nbytes: int) -> None:
        self.release(nbytes, "weights")

    def memory_held(self) -> int:
        return self._held

    def watch_memory(self) -> None:
        with self._ledger:
            self._grown_from = self._peak = self._used

    def memory_grown(self) -> int:
        return self._peak - self._grown_from

    # ---- link and compute

    def _upload(self, nbytes: int) -> None:
        self._enter("uploading" if self._serving.now else "warming")
        self._copy("h2d", nbytes)
        self.uploaded.nbytes += nbytes

    def download(self, nbytes: int) -> None:
        self._enter("returning")
        self._copy("d2h", nbytes)

    def _copy(self, direction: link.Direction, nbytes: int) -> None:
        rate = self.sim.h2d if direction == "h2d" else self.sim.d2h
        if self._fault == "slow-link":
            rate /= SLOW
        with self._wires[direction]:
            time.sleep(LATENCY + nbytes / rate)

    def _timed_copy(self, direction: link.Direction, nbytes: int) -> float:
        began = time.perf_counter()
        self._copy(direction, nbytes)
        return time.perf_counter() - began

    def _timed_both(self, nbytes: int) -> tuple[float, float]:
        with ThreadPoolExecutor(2) as pool:
            up, down = pool.map(lambda direction: self._timed_copy(direction, nbytes), ("h2d", "d2h"))
        return up, down

    def gather(
        self, memory: np.ndarray, rows: Sequence[int], shape: tuple[int, ...], total: int, cut_from: Sequence[Picture] = ()
    ) -> np.ndarray:
        self._upload_rows(rows, shape, cut_from)
        self._play()
        return super().gather(memory, rows, shape, total, cut_from)

    def _upload_rows(self, rows: Sequence[int], shape: tuple[int, ...], cut_from: Sequence[Picture]) -> None:
        """Lines of pictures cross once."""
        crossing = 0
        with self._pictures as kept:
            for picture, cuts in pictures.grouped(rows, cut_from).items():
                lines: list[int] = []
                if picture and kept.bring(picture, [*cuts.values()], shape[0], lambda _, first, count, to=lines: to.append(count)):
                    crossing += sum(lines) * picture.pitch
                else:
                    crossing += len(cuts) * int(np.prod(shape, dtype=np.int64))
            self._upload(crossing)

    def decodes(self, provider: str) -> bool:
        return self.sim.decode is not None

    def gather_coded(
        self,
        memory: np.ndarray,
        rows: Sequence[int],
        shape: tuple[int, ...],
        total: int,
        cut_from: Sequence[Picture],
        coded: Sequence[Coded],
        input: Input,
    ) -> np.ndarray:
        if here := decoding.others(coded, rows):
            self._upload_rows([*here.values()], shape, cut_from)
        self._play()
        batch = self._staging.array(total * int(np.prod(shape))).reshape(total, *shape)
        with self.decoded as decoded:
            found = decoded.bring(coded, rows, self._upload, lambda c, buffer: self._decode(memory, c, input, buffer))
            for row, offset, decoded_row in zip(batch, rows, found, strict=False):
                if decoded_row is None:
                    row[...] = pictures.cut(memory, offset, shape, cut_from)
                else:
                    c, buffer = decoded_row
                    row[...] = pictures.cut(buffer, offset - c.offset, shape, decoding.within(c, cut_from))
        batch[len(rows) :] = 0
        return batch

    def _decode(self, memory: np.ndarray, c: Coded, input: Input, buffer: np.ndarray) -> None:
        """The host's decoder does it, and makes the same rows; the decoder of the card takes its own time."""
        began = time.perf_counter()
        job, jpeg = decoding.source(memory, c)
        job.fill(jpeg.data, input, buffer.reshape(job.shape(input)))
        left = (self.sim.decode or 0.0) * job.header.coded_width * job.header.coded_height / 1e6 - (time.perf_counter() - began)
        if left > 0:
            time.sleep(left)

    def gather_slots(self, memory: np.ndarray, rows: Sequence[int], slots: Sequence[Slot]) -> list[Any]:
        self._upload(len(rows) * sum(slot.nbytes for slot in slots))
        self._play()
        return super().gather_slots(memory, rows, slots)

    def run(self, compute: Any, rows: int, row_bytes: int) -> Any:
        """Call `compute()` for a batch of `rows`, in modelled memory and time."""
        if self._serving.now:
            self._enter("computing")
        need = rows * row_bytes * 4 * ACTIVATION_COPIES
        self.reserve(need, "batch")
        try:
            with self._engine:
                began = time.perf_counter()
                result = compute()
                if self.sim.compute is not None:
                    modelled = self.sim.compute[0] + rows * self.sim.compute[1]
                    if self._fault == "hot":
                        modelled *= HOT
                    left = modelled - (time.perf_counter() - began)
                    if left > 0:
                        time.sleep(left)
                elif self._fault == "hot":
                    time.sleep((time.perf_counter() - began) * (HOT - 1))
            self._play()
        finally:
            self.release(need, "batch")
        if self._fault == "wrong-answers":
            result = [
                np.flip(array, -1) * np.asarray(1.5, array.dtype) if array.dtype.kind == "f" else np.flip(array, -1) for array in result
            ]
        return result

    # ---- faults

    def fault(self, fault: str, phase: str = "") -> None:
        """Switch a fault on, now or when `phase` is entered; "clear" ends all that a process can end (a sticky one ends with it)."""
        if phase:
            self._waiting[phase] = fault
            if phase == "idle" and not self._batches:
                self._strike("idle")
        elif (taken := memory_taken(fault)) is not None:
            self._others = taken
        elif fault == "clear":
            self._fault = ""
            self._others = 0
            self._waiting.clear()
        else:
            self._fault = fault

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self._ledger:
            self._batches += 1
        self._serving.now = True
        try:
            yield
        finally:
            self._serving.now = False
            with self._ledger:
                self._batches -= 1
                idle = self._batches == 0
            if idle:
                self._strike("idle")

    def _enter(self, phase: str) -> None:
        self._strike(phase)
        self._play()

    def _strike(self, phase: str) -> None:
        """Switch on what waits for this phase."""
        fault = self._waiting.pop(phase, "")
        if fault == "unplug":
            os._exit(EXIT_UNPLUGGED)
        if fault:
            self._fault = fault

    def _play(self) -> None:
        """Faults that strike wherever the device is used."""
        if self._fault == "hang":
            self._never.wait()
        if self._fault == "sticky":
            self._sticky = True
        if self._sticky:
            raise RuntimeError("CUDA error: unspecified launch failure (simulated); the context is lost until the process is replaced")

    def ping(self) -> None:
        """Called by the main thread for each ping: a hung device answers none."""
        if self._fault == "hang":
            self._never.wait()


def _wake_on_time() -> None:
    """Let this thread, and those that it starts, sleep to the microsecond: the kernel's 50 of slack are as long as a small copy."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
