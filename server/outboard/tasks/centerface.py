"""Decoder `centerface`: the maps of CenterFace, an anchor-free face detector -> `Detections` of class 0.

Source: Xu et al., "CenterFace: Joint Face Detection and Alignment Using Face as Point"; Star-Clouds/CenterFace `prj-python/centerface.py`.
"""

from __future__ import annotations

import numpy as np

from outboard.problems import Problem
from outboard.repository import ModelSpec
from outboard.tasks.detection import min_score, select
from outboard.tasks.options import Options
from outboard.tasks.results import Detections

STRIDE = 4  #: input pixels a cell


def centerface(outputs: dict[str, np.ndarray], spec: ModelSpec, options: Options) -> Detections:
    """Outputs in the model's order: probability of a face's centre [1, rows, columns]; log of height and width in cells [2, …]; offset of
    the centre in the cell, y and x [2, …]; further ones (landmarks) are not read. NMS here.
    """
    maps = list(outputs.values())[:3]
    same = len({m.shape[1:] for m in maps}) == 1 and all(m.dtype.kind == "f" for m in maps)
    if not same or [m.ndim for m in maps] != [3, 3, 3] or [len(m) for m in maps] != [1, 2, 2]:
        got = ", ".join(f"{name} {list(array.shape)}" for name, array in outputs.items())
        raise Problem(
            "inference_failed",
            f"{spec.name}: decoder 'centerface' got, for one image, {got or 'no outputs'}; "
            "expected heat map [1, rows, columns], scale [2, rows, columns] and offset [2, rows, columns] first",
        )
    heat, scale, offset = maps
    broken = ~np.isfinite(heat[0])
    row, column = np.nonzero((heat[0] >= min_score(spec, options)) & ~broken)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinite size is dropped by select
        halves = np.exp(scale[::-1, row, column].T.astype(np.float32)) * (STRIDE / 2)
        centres = (np.stack([column, row], axis=1) + offset[::-1, row, column].T.astype(np.float32) + 0.5) * STRIDE
        corners = np.concatenate([centres - halves, centres + halves], axis=1)
    classes = np.zeros(len(row), np.int64)
    return select(corners, heat[0, row, column], classes, spec, options, suppress=True, non_finite=int(broken.sum()))
