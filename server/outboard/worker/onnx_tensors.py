"""ONNX graphs that take and give tensors as they declare them: what numpy or the protocol has no word for is rewritten.

- bfloat16 inputs and outputs (numpy has none) become float32 with a Cast behind or before them: widening is exact, so are the bits.
- Scikit-learn's ZipMap (an output of type sequence<map<label, probability>>) is left out: its input is the tensor that everybody wants;
  what the columns mean is kept as the output's labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from outboard.devices.rows import BFLOAT16, BYTES
from outboard.repository import ModelProblem, ModelSpec, Network
from outboard.worker import onnx_graph
from outboard.worker.backend_onnx import Session
from outboard.worker.devices import Device
from outboard.worker.networks import Port

_NUMBERS = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
)  # fmt: skip
_DTYPES = {kind: helper.tensor_dtype_to_np_dtype(kind).name for kind in _NUMBERS} | {
    TensorProto.STRING: BYTES,
    TensorProto.BFLOAT16: BFLOAT16,
}
#: The graph's name for a bfloat16 input or output in float32; long enough that no graph has it.
_WIDE = "outboard_float32_"


class OnnxTensorBackend:
    """One ORT session. `run` takes one array for each input, in the order of `inputs`, with the batch axis: bfloat16 as float32,
    strings as objects."""

    recompilations = 0

    def __init__(self, network: Network, spec: ModelSpec, device: Device, threads: int):
        where = str(network.file)
        model = onnx_graph.load(network)
        self.labels = without_zipmap(model.graph)
        constants = {t.name for t in model.graph.initializer}
        given = [i for i in model.graph.input if i.name not in constants]
        if not given:
            raise ModelProblem(where, "graph inputs", "at least one", "the graph has none")
        self.inputs: list[Port] = [_port(i, where, "input") for i in given]
        self.outputs: list[Port] = [_port(o, where, "output") for o in model.graph.output]
        self._feeds = _widen_inputs(model.graph, given)
        self._fetches = _widen_outputs(model.graph)
        if not any(o.domain in ("", "ai.onnx") for o in model.opset_import):  # what was put in is of that domain
            model.opset_import.append(helper.make_opsetid("", 13))
        free = any(isinstance(axis, str) for _, _, shape in self.inputs for axis in shape[1:])
        self._session = Session(model, network, spec, device, threads, arena=not free)
        self.provider = device.provider

    def batch_rows(self, rows: int) -> int:
        return rows

    def run(self, batch: Sequence[Any]) -> list[np.ndarray]:
        arrays = self._session.run(dict(zip(self._feeds, batch, strict=True)), self._fetches)
        return [narrow(a) if dtype == BFLOAT16 else a for a, (_, dtype, _) in zip(arrays, self.outputs, strict=True)]

    def optimise(self, rows: Sequence[int]) -> None:
        """The session is as fast as it gets."""

    def shrink(self) -> None:
        self._session.shrink()


def narrow(array: np.ndarray) -> np.ndarray:
    """float32 that was widened from bfloat16 -> bfloat16: the upper half of each number."""
    return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16).view(BFLOAT16)


def without_zipmap(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Let each ZipMap's input out in its place; the labels of its columns by output."""
    outputs = {o.name: o for o in graph.output}
    labels: dict[str, list[str]] = {}
    for node in graph.node:
        if node.op_type != "ZipMap" or node.output[0] not in outputs:
            continue
        names = [a for a in node.attribute if a.name.startswith("classlabels")]
        found = [label.decode() for a in names for label in a.strings] + [str(label) for a in names for label in a.ints]
        name = node.output[0]
        labels[name] = found
        outputs[name].CopyFrom(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", len(found)]))
        node.CopyFrom(helper.make_node("Identity", [node.input[0]], [name], name=node.name))
    return labels


def _port(value: onnx.ValueInfoProto, where: str, what: str) -> Port:
    kind = value.type.WhichOneof("value")
    element = value.type.tensor_type.elem_type
    if kind != "tensor_type" or element not in _DTYPES:
        told = (
            f"a {TensorProto.DataType.Name(element)} tensor"
            if kind == "tensor_type"
            else f"a {(kind or 'untyped value').removesuffix('_type')}"
        )
        raise ModelProblem(where, f"graph {what} {value.name!r}", "a tensor of numbers, booleans or strings", f"it is {told}")
    if what == "input" and not value.type.tensor_type.HasField("shape"):
        raise ModelProblem(where, f"graph input {value.name!r}", "a shape (its axes may be free)", "it declares none")
    return value.name, _DTYPES[element], onnx_graph.axes(value)


def _widen_inputs(graph: onnx.GraphProto, given: Sequence[onnx.ValueInfoProto]) -> list[str]:
    """The names under which ORT is fed, in order."""
    feeds = []
    casts = []
    for value in given:
        name = value.name
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            casts.append(helper.make_node("Cast", [_WIDE + name], [name], to=TensorProto.BFLOAT16))
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            value.name = _WIDE + name
        feeds.append(value.name)
    if casts:
        body = list(graph.node)
        del graph.node[:]
        graph.node.extend(casts + body)
    return feeds


def _widen_outputs(graph: onnx.GraphProto) -> list[str]:
    """The names that ORT is asked for, in order."""
    for value in graph.output:
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            graph.node.append(helper.make_node("Cast", [value.name], [_WIDE + value.name], to=TensorProto.FLOAT))
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            value.name = _WIDE + value.name
    return [value.name for value in graph.output]
