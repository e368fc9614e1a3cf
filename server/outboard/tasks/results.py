"""What a decoder hands on: arrays, still in the network's pixels where they are places; `answer` makes them an answer's JSON."""

from __future__ import annotations

import msgspec
import numpy as np


class Detections(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Boxes, best score first. `non_finite`: rows that had a NaN or infinite number and were left out."""

    boxes: np.ndarray  #: float32 [k, 4] x1, y1, x2, y2 in pixels of the network's input
    scores: np.ndarray  #: float32 [k], 0..1
    class_ids: np.ndarray  #: int64 [k]
    non_finite: int = 0


class Classes(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """The best classes, best first. `non_finite`: classes whose value was NaN or infinite and that were left out."""

    class_ids: np.ndarray  #: int64 [k]
    scores: np.ndarray  #: float32 [k], 0..1
    non_finite: int = 0


class Texts(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """Lines of text in reading order."""

    texts: list[str]
    scores: np.ndarray  #: float32 [k], 0..1
    polygons: np.ndarray  #: float32 [k, 4, 2] x, y in pixels of the upright submitted image, clockwise from the text's top left
    non_finite: int = 0


class Tensors(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One row of a network's outputs as they are, by name."""

    outputs: dict[str, np.ndarray]


Result = Detections | Classes | Texts | Tensors
