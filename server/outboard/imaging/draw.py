"""The picture with the answer drawn on it, for `Accept: image/jpeg`, previews and the README."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import cv2
import numpy as np
import simplejpeg
from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
Polygon = Sequence[Sequence[float]]

#: Bright and far apart, also for most colour-blind eyes; a class keeps its colour from picture to picture.
_COLOURS: tuple[Colour, ...] = (
    (255, 196, 0), (0, 200, 255), (255, 82, 82), (105, 240, 120), (255, 128, 255),
    (255, 145, 40), (90, 150, 255), (200, 255, 60), (190, 140, 255), (0, 235, 200),
)  # fmt: skip
_DARK: Colour = (16, 16, 20)
_LIGHT: Colour = (255, 255, 255)
_TINT = 0.45  #: opacity of a mask
_MAX_LINES = 10


def draw(pixels: np.ndarray, answer: Mapping[str, Any], *, quality: int = 90) -> bytes:
    """A JPEG of `pixels` (uint8 RGB [h, w, 3], upright) with a predict `answer` drawn on.

    The answer's coordinates are pixels of `answer["image"]`; `pixels` may be smaller, they are scaled to it. Drawn: `detections`
    (box, label, score), `texts` (polygon, text), `classes` (a panel), `mask` (a tint for each class but 0, with its labels).
    """
    height, width = pixels.shape[:2]
    if mask := answer.get("mask"):
        pixels = _tint(pixels, mask)
    pen = _Pen(pixels, width / answer["image"]["width"], height / answer["image"]["height"])
    detections = sorted(answer.get("detections", ()), key=lambda d: d["score"])  # the surest on top
    shapes = [(_corners(d["box"]), _colour(d["class_id"]), f"{d['label']} {d['score']:.0%}") for d in detections]
    shapes += [(t["polygon"], _colour(i), t["text"]) for i, t in enumerate(answer.get("texts", ()))]
    for polygon, colour, _ in shapes:
        pen.outline(polygon, colour)
    for polygon, colour, text in reversed(shapes):  # the surest have the best places
        pen.label(polygon, colour, text)
    if classes := answer.get("classes"):
        pen.panel([(f"{item['label']}  {item['score']:.1%}", _colour(rank)) for rank, item in enumerate(classes[:_MAX_LINES])])
    elif mask and mask.get("labels"):
        pen.panel([(str(label), _colour(i)) for i, label in enumerate(mask["labels"]) if i][:_MAX_LINES])
    # Subsampled colours (420) would blur small letters.
    return simplejpeg.encode_jpeg(np.asarray(pen.image), quality=quality, colorspace="RGB", colorsubsampling="444")


def _corners(box: Sequence[float]) -> Polygon:
    x1, y1, x2, y2 = box
    return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]


def _colour(class_id: int) -> Colour:
    return _COLOURS[class_id % len(_COLOURS)]


def _tint(pixels: np.ndarray, mask: Mapping[str, Any]) -> np.ndarray:
    ids = cv2.imdecode(np.frombuffer(base64.b64decode(mask["data"]), np.uint8), cv2.IMREAD_UNCHANGED)
    ids = cv2.resize(ids, (pixels.shape[1], pixels.shape[0]), interpolation=cv2.INTER_NEAREST)
    table = np.array([_colour(i) for i in range(256)], np.uint8)
    mixed = cv2.addWeighted(pixels, 1 - _TINT, table[ids], _TINT, 0)
    return np.where(ids[..., None] > 0, mixed, pixels)


class _Pen:
    """Lines and letters in proportion to the picture; coordinates of the submitted image go in."""

    def __init__(self, pixels: np.ndarray, scale_x: float, scale_y: float):
        self.image = Image.fromarray(pixels)
        self._draw = ImageDraw.Draw(self.image)
        self._scale = (scale_x, scale_y)
        short = min(self.image.size)
        self._line = max(1, round(short / 180))
        self._font = ImageFont.load_default(size=min(max(11, short / 30), 72))
        self._pad = max(2, round(short / 150))
        self._labels: list[tuple[float, float, float, float]] = []

    def _points(self, polygon: Polygon) -> list[tuple[float, float]]:
        return [(x * self._scale[0], y * self._scale[1]) for x, y in polygon]

    def outline(self, polygon: Polygon, colour: Colour) -> None:
        """A closed outline with a dark rim, so that it shows on any ground."""
        points = self._points(polygon)
        ring = [*points, points[0], points[1]]  # the second point again: its corner is joined too
        self._draw.line(ring, fill=_DARK, width=self._line + 2, joint="curve")
        self._draw.line(ring, fill=colour, width=self._line, joint="curve")

    def label(self, polygon: Polygon, colour: Colour, text: str) -> None:
        """A label above the polygon, or where else it stays in the picture and covers no other label."""
        xs, ys = zip(*self._points(polygon), strict=True)
        top, bottom = min(ys), max(ys)
        width, height = self._size(text)
        left = max(0, min(min(xs) - self._line / 2, self.image.width - width))
        spots = [(left, y, left + width, y + height) for y in (top - height, top, bottom, bottom - height, top + height)]
        inside = [s for s in spots if s[1] >= 0 and s[3] <= self.image.height]
        spot = next((s for s in inside if not any(_overlap(s, other) for other in self._labels)), (inside or spots)[0])
        self._labels.append(spot)
        self._draw.rectangle(spot, fill=colour)
        self._text(spot[0], spot[1], text, _DARK)

    def panel(self, lines: list[tuple[str, Colour]]) -> None:
        """Lines of text in the lower left corner, each with a spot of its colour."""
        height = self._size("Ag")[1]
        width = max(self._size(text)[0] for text, _ in lines) + height + self._pad
        top = self.image.height - height * len(lines) - 2 * self._pad
        shade = Image.new("L", (min(round(width), self.image.width), self.image.height - max(0, round(top))), 190)
        self.image.paste(_DARK, (0, max(0, round(top))), mask=shade)
        for i, (text, colour) in enumerate(lines):
            y = top + self._pad + i * height
            inset = height * 0.28
            self._draw.rectangle((self._pad + inset / 2, y + inset, self._pad + height - 1.5 * inset, y + height - inset), fill=colour)
            self._text(height, y, text, _LIGHT)

    def _size(self, text: str) -> tuple[float, float]:
        ascent, descent = self._font.getmetrics()
        return self._font.getlength(text) + 2 * self._pad, ascent + descent + self._pad

    def _text(self, left: float, top: float, text: str, colour: Colour) -> None:
        self._draw.text((left + self._pad, top + self._pad / 2), text, fill=colour, font=self._font)


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
