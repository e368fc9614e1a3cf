"""From a network's outputs to an answer: decoders by the name that `[output] decoder` gives.

The way is `rows` (a batch's outputs -> one dict of arrays for each image), then the decoder (-> `Detections`, `Classes`, …), then
`answer.answer_body` (-> JSON values, places in pixels of the submitted image).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from outboard.problems import Problem
from outboard.repository import ModelSpec, Task
from outboard.tasks import centerface, classification, detection, tensor, yolov2
from outboard.tasks.options import Options
from outboard.tasks.results import Classes, Detections, Result, Tensors, Texts

__all__ = ["DECODERS", "Classes", "Decoder", "Detections", "Options", "Result", "Tensors", "Texts", "decode", "rows"]

Outputs = dict[str, np.ndarray]


class Decoder(NamedTuple):
    task: Task
    decode: Callable[[Outputs, ModelSpec, Options], Result]  #: one row's outputs, without the batch axis
    rows: Callable[[Outputs, int], list[Outputs]]


def by_first_axis(outputs: Outputs, n: int) -> list[Outputs]:
    """Row i of each output is row i of the batch: an array even where it is one value."""
    for name, array in outputs.items():
        if array.ndim == 0 or len(array) != n:
            raise _not_a_batch(name, array, n, f"{n} rows on the first axis, one for each image")
    return [{name: array[i, ...] for name, array in outputs.items()} for i in range(n)]


def by_batch_column(outputs: Outputs, n: int) -> list[Outputs]:
    """End-to-end exports: one output [detections of all images, 7] whose first column says which image (G05); else the first axis.

    Ids from `n` on belong to rows that only pad the batch to the size frozen into the graph.
    """
    name, array = next(iter(outputs.items()), ("", np.zeros(0)))
    if len(outputs) == 1 and array.ndim == 3 and array.shape[2] == 7:
        # Ultralytics' rotated boxes (OBB): x, y, w, h, score, class, angle. Read as corners they would be wrong and look right.
        raise _not_a_batch(name, array, n, "[detections, 7] or [n, detections, 6]; rotated boxes are not supported")
    if len(outputs) > 1 or array.ndim != 2 or array.shape[1] != 7:
        return by_first_axis(outputs, n)
    image = array[:, 0]
    if not (np.isfinite(image).all() and (image >= 0).all() and (image == np.floor(image)).all()):
        raise _not_a_batch(name, array, n, "whole image numbers from 0 on in the first of the 7 columns")
    return [{name: array[image == i]} for i in range(n)]


def by_first_axis_or_single(outputs: Outputs, n: int) -> list[Outputs]:
    """torchvision's detectors are exported for one image, and without a batch axis: boxes [k, 4], labels [k], scores [k]."""
    if n == 1 and any(array.ndim == 2 and array.shape[1] == 4 for array in outputs.values()):
        return [outputs]
    return by_first_axis(outputs, n)


DECODERS: dict[str, Decoder] = {
    "logits": Decoder("classification", classification.logits, by_first_axis),
    "probabilities": Decoder("classification", classification.probabilities, by_first_axis),
    "yolov2": Decoder("detection", yolov2.yolov2, by_first_axis),
    "yolov5": Decoder("detection", detection.yolov5, by_first_axis),
    "yolov8": Decoder("detection", detection.yolov8, by_first_axis),
    "end2end": Decoder("detection", detection.end2end, by_batch_column),
    "boxes": Decoder("detection", detection.boxes, by_first_axis_or_single),
    "detr": Decoder("detection", detection.detr, by_first_axis),
    "centerface": Decoder("detection", centerface.centerface, by_first_axis),
    "tensor": Decoder("tensor", tensor.tensor, by_first_axis),
}


def rows(decoder: str, outputs: Outputs, n: int) -> list[Outputs]:
    """The outputs of a batch of `n` images, an image each. Raises Problem `inference_failed` where they cannot be told apart."""
    return DECODERS[decoder].rows(outputs, n)


def decode(outputs: Outputs, spec: ModelSpec, options: Options) -> Result:
    """One row, by the decoder that its model names."""
    return DECODERS[spec.toml.output.decoder].decode(outputs, spec, options)


def _not_a_batch(name: str, array: np.ndarray, n: int, expected: str) -> Problem:
    return Problem("inference_failed", f"output {name!r} of a batch of {n} has shape {list(array.shape)}; expected {expected}")
