"""Non-maximum suppression: of boxes that show the same thing, the one with the best score stays."""

from __future__ import annotations

import numpy as np

#: Only this many best-scored boxes are compared; a detector that sends more above its threshold is answered from these.
#: It bounds the time of a hostile picture (or a threshold of 0).
CANDIDATES = 3000

#: Boxes are compared in tables of this many by this many, which stay in the processor's cache and in the allocator's hands:
#: 3000 boxes of which nearly all stay cost 60 ms, and 250 ms with tables of 128 by 3000.
_BLOCK = 128


def nms(boxes: np.ndarray, scores: np.ndarray, class_ids: np.ndarray | None, iou: float, *, candidates: int = CANDIDATES) -> np.ndarray:
    """Indices (intp, best score first) of the boxes that stay, as torchvision's `nms` and `batched_nms` choose them.

    `boxes` float [k, 4] x1, y1, x2, y2; `scores` float [k]; with `class_ids` int [k] only boxes of the same class suppress each
    other. A box goes when its intersection over union with a better one that stays is above `iou`. Equal scores: the lower
    index first. Boxes with NaN or infinite numbers never stay; boxes without area stay and suppress nothing.
    """
    boxes = np.asarray(boxes, np.float32).reshape(-1, 4)
    scores = np.asarray(scores, np.float32).reshape(-1)
    usable = np.flatnonzero(np.isfinite(scores) & np.isfinite(boxes).all(axis=1))
    order = usable[np.argsort(-scores[usable], kind="stable")[:candidates]]
    if order.size < 2:
        return order

    x1, y1, x2, y2 = np.ascontiguousarray(boxes[order].T, np.float64)  # float64: areas of huge boxes stay finite
    areas = np.maximum(x2 - x1, 0) * np.maximum(y2 - y1, 0)
    classes = None if class_ids is None else np.asarray(class_ids).reshape(-1)[order]

    def suppresses(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """bool [len(a), len(b)]: whether box a, staying, removes box b."""
        a = a[:, None]
        width = np.minimum(x2[a], x2[b])
        width -= np.maximum(x1[a], x1[b])
        inter = np.minimum(y2[a], y2[b])
        inter -= np.maximum(y1[a], y1[b])
        inter *= np.maximum(width, 0, out=width)
        union = areas[a] + areas[b]
        union -= inter
        union *= iou
        out = inter > union  # intersection / union > iou, without 0 / 0 for boxes without area
        if classes is not None:
            out &= classes[a] == classes[b]
        return out

    kept: list[np.ndarray] = []
    rest = np.arange(order.size)
    while rest.size:
        block, rest = rest[:_BLOCK], rest[_BLOCK:]
        table = suppresses(block, block)
        alive = np.ones(block.size, bool)
        for i in range(block.size):
            if alive[i]:
                alive[i + 1 :] &= ~table[i, i + 1 :]
        stay = block[alive]
        kept.append(stay)
        if rest.size:
            tiles = [rest[i : i + _BLOCK] for i in range(0, rest.size, _BLOCK)]
            rest = np.concatenate([tile[~suppresses(stay, tile).any(axis=0)] for tile in tiles])
    return order[np.concatenate(kept)]
