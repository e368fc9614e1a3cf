"""One decode function: upright, RGB, complete or refused, whatever the file holds."""

from __future__ import annotations

import io
import struct
import threading
import time
import zlib
from functools import cache

import cv2
import numpy as np
import pytest
from PIL import Image

from imaging_samples import CODED, UPRIGHT, astronaut, encoded, marked, png_chunk, png_of, red_box
from outboard.imaging.decode import decode
from outboard.imaging.header import read_header
from outboard.problems import Problem


def pixels_of(data: bytes, **options) -> np.ndarray:
    pixels = decode(data, read_header(data, max_pixels=50_000_000), **options)
    assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.flags.c_contiguous
    return pixels


def refusal(data: bytes, **options) -> Problem:
    with pytest.raises(Problem) as caught:
        pixels_of(data, **options)
    return caught.value


FORMATS = {"JPEG": {}, "JPEG progressive": {"progressive": True}, "PNG": {}, "WEBP": {"quality": 95}, "WEBP lossless": {"lossless": True}}


@cache
def photograph(name: str) -> bytes:
    picture = Image.fromarray(astronaut())
    return encoded(picture.convert("CMYK")) if name == "CMYK" else encoded(picture, name.split()[0], **FORMATS[name])


# ---- orientation


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once_in_every_format(name, orientation):
    """D01, D02: the same scene, held in eight ways, has its block in the same place."""
    scene = marked(240, 320)
    coded = np.ascontiguousarray(CODED[orientation](scene))
    assert np.array_equal(UPRIGHT[orientation](coded), scene)
    pixels = pixels_of(encoded(coded, name.split()[0], orientation=orientation, **FORMATS[name]))
    assert pixels.shape == (320, 240, 3)
    assert np.abs(np.array(red_box(pixels)) - (10, 10, 30, 30)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_to_a_cmyk_jpeg_and_to_a_scaled_one(orientation):
    coded = np.ascontiguousarray(CODED[orientation](marked(480, 640, 40, 40, 80)))
    cmyk = pixels_of(encoded(Image.fromarray(coded).convert("CMYK"), orientation=orientation))
    assert np.abs(np.array(red_box(cmyk)) - (40, 40, 120, 120)).max() <= 1
    scaled = pixels_of(encoded(coded, orientation=orientation), min_size=(100, 160))
    assert scaled.shape == (160, 120, 3)
    assert np.abs(np.array(red_box(scaled)) - (10, 10, 30, 30)).max() <= 1


# ---- what is not complete


@pytest.mark.parametrize("name", [*FORMATS, "CMYK"])
@pytest.mark.parametrize("keep", [0.3, 0.5, 0.9, -100, -2, -1])
@pytest.mark.parametrize("min_size", [None, (64, 64)])
def test_cut_data_is_refused_never_made_up(name, keep, min_size):
    """D03, also where only a small picture was asked for."""
    data = photograph(name)
    cut = data[: keep if keep < 0 else int(len(data) * keep)]
    problem = refusal(cut, min_size=min_size)
    assert (problem.slug, problem.status) == ("image_truncated", 422)


def test_a_png_whose_pixels_end_early_inside_whole_chunks_is_refused():
    rows = zlib.compress(bytes(40 * (1 + 3 * 40)))
    assert pixels_of(png_of(40, 40, idat=rows)).max() == 0
    assert refusal(png_of(40, 40, idat=rows[: len(rows) // 2])).slug == "image_truncated"
    assert refusal(png_of(40, 40, idat=zlib.compress(bytes(20 * (1 + 3 * 40))))).slug == "image_truncated"
    assert refusal(png_of(40, 40)).slug == "image_truncated"


def test_a_jpeg_with_a_hole_is_refused():
    data = encoded(astronaut())
    assert refusal(data[: len(data) // 2] + b"\xff\xd9").slug == "image_truncated"
    assert refusal(data[: len(data) // 2] + bytes(2000) + data[len(data) // 2 + 2000 :]).slug == "image_truncated"


def test_padding_that_cameras_write_is_no_damage():
    data = encoded(astronaut())
    assert np.array_equal(pixels_of(data + bytes(500)), pixels_of(data))
    padded = pixels_of(data[:-2] + bytes(3) + data[-2:])
    assert np.abs(padded.astype(int) - pixels_of(data)).max() <= 2


def test_a_file_that_says_two_sizes_is_refused_before_it_is_decoded():
    small = png_of(10, 10, chunks=png_chunk(b"IHDR", struct.pack(">IIBBBBB", 15000, 15000, 8, 2, 0, 0, 0)))
    assert refusal(small).slug in ("image_invalid", "image_truncated")


def test_a_jpeg_of_a_thousand_empty_scans_is_refused():
    data = encoded(marked(64, 64), progressive=True)
    start = data.rindex(b"\xff\xda")
    assert refusal(data[:start] + data[start:-2] * 200 + data[-2:]).slug == "image_invalid"


def test_pillow_is_left_strict():
    from PIL import ImageFile

    import outboard.imaging.decode

    assert outboard.imaging.decode and ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_the_size_check_does_not_need_pillows_guard(monkeypatch):
    """D11: some libraries switch it off for the whole process."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert refusal(png_of(20000, 20000)).slug == "image_too_large"


# ---- kinds of pixels


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_grey_becomes_three_equal_channels(format):
    assert np.unique(pixels_of(encoded(Image.new("L", (224, 224), 128), format))).tolist() == [128]


def test_16_bit_grey_keeps_its_256_levels():
    """D04: clipping would leave 2 levels, nearly all of them white."""
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0)
    data = cv2.imencode(".png", ramp)[1].tobytes()
    assert read_header(data, max_pixels=10**6).bit_depth == 16
    pixels = pixels_of(data)
    assert np.array_equal(pixels[0, :, 0], ramp[0] >> 8)
    assert len(np.unique(pixels)) == 256 and np.array_equal(pixels[..., 0], pixels[..., 2])


@pytest.mark.parametrize("channels", [3, 4])
def test_16_bit_colour_loses_its_low_byte(channels):
    deep = np.random.default_rng(0).integers(0, 65536, (16, 16, channels), np.uint16)
    deep[..., 3:] = 65535
    pixels = pixels_of(cv2.imencode(".png", deep)[1].tobytes())
    assert np.array_equal(pixels, (deep[..., 2::-1] >> 8).astype(np.uint8))


def test_cmyk_jpegs_have_their_colours_with_and_without_adobes_marker():
    photo = Image.fromarray(astronaut()).resize((128, 128))
    with_marker = encoded(photo.convert("CMYK"), quality=95)
    assert b"Adobe" in with_marker
    assert np.abs(pixels_of(with_marker).astype(int) - np.asarray(photo)).mean() < 4
    at = with_marker.index(b"\xff\xee")
    bare = with_marker[:at] + with_marker[at + 2 + struct.unpack_from(">H", with_marker, at + 2)[0] :]
    assert b"Adobe" not in bare and np.array_equal(pixels_of(bare), pixels_of(with_marker))


def test_cmyk_jpegs_are_scaled_too():
    data = encoded(Image.fromarray(astronaut()).convert("CMYK"))
    assert pixels_of(data, min_size=(100, 100)).shape == (128, 128, 3)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_transparent_pixels_show_the_background(format):
    """D08"""
    clear = encoded(Image.new("RGBA", (32, 32), (255, 0, 0, 0)), format, **({"lossless": True} if format == "WEBP" else {}))
    assert np.unique(pixels_of(clear)).tolist() == [114]
    assert pixels_of(clear, background=(1, 2, 3))[5, 5].tolist() == [1, 2, 3]
    half = encoded(Image.new("RGBA", (32, 32), (200, 0, 100, 128)), format, **({"lossless": True} if format == "WEBP" else {}))
    assert np.abs(pixels_of(half, background=(0, 100, 200))[5, 5].astype(int) - (100, 50, 150)).max() <= 1


def test_grey_with_alpha_and_palettes_with_transparency_show_the_background():
    assert np.unique(pixels_of(encoded(Image.new("LA", (32, 32), (200, 0)), "PNG"))).tolist() == [114]
    palette = Image.new("P", (32, 32), 1)
    palette.putpalette([255, 0, 0, 0, 255, 0])
    palette.paste(0, (0, 0, 16, 32))
    pixels = pixels_of(encoded(palette, "PNG", transparency=0))
    assert pixels[0, 0].tolist() == [114, 114, 114] and pixels[0, 31].tolist() == [0, 255, 0]


def test_a_colour_key_is_transparent():
    plain = encoded(np.array([[[7, 8, 9], [1, 2, 3]]], np.uint8), "PNG")
    keyed = plain[:33] + png_chunk(b"tRNS", struct.pack(">HHH", 7, 8, 9)) + plain[33:]
    assert pixels_of(keyed)[0].tolist() == [[114, 114, 114], [1, 2, 3]]


@pytest.mark.parametrize("mode", ["1", "P"])
def test_bilevel_and_palette_pngs_are_expanded(mode):
    picture = Image.fromarray(astronaut()).convert(mode)
    assert np.array_equal(pixels_of(encoded(picture, "PNG")), np.asarray(picture.convert("RGB")))


def test_the_first_frame_of_an_animation_is_the_picture():
    frames = [Image.new("RGB", (40, 30), c) for c in ("red", "blue")]
    for format in ("PNG", "WEBP"):
        pixels = pixels_of(encoded(frames[0], format, save_all=True, append_images=frames[1:]))
        assert red_box(pixels) == (0, 0, 40, 30)


@pytest.mark.parametrize("size", [(1, 1), (5000, 1), (1, 5000)])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_thin_pictures_decode(size, format):
    """D13"""
    data = encoded(Image.new("RGB", size, "white"), format)
    assert pixels_of(data, min_size=(1, 1)).min() > 250
    assert pixels_of(data).shape == (size[1], size[0], 3)


# ---- scaled decode


@pytest.mark.parametrize("size", [(3840, 2160), (3775, 1571), (427, 640), (513, 511), (20, 9)])
@pytest.mark.parametrize("wanted", [(224, 224), (416, 234), (640, 360), (1900, 1000), (5000, 5000), (1, 1)])
def test_a_scaled_decode_is_never_smaller_than_what_is_needed(size, wanted):
    data = encoded(marked(*size), quality=50)
    height, width = pixels_of(data, min_size=wanted).shape[:2]
    assert width >= min(wanted[0], size[0]) and height >= min(wanted[1], size[1])
    assert width <= size[0] and height <= size[1]


def test_a_block_is_in_its_place_after_a_scaled_decode():
    """D22: 4K, a block at (3000, 2000)."""
    pixels = pixels_of(encoded(marked(3840, 2160, 3000, 2000, 64)), min_size=(416, 234))
    assert pixels.shape == (270, 480, 3)
    assert np.abs(np.array(red_box(pixels)) * 8 - (3000, 2000, 3064, 2064)).max() <= 8


def test_a_scaled_decode_shows_the_same_picture():
    data = encoded(astronaut(), quality=95)
    scaled = pixels_of(data, min_size=(120, 120))
    reference = cv2.resize(astronaut(), (128, 128), interpolation=cv2.INTER_AREA)
    assert np.abs(scaled.astype(int) - reference).mean() < 2.5


def test_a_scaled_decode_is_at_most_as_dear_as_a_full_one_and_both_beat_pillow():
    """D21, as a ratio: the absolute time is the machine's."""
    data = encoded(cv2.resize(astronaut(), (2560, 1440)), quality=88)
    header = read_header(data, max_pixels=50_000_000)

    def best(work) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return min(times)

    scaled = best(lambda: decode(data, header, min_size=(224, 126)))
    pillow = best(lambda: np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert scaled < pillow * 0.8


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_other_threads_run_while_a_picture_is_decoded(format):
    """D21: the event loop must not wait for a decoder that holds the interpreter's lock."""
    data = encoded(cv2.resize(astronaut(), (1920, 1080)), format, **({"method": 0} if format == "WEBP" else {}))
    ticks, done = [], threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=tick)
    other.start()
    began = time.perf_counter()
    for _ in range(4):
        pixels_of(data)
    took = time.perf_counter() - began
    done.set()
    other.join()
    assert len(ticks) > took / 0.02, f"{len(ticks)} turns in {took:.3f} s"
