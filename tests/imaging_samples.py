"""Images for tests: photographs, marked blocks, and files that are damaged or lie."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache

import numpy as np
import skimage.data
from PIL import Image

RED = (255, 0, 0)


@cache
def astronaut() -> np.ndarray:
    """uint8 RGB [512, 512, 3]."""
    return skimage.data.astronaut()


def marked(width: int, height: int, x: int = 10, y: int = 10, side: int = 20) -> np.ndarray:
    """A black picture with a red square whose upper left corner is at (x, y)."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[y : y + side, x : x + side] = RED
    return pixels


def red_box(pixels: np.ndarray) -> tuple[int, int, int, int]:
    """(x1, y1, x2, y2) of what is red."""
    ys, xs = np.nonzero((pixels[..., 0] > 128) & (pixels[..., 1] < 100) & (pixels[..., 2] < 100))
    assert len(xs), "nothing is red"
    return int(xs.min()), int(ys.min()), int(xs.max()) + 1, int(ys.max()) + 1


def encoded(picture: np.ndarray | Image.Image, format: str = "JPEG", *, orientation: int | None = None, **options: object) -> bytes:
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    if format == "JPEG":
        options = {"quality": 92, **options}
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


#: EXIF orientation -> how a viewer turns the coded picture upright (numpy, independent of the code under test).
UPRIGHT = {
    1: lambda p: p,
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.transpose(1, 0, 2),
    6: lambda p: p.transpose(1, 0, 2)[:, ::-1],
    7: lambda p: p.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda p: p.transpose(1, 0, 2)[::-1],
}
#: EXIF orientation -> how a camera held that way codes the upright scene.
CODED = {**UPRIGHT, 6: UPRIGHT[8], 8: UPRIGHT[6]}


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width: int, height: int, *, depth: int = 8, color: int = 2, idat: bytes = b"", chunks: bytes = b"") -> bytes:
    ihdr = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + ihdr + chunks + png_chunk(b"IDAT", idat) + png_chunk(b"IEND", b"")
