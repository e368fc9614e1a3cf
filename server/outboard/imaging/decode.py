"""Compressed bytes -> upright RGB pixels: the only place where pixels are decoded and where EXIF orientation is applied.

Decoders disagree about orientation (Pillow never rotates; OpenCV does, for some formats in some versions), so all of them are
told to leave the picture as it is coded and the one transpose here turns it. They also disagree about damaged data, some make up
the missing part: here incomplete data is an error. JPEG goes through libjpeg-turbo (scaled in the DCT where less is needed), PNG and
WebP through OpenCV (4K WebP: 82 ms, Pillow 207), CMYK JPEG and HEIC through Pillow. All release the GIL while they work.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import cv2
import numpy as np
import simplejpeg
from PIL import Image

from outboard.imaging.header import Data, Header
from outboard.problems import Problem

cv2.setNumThreads(1)  # every decode thread is one core already

#: Warnings of libjpeg about complete pictures: padding before the end marker that cameras write, and harmless header values.
_HARMLESS = re.compile(r"extraneous bytes before marker 0xd9|Invalid SOS parameters|unknown JFIF revision|Unknown Adobe color transform")
#: A progressive JPEG of many empty scans costs a full pass over the picture for each; encoders write about ten.
_MAX_SCANS = 100

_TURN: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    2: lambda p: cv2.flip(p, 1),
    3: lambda p: cv2.rotate(p, cv2.ROTATE_180),
    4: lambda p: cv2.flip(p, 0),
    5: cv2.transpose,
    6: lambda p: cv2.rotate(p, cv2.ROTATE_90_CLOCKWISE),
    7: lambda p: cv2.rotate(cv2.transpose(p), cv2.ROTATE_180),
    8: lambda p: cv2.rotate(p, cv2.ROTATE_90_COUNTERCLOCKWISE),
}


def decode(
    data: Data, header: Header, *, min_size: tuple[int, int] | None = None, background: tuple[int, int, int] = (114, 114, 114)
) -> np.ndarray:
    """The upright picture: uint8 RGB [height, width, 3], C order.

    `header` is what read_header said of `data`. `min_size` is the (width, height) of the upright picture that suffices: a JPEG may then
    come back smaller than its header says, never smaller than that (unless the file is). Transparent pixels are laid over `background`.
    16-bit samples lose their low byte. Raises Problem: image_truncated, image_invalid.
    """
    if min_size and header.orientation >= 5:
        min_size = min_size[::-1]
    if header.format == "raw":
        return np.frombuffer(data, np.uint8).reshape(header.height, header.width, 3)
    try:
        if header.format == "jpeg" and header.mode != "CMYK":
            pixels = _jpeg(data, header, min_size)
        elif header.format in ("png", "webp"):
            pixels = _opencv(data, header, background)
        else:
            pixels = _pillow(data, header, min_size, background)
    except (Problem, MemoryError):
        raise
    except Exception as e:  # decoders raise what they like for damaged data: OSError, SyntaxError, struct.error, zlib.error …
        raise _damaged(header, str(e)) from e
    turn = _TURN.get(header.orientation)
    return turn(pixels) if turn else pixels


def decoded_size(header: Header, min_size: tuple[int, int] | None) -> tuple[int, int]:
    """(width, height) of the picture that `decode` gives."""
    factor = _shrink(header, min_size[::-1] if min_size and header.orientation >= 5 else min_size) if header.format == "jpeg" else 1
    return -(-header.width // factor), -(-header.height // factor)


def _damaged(header: Header, why: str) -> Problem:
    return Problem("image_truncated", f"The {header.format.upper()} ends too early or is damaged ({why}); send the whole file.")


def _check_size(header: Header, width: int, height: int) -> None:
    """What the decoder is about to allocate is what was admitted: a file may say two sizes to two readers."""
    if (width, height) != (header.coded_width, header.coded_height):
        stated = f"{header.coded_width} x {header.coded_height}"
        raise Problem("image_invalid", f"The image says {stated} pixels in one place and {width} x {height} in another.")


def _shrink(header: Header, min_size: tuple[int, int] | None) -> int:
    """The largest of 8, 4, 2, 1 that still leaves `min_size` (of the coded picture).

    A size that the factor does not divide is rounded up: the last column stands for some that the file only pads with. Turned to the front
    it would shift the whole picture by a fraction of a pixel, so a picture that is turned is only shrunk by what divides it.
    """
    width, height = header.coded_width, header.coded_height
    if min_size is None:
        return 1
    for factor in (8, 4, 2):
        divides = width % factor == 0 and height % factor == 0
        if -(-width // factor) >= min_size[0] and -(-height // factor) >= min_size[1] and (divides or header.orientation == 1):
            return factor
    return 1


def _jpeg(data: Data, header: Header, min_size: tuple[int, int] | None) -> np.ndarray:
    height, width, *_ = simplejpeg.decode_jpeg_header(data)
    _check_size(header, width, height)
    check_scans(data, header)
    # libjpeg-turbo also scales by n/8, but only 1/2, 1/4 and 1/8 are vectorised: 4K to 7/8 takes 78 ms, unscaled 34.
    factor = _shrink(header, min_size)
    scaled = {"min_width": -(-width // factor), "min_height": -(-height // factor), "min_factor": 1} if factor > 1 else {}
    try:
        return simplejpeg.decode_jpeg(data, "RGB", strict=True, **scaled)
    except ValueError as e:
        if not _HARMLESS.search(str(e)):
            raise
    # strict stops at the first warning; a second one, about missing data, must not be lost: Pillow insists on the end of the file.
    return _pillow(data, header, min_size, (0, 0, 0))


def check_scans(data: Data, header: Header) -> None:
    """Raises Problem for a file that would take any decoder minutes."""
    scans = bytes(data).count(b"\xff\xda") if header.progressive else 1
    if scans > _MAX_SCANS:
        raise Problem("image_invalid", f"The JPEG has {scans} scans, at most {_MAX_SCANS} are read; save it again as a baseline JPEG.")


def _opencv(data: Data, header: Header, background: tuple[int, int, int]) -> np.ndarray:
    """PNG and WebP (an animation's first frame). OpenCV refuses what is cut, also a PNG whose rows end early inside whole chunks, where
    Pillow leaves black rows. A grey PNG's colour key (tRNS) is not looked at: such a picture is opaque."""
    coded = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)  # UNCHANGED: not rotated, alpha and 16 bits kept
    if coded is None:
        raise _damaged(header, "the decoder finds less than the header promises")
    _check_size(header, coded.shape[1], coded.shape[0])
    if coded.dtype == np.uint16:
        coded = (coded >> 8).astype(np.uint8)
    if coded.ndim == 2:
        return cv2.cvtColor(coded, cv2.COLOR_GRAY2RGB)
    if coded.shape[2] == 4:
        return _flatten(Image.fromarray(cv2.cvtColor(coded, cv2.COLOR_BGRA2RGBA)), background)
    return cv2.cvtColor(coded, cv2.COLOR_BGR2RGB, dst=coded)


def _pillow(data: Data, header: Header, min_size: tuple[int, int] | None, background: tuple[int, int, int]) -> np.ndarray:
    """HEIC, and the JPEGs that libjpeg-turbo's own interface does not take. CMYK is read as Adobe stores it, inverted, as browsers do."""
    with _open(data, header) as image:
        _check_size(header, *image.size)
        if header.format == "jpeg":
            check_scans(data, header)
            factor = _shrink(header, min_size)
            image.draft(None, (image.width // factor, image.height // factor))
        if image.has_transparency_data:
            return _flatten(image.convert("RGBA"), background)
        return np.array(image.convert("RGB"))


def _open(data: Data, header: Header) -> Image.Image:
    if header.format == "heif":
        import pillow_heif  # the `heif` extra: read_header has found it

        return pillow_heif.open_heif(io.BytesIO(data)).to_pillow()
    return Image.open(io.BytesIO(data), formats=("JPEG",))


def _flatten(image: Image.Image, background: tuple[int, int, int]) -> np.ndarray:
    canvas = Image.new("RGB", image.size, background)
    canvas.paste(image, mask=image)
    return np.array(canvas)
