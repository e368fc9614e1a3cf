"""A device's decoder through torch makes the host's rows of a JPEG. Here it decodes on the CPU; tests/gpu/ has nvJPEG do it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from imaging_samples import UPRIGHT, astronaut, encoded, marked, red_box
from outboard.imaging import tiles
from outboard.imaging.coded import Job
from outboard.imaging.header import read_header
from outboard.imaging.tiles import Tiling
from outboard.problems import Problem
from outboard.repository import Input
from outboard.worker import torch_decode


def photo(width: int, height: int) -> np.ndarray:
    whole = np.tile(astronaut(), (1 + height // 512, 1 + width // 512, 1))
    return np.ascontiguousarray(whole[:height, :width])


def job_of(body: bytes, given: Input, tiling: Tiling | None = None) -> Job:
    header = read_header(body, max_pixels=10**8)
    plan = tiles.plan(header.width, header.height, given, tiling, 128) if tiling else None
    return Job(header, plan, tiles.layout(plan, header, given) if plan else None)


def both(body: bytes, given: Input, tiling: Tiling | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The host's rows, and the device's."""
    job = job_of(body, given, tiling)
    host = np.zeros(job.shape(given), np.uint8)
    job.fill(body, given, host)
    device = torch.full(job.shape(given), 7, dtype=torch.uint8)
    with torch.inference_mode():
        torch_decode.fill(job, np.frombuffer(body, np.uint8), given, device)
    return host, device.numpy()


def agree(host: np.ndarray, device: np.ndarray) -> None:
    difference = np.abs(host.astype(np.int16) - device)
    assert difference.mean() < 1.0, f"rows differ by {difference.mean():.2f} levels on the average, at most {difference.max()}"


@pytest.mark.parametrize("fit", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize("size", [(500, 400), (1003, 701), (1920, 1080), (3769, 600), (90, 60)])
def test_a_row_is_the_hosts(fit: str, size: tuple[int, int]) -> None:
    agree(*both(encoded(photo(*size)), Input(size=(224, 160), fit=fit)))  # type: ignore[arg-type]


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("size", [(640, 400), (639, 401)])
def test_a_picture_is_turned_upright(orientation: int, size: tuple[int, int]) -> None:
    agree(*both(encoded(photo(*size), orientation=orientation), Input(size=(224, 160))))


@pytest.mark.parametrize("tile", [0, 320, 900], ids=["cut as they are", "resized", "shrunk by the decoder"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_tiles_are_the_hosts(tile: int, orientation: int) -> None:
    agree(*both(encoded(photo(2000, 1200), orientation=orientation), Input(size=(256, 192)), Tiling(size=tile)))


@pytest.mark.parametrize("mode", ["grey", "BGR", "progressive"])
def test_colours_are_the_hosts(mode: str) -> None:
    pixels = photo(700, 500)
    given = Input(size=(224, 160), color="BGR" if mode == "BGR" else "RGB")
    agree(*both(encoded(pixels[..., 0] if mode == "grey" else pixels, progressive=mode == "progressive"), given))


def test_a_mark_is_where_the_host_has_it() -> None:
    host, device = both(encoded(marked(3769, 2101, 3700, 2000, 60), quality=98), Input(size=(512, 512)))
    assert np.abs(np.subtract(red_box(host[0]), red_box(device[0]))).max() <= 1


def test_what_the_decoder_cannot_read_is_an_error_and_a_bomb_is_not_read() -> None:
    body = encoded(photo(640, 480))
    given = Input(size=(224, 160))
    job = job_of(body, given)
    memory = torch.zeros(job.shape(given), dtype=torch.uint8)
    with pytest.raises(RuntimeError):
        torch_decode.fill(job, np.frombuffer(b"\xff\xd8" + bytes(500), np.uint8), given, memory)
    other = np.frombuffer(encoded(photo(320, 240)), np.uint8)
    with pytest.raises(RuntimeError, match="the header says 640 x 480"):
        torch_decode.fill(job, other, given, memory)
    scans = encoded(photo(64, 48), progressive=True)
    bomb = scans[:-2] + b"\xff\xda" * 200 + scans[-2:]
    with pytest.raises(Problem, match="scans"):
        torch_decode.fill(job_of(bomb, given), np.frombuffer(bomb, np.uint8), given, memory)
