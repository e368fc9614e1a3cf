"""Reading, checking and rewriting an ONNX graph before ONNX Runtime sees it.

The rewrite gives the network an input of uint8 [n, h, w, 3] and prepends the normalisation, so that only uint8 pixels cross the link and
nothing is normalised in numpy. `value = (pixel / 255 - mean) / std` is folded into one multiplication and one addition a channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper, numpy_helper

from outboard.repository import Input, ModelProblem, Network

#: Name of the new input; long enough that no graph has it.
PIXELS = "outboard_pixels_uint8_nhwc"

_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}

Axes = list[int | str]


@dataclass(frozen=True)
class Picture:
    """The graph's picture input: its name, ONNX element type, the four dimensions (free ones by name) and where the channels are."""

    name: str
    elem_type: int
    shape: tuple[int | str, ...]
    channels_last: bool

    @property
    def rows(self) -> int:
        """The frozen batch size; 0: free."""
        return _fixed(self.shape[0])

    @property
    def height(self) -> int:
        return _fixed(self.shape[1 if self.channels_last else 2])

    @property
    def width(self) -> int:
        return _fixed(self.shape[2 if self.channels_last else 3])


def _fixed(axis: int | str) -> int:
    return axis if isinstance(axis, int) else 0


def load(network: Network) -> onnx.ModelProto:
    """The graph of `network.file`, its external tensors left in their files. Raises ModelProblem."""
    where = str(network.file)
    try:
        model = onnx.load(network.file, load_external_data=False)
    except (DecodeError, ValueError, OSError) as e:
        raise ModelProblem(
            where, "file", "a whole ONNX file", f"it cannot be read ({str(e) or type(e).__name__}): truncated, or not ONNX"
        ) from e
    if not model.graph.node:
        raise ModelProblem(where, "graph", "a graph with nodes", "the file holds none: it is empty, truncated, or not ONNX")
    _check_external_data(model, network.file)
    return model


def read(network: Network) -> tuple[onnx.ModelProto, Picture]:
    """The checked graph of a network that takes pictures. Raises ModelProblem."""
    model, where = load(network), str(network.file)
    picture = _picture(model.graph, where)
    _check_size(picture, network.input, where)
    return model, picture


def _tensors(graph: onnx.GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from _tensors(inner)


def _check_external_data(model: onnx.ModelProto, file: Path) -> None:
    """Every side file lies inside the model's folder, exists and is long enough."""
    folder = file.parent.resolve()
    for tensor in _tensors(model.graph):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        where = {entry.key: entry.value for entry in tensor.external_data}
        location = where.get("location", "")
        path = (folder / location).resolve()
        if not location or not path.is_relative_to(folder):
            expected = "external data inside the model's folder"
            raise ModelProblem(str(file), f"external data of {tensor.name!r}", expected, f"{location!r} leaves it")
        if not path.is_file():
            raise ModelProblem(str(file), f"external data of {tensor.name!r}", f"the file {location!r} beside the model", "it is missing")
        need = int(where.get("offset", 0) or 0) + int(where.get("length", 0) or 0)
        if path.stat().st_size < need:
            raise ModelProblem(
                str(path), f"external data of {tensor.name!r}", f"at least {need} bytes", f"it has {path.stat().st_size}: truncated"
            )


def axes(value: onnx.ValueInfoProto) -> Axes:
    """Dimensions of a graph input or output: a number, or a name where it is free ("?" for a nameless one)."""
    return [d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else d.dim_param or "?" for d in value.type.tensor_type.shape.dim]


def _picture(graph: onnx.GraphProto, where: str) -> Picture:
    constants = {t.name for t in graph.initializer}
    inputs = [i for i in graph.input if i.name not in constants]
    if len(inputs) != 1:
        raise ModelProblem(where, "graph input", "one input, the picture", f"the graph has {len(inputs)}: {[i.name for i in inputs]}")
    value = inputs[0]
    elem_type, shape = value.type.tensor_type.elem_type, axes(value)
    key = f"graph input {value.name!r}"
    if elem_type not in _FLOATS and elem_type != TensorProto.UINT8:
        kind = TensorProto.DataType.Name(elem_type) if elem_type else "not a tensor"
        raise ModelProblem(where, key, "float32, float16, float64 or uint8 elements", f"it has {kind}")
    if len(shape) != 4 or not (_fixed(shape[1]) in (0, 3) or _fixed(shape[3]) in (0, 3)):
        raise ModelProblem(where, key, "[batch, 3, height, width] or [batch, height, width, 3]", f"it has {shape}")
    # A free axis may be anything, so a 3 at the end with no 3 in front decides for channels last; all else is channels first.
    channels_last = shape[3] == 3 and shape[1] != 3
    if not channels_last and _fixed(shape[1]) not in (0, 3):
        raise ModelProblem(where, key, "[batch, 3, height, width] or [batch, height, width, 3]", f"it has {shape}")
    return Picture(value.name, elem_type, tuple(shape), channels_last)


def _check_size(picture: Picture, manifest: Input, where: str) -> None:
    width, height = manifest.size
    if picture.width not in (0, width) or picture.height not in (0, height):
        expected = f"[{picture.width or width}, {picture.height or height}]"
        raise ModelProblem(where, "input.size", expected, f"model.toml says {[width, height]}, the graph's input is {list(picture.shape)}")


def with_uint8_input(model: onnx.ModelProto, picture: Picture, manifest: Input) -> onnx.ModelProto:
    """`model`, changed in place to take uint8 [n, h, w, 3] under the name PIXELS. A graph that takes uint8 keeps its own normalisation."""
    graph = model.graph
    old = next(i for i in graph.input if i.name == picture.name)
    dims = picture.shape if picture.channels_last else tuple(picture.shape[i] for i in (0, 2, 3, 1))
    # Nameless free axes must stay nameless: one shared name would tell the runtime that they are equal.
    pixels = helper.make_tensor_value_info(PIXELS, TensorProto.UINT8, [None if d == "?" else d for d in dims[:3]] + [3])
    nodes: list[onnx.NodeProto] = []
    last = PIXELS

    def then(op: str, *others: str, out: str = "", **attributes: object) -> None:
        nonlocal last
        name = out or f"{PIXELS}_{op.lower()}"
        nodes.append(helper.make_node(op, [last, *others], [name], name=name, **attributes))
        last = name

    def constant(label: str, values: np.ndarray) -> str:
        name = f"{PIXELS}_{label}"
        graph.initializer.append(
            numpy_helper.from_array(values.astype(np.float32).reshape((3,) if picture.channels_last else (1, 3, 1, 1)), name)
        )
        return name

    if not picture.channels_last:
        then("Transpose", perm=[0, 3, 1, 2])  # while a pixel is a byte: a quarter of float32's traffic
    if picture.elem_type != TensorProto.UINT8:
        std = np.asarray(manifest.std, np.float64)
        scale, shift = 1 / (255 * std), -np.asarray(manifest.mean, np.float64) / std
        then("Cast", to=TensorProto.FLOAT)
        then("Mul", constant("scale", scale))
        if shift.any():
            then("Add", constant("shift", shift))
        if picture.elem_type != TensorProto.FLOAT:
            then("Cast", to=picture.elem_type, out=f"{PIXELS}_typed")
    if nodes:
        nodes[-1].output[0] = picture.name
    else:
        then("Identity", out=picture.name)
    graph.input.remove(old)
    graph.input.insert(0, pixels)
    body = list(graph.node)
    del graph.node[:]
    graph.node.extend(nodes + body)
    return model
