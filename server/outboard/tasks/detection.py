"""Decoders for detectors that people bring: one row of a network's outputs -> `Detections` in the network's input pixels.

Each decoder is named as `[output] decoder` names it and states the layout that it reads, with its source. In all of them the
threshold comes before everything that costs, and a candidate with a NaN or infinite number is left out and counted.
Layouts that a row does not have raise Problem `inference_failed` with the shapes that came and those expected.
"""

from __future__ import annotations

import numpy as np

from outboard.problems import Problem
from outboard.repository import ModelSpec
from outboard.tasks.nms import nms
from outboard.tasks.options import Options
from outboard.tasks.results import Detections

Outputs = dict[str, np.ndarray]


def yolov5(outputs: Outputs, spec: ModelSpec, options: Options) -> Detections:
    """YOLOv5, v6, v7 (and v3, v4 exports of the same school): one output [N, 5 + C] of centre x, centre y, width, height in
    input pixels, objectness, class scores; sigmoids applied. The score is objectness times the best class. NMS here.

    Columns after the classes that `labels` counts (a segmentation model's mask coefficients) are not read.
    Source: ultralytics/yolov5 `models/yolo.py` Detect.forward, `utils/general.py` non_max_suppression.
    """
    rows = yolov5_rows(outputs, spec)
    least = min_score(spec, options)
    objectness = rows[:, 4]
    broken = ~np.isfinite(objectness)
    # A class score is at most 1, so objectness alone rules nearly every row out.
    candidates = rows[(objectness >= least) & ~broken].astype(np.float32, copy=False)
    classes = candidates[:, 5 : 5 + class_count(spec, rows.shape[1] - 5)]
    best = classes.argmax(axis=1)
    with np.errstate(invalid="ignore", over="ignore"):  # infinite class scores: select drops the product
        scores = classes[np.arange(len(best)), best] * candidates[:, 4]
    return select(_corners(candidates[:, :4]), scores, best, spec, options, suppress=True, non_finite=int(broken.sum()))


def yolov5_rows(outputs: Outputs, spec: ModelSpec) -> np.ndarray:
    """The table [N, 5 + classes]."""
    rows = _matrix(outputs, spec, "[N, 5 + classes]")
    if rows.shape[1] < 6:
        raise _misfit(outputs, spec, "[N, 5 + classes] with at least one class")
    return rows


def yolov8(outputs: Outputs, spec: ModelSpec, options: Options) -> Detections:
    """YOLOv8, v9, 11, 12 without NMS inside: one output [4 + C, N] (as exported) or [N, 4 + C] of centre x, centre y, width,
    height in input pixels and class scores; sigmoids applied, no objectness. NMS here.

    Which axis is which: the one of length 4 + C where `labels` tells C, else the shorter one. Columns after the classes that
    `labels` counts (mask coefficients, key points) are not read.
    Source: ultralytics/ultralytics `nn/modules/head.py` Detect, `utils/nms.py` non_max_suppression; issue 751 (1x84x8400).
    """
    table = yolov8_table(outputs, spec)
    classes = table[4 : 4 + class_count(spec, table.shape[0] - 4)]
    scores = classes.max(axis=0)
    broken = ~np.isfinite(scores)
    candidates = np.flatnonzero((scores >= min_score(spec, options)) & ~broken)
    best = classes[:, candidates].argmax(axis=0)
    boxes = _corners(table[:4, candidates].T)
    return select(boxes, scores[candidates], best, spec, options, suppress=True, non_finite=int(broken.sum()))


def yolov8_table(outputs: Outputs, spec: ModelSpec) -> np.ndarray:
    """The table [4 + classes, N], whichever way it was exported."""
    table = _matrix(outputs, spec, "[4 + classes, N] or [N, 4 + classes]")
    counted = 4 + len(spec.labels) + spec.toml.output.first_class if spec.labels else 0
    if table.shape[0] != counted and (table.shape[1] == counted or table.shape[1] < table.shape[0]):
        table = table.T
    if table.shape[0] < 5:
        raise _misfit(outputs, spec, "[4 + classes, N] or [N, 4 + classes] with at least one class")
    return table


