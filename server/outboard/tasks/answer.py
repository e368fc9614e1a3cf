"""The part of an answer that depends on the task: plain Python values, places in pixels of the submitted image."""

from __future__ import annotations

from typing import Any

import numpy as np

from outboard.imaging.geometry import Geometry
from outboard.repository import ModelSpec
from outboard.tasks.results import Classes, Detections, Result, Tensors, Texts
from outboard.tasks.tensor import tensor_body

_PLACE_DIGITS = 2  #: hundredths of a pixel
_SCORE_DIGITS = 5


def answer_body(result: Result, spec: ModelSpec, geometry: Geometry) -> dict[str, Any]:
    """`{"detections": […]}`, `{"classes": […]}`, `{"texts": […]}` or `{"outputs": […]}`, with `"non_finite": n` where that is above 0.

    Boxes are mapped through `geometry` to the upright submitted image and clipped to it; polygons are there already.
    """
    if isinstance(result, Tensors):
        return tensor_body(result.outputs)
    scores = _plain(result.scores, _SCORE_DIGITS)
    body: dict[str, Any]
    if isinstance(result, Detections):
        ids = result.class_ids.tolist()
        boxes = _plain(geometry.to_image(result.boxes), _PLACE_DIGITS)
        label = spec.label
        body = {
            "detections": [{"label": label(c), "class_id": c, "score": s, "box": b} for c, s, b in zip(ids, scores, boxes, strict=True)]
        }
    elif isinstance(result, Classes):
        ids = result.class_ids.tolist()
        body = {"classes": [{"label": spec.label(c), "class_id": c, "score": s} for c, s in zip(ids, scores, strict=True)]}
    else:
        assert isinstance(result, Texts), f"no answer is known for a {type(result).__name__}"
        polygons = _plain(result.polygons, _PLACE_DIGITS)
        body = {"texts": [{"text": t, "score": s, "polygon": p} for t, s, p in zip(result.texts, scores, polygons, strict=True)]}
    if result.non_finite:
        body["non_finite"] = result.non_finite
    return body


def _plain(values: np.ndarray, digits: int) -> list[Any]:
    """Rounded Python floats. Rounding is done in float64, since a float32 has no short decimal form; + 0.0 turns -0.0 into 0.0."""
    return (np.asarray(values, np.float64).round(digits) + 0.0).tolist()
