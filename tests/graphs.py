"""Small ONNX graphs whose answers are known, for tests that need a real network but no weights.

All take `images` float32 [N, 3, height, width], RGB, 0..1 (unless said otherwise), and are made with `onnx.helper` alone.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

#: What `block_finder` looks for: class id -> the colour of its block, RGB.
COLORS: dict[int, tuple[int, int, int]] = {0: (255, 0, 0), 1: (0, 255, 0)}

#: The layouts that `block_finder` can answer in, and the `[output] decoder` of each.
FORMATS: dict[str, str] = {
    "yolov5": "yolov5",
    "yolov8": "yolov8",
    "yolov8_rows": "yolov8",
    "end2end": "end2end",
    "end2end_batch_column": "end2end",
    "efficient_nms": "end2end",
    "boxes": "boxes",
    "boxes_single": "boxes",
    "ssd": "boxes",
    "detr": "detr",
    "rt_detr": "detr",
}

_FAR = 1e6


class Graph:
    """Nodes, appended in order; every method returns the name of the tensor that it made."""

    def __init__(self, size: tuple[int, int], batch: int | str = "batch"):
        self.width, self.height = size
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.inputs = [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, self.height, self.width])]

    def const(self, value: Any, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def model(self, outputs: dict[str, tuple[int, list[int | str]]]) -> bytes:
        """The finished model: `outputs` name -> (element type, shape)."""
        infos = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()]
        graph = helper.make_graph(self.nodes, "test", self.inputs, infos, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        return model.SerializeToString()


def block_finder(layout: str, size: tuple[int, int] = (320, 320), batch: int | str = "batch") -> bytes:
    """Finds the red block (class 0, score 0.9) and the green block (class 1, score 0.8) and answers in `layout`, one of FORMATS.

    Raw layouts (yolov5, yolov8, ssd) give each box eight times, shifted a little and scored less, as real heads do; so without
    non-maximum suppression there are too many. A colour that is not in the picture scores 0. `size` is [width, height].
    """
    g = Graph(size, batch)
    corners, scores = _find(g)  # [N, 2, 4] and [N, 2]
    raw = layout in ("yolov5", "yolov8", "yolov8_rows", "ssd")
    k = 16 if raw else 2
    classes = np.array([0, 1] * (k // 2))
    if raw:
        shift = np.repeat(np.arange(8), 2)
        corners = g.op("Add", g.op("Tile", corners, g.const([1, 8, 1], np.int64)), g.const(shift[None, :, None] * 0.5))
        scores = g.op("Mul", g.op("Tile", scores, g.const([1, 8], np.int64)), g.const(1 - 0.05 * shift[None]))
    column = g.op("Unsqueeze", scores, g.const([2], np.int64))  # [N, k, 1]
    onehot = g.op("Mul", column, g.const(np.eye(2)[classes][None]))  # [N, k, 2]
    unit = g.op("Div", corners, g.const([size[0], size[1]] * 2))
    float32, int64 = TensorProto.FLOAT, TensorProto.INT64

    if layout == "yolov5":
        objectness = g.op("Sqrt", column)
        # objectness x class = score
        classwise = g.op("Mul", objectness, g.const(np.eye(2)[classes][None]))
        g.op("Concat", _centres(g, corners), objectness, classwise, axis=2, out="output0")
        return g.model({"output0": (float32, [batch, k, 7])})
    if layout in ("yolov8", "yolov8_rows"):
        table = g.op("Concat", _centres(g, corners), onehot, axis=2, out="" if layout == "yolov8" else "output0")
        if layout == "yolov8_rows":
            return g.model({"output0": (float32, [batch, k, 6])})
        g.op("Transpose", table, perm=[0, 2, 1], out="output0")
        return g.model({"output0": (float32, [batch, 6, k])})
    if layout == "ssd":
        background = g.op("Sub", g.const(1.0), column)
        g.op("Concat", background, onehot, axis=2, out="scores")
        g.op("Identity", unit, out="boxes")
        return g.model({"scores": (float32, [batch, k, 3]), "boxes": (float32, [batch, k, 4])})
    if layout in ("detr", "rt_detr"):
        # Eight more queries that see nothing, as DETR's hundred mostly do.
        nothing = g.op("Mul", g.op("Tile", unit, g.const([1, 4, 1], np.int64)), g.const(0.0))
        g.op("Concat", _centres(g, unit), nothing, axis=1, out="pred_boxes")
        likely = g.op("Concat", onehot, g.op("Mul", g.op("Tile", onehot, g.const([1, 4, 1], np.int64)), g.const(0.0)), axis=1)
        if layout == "detr":
            rest = g.op("Sub", g.const(1.0), g.op("ReduceSum", likely, g.const([2], np.int64), keepdims=1))
            likely = g.op("Concat", likely, rest, axis=2)
            g.op("Log", g.op("Add", likely, g.const(1e-6)), out="logits")
        else:
            inner = g.op("Clip", likely, g.const(1e-6), g.const(1 - 1e-6))
            g.op("Log", g.op("Div", inner, g.op("Sub", g.const(1.0), inner)), out="logits")
        return g.model({"logits": (float32, [batch, 10, 3 if layout == "detr" else 2]), "pred_boxes": (float32, [batch, 10, 4])})

    ids = g.op("Expand", g.const(classes[None], np.int64), g.op("Shape", scores))  # [N, k]
    if layout == "end2end":
        floats = g.op("Unsqueeze", g.op("Cast", ids, to=float32), g.const([2], np.int64))
        g.op("Concat", corners, column, floats, axis=2, out="output0")
        return g.model({"output0": (float32, [batch, k, 6])})
    if layout == "efficient_nms":
        # Valid ones first, as the plugin promises: by score, descending.
        order = g.op("Unsqueeze", _order(g, scores), g.const([2], np.int64))
        seen = g.op("Cast", g.op("Greater", scores, g.const(0.0)), to=TensorProto.INT32)
        g.op("ReduceSum", seen, g.const([1], np.int64), keepdims=1, out="num_dets")
        four = g.op("Tile", order, g.const([1, 1, 4], np.int64))
        g.op("GatherElements", corners, four, axis=1, out="det_boxes")
        flat = g.op("Squeeze", order, g.const([2], np.int64))
        g.op("GatherElements", scores, flat, axis=1, out="det_scores")
        g.op("Cast", g.op("GatherElements", ids, flat, axis=1), to=TensorProto.INT32, out="det_classes")
        one = {"num_dets": (TensorProto.INT32, [batch, 1]), "det_boxes": (float32, [batch, k, 4])}
        return g.model({**one, "det_scores": (float32, [batch, k]), "det_classes": (TensorProto.INT32, [batch, k])})
    if layout == "boxes":
        g.op("Identity", corners, out="boxes")
        g.op("Identity", ids, out="labels")
        g.op("Identity", scores, out="scores")
        return g.model({"boxes": (float32, [batch, k, 4]), "labels": (int64, [batch, k]), "scores": (float32, [batch, k])})

    # The two layouts that hold only what was found: [found, 2] indices (image, candidate).
    found = g.op("Transpose", g.op("NonZero", g.op("Greater", scores, g.const(0.0))), perm=[1, 0])
    places, values, kinds = (g.op("GatherND", t, found) for t in (corners, scores, ids))
    if layout == "boxes_single":
        g.op("Identity", places, out="boxes")
        g.op("Identity", kinds, out="labels")
        g.op("Identity", values, out="scores")
        return g.model({"boxes": (float32, ["found", 4]), "labels": (int64, ["found"]), "scores": (float32, ["found"])})
    assert layout == "end2end_batch_column", f"no layout {layout!r}; there are {', '.join(FORMATS)}"
    image = g.op("Cast", g.op("Slice", found, *(g.const([i], np.int64) for i in (0, 1, 1))), to=float32)
    one = g.const([1], np.int64)
    kinds = g.op("Unsqueeze", g.op("Cast", kinds, to=float32), one)
    # Of all images together and last image first, so that order alone tells nothing.
    table = g.op("Concat", image, places, kinds, g.op("Unsqueeze", values, one), axis=1)
    g.op(
        "Slice",
        table,
        g.const([-1], np.int64),
        g.const([-(2**31)], np.int64),
        g.const([0], np.int64),
        g.const([-1], np.int64),
        out="output",
    )
    return g.model({"output": (float32, ["num_dets", 7])})


def every_block(size: tuple[int, int] = (320, 320), batch: int | str = "batch") -> bytes:
    """Finds every upright red block that touches no other, however many there are: `output` [found, 7] of image, x1, y1, x2, y2, class 0
    and score, for decoder `end2end`. A large block scores less than a small one, so that of a block that a border cuts the part scores
    more than the whole. `size` is [width, height].
    """
    g = Graph(size, batch)
    red = g.const(np.array([1.0, 0.0, 0.0])[None, :, None, None])
    far = g.op("ReduceMax", g.op("Abs", g.op("Sub", "images", red)), axes=[1], keepdims=1)
    mask = g.op("Less", far, g.const(0.3))  # bool [N, 1, H, W]

    def shifted(tensor: str, axis: int, by: int, fill: float) -> str:
        """The value that lies `by` pixels further along `axis`; `fill` beyond the picture."""
        pads = [0] * 8
        pads[axis + 4 if by > 0 else axis] = abs(by)
        length = (g.height, g.width)[axis - 2]
        padded = g.op("Pad", tensor, g.const(pads, np.int64), g.const(fill))
        return g.op("Slice", padded, *(g.const([i], np.int64) for i in ((by, by + length, axis) if by > 0 else (0, length, axis))))

    def end(axis: int) -> str:
        """Where the run of red pixels that goes through a pixel ends along `axis`."""
        length = (g.height, g.width)[axis - 2]
        index = np.arange(length, dtype=np.float32).reshape((1, 1, 1, -1) if axis == 3 else (1, 1, -1, 1))
        stop = g.op("Where", mask, g.const(float(length)), g.const(index))
        for power in range(length.bit_length()):
            if 1 << power < length:
                stop = g.op("Min", stop, shifted(stop, axis, 1 << power, float(length)))
        return stop

    number = g.op("Cast", mask, to=TensorProto.FLOAT)
    corner = g.op("Sub", g.op("Sub", number, shifted(number, 2, -1, 0.0)), shifted(number, 3, -1, 0.0))
    found = g.op("Transpose", g.op("NonZero", g.op("Greater", corner, g.const(0.5))), perm=[1, 0])  # int64 [found, 4]: image, 0, y, x
    one = g.const([1], np.int64)
    image, _, y1, x1 = (
        g.op("Cast", g.op("Slice", found, *(g.const([i], np.int64) for i in (column, column + 1, 1))), to=TensorProto.FLOAT)
        for column in range(4)
    )
    x2, y2 = (g.op("Unsqueeze", g.op("GatherND", end(axis), found), one) for axis in (3, 2))
    area = g.op("Mul", g.op("Sub", x2, x1), g.op("Sub", y2, y1))
    score = g.op("Sub", g.const(0.9), g.op("Mul", area, g.const(1e-6)))
    g.op("Concat", image, x1, y1, x2, y2, g.op("Mul", image, g.const(0.0)), score, axis=1, out="output")
    return g.model({"output": (TensorProto.FLOAT, ["found", 7])})


def channel_means(size: tuple[int, int] = (32, 32), batch: int | str = "batch") -> bytes:
    """`means` [N, 3]: each channel's mean, in the order in which the network got them. Tells RGB from BGR."""
    g = Graph(size, batch)
    g.op("ReduceMean", "images", axes=[2, 3], keepdims=0, out="means")
    return g.model({"means": (TensorProto.FLOAT, [batch, 3])})


