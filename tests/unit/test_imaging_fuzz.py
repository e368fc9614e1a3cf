"""Whatever arrives as a body, the only error is a Problem, and what is decoded has the size that was admitted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from imaging_samples import astronaut, encoded
from outboard.imaging.decode import decode
from outboard.imaging.header import read_header
from outboard.problems import Problem

LIMIT = 1_000_000
PHOTO = Image.fromarray(astronaut()).resize((61, 47))
SEEDS = [
    encoded(PHOTO, orientation=6),
    encoded(PHOTO, progressive=True),
    encoded(PHOTO.convert("L")),
    encoded(PHOTO.convert("CMYK")),
    encoded(PHOTO, "PNG", orientation=3),
    encoded(PHOTO.convert("P"), "PNG", transparency=3),
    encoded(PHOTO.convert("RGBA"), "PNG"),
    encoded(Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100), "PNG"),
    encoded(PHOTO, "WEBP", orientation=8),
    encoded(PHOTO.convert("RGBA"), "WEBP", lossless=True),
]
MAGIC = [
    b"",
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    *(b"RIFF\x40\0\0\0WEBP" + chunk for chunk in (b"VP8X", b"VP8 ", b"VP8L")),
    b"\0\0\0\x18ftypheic",
]


def take(data: bytes, min_size: tuple[int, int] | None = None) -> None:
    try:
        header = read_header(data, max_pixels=LIMIT)
        pixels = decode(data, header, min_size=min_size)
    except Problem as problem:
        assert 400 <= problem.status < 500
        return
    if min_size is None:
        assert pixels.shape == (header.height, header.width, 3)
    assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous and pixels.shape[0] * pixels.shape[1] <= LIMIT


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(MAGIC), st.binary(max_size=300))
def test_random_bytes(magic, tail):
    take(magic + tail)


@settings(max_examples=250, deadline=None)
@given(st.sampled_from(SEEDS), st.data(), st.sampled_from([None, (8, 8)]))
def test_images_with_wrong_bytes(seed, data, min_size):
    image = bytearray(seed)
    for _ in range(data.draw(st.integers(1, 6))):
        # Half of the changes hit the header, where the structure is.
        where = data.draw(st.one_of(st.integers(0, min(200, len(image) - 1)), st.integers(0, len(image) - 1)))
        image[where] = data.draw(st.integers(0, 255))
    take(bytes(image), min_size)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SEEDS), st.data())
def test_images_with_parts_removed_or_repeated(seed, data):
    a, b = sorted((data.draw(st.integers(0, len(seed))), data.draw(st.integers(0, len(seed)))))
    take(data.draw(st.sampled_from([seed[:a] + seed[b:], seed[:b] + seed[a:], seed[:a]])))