def end2end(outputs: Outputs, spec: ModelSpec, options: Options) -> Detections:
    """Exports with NMS (or none to do) inside; boxes are corners in input pixels, nothing is suppressed again. One of

    - [N, 6 or more]: x1, y1, x2, y2, score, class, … padded with zeros: YOLOv10, YOLO26, Ultralytics' `nms=True`.
      Source: ultralytics/ultralytics `nn/modules/head.py` Detect.postprocess, `engine/exporter.py` NMSModel.
    - [k, 7]: image of the batch, x1, y1, x2, y2, class, score: YOLOv7's `--end2end --max-wh`, already split by `rows`.
      Source: WongKinYiu/yolov7 `models/experimental.py` ONNX_ORT.
    - four outputs: number of detections [1], boxes [k, 4], scores [k], classes [k], of which the first `number` are valid.
      Source: NVIDIA/TensorRT `plugin/efficientNMSPlugin/README.md`, "Outputs".
    """
    expected = "one output [N, 6] or [k, 7], or the four outputs number, boxes, scores, classes"
    if len(outputs) >= 4:
        boxes, scores, classes = (named(outputs, spec, what, expected) for what in ("boxes", "scores", "classes"))
        counted = named(outputs, spec, "number", expected).reshape(-1)
        if counted.size != 1 or scores.dtype.kind != "f":
            raise _misfit(outputs, spec, expected)
        number = int(counted[0])
        if not (boxes.ndim == 2 and boxes.shape[1] == 4 and len(boxes) == scores.size == classes.size and 0 <= number <= len(boxes)):
            raise _misfit(outputs, spec, f"boxes [k, 4], scores [k], classes [k] and a number of at most k (it is {number})")
        return select(boxes[:number], scores.reshape(-1)[:number], classes.reshape(-1)[:number], spec, options)
    rows = _matrix(outputs, spec, expected)
    if rows.shape[1] == 7:
        return select(rows[:, 1:5], rows[:, 6], rows[:, 5], spec, options)
    if rows.shape[1] < 6:
        raise _misfit(outputs, spec, expected)
    return select(rows[:, :4], rows[:, 4], rows[:, 5], spec, options)


def boxes(outputs: Outputs, spec: ModelSpec, options: Options) -> Detections:
    """Detectors that name their outputs: boxes [N, 4] as corners x1, y1, x2, y2, in input pixels or, with
    `[output] boxes = "unit"`, in 0..1 of the input; and either

    - labels [N] and scores [N]: torchvision's detectors, the ONNX zoo's SSD. Their NMS is inside; nothing is suppressed again.
      Source: torchvision `models/detection/ssd.py`, docstring of SSD ("boxes", "labels", "scores").
    - scores [N, C] of all classes, already probabilities: bare SSD heads. Each class above the threshold is a detection. NMS here.

    `[output] background_class = true`: class 0 means "nothing". Outputs are found by name (box; score, conf, prob; label, class),
    else by shape and dtype.
    """
    expected = "boxes [N, 4] with scores [N] and labels [N], or with scores [N, classes]"
    corners, scores = (named(outputs, spec, what, expected) for what in ("boxes", "scores"))
    fits = corners.ndim == 2 and corners.shape[1] == 4 and scores.ndim in (1, 2) and len(scores) == len(corners)
    if not fits or scores.dtype.kind != "f":
        raise _misfit(outputs, spec, expected)
    if spec.toml.output.boxes == "unit":
        corners = corners.astype(np.float32) * _input_size(spec)
    background = spec.toml.output.background_class
    if scores.ndim == 1:
        classes = named(outputs, spec, "classes", expected)
        if classes.shape != scores.shape:
            raise _misfit(outputs, spec, expected)
        if background:
            something = classes != 0
            corners, scores, classes = corners[something], scores[something], classes[something]
        return select(corners, scores, classes, spec, options)
    return _each_class(corners, scores, int(background), spec, options, suppress=True)


def detr(outputs: Outputs, spec: ModelSpec, options: Options) -> Detections:
    """DETR and its kin: logits [Q, C + 1] and pred_boxes [Q, 4] of centre x, centre y, width, height in 0..1 of the input. No NMS.

    DETR, Conditional DETR, YOLOS: softmax over the classes, the last of which is "no object"; a query's best class is its answer.
    Where `labels` has exactly as many lines as there are logits (counted from `first_class`), there is no such class: RT-DETR,
    Deformable DETR, D-FINE: a sigmoid each, and every class above the threshold is a detection.
    Source: huggingface/transformers, post_process_object_detection of image_processing_detr.py and image_processing_rt_detr.py.
    """
    expected = "logits [Q, classes + 1] and pred_boxes [Q, 4]"
    places, logits = (named(outputs, spec, what, expected) for what in ("boxes", "scores"))
    fits = places.ndim == 2 and places.shape[1] == 4 and logits.ndim == 2 and len(logits) == len(places) and logits.shape[1] >= 1
    if not fits or logits.dtype.kind != "f":
        raise _misfit(outputs, spec, expected)
    corners = _corners(places.astype(np.float32, copy=False)) * _input_size(spec)
    logits = logits.astype(np.float32, copy=False)
    if spec.labels and logits.shape[1] == len(spec.labels) + spec.toml.output.first_class:
        with np.errstate(over="ignore"):  # exp of a very negative logit's opposite is infinite, and its score rightly 0
            probabilities = 1 / (1 + np.exp(-logits))
        # A sigmoid turns infinite logits into clean 0 and 1; they are broken all the same.
        probabilities[~np.isfinite(logits)] = np.nan
        return _each_class(corners, probabilities, 0, spec, options, suppress=False)
    if logits.shape[1] < 2:
        raise _misfit(outputs, spec, expected)
    with np.errstate(invalid="ignore"):
        powers = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
        probabilities = (powers / powers.sum(axis=1, keepdims=True))[:, :-1]
    best = probabilities.argmax(axis=1)
    return select(corners, probabilities[np.arange(len(best)), best], best, spec, options)