def identity(size: tuple[int, int] = (32, 32), batch: int | str = "batch") -> bytes:
    """`output` is the input."""
    g = Graph(size, batch)
    g.op("Identity", "images", out="output")
    return g.model({"output": (TensorProto.FLOAT, [batch, 3, size[1], size[0]])})


def fixed_batch(n: int, size: tuple[int, int] = (32, 32)) -> bytes:
    """`channel_means` behind a convolution, with the batch frozen at `n` rows as an export with that example would have it."""
    g = Graph(size, n)
    kept = g.op("Conv", "images", g.const(np.eye(3)[:, :, None, None]))
    g.op("ReduceMean", kept, axes=[2, 3], keepdims=0, out="means")
    return g.model({"means": (TensorProto.FLOAT, [n, 3])})


#: What `nan_model` answers for every image.
STRANGE_NUMBERS = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-42, 0.1], np.float32)


def nan_model(size: tuple[int, int] = (32, 32), batch: int | str = "batch") -> bytes:
    """`output` [N, 6] is STRANGE_NUMBERS (NaN, infinities, -0.0, a denormal, 0.1) for every image."""
    g = Graph(size, batch)
    rows = g.op("Slice", g.op("Shape", "images"), *(g.const([i], np.int64) for i in (0, 1, 0)))
    g.op("Expand", g.const(STRANGE_NUMBERS[None]), g.op("Concat", rows, g.const([6], np.int64), axis=0), out="output")
    return g.model({"output": (TensorProto.FLOAT, [batch, 6])})


