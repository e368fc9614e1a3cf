"""Cut a large picture into tiles that overlap, one row of the network each: what is small in the picture is lost when all of it is
shrunk into one row.

Slicing aided inference: Akyon, Altinuc and Temizel, "Slicing Aided Hyper Inference and Fine-tuning for Small Object Detection" (2022);
obss/sahi `sahi/slicing.py`. As there, tiles at the edge are moved inside the picture, never padded or cut, and the whole picture is one
row more unless it is asked not to be. Here they are also spread evenly, so that every overlap is at least what was asked for, and all of
them have the network's aspect ratio, so that no row is padded. `tasks/merge.py` puts their detections together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import cv2
import msgspec
import numpy as np

from outboard.core.state import Layout
from outboard.imaging import fit
from outboard.imaging.decode import decoded_size
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header
from outboard.problems import Problem
from outboard.repository import Input

#: Tile sides that are taken, in pixels of the picture: below, a tile is mostly overlap with nothing to see; above, no picture is larger.
SMALLEST, LARGEST = 32, 16384
MOST_OVERLAP = 0.9


class Tiling(msgspec.Struct, frozen=True, kw_only=True):
    """What a request asks for, checked."""

    size: int = 0  #: width of a tile in pixels of the picture, SMALLEST to LARGEST; 0: auto
    overlap: float = 0.2  #: share of a tile that the next one shows again, at least; 0 to MOST_OVERLAP
    merge: Literal["nmm", "nms"] = "nmm"  #: how one object's boxes of several tiles become one (tasks/merge.py)
    whole: bool = True  #: the whole picture is one row more: it finds what is larger than a tile


@dataclass(frozen=True, slots=True)
class View:
    """What one row of the network shows: a rectangle of the upright picture, and the way from the row's pixels into it."""

    left: int
    top: int
    geometry: Geometry  #: from the row to the rectangle, whose size it knows

    @property
    def rectangle(self) -> tuple[int, int, int, int]:
        """x1, y1, x2, y2 in pixels of the upright picture."""
        return self.left, self.top, self.left + self.geometry.width, self.top + self.geometry.height

    def to_image(self, boxes: np.ndarray) -> np.ndarray:
        """float [k, 4] in the row's pixels -> float32 [k, 4] in the picture's, clipped to what the row shows."""
        return self.geometry.to_image(boxes) + np.array([self.left, self.top] * 2, np.float32)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a picture is cut. Tiles are all of one size and lie inside the picture, row by row; no tiles: only the whole picture."""

    width: int  #: of a tile, in pixels of the upright picture
    height: int
    origins: tuple[tuple[int, int], ...]  #: (left, top) of each tile
    whole: bool  #: one row more, the last one

    @property
    def rows(self) -> int:
        return len(self.origins) + self.whole


def plan(width: int, height: int, input: Input, tiling: Tiling, most: int) -> Plan:
    """How a picture of `width` x `height` upright pixels is cut for a network's `input` into at most `most` tiles.

    A tile of `tiling.size` pixels' width has the network's aspect ratio. `auto` looks at the picture as it is, one pixel of a tile for
    each pixel of the network; where that takes more than `most` tiles, at half, a third … of it. A picture that is not larger than a tile
    is not cut; one that is narrower or lower than a tile has tiles as narrow or low as itself. Raises Problem bad_option.
    """
    columns, rows = input.size

    def tile_of(size: int) -> tuple[int, int]:
        return min(size, width), min(max(1, round(size * rows / columns)), height)

    def tiles_of(size: int) -> int:
        across, down = tile_of(size)
        return _count(width, across, tiling.overlap) * _count(height, down, tiling.overlap)

    size = tiling.size or columns
    if tiling.size and (needed := tiles_of(size)) > most:
        while tiles_of(size) > most:
            size += max(1, size // 16)
        raise Problem(
            "bad_option",
            f"tile={tiling.size} with overlap={tiling.overlap:g} cuts {width} x {height} pixels into {needed} tiles, the server takes at "
            f"most {most} a picture; ask for tile={size} or more, for tile=auto, or raise [limits] tiles",
            tiles=needed,
            max_tiles=most,
        )
    while tiles_of(size) > most:
        size += columns
    tile_width, tile_height = tile_of(size)
    if (tile_width, tile_height) == (width, height):
        return Plan(width, height, (), True)
    lefts, tops = _starts(width, tile_width, tiling.overlap), _starts(height, tile_height, tiling.overlap)
    return Plan(tile_width, tile_height, tuple((left, top) for top in tops for left in lefts), tiling.whole)


def _count(length: int, tile: int, overlap: float) -> int:
    """As few tiles as cover `length` so that neighbours share at least `overlap` of a tile."""
    stride = max(1, tile - ceil(overlap * tile))
    return 1 + ceil((length - tile) / stride)


def _starts(length: int, tile: int, overlap: float) -> list[int]:
    """First pixels of `_count` tiles, evenly spread."""
    last = _count(length, tile, overlap) - 1
    # Rounded down, two neighbours are at most ceil((length - tile) / last) apart, which is no more than the stride.
    return [i * (length - tile) // last for i in range(last + 1)] if last else [0]


def decode_size(plan: Plan, header: Header, input: Input) -> tuple[int, int] | None:
    """The (width, height) of the upright picture that `cut` needs so that no row is enlarged; None: all of it."""
    whole = fit.decode_size(header, input) if plan.whole else (1, 1)
    if not plan.origins or whole is None:
        return whole
    scale = min(input.size[0] / plan.width, input.size[1] / plan.height)
    if scale >= 1:
        return None
    return max(whole[0], ceil(header.width * scale)), max(whole[1], ceil(header.height * scale))


def layout(plan: Plan, header: Header, input: Input) -> Layout | None:
    """How the decoded picture lies in frame memory so that the device cuts it: where a tile has as many of its pixels as the network's
    input. None: the host cuts, as each tile is resized. Never more bytes than the rows of `cut`: these have every overlap twice."""
    width, height = decoded_size(header, decode_size(plan, header, input))
    shrunk = _shrunk(header, width, height)
    places = [_place(plan, origin, shrunk, width, height) for origin in plan.origins]
    if not places or any((wide, high) != input.size for _, _, wide, high in places):
        return None
    pitch, row = 3 * width, 3 * input.size[0] * input.size[1]
    starts = [top * pitch + 3 * left for left, top, _, _ in places]
    whole = [pitch * height] if plan.whole else []
    return Layout(pitch * height + len(whole) * row, pitch * height, pitch, tuple(starts + whole))


def lay(plan: Plan, layout: Layout, pixels: np.ndarray, header: Header, input: Input, memory: np.ndarray) -> list[View]:
    """Write the picture into `memory` (uint8 [layout.nbytes]), and the whole of it in small behind it; say what each row shows.

    The rows are, byte for byte, those of `cut`."""
    picture = memory[: layout.picture].reshape(-1, layout.pitch // 3, 3)
    height, width, _ = picture.shape
    if plan.whole:
        fit.fit(pixels, header, input, memory[layout.picture :].reshape(input.size[1], input.size[0], 3))
    fit.resize(pixels, picture)  # which copies, unless a damaged file's second decoder has shrunk it by another factor
    if input.color == "BGR":
        cv2.cvtColor(picture, cv2.COLOR_RGB2BGR, dst=picture)
    return views(plan, header, input, (width, height))


def cut(plan: Plan, pixels: np.ndarray, header: Header, input: Input, out: np.ndarray) -> list[View]:
    """Write each of the plan's rows into `out` (uint8 [plan.rows, height, width, 3] of the network's input), and say what it shows.

    `pixels` uint8 RGB [h, w, 3] is the upright picture, perhaps shrunk by the decoder.
    """
    assert len(out) == plan.rows, f"{len(out)} rows for a plan of {plan.rows}"
    size = pixels.shape[1], pixels.shape[0]
    for tile, row in zip(cuts(plan, header, input, size), out, strict=False):
        _write(tile, pixels, input, row)
    if plan.whole:
        fit.fit(pixels, header, input, out[-1])
    return views(plan, header, input, size)


@dataclass(frozen=True, slots=True)
class Cut:
    """A rectangle of the decoded picture that becomes a row: resized to `wide` x `high` pixels that lie at (`x`, `y`) in it."""

    left: int
    top: int
    width: int
    height: int
    wide: int
    high: int
    x: int
    y: int


def cuts(plan: Plan, header: Header, input: Input, decoded: tuple[int, int]) -> list[Cut]:
    """The plan's tiles in a picture that is decoded to (width, height) pixels.

    Whatever `input.fit` says, a tile has the network's aspect ratio, unless the picture is narrower or lower than a tile.
    """
    shrunk, found = _shrunk(header, *decoded), []
    for origin in plan.origins:
        left, top, width, height = _place(plan, origin, shrunk, *decoded)
        scale = min(input.size[0] / width, input.size[1] / height)
        wide, high = (max(1, min(most, round(n * scale))) for n, most in ((width, input.size[0]), (height, input.size[1])))
        found.append(Cut(left, top, width, height, wide, high, (input.size[0] - wide) // 2, (input.size[1] - high) // 2))
    return found


def views(plan: Plan, header: Header, input: Input, decoded: tuple[int, int]) -> list[View]:
    """What the plan's rows show, made of a picture that is decoded to (width, height) pixels."""
    shrunk = _shrunk(header, *decoded)
    whole = [View(0, 0, fit.placing(header, input, decoded).geometry)] if plan.whole else []
    return [_view(tile, shrunk, header) for tile in cuts(plan, header, input, decoded)] + whole


