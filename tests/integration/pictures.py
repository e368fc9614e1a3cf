"""Pictures in every shape that senders send them in."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

RED = (255, 0, 0)


def encoded(pixels: np.ndarray | Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    if kind == "JPEG":
        options.setdefault("quality", 95)
        options.setdefault("subsampling", 0)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def scene(width: int, height: int, left: int, top: int, side: int, color: tuple[int, int, int] = RED) -> np.ndarray:
    """Grey, with one square block of `color`."""
    pixels = np.full((height, width, 3), 90, np.uint8)
    pixels[top : top + side, left : left + side] = color
    return pixels


def turned(pixels: np.ndarray, orientation: int, kind: str = "JPEG") -> bytes:
    """The scene stored so that a viewer who applies `orientation` sees it upright."""
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # PIL's Transpose that turns upright pixels into stored ones
    image = Image.fromarray(pixels)
    if orientation != 1:
        image = image.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if kind == "WEBP" else {}
    return encoded(image, kind, exif=exif, **lossless)


def bomb(width: int, height: int) -> bytes:
    """A PNG of some 65 bytes that claims to be width x height."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def multipart(*bodies: bytes, field: str = "image", end: bytes = b"--B--\r\n", **fields: str) -> tuple[bytes, str]:
    """(body, content type) of a multipart upload."""
    parts = [f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields.items()]
    for i, body in enumerate(bodies):
        head = f'--B\r\nContent-Disposition: form-data; name="{field}"; filename="../../{i}.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
        parts += [head.encode(), body, b"\r\n"]
    return b"".join([*parts, end]), "multipart/form-data; boundary=B"


def iou(a: list[float], b: list[float]) -> float:
    shared = max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)
