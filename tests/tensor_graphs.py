"""Small ONNX graphs that take tensors, whose answers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import graphs

Value = tuple[str, int, list[int | str]]

MANIFEST = """\
task = "tensor"
backend = "onnx"
file = "model.onnx"
[output]
decoder = "tensor"
"""

#: Datatype of the protocol -> ONNX element type.
ELEMENTS = {
    "BOOL": TensorProto.BOOL,
    **{f"INT{n}": getattr(TensorProto, f"INT{n}") for n in (8, 16, 32, 64)},
    **{f"UINT{n}": getattr(TensorProto, f"UINT{n}") for n in (8, 16, 32, 64)},
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BF16": TensorProto.BFLOAT16,
    "BYTES": TensorProto.STRING,
}


def graph(nodes: list[onnx.NodeProto], inputs: list[Value], outputs: list[Value], constants: dict[str, np.ndarray] | None = None) -> bytes:
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        [numpy_helper.from_array(array, name) for name, array in (constants or {}).items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def write(root: Path, name: str, model: bytes, more: str = "") -> Path:
    """A model folder `root`/`name`."""
    return graphs.write_model(root, name, model, MANIFEST + more)


def same(datatype: str, axes: list[int | str] | None = None) -> bytes:
    """`y` is `x`, [n, 4] unless said otherwise."""
    kind, shape = ELEMENTS[datatype], ["n", 4] if axes is None else axes
    return graph([helper.make_node("Identity", ["x"], ["y"])], [("x", kind, shape)], [("y", kind, shape)])


def row_sums() -> bytes:
    """`y` [n, 1] of FP32 `x` [n, width]."""
    node = helper.make_node("ReduceSum", ["x", "one"], ["y"])
    kind = TensorProto.FLOAT
    return graph([node], [("x", kind, ["n", "width"])], [("y", kind, ["n", 1])], {"one": np.array([1], np.int64)})


def add_and_subtract(rows: int | str = "n") -> bytes:
    """Triton's example: OUTPUT0 = INPUT0 + INPUT1, OUTPUT1 = INPUT0 - INPUT1, INT32 [n, 16]."""
    nodes = [helper.make_node(op, ["INPUT0", "INPUT1"], [out]) for op, out in (("Add", "OUTPUT0"), ("Sub", "OUTPUT1"))]
    return graph(
        nodes,
        [(name, TensorProto.INT32, [rows, 16]) for name in ("INPUT0", "INPUT1")],
        [(name, TensorProto.INT32, [rows, 16]) for name in ("OUTPUT0", "OUTPUT1")],
    )