def _shrunk(header: Header, width: int, height: int) -> int:
    """By how much the decoder has shrunk the picture to `width` x `height`."""
    return max(1, round(header.width / width), round(header.height / height))


def _place(plan: Plan, origin: tuple[int, int], shrunk: int, width: int, height: int) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a tile in the decoded picture of `width` x `height` pixels.

    In a picture that the decoder has shrunk by 2, 4 or 8 a tile begins at one of its pixels and has the same number of them as all others.
    """
    wide, high = min(ceil(plan.width / shrunk), width), min(ceil(plan.height / shrunk), height)
    return min(origin[0] // shrunk, width - wide), min(origin[1] // shrunk, height - high), wide, high


def _view(tile: Cut, shrunk: int, header: Header) -> View:
    left, top = tile.left * shrunk, tile.top * shrunk
    shown_width, shown_height = min(tile.width * shrunk, header.width - left), min(tile.height * shrunk, header.height - top)
    scales = tile.wide / (tile.width * shrunk), tile.high / (tile.height * shrunk)
    return View(left, top, Geometry(shown_width, shown_height, *scales, tile.x, tile.y))


def _write(tile: Cut, pixels: np.ndarray, input: Input, out: np.ndarray) -> None:
    if (tile.wide, tile.high) != input.size:
        out[:] = input.background
    part = pixels[tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
    fit.resize(part, out[tile.y : tile.y + tile.high, tile.x : tile.x + tile.wide])
    if input.color == "BGR":
        cv2.cvtColor(out, cv2.COLOR_RGB2BGR, dst=out)
