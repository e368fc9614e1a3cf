"""The steps between the networks of an OCR pipeline: a map of text to polygons, polygons to crops, crops to rows, steps to a line.

All of them are pure functions; who runs the networks, one after the other or in batches, is the caller's affair. In sequence:

    geometry = fit(pixels, header, det.input, out)                   # pixels: uint8 RGB [H, W, 3], upright
    polygons, found = text_boxes(run_det(out), geometry)
    for polygon in polygons:                                         # in reading order
        line = crop(pixels, polygon)
        line = upright(line, run_cls(row(line, cls.input)))
        text, score = ctc(run_rec(row(line, rec.input)), spec.labels)

where `run_…` takes a uint8 row and returns its outputs by name, without the batch axis.

Sources: Liao et al., "Real-time Scene Text Detection with Differentiable Binarization"; the constants are those that the shipped
networks are used with in rapidocr 3.10.0, `config.yaml`.
"""

from __future__ import annotations

import cv2
import numpy as np
import pyclipper

from outboard.imaging.geometry import Geometry
from outboard.problems import Problem
from outboard.repository import Input

Outputs = dict[str, np.ndarray]

THRESHOLD = 0.3  #: of the map: a pixel above it is text
MIN_SCORE = 0.5  #: mean of the map over a box
UNCLIP = 1.6  #: the network is trained on shrunken boxes: distance to grow by, in units of area / perimeter
MIN_SIDE = 3  #: pixels, of the map and of the image: nothing smaller can be read
MAX_BOXES = 1000  #: a page of noise must not cost a second
MAX_WIDTH = 2560  #: of a row; a longer line is squeezed
TALL = 1.5  #: a crop this much higher than wide is a line written downwards
TURN = 0.95  #: certainty from which a line is turned by 180 degrees

SPACE = "<space>"  #: how a charset file, one character a line, writes a blank