def mixed() -> bytes:
    """`sums` [n, width] of FP32 `x` [n, width], INT64 `k` [n] and FP64 `z` [n, 3, 1], of three ranks, one axis free."""
    nodes = [
        helper.make_node("Cast", ["k"], ["kf"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["kf", "one"], ["kc"]),
        helper.make_node("Cast", ["z"], ["zf"], to=TensorProto.FLOAT),
        helper.make_node("ReduceSum", ["zf", "two"], ["zs"], keepdims=0),
        helper.make_node("ReduceSum", ["zs", "one"], ["zc"], keepdims=1),
        helper.make_node("Add", ["x", "kc"], ["xk"]),
        helper.make_node("Add", ["xk", "zc"], ["sums"]),
    ]
    inputs: list[Value] = [
        ("x", TensorProto.FLOAT, ["n", "width"]),
        ("k", TensorProto.INT64, ["n"]),
        ("z", TensorProto.DOUBLE, ["n", 3, 1]),
    ]
    constants = {"one": np.array([1], np.int64), "two": np.array([2], np.int64)}
    return graph(nodes, inputs, [("sums", TensorProto.FLOAT, ["n", "width"])], constants)


def softmax_over_rows() -> bytes:
    """`y` [n, 3]: each column's softmax over the first axis, which therefore is no batch axis."""
    return graph(
        [helper.make_node("Softmax", ["x"], ["y"], axis=0)],
        [("x", TensorProto.FLOAT, ["n", 3])],
        [("y", TensorProto.FLOAT, ["n", 3])],
    )


def scalar_times_vector() -> bytes:
    """`y` [k] = scalar `a` times `b` [k]: no batch axis at all."""
    return graph(
        [helper.make_node("Mul", ["a", "b"], ["y"])],
        [("a", TensorProto.FLOAT, []), ("b", TensorProto.FLOAT, ["k"])],
        [("y", TensorProto.FLOAT, ["k"])],
    )


def trees(labels: list[str] | list[int] | None = None) -> bytes:
    """A tree ensemble as sklearn-onnx writes it: x [n, 2] -> label [n], probabilities through ZipMap (a sequence of maps).

    One tree: x[0] <= 0.5 gives class 0, else x[1] <= 0.5 gives class 1, else class 2.
    """
    names = labels or ["cat", "dog", "fox"]
    words = isinstance(names[0], str)
    keys = {"classlabels_strings": names} if words else {"classlabels_int64s": names}
    tree = helper.make_node(
        "TreeEnsembleClassifier",
        ["x"],
        ["label", "scores"],
        domain="ai.onnx.ml",
        nodes_treeids=[0] * 5,
        nodes_nodeids=[0, 1, 2, 3, 4],
        nodes_featureids=[0, 0, 1, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_values=[0.5, 0.0, 0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 3, 0, 0],
        nodes_falsenodeids=[2, 0, 4, 0, 0],
        nodes_hitrates=[1.0] * 5,
        nodes_missing_value_tracks_true=[0] * 5,
        class_treeids=[0, 0, 0],
        class_nodeids=[1, 3, 4],
        class_ids=[0, 1, 2],
        class_weights=[1.0, 1.0, 1.0],
        post_transform="NONE",
        **keys,
    )
    zipmap = helper.make_node("ZipMap", ["scores"], ["probabilities"], domain="ai.onnx.ml", **keys)
    key = TensorProto.STRING if words else TensorProto.INT64
    maps = helper.make_sequence_type_proto(helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, None)))
    made = helper.make_graph(
        [tree, zipmap],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, 2])],
        [helper.make_tensor_value_info("label", key, [None]), helper.make_value_info("probabilities", maps)],
    )
    opsets = [helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(made, opset_imports=opsets, ir_version=8).SerializeToString()


def words_to_numbers() -> bytes:
    """`y` INT64 [n, 2]: a label encoder of `x` BYTES [n, 2]: cat 1, dog 2, Füchse 3, all else -1."""
    node = helper.make_node(
        "LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", keys_strings=["cat", "dog", "Füchse"], values_int64s=[1, 2, 3], default_int64=-1
    )
    made = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["n", 2])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ["n", 2])],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8).SerializeToString()


def sparse_dot() -> bytes:
    """`score` FP32 [n]: the dot product of the weights 0, 1, 2 … 99 with rows given as `indices` INT64 [n, k], `values` FP32 [n, k]."""
    nodes = [
        helper.make_node("Gather", ["weights", "indices"], ["picked"], axis=0),
        helper.make_node("Mul", ["picked", "values"], ["products"]),
        helper.make_node("ReduceSum", ["products", "one"], ["score"], keepdims=0),
    ]
    inputs: list[Value] = [("indices", TensorProto.INT64, ["n", "k"]), ("values", TensorProto.FLOAT, ["n", "k"])]
    constants = {"weights": np.arange(100, dtype=np.float32), "one": np.array([1], np.int64)}
    return graph(nodes, inputs, [("score", TensorProto.FLOAT, ["n"])], constants)


def needs_even_length() -> bytes:
    """`y` [n, half, 2] = `x` [n, width] in pairs: an odd width is refused when it runs."""
    return graph(
        [helper.make_node("Reshape", ["x", "pairs"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", "width"])],
        [("y", TensorProto.FLOAT, ["n", "half", 2])],
        {"pairs": np.array([0, -1, 2], np.int64)},
    )
