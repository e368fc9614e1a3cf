"""One object, seen in several tiles, becomes one detection.

Greedy as in SAHI (obss/sahi `sahi/postprocess/combine.py`: greedy_nmm, nms; Akyon et al. 2022): the best box collects the boxes of its
class that show the same object, then the best of those that are left, and so on. `nms` keeps the best box of each group as it is; `nmm`
(non-maximum merging) answers the rectangle around the group with its best score.

What "the same object" means differs from SAHI, which compares whole boxes by intersection over the smaller one (IoS): the box of a crowd
then swallows each person in it. Here two boxes are compared inside the part of the picture that both rows show, where they must agree:

- A box that ends at an inner border of its tile is *cut*: it shows a part of something, so the share of it that the other box covers
  counts (of two cut boxes, of the smaller one: IoS). Of two whole boxes it is intersection over union.
- Whole boxes come before cut ones, whatever they score. An object's whole boxes collect the parts of it; where there is none, parts are
  followed from one to the next, so that what is longer than a tile comes out in one piece.
- Edges nearer than a pixel or so of the coarser row are the same edge: a row that shows all of a 4K picture knows places to six pixels.
- Boxes of one row are never compared: the model has decided about those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from outboard.imaging.tiles import View
from outboard.tasks.nms import CANDIDATES
from outboard.tasks.results import Detections

#: Least agreement of two boxes of one object; SAHI's `postprocess_match_threshold`.
MATCH = 0.5
#: A box is cut when it ends this near to an inner border of its tile, as a share of the tile.
NEAR = 0.01
#: Network pixels of its row that an edge may be off.
SLACK = 1.5


def merge(
    found: Sequence[Detections], views: Sequence[View], size: tuple[int, int], how: Literal["nmm", "nms"], top_k: int | None = None
) -> Detections:
    """The detections of a picture of `size` (width, height), best first, boxes in its pixels: float32 [k, 4].

    `found[i]` are those of the row that `views[i]` describes, in the row's pixels. The order of the rows makes no difference; where scores
    are equal the finer row comes first, then the larger box, then the one further left, further up. `top_k` counts after merging.
    """
    assert len(found) == len(views), f"{len(found)} rows with detections, {len(views)} views"
    counts = [len(row.scores) for row in found]
    boxes = _Boxes(
        places=np.concatenate([view.to_image(row.boxes) for view, row in zip(views, found, strict=True)]).astype(np.float64),
        scores=np.concatenate([row.scores for row in found]),
        class_ids=np.concatenate([row.class_ids for row in found]),
        rows=np.repeat(np.array([view.rectangle for view in views], np.float64), counts, axis=0),
        slack=np.repeat([SLACK / min(view.geometry.scale_x, view.geometry.scale_y) for view in views], counts),
        size=size,
    )
    boxes = boxes.take(boxes.order()[:CANDIDATES])
    boxes = boxes.take(boxes.order(whole_first=True))
    groups = boxes.groups()
    kept = boxes.take(np.array([group[0] for group in groups], np.intp))
    if how == "nmm" and groups:
        kept.places = np.stack([boxes.around(group) for group in groups])
        kept.scores = np.array([boxes.scores[group].max() for group in groups], np.float32)
    best = kept.take(kept.order()[:top_k])
    return Detections(
        boxes=best.places.astype(np.float32),
        scores=best.scores,
        class_ids=best.class_ids,
        non_finite=sum(row.non_finite for row in found),
    )


class _Boxes:
    """Boxes of all rows, in the picture's pixels; k of them in every array."""

    def __init__(
        self,
        places: np.ndarray,
        scores: np.ndarray,
        class_ids: np.ndarray,
        rows: np.ndarray,
        slack: np.ndarray,
        size: tuple[int, int],
    ):
        self.places = places  #: float64 [k, 4]
        self.scores = scores
        self.class_ids = class_ids
        self.rows = rows  #: float64 [k, 4]: the rectangle that its row shows
        self.slack = slack  #: pixels of the picture that an edge may be off
        self.size = size
        near = NEAR * (rows[:, 2:] - rows[:, :2])
        first = (places[:, :2] <= rows[:, :2] + near) & (rows[:, :2] > 0)
        last = (places[:, 2:] >= rows[:, 2:] - near) & (rows[:, 2:] < np.array(size))
        self.cut = (first | last).any(axis=1)
        self._columns = np.ascontiguousarray(places.T)
        self._reach = np.array([-1, -1, 1, 1]) * slack.max(initial=0)

    def take(self, indices: np.ndarray) -> _Boxes:
        return _Boxes(*(values[indices] for values in (self.places, self.scores, self.class_ids, self.rows, self.slack)), self.size)

    def order(self, whole_first: bool = False) -> np.ndarray:
        """By score; of equal ones the finer row, the larger box, then by place, class and row: the same whatever order they came in."""
        areas = (self.places[:, 2:] - self.places[:, :2]).prod(axis=1)
        keys = (*self.rows.T, self.class_ids, *self.places.T[::-1], -areas, self.slack, -self.scores)
        return np.lexsort((*keys, self.cut) if whole_first else keys)

    def groups(self) -> list[list[int]]:
        """Indices of the boxes that show one object, the best of them in front, for each object; `self` is in order, whole ones first."""
        found = []
        left = np.ones(len(self.scores), bool)
        for best in range(len(self.scores)):
            if not left[best]:
                continue
            left[best] = False
            group, fresh = [best], [best]
            while fresh:
                member = fresh.pop()
                near = self._near(member, left)
                if member != best:
                    near = near[self.cut[near]]  # reached over another: a part of the same object, not another whole one
                if not near.size:
                    continue
                joined = near[self._agreement(member, near) >= MATCH]
                left[joined] = False
                group += joined.tolist()
                fresh += joined[self.cut[joined] == self.cut[best]].tolist()
            found.append(group)
        return found

    def _near(self, one: int, left: np.ndarray) -> np.ndarray:
        """Those of the boxes `left` that could show the same as box `one`: of its class, and not apart from it. Cheap: it looks at all."""
        x1, y1, x2, y2 = self.places[one] + self._reach
        columns = self._columns
        return np.flatnonzero(
            left & (columns[0] < x2) & (columns[2] > x1) & (columns[1] < y2) & (columns[3] > y1) & (self.class_ids == self.class_ids[one])
        )

    def around(self, group: list[int]) -> np.ndarray:
        """float64 [4]: the box of the finest row that shows the object whole, and whatever of the others sticks out of it."""
        places, slack = self.places[group], self.slack[group, None]
        base = places[np.lexsort((np.arange(len(group)), self.slack[group], self.cut[group]))[0]]
        first = np.where(places[:, :2] < base[:2] - slack, places[:, :2], base[:2]).min(axis=0)
        last = np.where(places[:, 2:] > base[2:] + slack, places[:, 2:], base[2:]).max(axis=0)
        return np.concatenate([first, last])

    def _agreement(self, one: int, others: np.ndarray) -> np.ndarray:
        """float [n], 0..1: how far box `one` and each of `others` agree where both of their rows look; 0 where they are of one row."""
        row, rows = self.rows[one], self.rows[others]
        a, b = self.places[one], self.places[others]
        b = np.where(np.abs(b - a) <= np.maximum(self.slack[one], self.slack[others])[:, None], a, b)
        shared_first, shared_last = np.maximum(row[:2], rows[:, :2]), np.minimum(row[2:], rows[:, 2:])

        def area(first: np.ndarray, last: np.ndarray) -> np.ndarray:
            return np.maximum(np.minimum(last, shared_last) - np.maximum(first, shared_first), 0).prod(axis=1)

        mine, theirs = area(a[:2], a[2:]), area(b[:, :2], b[:, 2:])
        both = area(np.maximum(a[:2], b[:, :2]), np.minimum(a[2:], b[:, 2:]))
        cut = self.cut[others]
        if self.cut[one]:
            of = np.where(cut, np.minimum(mine, theirs), mine)
        else:
            of = np.where(cut, theirs, mine + theirs - both)
        apart = (rows == row).all(axis=1) | (of <= 0)
        return np.where(apart, 0, both / np.where(apart, 1, of))