def _each_class(corners: np.ndarray, scores: np.ndarray, first: int, spec: ModelSpec, options: Options, *, suppress: bool) -> Detections:
    """Every (box, class) of `scores` [N, C] above the threshold, classes from `first` on. A box with a broken score counts once."""
    broken = ~np.isfinite(scores[:, first:].max(axis=1, initial=0))
    row, column = np.nonzero((scores[:, first:] >= min_score(spec, options)) & ~broken[:, None])
    column += first
    return select(corners[row], scores[row, column], column, spec, options, suppress=suppress, non_finite=int(broken.sum()))


def select(
    corners: np.ndarray,
    scores: np.ndarray,
    class_ids: np.ndarray,
    spec: ModelSpec,
    options: Options,
    *,
    suppress: bool = False,
    non_finite: int = 0,
) -> Detections:
    """Of candidates [k] those with finite numbers that reach the threshold, best first; `suppress`: after NMS within each class.

    A score of 0 is never answered: it is what exports pad with.
    """
    corners = corners.astype(np.float32, copy=False)
    scores = scores.astype(np.float32, copy=False)
    finite = np.isfinite(scores) & np.isfinite(corners).all(axis=1) & np.isfinite(class_ids)
    # What scores less than asked is nobody's loss, broken or not; a NaN score cannot be told from a good one.
    missed = int((~finite & ~(scores < min_score(spec, options))).sum())
    kept = np.flatnonzero(finite & (scores >= min_score(spec, options)) & (scores > 0))
    corners, scores, class_ids = corners[kept], scores[kept], class_ids[kept].astype(np.int64)
    order = nms(corners, scores, class_ids, spec.toml.output.iou) if suppress else np.argsort(-scores, kind="stable")
    order = order[: options.top_k]
    return Detections(boxes=corners[order], scores=scores[order], class_ids=class_ids[order], non_finite=non_finite + missed)


def _corners(places: np.ndarray) -> np.ndarray:
    """[k, 4] centre x, centre y, width, height -> float32 [k, 4] x1, y1, x2, y2."""
    places = places.astype(np.float32, copy=False)
    half = places[:, 2:] / 2
    return np.concatenate([places[:, :2] - half, places[:, :2] + half], axis=1)


def min_score(spec: ModelSpec, options: Options) -> float:
    return spec.toml.output.min_score if options.min_score is None else options.min_score


def class_count(spec: ModelSpec, columns: int) -> int:
    """How many of `columns` are class scores: as many as there are labels, or all."""
    return min(columns, len(spec.labels) + spec.toml.output.first_class) if spec.labels else columns


def _input_size(spec: ModelSpec) -> np.ndarray:
    """float32 [4]: width, height, width, height of the network's input."""
    return np.array(spec.networks[""].input.size * 2, np.float32)


#: What an output is called, by a part of its name.
_NAMES: dict[str, tuple[str, ...]] = {
    "number": ("num",),
    "boxes": ("box",),
    "scores": ("score", "conf", "prob", "logit"),
    "classes": ("label", "class", "cls"),
}


def named(outputs: Outputs, spec: ModelSpec, what: str, expected: str) -> np.ndarray:
    """The output that is `what` by its name, else by its shape and dtype."""
    for part in _NAMES[what]:
        for name, array in outputs.items():
            if part in name.lower():
                return array
    unnamed = [a for name, a in outputs.items() if not any(part in name.lower() for parts in _NAMES.values() for part in parts)]
    corners = next((a for a in unnamed if a.ndim == 2 and a.shape[1] == 4), None)
    others = [a for a in unnamed if a is not corners]
    fitting = {
        "boxes": [] if corners is None else [corners],
        "number": [a for a in others if a.dtype.kind in "iu" and a.size == 1],
        "scores": [a for a in others if a.dtype.kind == "f"],
        "classes": [a for a in others if a.dtype.kind in "iu" and a.ndim == 1],
    }[what]
    if fitting:
        return fitting[0]
    raise _misfit(outputs, spec, expected)


def _matrix(outputs: Outputs, spec: ModelSpec, expected: str) -> np.ndarray:
    """The first output of floating-point numbers with two axes: others (a segmentation model's prototypes) are not boxes."""
    for array in outputs.values():
        if array.ndim == 2 and array.dtype.kind == "f":
            return array
    raise _misfit(outputs, spec, f"an output {expected}")


def _misfit(outputs: Outputs, spec: ModelSpec, expected: str) -> Problem:
    shapes = ", ".join(f"{name} {list(a.shape)}{'' if a.dtype.kind == 'f' else f' of {a.dtype}'}" for name, a in outputs.items())
    detail = f"{spec.name}: decoder {spec.toml.output.decoder!r} got, for one image, {shapes or 'no outputs'}; expected {expected}"
    return Problem("inference_failed", f"{detail}. Choose the `[output] decoder` in model.toml that fits the model.")
