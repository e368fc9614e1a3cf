"""Whether a network's outputs are what its decoder reads: looked at once, at load, on its golden answers.

A decoder that does not fit would refuse every picture, or answer nonsense with status 200; labels of another data set would name the
wrong things. Both are found here, as far as shapes, types and the values for one picture tell it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outboard import tasks
from outboard.problems import Problem
from outboard.repository import ModelProblem, ModelSpec
from outboard.tasks import centerface, detection, yolov2
from outboard.tasks.options import Options

Outputs = dict[str, np.ndarray]

_NONE = np.zeros(0, np.float32)


class Reading(NamedTuple):
    """What a decoder takes out of one row's outputs."""

    chances: np.ndarray = _NONE  #: numbers that it takes for probabilities
    classes: tuple[int, ...] = ()  #: how many classes the network has by its shapes; several where both are usual, () where nothing tells


def check(outputs: Outputs, spec: ModelSpec, part: str) -> None:
    """`outputs` are the golden answers, a batch of 1, of `part` of the model ("": of all of it). Raises ModelProblem."""
    where = str(spec.directory / "model.toml")
    if part:
        _check_part(outputs, spec, part, where)
        return
    decoder = spec.toml.output.decoder
    try:
        row = tasks.rows(decoder, outputs, 1)[0]
        tasks.decode(row, spec, Options())
        read = _READINGS[decoder](row, spec)
    except Problem as e:
        got, _, expected = e.detail.partition("; expected ")
        raise ModelProblem(where, "output.decoder", expected, got) from e
    finite = read.chances[np.isfinite(read.chances)]
    if finite.size and (finite.min() < -1e-3 or finite.max() > 1 + 1e-3):
        raise ModelProblem(
            where,
            "output.decoder",
            f"a decoder that fits the model: {decoder!r} reads probabilities from 0 to 1",
            f"for the golden picture they are {finite.min():.3g} to {finite.max():.3g}; the outputs of one image are {_shapes(row)}",
        )
    labelled = len(spec.labels) + spec.toml.output.first_class
    if spec.labels and read.classes and labelled not in read.classes:
        first = f", counted from class {spec.toml.output.first_class}" if spec.toml.output.first_class else ""
        raise ModelProblem(
            str(spec.directory / spec.toml.labels),
            "labels",
            f"{' or '.join(str(n - spec.toml.output.first_class) for n in read.classes)} lines, one for each class of the network{first}",
            f"it has {len(spec.labels)}; the outputs of one image are {_shapes(row)}",
        )


def _logits(row: Outputs, spec: ModelSpec) -> Reading:
    name, values = next(iter(row.items()))
    if values.dtype.kind != "f" or sum(n > 1 for n in values.shape) > 1:
        got = f"{spec.name}: the first output {name!r} of one image is {values.dtype} {list(values.shape)}"
        raise Problem("inference_failed", f"{got}; expected floating-point numbers on one axis, one for each class")
    return Reading(classes=(values.size,))


def _probabilities(row: Outputs, spec: ModelSpec) -> Reading:
    return _logits(row, spec)._replace(chances=next(iter(row.values())).reshape(-1))


def _yolov2(row: Outputs, spec: ModelSpec) -> Reading:
    head = next(iter(row.values()))
    _check_grid(head, yolov2.STRIDE, spec)
    return Reading(classes=(head.shape[0] // len(spec.toml.output.anchors) - 5,))


def _centerface(row: Outputs, spec: ModelSpec) -> Reading:
    heat = next(iter(row.values()))
    _check_grid(heat, centerface.STRIDE, spec)
    return Reading(heat, (1,))


def _check_grid(maps: np.ndarray, stride: int, spec: ModelSpec) -> None:
    """`maps` [channels, rows, columns] must be the input's size in cells: of another grid every box would be in the wrong place."""
    width, height = spec.networks[""].input.size
    if maps.shape[1:] != (-(-height // stride), -(-width // stride)):
        got = f"{spec.name}: the first output of one image is {list(maps.shape)} for an input of {width} x {height}"
        raise Problem(
            "inference_failed", f"{got}; expected a grid of {stride} pixels a cell: [{-(-height // stride)}, {-(-width // stride)}]"
        )


def _yolov5(row: Outputs, spec: ModelSpec) -> Reading:
    return _columns(detection.yolov5_rows(row, spec).T, 5, 4, spec)


def _yolov8(row: Outputs, spec: ModelSpec) -> Reading:
    return _columns(detection.yolov8_table(row, spec), 4, 4, spec)


def _columns(table: np.ndarray, before: int, chances: int, spec: ModelSpec) -> Reading:
    """`table` [before + classes (+ others), N], whose probabilities begin at index `chances`.

    What follows the classes that `labels` counts may be mask coefficients or key points, which are not between 0 and 1 everywhere. Where
    it is, it is the scores of further classes.
    """
    known = before + detection.class_count(spec, len(table) - before)
    others = table[known:]
    if others.size and not (np.nanmin(others) >= 0 and np.nanmax(others) <= 1):
        return Reading(table[chances:known])
    return Reading(table[chances:], (len(table) - before,))


def _end2end(row: Outputs, spec: ModelSpec) -> Reading:
    return Reading(detection.end2end(row, spec, _ALL).scores)


def _boxes(row: Outputs, spec: ModelSpec) -> Reading:
    scores = detection.named(row, spec, "scores", "scores")
    return Reading(scores, (scores.shape[1],) if scores.ndim == 2 else ())


def _detr(row: Outputs, spec: ModelSpec) -> Reading:
    classes = detection.named(row, spec, "scores", "logits").shape[1]
    return Reading(classes=(classes - 1, classes))


def _tensor(row: Outputs, spec: ModelSpec) -> Reading:
    return Reading()


_ALL = Options(min_score=0.0)
_READINGS = {
    "logits": _logits,
    "probabilities": _probabilities,
    "yolov2": _yolov2,
    "centerface": _centerface,
    "yolov5": _yolov5,
    "yolov8": _yolov8,
    "end2end": _end2end,
    "boxes": _boxes,
    "detr": _detr,
    "tensor": _tensor,
}


def _check_part(outputs: Outputs, spec: ModelSpec, part: str, where: str) -> None:
    """The three networks that read text: what `outboard.tasks.text` takes from each."""
    if part == "rec":
        ids, scores = outputs.get("ids", _NONE), outputs.get("scores", _NONE)
        fits = ids.ndim == 2 and ids.shape == scores.shape and ids.dtype.kind in "iu" and scores.dtype.kind == "f"
        expected = "ids (whole numbers) and scores, each [1, steps]"
        if fits and ids.size and ids.max() > len(spec.labels):
            path = str(spec.directory / spec.toml.labels)
            raise ModelProblem(
                path,
                "labels",
                "a line for each character that the network knows",
                f"it has {len(spec.labels)} lines, and class {ids.max()} was read",
            )
    else:
        first = next(iter(outputs.values()))
        fits = first.dtype.kind == "f" and (first.ndim == 4 and first.shape[1] == 1 if part == "det" else first.size == 2)
        expected = "a map [1, 1, height, width]" if part == "det" else "two probabilities: upright and upside down"
    if not fits:
        raise ModelProblem(where, f"parts.{part}", f"a network that gives {expected}", f"it gives {_shapes(outputs)} for one image")


def _shapes(outputs: Outputs) -> str:
    return ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in outputs.items())
