"""A picture goes into the network's input, and boxes come back to where they were in the submitted image."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from imaging_samples import CODED, astronaut, encoded, marked, red_box
from outboard.imaging.decode import decode
from outboard.imaging.fit import decode_size, fit
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header, read_header
from outboard.repository import Input

FITS = ["letterbox", "stretch", "crop"]


def fitted(data: bytes, input: Input, *, scaled: bool = True) -> tuple[np.ndarray, Geometry]:
    """What the server does with a body: header, decode, fit into a dirty piece of a larger memory."""
    header = read_header(data, max_pixels=50_000_000)
    pixels = decode(data, header, min_size=decode_size(header, input) if scaled else None, background=input.background)
    width, height = input.size
    memory = np.full((3, height, width, 3), 77, np.uint8)
    geometry = fit(pixels, header, input, memory[1])
    assert (memory[0] == 77).all() and (memory[2] == 77).all()
    return memory[1], geometry


def forward(g: Geometry, x: float, y: float) -> tuple[float, float]:
    return x * g.scale_x + g.pad_x, y * g.scale_y + g.pad_y


def centre(pixels: np.ndarray) -> tuple[float, float]:
    """(x, y) of the middle of what is red, to a fraction of a pixel: shades at its edges count by how red they are."""
    red = np.clip(pixels[..., 0].astype(float) - pixels[..., 1], 0, None)
    red[red < 12] = 0  # the JPEG's ringing
    ys, xs = np.mgrid[: red.shape[0], : red.shape[1]] + 0.5
    return (red * xs).sum() / red.sum(), (red * ys).sum() / red.sum()


# ---- where things lie

SHAPES = [(3775, 1571), (427, 640), (581, 640), (1920, 1080), (1080, 1920), (1000, 1000), (2520, 1080), (640, 427), (100, 37)]


@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("input_size", [(416, 416), (640, 384), (224, 224)])
@pytest.mark.parametrize("kind", ["letterbox", "stretch"])
def test_a_marked_block_is_found_to_half_a_pixel_where_the_geometry_says(size, input_size, kind):
    """G01, G02: through a scaled decode, for odd sizes and all aspects."""
    side = max(16, size[0] // 8)
    block = (size[0] // 2, size[1] // 3, size[0] // 2 + side, size[1] // 3 + side)
    data = encoded(marked(*size, block[0], block[1], side), quality=95)
    out, geometry = fitted(data, Input(size=input_size, fit=kind))
    found = geometry.to_image(np.array(centre(out)))
    step = max(1 / geometry.scale_x, 1 / geometry.scale_y)  # a network pixel; bilinear sampling shifts an edge by up to a tenth of it
    assert np.abs(found - ((block[0] + block[2]) / 2, (block[1] + block[3]) / 2)).max() <= 0.5 + 0.1 * step


@pytest.mark.parametrize("size", [(3840, 2160), (2160, 3840), (640, 480), (300, 300)])
def test_a_centre_crop_keeps_the_middle_and_knows_it(size):
    block = (size[0] // 2 - 24, size[1] // 2 - 24, size[0] // 2 + 24, size[1] // 2 + 24)
    out, geometry = fitted(encoded(marked(*size, block[0], block[1], 48), quality=95), Input(size=(224, 224), fit="crop", crop=0.875))
    assert geometry.pad_x <= 0 and geometry.pad_y <= 0
    x1, y1, x2, y2 = red_box(out)
    assert abs((x1 + x2) / 2 - 112) <= 1 and abs((y1 + y2) / 2 - 112) <= 1
    assert np.abs(geometry.to_image(np.array([x1, y1, x2, y2])) - block).max() <= 0.5 + 0.5 / geometry.scale_x


@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_that_no_factor_divides_stay_exact_in_every_orientation(orientation):
    """A decoder that shrinks by 8 rounds 1769 up; the block is near the far edge, where that would show most."""
    scene = marked(1769, 1001, 1600, 880, 100)
    coded = np.ascontiguousarray(CODED[orientation](scene))
    for kind in FITS:
        out, geometry = fitted(encoded(coded, orientation=orientation, quality=95), Input(size=(190, 110), fit=kind))
        assert np.abs(geometry.to_image(np.array(centre(out))) - (1650, 930)).max() <= 0.5


def test_a_corner_block_of_a_4k_picture_comes_back_to_its_pixels():
    """D22: answers are in the submitted image, not in the shrunk frame."""
    out, geometry = fitted(encoded(marked(3840, 2160, 3000, 2000, 80), quality=95), Input(size=(416, 416)))
    assert np.abs(geometry.to_image(np.array(red_box(out))) - (3000, 2000, 3080, 2080)).max() <= 0.5 + 0.5 / geometry.scale_x


sizes = st.tuples(st.integers(1, 4000), st.integers(1, 4000))
inputs = st.builds(
    Input,
    size=st.tuples(st.integers(1, 500), st.integers(1, 500)),
    fit=st.sampled_from(FITS),
    crop=st.sampled_from([1.0, 0.875, 0.5]),
)


@settings(max_examples=100, deadline=None)
@given(sizes, inputs, st.floats(0, 1), st.floats(0, 1))
@example((3775, 1571), Input(size=(416, 416)), 1.0, 1.0)
@example((427, 640), Input(size=(640, 640)), 0.0, 1.0)
@example((581, 640), Input(size=(640, 640)), 1.0, 0.0)
@example((1, 5000), Input(size=(416, 416)), 1.0, 1.0)
@example((5000, 1), Input(size=(224, 224), fit="crop"), 0.5, 0.5)
@example((20, 1), Input(size=(700, 1), fit="crop", crop=0.5), 1.0, 0.0)
@example((1, 1), Input(size=(224, 224), fit="crop", crop=0.875), 0.5, 0.5)
def test_every_point_makes_the_round_trip(size, input, u, v):
    """The geometry that `fit` returns is the one that it used, to half a pixel of the image, for all sizes."""
    header = Header("png", *size)
    wanted = decode_size(header, input) or size
    pixels = np.zeros((max(1, min(size[1], wanted[1])), max(1, min(size[0], wanted[0])), 3), np.uint8)
    out = np.empty((input.size[1], input.size[0], 3), np.uint8)
    geometry = fit(pixels, header, input, out)
    point = np.array([u * size[0], v * size[1]])
    back = geometry.to_image(np.array(forward(geometry, *point), np.float32))
    assert np.abs(back - point).max() <= 0.5
    # Where the picture's corners fall is what is written: background outside, picture inside.
    left, top = forward(geometry, 0, 0)
    right, bottom = forward(geometry, *size)
    if input.fit != "crop":
        inside = out[round(top) : round(bottom), round(left) : round(right)]
        assert inside.size and not inside.any()
        # Half a pixel more may be picture: the last pixel of a halved odd width shows half a pixel of nothing.
        picture = out[max(0, math.floor(top)) : math.ceil(bottom), max(0, math.floor(left)) : math.ceil(right)]
        assert (out == 114).sum() == out.size - (picture == 0).sum() >= out.size - picture.size
        assert abs((right + left) / 2 - input.size[0] / 2) <= 0.5 and abs((bottom + top) / 2 - input.size[1] / 2) <= 0.5
    else:
        assert not out.any()
        assert left <= 0 and top <= 0 and right >= input.size[0] - 0.07 and bottom >= input.size[1] - 0.07


@settings(max_examples=200, deadline=None)
@given(sizes, inputs)
def test_what_is_asked_of_the_decoder_suffices_and_keeps_the_aspect(size, input):
    wanted = decode_size(Header("jpeg", *size), input)
    if wanted is None:
        return
    assert 1 <= wanted[0] < size[0] and 1 <= wanted[1] < size[1]
    covers = [w >= s for w, s in zip(wanted, input.size, strict=True)]
    assert any(covers) if input.fit == "letterbox" else all(covers)


def test_an_upright_size_is_asked_for():
    turned = Header("jpeg", 4000, 3000, orientation=6)
    assert decode_size(turned, Input(size=(300, 400))) == (300, 400)


# ---- what is written


def test_letterbox_pads_have_the_background_and_integer_sizes():
    out, geometry = fitted(encoded(Image.new("RGB", (200, 100), "white"), "PNG"), Input(size=(100, 101), background=(1, 2, 3)))
    assert (geometry.pad_x, geometry.pad_y) == (0, 25)
    assert (out[:25] == (1, 2, 3)).all() and (out[75:] == (1, 2, 3)).all() and (out[25:75] == 255).all()


@pytest.mark.parametrize("kind", FITS)
def test_a_picture_of_the_right_size_is_not_touched(kind):
    photo = np.ascontiguousarray(astronaut()[:224, 100:324])
    out, geometry = fitted(encoded(photo, "PNG"), Input(size=(224, 224), fit=kind))
    assert np.array_equal(out, photo)
    assert geometry == Geometry(224, 224, 1.0, 1.0, 0, 0)


@pytest.mark.parametrize(("color", "pixel"), [("RGB", [255, 0, 0]), ("BGR", [0, 0, 255])])
@pytest.mark.parametrize("kind", FITS)
def test_channels_are_in_the_networks_order(color, pixel, kind):
    """D06: pure red."""
    out, _ = fitted(encoded(Image.new("RGB", (64, 64), "red"), "PNG"), Input(size=(32, 32), fit=kind, color=color))
    assert (out == pixel).all()


def test_the_background_is_in_the_networks_order_too():
    out, _ = fitted(encoded(Image.new("RGB", (64, 32), "red"), "PNG"), Input(size=(32, 32), color="BGR", background=(1, 2, 3)))
    assert out[0, 0].tolist() == [3, 2, 1]


def test_grey_fits_as_colour():
    """D07"""
    out, _ = fitted(encoded(Image.new("L", (224, 224), 128)), Input(size=(100, 100)))
    assert (out == 128).all()


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("size", [(1, 1), (5000, 1), (1, 5000), (2, 3)])
@pytest.mark.parametrize("crop", [1.0, 0.1])
def test_thin_pictures_fit(size, kind, crop):
    """D13"""
    out, geometry = fitted(encoded(Image.new("RGB", size, "white"), "PNG"), Input(size=(224, 224), fit=kind, crop=crop))
    assert (out == 255).any()
    assert geometry.scale_x > 0 and geometry.scale_y > 0
    assert (geometry.width, geometry.height) == size


@pytest.mark.parametrize("kind", FITS)
@pytest.mark.parametrize("size", [(64, 64), (150, 100), (416, 234)])
def test_scaled_decode_and_full_decode_fit_the_same_picture(kind, size):
    data = encoded(cv2.resize(astronaut(), (1536, 1152), interpolation=cv2.INTER_CUBIC), quality=95)
    scaled, a = fitted(data, Input(size=size, fit=kind))
    full, b = fitted(data, Input(size=size, fit=kind), scaled=False)
    assert a == b
    assert np.abs(scaled.astype(int) - full).mean() < 4


@pytest.mark.parametrize(("size", "factor"), [((800, 600), 8), ((1920, 1080), 6), ((1230, 890), 10)])
def test_of_a_picture_that_is_shrunk_much_every_pixel_counts_alike(size, factor):
    """Halving it first changes the mean of what a network's pixel shows by rounding only."""
    photo = cv2.resize(astronaut(), size, interpolation=cv2.INTER_CUBIC)
    noisy = np.clip(photo.astype(int) + np.random.default_rng(1).integers(-40, 40, photo.shape), 0, 255).astype(np.uint8)
    width, height = size[0] // factor, size[1] // factor
    out = np.empty((height, width, 3), np.uint8)
    fit(noisy, Header("raw", *size), Input(size=(width, height), fit="stretch"), out)
    means = noisy.reshape(height, factor, width, factor, 3).mean((1, 3))
    assert np.abs(out - means).max() <= 1.5


def test_an_output_of_another_size_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="not .8, 8, 3. uint8"):
        fit(np.zeros((4, 4, 3), np.uint8), Header("png", 4, 4), Input(size=(8, 8)), np.zeros((8, 9, 3), np.uint8))
