"""Images as people hold them, and the bytes that are sent."""

from __future__ import annotations

import io
import mimetypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

#: A path, an encoded image, an open file, a Pillow image, or an array: uint8 [height, width, 3 or 4] in RGB(A), [height, width] in grey, or
#: uint16 [height, width]. OpenCV's arrays are BGR: send `frame[..., ::-1]`.
ImageLike = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO | Image.Image | np.ndarray

_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_JPEG_MODES = frozenset({"L", "RGB", "CMYK"})


@dataclass(frozen=True, slots=True)
class Encoding:
    """How images that are not encoded yet are: PNG keeps every value; JPEG is a tenth of its size for a photograph."""

    format: str = "png"
    quality: int = 90  #: of JPEG, 1 to 95

    def __post_init__(self) -> None:
        if self.format not in ("png", "jpeg"):
            raise ValueError(f"format is {self.format!r}, expected 'png' or 'jpeg'")
        if not 1 <= self.quality <= 95:
            raise ValueError(f"quality is {self.quality}, expected 1 to 95")


PNG = Encoding("png")
JPEG = Encoding("jpeg")


def encoded(image: ImageLike, encoding: Encoding = PNG) -> tuple[bytes, str]:
    """(bytes, content type). What is encoded already, a path, bytes or a file, is sent as it is.

    Raises OSError for a path that cannot be read, TypeError or ValueError for something that is no image.
    """
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image), "application/octet-stream"
    if isinstance(image, (str, os.PathLike)):
        path = Path(image)
        kind = mimetypes.guess_type(path.name)[0] or ""
        return path.read_bytes(), kind if kind.startswith("image/") else "application/octet-stream"
    if isinstance(image, np.ndarray):
        image = from_array(image)
    if isinstance(image, Image.Image):
        return compress(image, encoding), f"image/{encoding.format}"
    if hasattr(image, "read"):
        data = image.read()
        if not isinstance(data, bytes):
            raise TypeError(f"the file gave {type(data).__name__}, expected bytes: open it with mode 'rb'")
        return data, "application/octet-stream"
    raise TypeError(f"an image is {type(image).__name__}, expected a path, bytes, a file, a Pillow image or a numpy array")


def from_array(array: np.ndarray) -> Image.Image:
    """A Pillow image of the array's values. Raises ValueError for a shape or dtype that is no image."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    colour = array.ndim == 3 and array.shape[2] in (3, 4) and array.dtype == np.uint8
    grey = array.ndim == 2 and array.dtype in (np.uint8, np.uint16)
    if not (colour or grey) or array.size == 0:
        raise ValueError(
            f"the array is {array.dtype} {list(array.shape)}, expected uint8 [height, width, 3] in RGB, [height, width, 4] in RGBA, "
            "uint8 or uint16 [height, width] in grey; scale floats to 0..255 and cast them"
        )
    return Image.fromarray(np.ascontiguousarray(array))


def compress(image: Image.Image, encoding: Encoding) -> bytes:
    """Encode, upright: Pillow's writers drop the EXIF orientation, so it is applied before, as the server would."""
    image = ImageOps.exif_transpose(image)
    modes = _PNG_MODES if encoding.format == "png" else _JPEG_MODES
    if image.mode not in modes:
        if image.mode in ("F", "I"):
            raise ValueError(f"a Pillow image of mode {image.mode} has no range that an image format knows; convert it to L or I;16")
        image = image.convert("RGB")
    buffer = io.BytesIO()
    if encoding.format == "png":
        image.save(buffer, "PNG", compress_level=1)
    else:
        image.save(buffer, "JPEG", quality=encoding.quality)
    return buffer.getvalue()


def fitted(data: bytes, limit: int) -> bytes | None:
    """The same picture in at most `limit` bytes and as many pixels as before, or None where that cannot be had.

    JPEG, at lower and lower quality; EXIF is kept, since the orientation is in it. Pictures with an alpha channel or 16 bits are not
    touched: a JPEG has neither, and what would become of them is the model's to say.
    """
    if len(data) <= limit:
        return data
    try:
        with Image.open(io.BytesIO(data)) as picture:
            exif = picture.getexif().tobytes()
            if picture.mode not in _JPEG_MODES:
                return None
            for quality in (90, 75, 50, 25):
                buffer = io.BytesIO()
                picture.save(buffer, "JPEG", quality=quality, exif=exif)
                if buffer.tell() <= limit:
                    return buffer.getvalue()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None
    return None