def divides_by_zero_rows(size: tuple[int, int] = (32, 32), batch: int | str = "batch") -> bytes:
    """`channel_means`, but a batch with no bright picture (mean above 0.05) in it fails at run time: it reshapes nothing into a row."""
    g = Graph(size, batch)
    means = g.op("ReduceMean", "images", axes=[2, 3], keepdims=0)
    bright = g.op("Greater", g.op("ReduceMean", means, axes=[1], keepdims=0), g.const(0.05))
    chosen = g.op("Compress", means, bright, axis=0)  # [bright rows, 3]
    first = g.op("Reshape", g.op("Slice", chosen, *(g.const([i], np.int64) for i in (0, 1, 0))), g.const([1, 3], np.int64))
    g.op("Add", means, g.op("Mul", first, g.const(0.0)), out="means")
    return g.model({"means": (TensorProto.FLOAT, [batch, 3])})


#: The colour that `dies_of_poison` dies of.
POISON = (13, 7, 99)


def dies_of_poison(size: tuple[int, int] = (32, 32), batch: int | str = "batch") -> bytes:
    """`channel_means`, but a picture of the colour POISON kills the process that runs it: ONNX Runtime guards integer division
    against zero, not against the lowest number divided by -1, which the processor answers with SIGFPE (seen with 1.31). One
    division for the whole batch: of a vector of them, four and more are divided as floating-point numbers, which nobody dies of."""
    g = Graph(size, batch)
    means = g.op("ReduceMean", "images", axes=[2, 3], keepdims=0)
    levels = g.op("Cast", g.op("Round", g.op("Mul", means, g.const(255.0))), to=TensorProto.INT32)
    distance = g.op("ReduceSum", g.op("Abs", g.op("Sub", levels, g.const([POISON], np.int32))), g.const([1], np.int64), keepdims=1)
    nearest = g.op("ReduceMin", distance, axes=[0], keepdims=1)
    quotient = g.op("Div", g.const([[-(2**31)]], np.int32), g.op("Sub", nearest, g.const([[1]], np.int32)))
    nothing = g.op("Cast", g.op("Mul", quotient, g.const([[0]], np.int32)), to=TensorProto.FLOAT)
    g.op("Add", means, nothing, out="means")
    return g.model({"means": (TensorProto.FLOAT, [batch, 3])})


