"""Small ONNX graphs with answers that one can work out, and model folders around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MANIFEST = """task = "tensor"
backend = "onnx"
file = "net.onnx"
[input]
size = [{width}, {height}]
mean = [{mean}]
std = [{std}]
[output]
decoder = "tensor"
[batching]
max = {batch_max}
"""


def channel_means(shape: Sequence[int | str] = ("n", 3, "h", "w"), elem_type: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """Means of the three channels of the normalised picture: [n, 3] where the channels come first, [n, 3] where they come last."""
    last = shape[3] == 3
    nodes = [
        helper.make_node("ReduceMean", ["x" if elem_type != TensorProto.UINT8 else "f"], ["y"], axes=[1, 2] if last else [2, 3], keepdims=0)
    ]
    if elem_type == TensorProto.UINT8:
        nodes.insert(0, helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT))
    out_type = TensorProto.FLOAT if elem_type == TensorProto.UINT8 else elem_type
    return model(nodes, [("x", elem_type, shape)], [("y", out_type, [shape[0], 3])])


def convolution(channels: int = 8) -> onnx.ModelProto:
    """A 3x3 convolution with padding, whose border shows whether zeros mean what they meant before the normalisation moved."""
    weight = np.random.default_rng(1).standard_normal((channels, 3, 3, 3)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    return model(
        [node], [("x", TensorProto.FLOAT, ["n", 3, "h", "w"])], [("y", TensorProto.FLOAT, ["n", channels, "h", "w"])], {"w": weight}
    )


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[tuple[str, int, Sequence[int | str]]],
    outputs: Sequence[tuple[str, int, Sequence[int | str]]],
    constants: dict[str, np.ndarray] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info(n, t, list(s)) for n, t, s in inputs],
        [helper.make_tensor_value_info(n, t, list(s)) for n, t, s in outputs],
        [numpy_helper.from_array(v, k) for k, v in (constants or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def folder(
    root: Path,
    graph: onnx.ModelProto | bytes,
    *,
    name: str = "net",
    size: tuple[int, int] = (8, 6),
    mean: Sequence[float] = (0, 0, 0),
    std: Sequence[float] = (1, 1, 1),
    batch_max: int = 4,
    more: str = "",
) -> Path:
    """A model folder `root`/`name` around the graph."""
    directory = root / name
    directory.mkdir()
    (directory / "net.onnx").write_bytes(graph if isinstance(graph, bytes) else graph.SerializeToString())
    listed = [", ".join(str(float(v)) for v in values) for values in (mean, std)]
    text = MANIFEST.format(width=size[0], height=size[1], mean=listed[0], std=listed[1], batch_max=batch_max)
    (directory / "model.toml").write_text(text + more)
    return directory
