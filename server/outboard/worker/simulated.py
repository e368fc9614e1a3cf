"""The device behind `sim:`: the CPU computes, a link, a memory and a clock are modelled, and faults are played on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from outboard.devices.simulated import LATENCY, SimSpec, parse
from outboard.worker.devices import CpuDevice

#: Modelled working memory of a row: its float32 input held this many times over (input, output and workspace of the widest layer).
ACTIVATION_COPIES = 6
#: A throttled card's clock: what `hot` does to compute time.
HOT = 3.0
#: A cable that trained at a lower rate: what `slow-link` does to bandwidth.
SLOW = 10.0


class SimulatedDevice(CpuDevice):
    """See the module's head. `simulated_time` is true where the compute time is modelled too."""

    def __init__(self, spec: str):
        super().__init__(spec)
        self.sim: SimSpec = parse(spec)
        self.name = f"simulated eGPU over {self.sim.link}, {self.sim.vram / (1 << 30):g} GiB"
        self.uuid = f"SIM-{spec.split(',fault=')[0]}"
        self.memory_total = self.sim.vram
        self.h2d_bytes_per_s = self.sim.h2d
        self.d2h_bytes_per_s = self.sim.d2h
        self._fault = self.sim.fault
        self._sticky = False
        self._used = 0
        self._ledger = threading.Lock()
        self._wires = threading.Lock()  # one cable: copies take turns
        self._engine = threading.Lock()  # one processor: batches take turns
        self._never = threading.Event()

    # ---- memory

    def memory_free(self) -> int:
        with self._ledger:
            return self.sim.vram - self._used

    def reserve(self, nbytes: int, what: str) -> None:
        """Take modelled memory. Raises RuntimeError with the text that torch's allocator uses."""
        with self._ledger:
            if self._fault == "oom" and what == "batch" or self._used + nbytes > self.sim.vram:
                free = self.sim.vram - self._used
                raise RuntimeError(
                    f"CUDA out of memory. Tried to allocate {nbytes / (1 << 20):.0f} MiB. {self.name} has a total capacity of "
                    f"{self.sim.vram / (1 << 30):.2f} GiB of which {free / (1 << 20):.0f} MiB is free."
                )
            self._used += nbytes

    def release(self, nbytes: int) -> None:
        with self._ledger:
            self._used -= nbytes

    # ---- link and compute

    def upload(self, nbytes: int) -> None:
        self._play()
        self._copy(nbytes, self.sim.h2d)

    def download(self, nbytes: int) -> None:
        self._play()
        self._copy(nbytes, self.sim.d2h)

    def _copy(self, nbytes: int, rate: float) -> None:
        if self._fault == "slow-link":
            rate /= SLOW
        with self._wires:
            time.sleep(LATENCY + nbytes / rate)

    def gather(self, memory: np.ndarray, rows: Sequence[int], shape: tuple[int, ...], total: int) -> np.ndarray:
        self._play()
        return super().gather(memory, rows, shape, total)

    def run(self, compute: Any, rows: int, row_bytes: int) -> Any:
        """Call `compute()` for a batch of `rows`, in modelled memory and time."""
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
            self.release(need)
        if self._fault == "wrong-answers":
            result = [
                np.flip(array, -1) * np.asarray(1.5, array.dtype) if array.dtype.kind == "f" else np.flip(array, -1) for array in result
            ]
        return result

    # ---- faults

    def fault(self, fault: str) -> None:
        """Switch a fault on; "clear" ends every fault that a process can end (a sticky one only ends with the process)."""
        self._fault = "" if fault == "clear" else fault

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
