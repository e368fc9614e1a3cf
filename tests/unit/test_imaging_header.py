"""The header tells what an image is, and refuses what cannot be used, before a pixel is decoded."""

from __future__ import annotations

import struct
import timeit

import numpy as np
import pytest
from PIL import Image

from imaging_samples import astronaut, encoded, marked, png_chunk, png_of
from outboard.imaging.header import Header, read_header
from outboard.problems import Problem

LIMIT = 50_000_000


def header(data: bytes) -> Header:
    return read_header(data, max_pixels=LIMIT)


def refusal(data: bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        header(data)
    return caught.value


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_size_is_upright_and_the_coded_size_is_kept(format, orientation):
    h = header(encoded(marked(320, 240), format, orientation=orientation))
    assert (h.format, h.coded_width, h.coded_height) == (format.lower(), 320, 240)
    assert h.orientation == (orientation or 1)
    assert (h.width, h.height) == ((240, 320) if (orientation or 1) >= 5 else (320, 240))


@pytest.mark.parametrize(
    ("mode", "format", "stored"),
    [
        ("L", "JPEG", "L"),
        ("CMYK", "JPEG", "CMYK"),
        ("RGB", "JPEG", "RGB"),
        ("1", "PNG", "L"),
        ("P", "PNG", "P"),
        ("LA", "PNG", "LA"),
        ("RGBA", "PNG", "RGBA"),
        ("RGBA", "WEBP", "RGBA"),
    ],
)
def test_stored_mode_is_told(mode, format, stored):
    picture = Image.fromarray(astronaut()).convert(mode)
    if mode == "RGBA":
        picture.putalpha(100)
    assert header(encoded(picture, format)).mode == stored


def test_16_bit_is_told():
    assert header(encoded(Image.fromarray(np.zeros((4, 4), np.uint16)), "PNG")).bit_depth == 16
    assert header(encoded(marked(32, 32), "PNG")).bit_depth == 8


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_is_none(value):
    assert header(encoded(marked(32, 40), orientation=value)).orientation == 1


@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_read_in_both_byte_orders_and_among_other_tags(order):
    entries = [(0x010F, 2, 4, 0x41424300), (0x0112, 3, 1, 6 if order == "<" else 6 << 16), (0x011A, 4, 1, 0)]
    ifd = struct.pack(order + "H", len(entries)) + b"".join(struct.pack(order + "HHII", *e) for e in entries)
    tiff = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8) + ifd
    app1 = b"Exif\0\0" + tiff
    plain = encoded(marked(32, 40))
    with_exif = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(app1) + 2) + app1 + plain[2:]
    assert header(with_exif).orientation == 6


def test_exif_of_a_png_is_read_also_after_the_pixels():
    tiff = b"II*\0" + struct.pack("<IHHHIHH", 8, 1, 0x0112, 3, 1, 8, 0)
    whole = encoded(marked(32, 40), "PNG")
    assert header(whole[:-12] + png_chunk(b"eXIf", tiff) + whole[-12:]).orientation == 8


def test_a_65_byte_bomb_is_refused_by_its_header():
    problem = refusal(png_of(11000, 11000)[:65])
    assert problem.slug == "image_too_large"
    assert problem.status == 413
    assert "11000 x 11000" in problem.detail and "121.0" in problem.detail and "50" in problem.detail


@pytest.mark.parametrize("data", [png_of(20000, 20000), png_of(2**31 - 1, 2**31 - 1)])
def test_larger_bombs_too(data):
    assert refusal(data).slug == "image_too_large"


def test_the_limit_is_in_pixels_and_inclusive():
    data = encoded(marked(100, 80))
    assert read_header(data, max_pixels=8000).width == 100
    with pytest.raises(Problem, match="image_too_large"):
        read_header(data, max_pixels=7999)


def test_no_bytes_are_an_empty_body():
    assert refusal(b"").slug == "empty_body"
    assert refusal(b"").status == 400


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"hello world", "text"),
        ("größe".encode(), "text"),
        (b"%PDF-1.7\n", "PDF"),
        (b"PK\x03\x04" + bytes(30), "zip"),
        (b"GIF89a" + bytes(30), "GIF"),
        (b"II*\0" + bytes(30), "TIFF"),
        (b"BM" + bytes(60), "BMP"),
        (b'<?xml version="1.0"?><svg/>', "XML"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"/9j/4AAQSkZJRgABAQ", "base64"),
        (b"data:image/png;base64,iVBOR", "data URI"),
        (b"\x00\x00\x00\x18ftypisom\0\0\2\0isommp42", "video"),
        (bytes(100), "unknown binary"),
        (b"\xff", "unknown binary"),
    ],
)
def test_what_is_no_image_is_named(data, name):
    problem = refusal(data)
    assert (problem.slug, problem.status) == ("not_an_image", 415)
    assert name in problem.detail
    assert "JPEG, PNG and WebP" in problem.detail


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1"])
def test_heic_names_the_extra_whatever_the_file_was_called(brand, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pillow_heif", None)  # as if the extra were not installed
    problem = refusal(b"\0\0\0\x18ftyp" + brand + bytes(40))
    assert (problem.slug, problem.status) == ("heic_not_supported", 415)
    assert "pip install 'outboard[heif]'" in problem.detail


def test_avif_is_refused_by_its_name():
    problem = refusal(b"\0\0\0\x18ftypavif" + bytes(40))
    assert problem.slug == "heic_not_supported" and "AVIF" in problem.detail


@pytest.mark.parametrize("size", [(0, 10), (10, 0), (0, 0)])
def test_a_side_of_0_is_refused(size):
    assert refusal(png_of(*size)).slug == "image_invalid"


def test_a_jpeg_of_height_0_is_refused():
    data = bytearray(encoded(marked(32, 40)))
    data[data.index(b"\xff\xc0") + 5 : data.index(b"\xff\xc0") + 7] = b"\0\0"
    assert refusal(bytes(data)).slug == "image_invalid"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_header_cut_short_is_truncated(format):
    data = encoded(marked(32, 40), format)
    for length in range(12, 28):
        assert refusal(data[:length]).slug == "image_truncated"


def test_millions_of_empty_segments_do_not_hold_up_the_event_loop():
    jpeg = b"\xff\xd8" + b"\xff\xe2\0\2" * 500_000
    png = png_of(10, 10, chunks=png_chunk(b"teXt", b"") * 200_000)
    began = timeit.default_timer()
    assert refusal(jpeg).slug == "image_truncated"
    assert header(png).width == 10
    assert timeit.default_timer() - began < 0.2


def test_reading_a_header_is_much_cheaper_than_opening_the_image():
    import io

    data = encoded(astronaut(), orientation=6)
    ours = min(timeit.repeat(lambda: header(data), number=200, repeat=5))
    pillow = min(timeit.repeat(lambda: Image.open(io.BytesIO(data)), number=200, repeat=5))
    assert ours < pillow / 2


def test_a_memoryview_will_do():
    assert header(memoryview(encoded(marked(32, 40), "WEBP", orientation=6))) == header(encoded(marked(32, 40), "WEBP", orientation=6))