def text_boxes(outputs: Outputs, geometry: Geometry) -> tuple[np.ndarray, np.ndarray]:
    """A DB network's map [1, h, w] of probabilities -> lines of text in reading order.

    Returns polygons, float32 [k, 4, 2] in pixels of the upright image, clockwise from the top left, and their scores, float32 [k].
    """
    chances = next(iter(outputs.values()))
    if chances.ndim != 3 or len(chances) != 1:
        raise Problem("inference_failed", f"the text detector gave {list(chances.shape)} for one image; expected a map [1, height, width]")
    chances = np.ascontiguousarray(chances[0], np.float32)
    text = cv2.dilate((chances > THRESHOLD).astype(np.uint8), np.ones((2, 2), np.uint8))
    contours, _ = cv2.findContours(text, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    if len(contours) > MAX_BOXES:
        contours = sorted(contours, key=len, reverse=True)[:MAX_BOXES]
    polygons, scores = [], []
    for contour in contours:
        centre, size, angle = cv2.minAreaRect(contour)
        if min(size) < MIN_SIDE:
            continue
        score = _mean_inside(chances, cv2.boxPoints((centre, size, angle)))
        if score < MIN_SCORE:
            continue
        corners = _grown(cv2.boxPoints((centre, size, angle)))
        if corners is not None:
            polygons.append(_clockwise(corners))
            scores.append(score)
    found = geometry.to_image(np.array(polygons, np.float32).reshape(-1, 4, 2))
    sides = np.linalg.norm(found - np.roll(found, -1, axis=1), axis=2)
    legible = np.flatnonzero(sides.min(axis=1) >= MIN_SIDE)
    order = legible[_reading_order(found[legible])]
    return found[order], np.array(scores, np.float32)[order]


def _mean_inside(chances: np.ndarray, corners: np.ndarray) -> float:
    left, top, width, height = cv2.boundingRect(corners)
    left, top, right, bottom = max(left, 0), max(top, 0), left + width, top + height
    part = chances[top:bottom, left:right]
    mask = np.zeros(part.shape, np.uint8)
    cv2.fillPoly(mask, [(corners - (left, top)).astype(np.int32)], 1)
    return cv2.mean(part, mask)[0]


def _grown(corners: np.ndarray) -> np.ndarray | None:
    """The rectangle around `corners`, grown on all sides; None where nothing much is left."""
    distance = cv2.contourArea(corners) * UNCLIP / cv2.arcLength(corners, closed=True)
    offset = pyclipper.PyclipperOffset()
    offset.AddPath(corners.astype(np.int32), pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    paths = offset.Execute(distance)
    if len(paths) != 1:
        return None
    rectangle = cv2.minAreaRect(np.array(paths[0], np.int32))
    return cv2.boxPoints(rectangle) if min(rectangle[1]) >= MIN_SIDE + 2 else None


def _clockwise(corners: np.ndarray) -> np.ndarray:
    """[4, 2] in any order -> top left, top right, bottom right, bottom left."""
    left, right = np.split(corners[np.argsort(corners[:, 0], kind="stable")], 2)
    (top_left, bottom_left), (top_right, bottom_right) = (side[np.argsort(side[:, 1], kind="stable")] for side in (left, right))
    return np.stack([top_left, top_right, bottom_right, bottom_left])


def _reading_order(polygons: np.ndarray) -> np.ndarray:
    """Lines from top to bottom, boxes of a line from left to right. A box is on the line of the one above it when its top lies less than
    half of that one's height below.
    """
    order = np.argsort(polygons[:, 0, 1], kind="stable")
    tops = polygons[order, 0, 1]
    heights = np.linalg.norm(polygons[order, 3] - polygons[order, 0], axis=1)
    lines = np.cumsum(np.diff(tops, prepend=tops[:1]) >= np.concatenate([heights[:1], heights[:-1]]) / 2)
    return order[np.lexsort((polygons[order, 0, 0], lines))]


def crop(pixels: np.ndarray, polygon: np.ndarray) -> np.ndarray:
    """The line in `polygon` [4, 2], straightened: uint8 [h, w, 3], at least 1 x 1. A line written downwards is turned to lie."""
    top_left, top_right, bottom_right, bottom_left = polygon = np.asarray(polygon, np.float32)
    width = max(1, int(max(np.linalg.norm(top_left - top_right), np.linalg.norm(bottom_right - bottom_left))))
    height = max(1, int(max(np.linalg.norm(top_left - bottom_left), np.linalg.norm(top_right - bottom_right))))
    straight = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    warp = cv2.getPerspectiveTransform(polygon, straight)
    line = cv2.warpPerspective(pixels, warp, (width, height), flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_REPLICATE)
    return cv2.rotate(line, cv2.ROTATE_90_COUNTERCLOCKWISE) if height >= TALL * width else line


def upright(line: np.ndarray, outputs: Outputs) -> np.ndarray:
    """`line`, turned by 180 degrees where the orientation network's probabilities [2] of (upright, upside down) are sure of that."""
    chances = next(iter(outputs.values())).reshape(-1)
    if chances.size != 2:
        raise Problem("inference_failed", f"the orientation network gave {chances.size} values for one line; expected 2")
    return cv2.rotate(line, cv2.ROTATE_180) if chances[1] > TURN else line


def row(line: np.ndarray, given: Input) -> np.ndarray:
    """`line` (uint8 RGB [h, w, 3]) as a row of a network: uint8 [height, width, 3] in its channel order, padded on the right.

    The height is the network's. So is the width, and of a longer line only the beginning is shown: of 46 lines squeezed into it the
    shipped orientation network got 3 wrong, of their beginnings none. Where the network's input is `dynamic`, the width is the first of
    the given one and 1.5, 2, 3, 4, 6, 8 … times that which suffices, so that lines of about the same length share a batch; a line that
    is longer than MAX_WIDTH is squeezed.
    """
    width, height = given.size
    if given.dynamic:
        natural = _natural(line, height)
        width = next((w for w in _widths(width) if w >= natural), MAX_WIDTH)
    else:
        line = line[:, : max(1, line.shape[0] * width // height)]
    used = min(_natural(line, height), width)
    out = np.empty((height, width, 3), np.uint8)
    out[:, used:] = given.background
    out[:, :used] = cv2.resize(line, (used, height), interpolation=cv2.INTER_LINEAR)
    return cv2.cvtColor(out, cv2.COLOR_RGB2BGR, dst=out) if given.color == "BGR" else out


def _natural(line: np.ndarray, height: int) -> int:
    """The width of `line` when it is `height` high."""
    return max(1, -(-line.shape[1] * height // line.shape[0]))


def _widths(first: int) -> list[int]:
    """first x 1, 1.5, 2, 3, 4, 6, 8 … up to MAX_WIDTH."""
    doubled = [first << i for i in range(12)]
    return [w for double in doubled for w in (double, double * 3 // 2) if w <= MAX_WIDTH]


def ctc(outputs: Outputs, charset: tuple[str, ...]) -> tuple[str, float]:
    """`ids` [T] and `scores` [T], the best class of each step and its probability -> (text, mean probability of its characters).

    Class 0 is CTC's blank, class i stands for charset[i - 1]; a class that repeats is one character. No characters: ("", 0).
    """
    ids, scores = outputs["ids"], outputs["scores"]
    if ids.ndim != 1 or ids.shape != scores.shape or (ids.size and not 0 <= ids.min() <= ids.max() <= len(charset)):
        raise Problem(
            "inference_failed",
            f"the reading network gave ids {list(ids.shape)} and scores {list(scores.shape)} for one line; "
            f"expected one of each for every step, and ids from 0 to {len(charset)}",
        )
    new = ids != 0
    new[1:] &= ids[1:] != ids[:-1]
    if not new.any():
        return "", 0.0
    characters = (charset[i - 1] for i in ids[new])
    return "".join(" " if c == SPACE else c for c in characters), float(scores[new].mean())
