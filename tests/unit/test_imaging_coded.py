"""What a device is told of a JPEG: the same rows, and the same way back into the picture, as the host's."""

from __future__ import annotations

import numpy as np
import pytest

from imaging_samples import astronaut, encoded
from outboard.imaging import coded, tiles
from outboard.imaging.header import read_header
from outboard.imaging.tiles import Tiling
from outboard.repository import Input

LIMIT = 50_000_000


def picture(width: int, height: int) -> np.ndarray:
    return np.ascontiguousarray(np.tile(astronaut(), (1 + height // 512, 1 + width // 512, 1))[:height, :width])


@pytest.mark.parametrize("fit", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("size", [(64, 48), (769, 511), (1601, 1203), (40, 1900)])
def test_where_a_picture_lies_is_known_before_its_pixels_are(fit: str, orientation: int, size: tuple[int, int]) -> None:
    body = encoded(picture(*size), orientation=orientation)
    given = Input(size=(224, 160), fit=fit)  # type: ignore[arg-type]
    job = coded.Job(read_header(body, max_pixels=LIMIT))
    memory = np.zeros(job.shape(given), np.uint8)
    assert job.shows(given) == job.fill(body, given, memory)


@pytest.mark.parametrize("tile", [0, 224, 500])
@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("size", [(700, 500), (1601, 1203), (180, 1900)])
def test_what_tiles_show_is_known_before_they_are_cut(tile: int, orientation: int, size: tuple[int, int]) -> None:
    body = encoded(picture(*size), orientation=orientation)
    given = Input(size=(224, 160))
    header = read_header(body, max_pixels=LIMIT)
    plan = tiles.plan(header.width, header.height, given, Tiling(size=tile), 128)
    job = coded.Job(header, plan, tiles.layout(plan, header, given))
    memory = np.zeros(job.shape(given), np.uint8)
    assert job.shows(given) == job.fill(body, given, memory)


def test_a_job_and_its_jpeg_come_out_of_frame_memory_as_they_went_in() -> None:
    body = encoded(picture(900, 700), orientation=6)
    given = Input(size=(224, 224))
    header = read_header(body, max_pixels=LIMIT)
    plan = tiles.plan(header.width, header.height, given, Tiling(), 128)
    job = coded.Job(header, plan, tiles.layout(plan, header, given))
    head = coded.packed(job)
    memory = np.zeros(len(head) + len(body), np.uint8)
    coded.write(head, memoryview(body), memory)
    got, jpeg = coded.read(memory)
    assert got == job and jpeg.tobytes() == body


def test_devices_get_whole_files_that_every_decoder_reads_alike() -> None:
    pixels = picture(64, 48)

    def for_devices(body: bytes) -> bool:
        return coded.for_devices(read_header(body, max_pixels=LIMIT), body)

    body = encoded(pixels)
    assert for_devices(body) and for_devices(encoded(pixels, progressive=True)) and for_devices(encoded(pixels[..., 0]))
    assert not for_devices(body[:-100]), "its end is missing, which decoders of devices do not tell"
    assert not for_devices(encoded(pixels, "PNG"))
    as_rgb = body.replace(b"\xff\xc0", b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00\xff\xc0", 1)
    assert not for_devices(as_rgb), "its three colours are stored as they are"
    arithmetic = body.replace(b"\xff\xc0", b"\xff\xc9", 1)
    assert not for_devices(arithmetic)


def test_cmyk_is_for_the_host() -> None:
    from PIL import Image

    body = encoded(Image.fromarray(picture(64, 48)).convert("CMYK"))
    assert not coded.for_devices(read_header(body, max_pixels=LIMIT), body)