def sleeper(ms: float, size: tuple[int, int] = (32, 32), batch: int | str = "batch") -> bytes:
    """`channel_means` after convolutions that take one free core about `ms` for one row, and as much again for every other row.

    The number of convolutions is measured when the graph is made, so the time is right within some tens of per cent here, only here.
    """
    import onnxruntime

    def build(convolutions: int) -> bytes:
        g = Graph(size, batch)
        tensor = "images"
        # A blur, so that the values stay finite however often it is applied.
        kernel = g.const(np.eye(3)[:, :, None, None] * np.full((7, 7), 1 / 49))
        for _ in range(convolutions):
            tensor = g.op("Conv", tensor, kernel, pads=[3, 3, 3, 3])
        nothing = g.op("Mul", g.op("ReduceMean", tensor, axes=[2, 3], keepdims=0), g.const(0.0))
        g.op("Add", g.op("ReduceMean", "images", axes=[2, 3], keepdims=0), nothing, out="means")
        return g.model({"means": (TensorProto.FLOAT, [batch, 3])})

    probe = 64
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(build(probe), options, providers=["CPUExecutionProvider"])
    image = np.full((1 if batch == "batch" else int(batch), 3, size[1], size[0]), 0.5, np.float32)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        session.run(None, {"images": image})
        seconds.append(time.perf_counter() - start)
    return build(max(1, round(probe * ms / 1000 / min(seconds))))


