"""Decoder `yolov2`: the grid of a YOLOv2 head -> `Detections`.

Source: Redmon and Farhadi, "YOLO9000: Better, Faster, Stronger", section 2; AlexeyAB/darknet `src/region_layer.c`.
"""

from __future__ import annotations

import numpy as np

from outboard.problems import Problem
from outboard.repository import ModelSpec
from outboard.tasks.detection import min_score, select
from outboard.tasks.options import Options
from outboard.tasks.results import Detections

STRIDE = 32  #: input pixels a cell


def yolov2(outputs: dict[str, np.ndarray], spec: ModelSpec, options: Options) -> Detections:
    """One output [anchors x (5 + classes), rows, columns] of raw x, y, w, h, objectness, class logits. NMS here.

    A cell's centre is (column + sigmoid x, row + sigmoid y), its size anchor x exp(w, h), all in cells; the score is sigmoid of the
    objectness times the softmax of the best class.
    """
    head = next(iter(outputs.values()))
    anchors = np.asarray(spec.toml.output.anchors, np.float32)
    if head.dtype.kind != "f" or head.ndim != 3 or head.shape[0] % len(anchors) or head.shape[0] // len(anchors) < 6:
        raise Problem(
            "inference_failed",
            f"{spec.name}: decoder 'yolov2' got, for one image, {list(head.shape)}{'' if head.dtype.kind == 'f' else f' of {head.dtype}'}; "
            f"expected [{len(anchors)} anchors x (5 + classes), rows, columns] of floating-point numbers, with at least one class",
        )
    grid = head.reshape(len(anchors), -1, *head.shape[1:])
    raw = grid[:, 4]
    broken = ~np.isfinite(raw)
    with np.errstate(over="ignore", invalid="ignore"):  # exp of a large number is infinite, and 1 / infinity is the right answer
        objectness = 1 / (1 + np.exp(-raw.astype(np.float32, copy=False)))
        # The class's share is at most 1, so objectness alone rules nearly every cell out.
        anchor, row, column = np.nonzero((objectness >= min_score(spec, options)) & ~broken)
        candidates = grid[anchor, :, row, column].astype(np.float32, copy=False)
        logits = candidates[:, 5:]
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        best = shares.argmax(axis=1)
        scores = objectness[anchor, row, column] * shares.max(axis=1) / shares.sum(axis=1)
        centres = (np.stack([column, row], axis=1) + 1 / (1 + np.exp(-candidates[:, :2]))) * STRIDE
        halves = anchors[anchor] * np.exp(candidates[:, 2:4]) * (STRIDE / 2)
        corners = np.concatenate([centres - halves, centres + halves], axis=1)
    return select(corners, scores, best, spec, options, suppress=True, non_finite=int(broken.sum()))
