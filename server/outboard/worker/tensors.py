"""A loaded network that takes tensors: several inputs of any dtype and shape, batched by their first axis where that is what it means."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from outboard.core.state import Coded, Picture
from outboard.devices.protocol import Slot
from outboard.repository import ModelSpec
from outboard.worker.devices import Device
from outboard.worker.errors import InputRefused
from outboard.worker.networks import LoadedNetwork, Port

log = logging.getLogger(__name__)


class TensorNetwork(LoadedNetwork):
    """One version of a tensor network on one device.

    Most graphs have a batch axis, the first of every input and output. Where it is none (axes that differ, answers that depend on the
    neighbours or have no such axis) the network runs `whole`: a request is one row and reaches the graph as it was sent.
    """

    def _frozen_rows(self) -> int:
        """As of pictures; it settles `whole`, too."""
        first = {shape[0] if shape else None for _, _, shape in self.backend.inputs}
        frozen = {axis for axis in first if isinstance(axis, int)}
        self.whole = None in first or len(frozen) > 1 or bool(frozen) and len(first) > 1
        return 1 if self.whole else next(iter(frozen), 0)

    def run_whole(self, why: str) -> None:
        log.info("%s: the first axis is no batch axis, each request runs alone: %s", self.network.key, why)
        self.whole, self.fixed_rows = True, 1

    def axes(self, port: Port) -> list[int | str]:
        """The axes of one row of an input."""
        return port[2] if self.whole else port[2][1:]

    def check(self, shape: Sequence[Any]) -> None:
        """Raise InputRefused unless rows of these slots fit the network."""
        slots: dict[str, Slot] = {slot.name: slot for slot in shape}
        for port in self.backend.inputs:
            name, dtype, _ = port
            slot = slots.pop(name, None)
            if slot is None:
                raise InputRefused(f"{self.network.key}: input {name!r} is missing")
            axes = self.axes(port)
            if slot.dtype != dtype or len(slot.shape) != len(axes):
                raise InputRefused(f"{self.network.key}: input {name!r} is {slot.dtype} {list(slot.shape)}, expected {dtype} {axes}")
            for i, (got, want) in enumerate(zip(slot.shape, axes, strict=True)):
                if isinstance(want, int) and got != want:
                    raise InputRefused(f"{self.network.key}: axis {i} of the rows of input {name!r} is {got}, expected {want}")
        if slots:
            raise InputRefused(f"{self.network.key}: there is no input {next(iter(slots))!r}")

    def _run_piece(
        self, memory: np.ndarray, rows: Sequence[int], shape: Sequence[Any], cut_from: Sequence[Picture], coded: Sequence[Coded]
    ) -> list[np.ndarray]:
        n = len(rows)
        total = max(self.fixed_rows, n)
        slots: dict[str, Slot] = {slot.name: slot for slot in shape}
        ordered = [slots[name] for name, _, _ in self.backend.inputs]
        row_bytes = sum(slot.nbytes for slot in ordered)
        # A row of zeros may be what a network cannot compute: the last row stands in for those that only fill a frozen batch.
        batch = self.device.gather_slots(memory, [*rows, *[rows[-1]] * (total - n)], ordered)
        if self.whole:
            batch = [array.reshape(slot.shape) for array, slot in zip(batch, ordered, strict=True)]
        arrays = self._compute(batch, total, row_bytes)
        if self.whole:
            return arrays
        self._check_row_axis(arrays, total)
        return [a[:n] for a in arrays] if total > n else arrays


def load(spec: ModelSpec, part: str, device: Device, threads: int) -> TensorNetwork:
    """As `networks.load`."""
    network = spec.networks[part]
    backend: Any
    if spec.toml.backend == "onnx":
        from outboard.worker.onnx_tensors import OnnxTensorBackend

        backend = OnnxTensorBackend(network, spec, device, threads)
    else:
        from outboard.worker.torch_tensors import TorchTensorBackend

        backend = TorchTensorBackend(network, spec, device, threads)
    return TensorNetwork(spec, network, backend, device)