def write_model(folder: Path, name: str, onnx_bytes: bytes, toml_text: str) -> Path:
    """`folder`/`name`/model.onnx and model.toml; the model's folder."""
    directory = Path(folder) / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.onnx").write_bytes(onnx_bytes)
    (directory / "model.toml").write_text(toml_text, "utf-8")
    return directory


def toml(task: str, decoder: str, size: tuple[int, int], *, input: str = "", output: str = "", rest: str = "") -> str:
    """A model.toml for model.onnx: `input`, `output` and `rest` are further lines of those tables and of the file's end."""
    return (
        f'task = "{task}"\nbackend = "onnx"\nfile = "model.onnx"\n'
        f'[input]\nsize = [{size[0]}, {size[1]}]\n{input}\n[output]\ndecoder = "{decoder}"\n{output}\n{rest}\n'
    )


def _find(g: Graph) -> tuple[str, str]:
    """corners [N, 2, 4] x1, y1, x2, y2 in pixels, zero where nothing was found, and scores [N, 2], for each of COLORS."""
    colors = g.const(np.array(list(COLORS.values()))[None, :, :, None, None] / 255)  # [1, 2, 3, 1, 1]
    near = g.op("Abs", g.op("Sub", g.op("Unsqueeze", "images", g.const([1], np.int64)), colors))
    mask = g.op("Less", g.op("ReduceMax", near, axes=[2], keepdims=0), g.const(0.5))  # bool [N, 2, H, W]

    def extent(length: int, axis: int) -> tuple[str, str]:
        index = np.arange(length, dtype=np.float32).reshape((1, 1, 1, -1) if axis == 3 else (1, 1, -1, 1))
        low = g.op("ReduceMin", g.op("Where", mask, g.const(index), g.const(_FAR)), axes=[2, 3], keepdims=0)
        high = g.op("ReduceMax", g.op("Where", mask, g.const(index + 1), g.const(0.0)), axes=[2, 3], keepdims=0)
        return low, high

    x1, x2 = extent(g.width, 3)
    y1, y2 = extent(g.height, 2)
    last = g.const([2], np.int64)
    corners = g.op("Concat", *(g.op("Unsqueeze", t, last) for t in (x1, y1, x2, y2)), axis=2)
    seen = g.op("Cast", g.op("Greater", x2, g.const(0.0)), to=TensorProto.FLOAT)  # [N, 2]
    corners = g.op("Mul", corners, g.op("Unsqueeze", seen, last))
    return corners, g.op("Mul", seen, g.const([[0.9, 0.8]]))


def _centres(g: Graph, corners: str) -> str:
    """[N, k, 4] x1, y1, x2, y2 -> centre x, centre y, width, height."""
    to_centres = np.array([[0.5, 0, -1, 0], [0, 0.5, 0, -1], [0.5, 0, 1, 0], [0, 0.5, 0, 1]])
    return g.op("MatMul", corners, g.const(to_centres))


def _order(g: Graph, scores: str) -> str:
    """int64 [N, 2]: candidates by score, descending."""
    g.nodes.append(helper.make_node("TopK", [scores, g.const([2], np.int64)], ["_best", "_order"], axis=1))
    return "_order"
