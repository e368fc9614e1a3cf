"""Fit an upright picture into a network's input, in shared memory, and say exactly where it went."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header
from outboard.repository import Input

cv2.setNumThreads(1)  # every decode thread is one core already

#: From this shrinking on every source pixel is averaged (INTER_AREA); below it bilinear sampling is four to ten times faster
#: (480 x 270 to 224 x 126: 0.12 ms, INTER_AREA 1.07) and within 39 dB of averaging all of the 4K picture; at 1.5, 47 dB.
AREA_FROM = 2.5
#: From this shrinking on a picture is halved first: the mean of 2 x 2 pixels is vectorised, INTER_AREA of other factors is not, and in the
#: end every pixel counts as before but for rounding, 49 dB (800 x 600 to 64 x 64: 0.4 ms, at once 2.0; 4K to 224 x 126: 6, at once 29).
HALVE_FROM = 4
#: Centre crops of longer pictures cut the source first: resized whole, 1 x 5000 for 256 x 256 would take 1 GB.
_LONG = 16


def decode_size(header: Header, input: Input) -> tuple[int, int] | None:
    """The (width, height) of the upright picture that `fit` needs so that it only shrinks; None: all of it."""
    width, height = _resized(header, input)
    return (width, height) if width < header.width and height < header.height else None


def fit(pixels: np.ndarray, header: Header, input: Input, out: np.ndarray) -> Geometry:
    """Write `pixels` (uint8 RGB [h, w, 3], upright, perhaps scaled by the decoder) into `out` as `input` says.

    `out` is uint8 [height, width, 3] of `input.size`, in the network's channel order afterwards; nothing of its former content is left.
    The Geometry holds the integer sizes and pads that were used.
    """
    width, height = input.size
    assert out.shape == (height, width, 3) and out.dtype == np.uint8, f"out is {out.shape} {out.dtype}, not {height, width, 3} uint8"
    p = placing(header, input, (pixels.shape[1], pixels.shape[0]))
    part = pixels[p.rows, p.columns]
    if p.cut:
        whole = np.empty((p.height, p.width, 3), np.uint8)
        resize(part, whole)
        np.copyto(out, whole[p.top : p.top + height, p.left : p.left + width])
    else:
        if (p.height, p.width) != out.shape[:2]:
            for pad in (out[: p.top], out[p.top + p.height :], out[:, : p.left], out[:, p.left + p.width :]):
                pad[:] = input.background
        resize(part, out[p.top : p.top + p.height, p.left : p.left + p.width])
    if input.color == "BGR":  # the one place where channels change their order
        cv2.cvtColor(out, cv2.COLOR_RGB2BGR, dst=out)
    return p.geometry


@dataclass(frozen=True, slots=True)
class Placing:
    """How a decoded picture comes into a network's input: `columns` and `rows` of it are resized to `width` x `height` pixels. `cut`: of
    these the input is what begins at (`left`, `top`); else they lie there in it, and around them is background."""

    columns: slice
    rows: slice
    width: int
    height: int
    left: int
    top: int
    cut: bool
    geometry: Geometry


def placing(header: Header, input: Input, decoded: tuple[int, int]) -> Placing:
    """What `fit` does with a picture that is decoded to (width, height) pixels."""
    return (_crop if input.fit == "crop" else _place)(header, input, decoded)


def _resized(header: Header, input: Input) -> tuple[int, int]:
    """(width, height) of the whole picture at the network's scale; never 0."""
    width, height = input.size
    if input.fit == "stretch":
        return width, height
    x, y = width / header.width, height / header.height
    if input.fit == "crop":
        scale = max(x, y) / input.crop
        return max(width, round(header.width * scale)), max(height, round(header.height * scale))
    scale = min(x, y)
    return min(width, max(1, round(header.width * scale))), min(height, max(1, round(header.height * scale)))


def _place(header: Header, input: Input, decoded: tuple[int, int]) -> Placing:
    """letterbox and stretch: the whole picture in the middle."""
    width, height = _resized(header, input)
    left, top = (input.size[0] - width) // 2, (input.size[1] - height) // 2
    columns, rows = _shown(decoded, header)
    geometry = Geometry(header.width, header.height, width / columns, height / rows, left, top)
    return Placing(slice(0, decoded[0]), slice(0, decoded[1]), width, height, left, top, False, geometry)


def _shown(decoded: tuple[int, int], header: Header) -> tuple[int, int]:
    """(columns, rows) of the submitted image that `decoded` pixels show.

    A decoder that shrinks by 8 makes 472 columns of 3769, and the last one stands for 8 as well (the file's padding): 3776 in all. Taking
    them for 3769 would put boxes at the right edge 7 pixels off.
    """
    width, height = decoded
    for factor in (1, 2, 4, 8):
        if decoded == (-(-header.width // factor), -(-header.height // factor)):
            return width * factor, height * factor
    return header.width, header.height


def _crop(header: Header, input: Input, decoded: tuple[int, int]) -> Placing:
    """The middle of the picture fills the input."""
    width, height = _resized(header, input)
    shown = _shown(decoded, header)
    (columns, width, left), (pad_x, scale_x) = _middle(decoded[0], shown[0], width, input.size[0])
    (rows, height, top), (pad_y, scale_y) = _middle(decoded[1], shown[1], height, input.size[1])
    geometry = Geometry(header.width, header.height, scale_x, scale_y, pad_x, pad_y)
    return Placing(columns, rows, width, height, left, top, (width, height) != input.size, geometry)


def _middle(have: int, full: int, resized: int, wanted: int) -> tuple[tuple[slice, int, int], tuple[int, float]]:
    """One axis of a centre crop: ((source pixels to take, length to resize them to, first one to keep), (pad, scale) of the Geometry).

    `have` decoded pixels show `full` of the image's; the whole axis is `resized` network pixels long, the middle `wanted` are kept.
    """
    count = max(1, round(have * wanted / resized))
    start = (have - count) // 2
    if 2 * start < _LONG * count:
        first = (resized - wanted) // 2
        return (slice(0, have), resized, first), (-first, resized / full)
    # The pad must be an integer: the scale is the one that makes it exact at the first pixel, and 0.06 network pixels off at the last.
    pad = round(start * wanted / count)
    return (slice(start, start + count), wanted, 0), (-pad, pad * have / (start * full))


def resize(source: np.ndarray, out: np.ndarray) -> None:
    """Fill `out` with all of `source` (both uint8 RGB), in place."""
    height, width = out.shape[:2]
    if source.shape == out.shape:
        np.copyto(out, source)
        return
    while min(source.shape[1] / width, source.shape[0] / height) >= HALVE_FROM and not (source.shape[0] | source.shape[1]) & 1:
        source = cv2.resize(source, (source.shape[1] // 2, source.shape[0] // 2), interpolation=cv2.INTER_AREA)
    shrink = max(source.shape[1] / width, source.shape[0] / height)
    result = cv2.resize(source, (width, height), dst=out, interpolation=cv2.INTER_AREA if shrink >= AREA_FROM else cv2.INTER_LINEAR)
    assert np.may_share_memory(result, out), "OpenCV wrote into memory of its own"
