"""torch.export archives that take and give tensors as they were exported."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from outboard.devices.rows import BFLOAT16
from outboard.repository import ModelProblem, ModelSpec, Network
from outboard.worker.backend_torch import Streams, as_tensor
from outboard.worker.devices import Device
from outboard.worker.networks import Port
from outboard.worker.torch_memory import TorchAllocator
from outboard.worker.torch_modules import flat

_NAMES = {getattr(torch, name): name for name in ("bool", "float16", "float32", "float64", BFLOAT16)} | {
    getattr(torch, f"{sign}int{bits}"): f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class TorchTensorBackend:
    """A module in eager mode. `run` takes one array for each input, in the order of `inputs`, with the batch axis."""

    provider = "torch eager"
    recompilations = 0

    def __init__(self, network: Network, spec: ModelSpec, device: Device, threads: int):
        torch.set_num_threads(threads)
        where = str(network.file)
        try:
            program = torch.export.load(network.file)
        except Exception as e:
            raise ModelProblem(where, "file", f"an archive of torch.export.save that torch {torch.__version__} reads", str(e)) from e
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        signature = program.graph_signature
        self.inputs: list[Port] = [_port(where, "input", name, values.get(name)) for name in signature.user_inputs]
        if not self.inputs:
            raise ModelProblem(where, "export inputs", "at least one", "the archive has none")
        named = _named_outputs(where, program, len(signature.user_outputs))
        self.outputs: list[Port] = [
            _port(where, "output", name, values.get(node)) for name, node in zip(named, signature.user_outputs, strict=True)
        ]
        self.labels: dict[str, list[str]] = {}
        self._module = program.module().to(device.torch_device)
        self._streams = Streams() if device.torch_device == "cuda" else None
        if self._streams:
            device.allocator = TorchAllocator()

    def batch_rows(self, rows: int) -> int:
        return rows

    def run(self, batch: Sequence[Any]) -> list[np.ndarray]:
        stream = torch.cuda.stream(self._streams.stream) if self._streams else contextlib.nullcontext()
        with torch.inference_mode(), stream:
            given = [self._tensor(array, dtype) for array, (_, dtype, _) in zip(batch, self.inputs, strict=True)]
            return [_array(t) for _, t in flat(self._module(*given))]

    def _tensor(self, array: Any, dtype: str) -> torch.Tensor:
        if not isinstance(array, np.ndarray):
            return torch.as_tensor(array, device="cuda")
        made = as_tensor(array) if array.size else torch.empty(array.shape, dtype=_DTYPES[dtype])
        return made.to(device="cuda" if self._streams else "cpu", dtype=_DTYPES[dtype])

    def optimise(self, rows: Sequence[int]) -> None:
        """Compiled code is for networks that take pictures, whose shapes are known."""

    def shrink(self) -> None:
        """As of networks that take pictures."""
        if self._streams:
            torch.cuda.empty_cache()


def _port(where: str, what: str, name: str, value: Any) -> Port:
    if not isinstance(value, torch.Tensor) or value.dtype not in _NAMES:
        raise ModelProblem(
            where, f"export {what} {name!r}", f"a tensor of {', '.join(_DTYPES)}", f"it is {getattr(value, 'dtype', type(value).__name__)}"
        )
    return name, _NAMES[value.dtype], [d if isinstance(d, int) else str(d) for d in value.shape]


def _named_outputs(where: str, program: torch.export.ExportedProgram, count: int) -> list[str]:
    """The names that `flat` will give: of one tensor, of a tuple's, of a dict's."""
    shape = pytree.tree_unflatten([torch.empty(0) for _ in range(count)], program.call_spec.out_spec)
    try:
        return [name for name, _ in flat(shape)]
    except TypeError as e:
        raise ModelProblem(where, "export outputs", "a tensor, a tuple or a dict of tensors", str(e)) from e


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.cpu().contiguous()
    return tensor.view(torch.int16).numpy().view(BFLOAT16) if tensor.dtype is torch.bfloat16 else tensor.numpy()
