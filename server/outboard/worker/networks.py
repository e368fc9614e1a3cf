"""A loaded network: rows of the slab in, named arrays out, whatever backend runs it and whatever batch size is frozen into it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from outboard.core.state import Coded, Picture
from outboard.repository import ModelSpec, Network
from outboard.worker.devices import Device
from outboard.worker.errors import InputRefused

log = logging.getLogger(__name__)

#: (name, numpy's dtype name, shape with free axes by name)
Port = tuple[str, str, list[int | str]]


class Backend(Protocol):
    """What a runtime adds: one batch in the device's memory to output arrays on the host."""

    provider: str
    recompilations: int  #: of compiled code while it serves: 0, or a frame has waited for a compiler
    inputs: list[Port]
    outputs: list[Port]

    def batch_rows(self, rows: int) -> int:
        """How many rows the batch must have to hold `rows`; fewer where that many do not fit one batch."""

    def run(self, batch: Any) -> list[np.ndarray]:
        """uint8 [n, h, w, 3] as `Device.gather` gives it -> the outputs in the order of `outputs`."""

    def optimise(self, rows: Sequence[int]) -> Backend | None:
        """Slow, while this one serves: a faster backend for batches of these sizes, or None."""

    def shrink(self) -> None:
        """Before the next run: let it give back the memory that larger batches took."""


class LoadedNetwork:
    """One version of a network on one device. `run` may be called from several threads."""

    def __init__(self, spec: ModelSpec, network: Network, backend: Backend, device: Device, memory_bytes: int = 0):
        self.spec, self.network, self.backend, self.device = spec, network, backend, device
        self.memory_bytes = memory_bytes
        self.weights_bytes = 0  #: of its file
        self.kept_bytes = 0  #: what its batches have needed at most, where the device's allocators keep that
        self.fixed_rows = self._frozen_rows()
        self._told, self._telling = 0, threading.Lock()

    def recompiled(self) -> int:
        """Recompilations since this was last asked."""
        with self._telling:
            new = self.backend.recompilations - self._told
            self._told += new
            return new

    def _frozen_rows(self) -> int:
        """The batch size that is frozen into the graph; 0: none."""
        fixed = self.backend.inputs[0][2][0]
        if not isinstance(fixed, int):
            return 0
        if fixed == 1:
            log.info("%s: the batch size 1 is frozen into the graph, rows run singly", self.network.key)
        elif fixed:
            log.info("%s: the batch size %d is frozen into the graph, smaller batches are padded", self.network.key, fixed)
        return fixed

    @property
    def max_rows(self) -> int:
        """The largest batch worth measuring."""
        return 1 if self.fixed_rows == 1 else self.fixed_rows or self.network.batching.max

    def run_singly(self) -> None:
        """From now on each row runs alone: the graph's answers for a row depend on its neighbours, or cannot be told apart."""
        self.fixed_rows = 1

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise InputRefused unless rows of `shape` fit the network."""
        axes = self.backend.inputs[0][2][1:]
        for axis, got, want in zip(("height", "width", "channels"), shape, axes, strict=False):
            if isinstance(want, int) and got != want:
                raise InputRefused(f"{self.network.key}: {axis} of the rows is {got}, expected {want}")
        if len(shape) != 3 or min(shape) < 1:
            raise InputRefused(f"{self.network.key}: rows have shape {list(shape)}, expected [height, width, 3]")

    def run(
        self,
        memory: np.ndarray,
        rows: Sequence[int],
        shape: tuple[int, ...],
        cut_from: Sequence[Picture] = (),
        coded: Sequence[Coded] = (),
    ) -> dict[str, np.ndarray]:
        """Answers for the rows (uint8 `shape`, C order) at byte offsets `rows` of `memory`, whole or `cut_from` pictures, those of
        `coded` frames decoded on the device, one by name, rows on the first axis."""
        self.check(shape)
        if not rows:
            raise InputRefused(f"{self.network.key}: a batch without rows")
        step = self.fixed_rows or len(rows)
        pieces = [self._run_piece(memory, rows[i : i + step], shape, cut_from, coded) for i in range(0, len(rows), step)]
        if len(pieces) == 1:
            arrays = pieces[0]
        else:
            arrays = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
            self._check_row_axis(arrays, len(rows))
        return {name: array for (name, _, _), array in zip(self.backend.outputs, arrays, strict=True)}

    def _run_piece(
        self, memory: np.ndarray, rows: Sequence[int], shape: tuple[int, ...], cut_from: Sequence[Picture], coded: Sequence[Coded]
    ) -> list[np.ndarray]:
        n = len(rows)
        total = max(self.fixed_rows, self.backend.batch_rows(n))
        row_bytes = int(np.prod(shape))
        if coded:
            batch = self.device.gather_coded(memory, rows, shape, total, cut_from, coded, self.network.input)
        else:
            batch = self.device.gather(memory, rows, shape, total, cut_from)
        arrays = self._compute(batch, total, row_bytes)
        if total > n:
            self._check_row_axis(arrays, total)
            arrays = [a[:n] for a in arrays]
        return arrays

    def _compute(self, batch: Any, total: int, row_bytes: int) -> list[np.ndarray]:
        """The backend's answers for a gathered batch."""
        timeline = self.device.timeline
        timeline.gathered = timeline.gathered or time.perf_counter()
        arrays = self.device.run(lambda: self.backend.run(batch), total, row_bytes)
        timeline.computed = time.perf_counter()
        return arrays

    def _check_row_axis(self, arrays: Sequence[np.ndarray], rows: int) -> None:
        for (name, _, _), array in zip(self.backend.outputs, arrays, strict=True):
            if array.ndim == 0 or array.shape[0] != rows:
                raise RuntimeError(
                    f"{self.network.key}: output {name!r} has shape {list(array.shape)} for {rows} rows: "
                    "it cannot be split into rows, send them one by one"
                )


def load(spec: ModelSpec, part: str, device: Device, threads: int) -> LoadedNetwork:
    """Load one network on the device. Raises ModelProblem where the files are at fault, RuntimeError where the device is."""
    if spec.takes_tensors:
        from outboard.worker import tensors

        return tensors.load(spec, part, device, threads)
    network = spec.networks[part]
    if spec.toml.backend == "onnx":
        from outboard.worker.backend_onnx import OnnxBackend

        backend: Backend = OnnxBackend(network, spec, device, threads)
    else:
        from outboard.worker.backend_torch import TorchBackend

        backend = TorchBackend(network, spec, device, threads)
    return LoadedNetwork(spec, network, backend, device)
