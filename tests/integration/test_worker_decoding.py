"""JPEGs that a worker's device decodes itself, on a simulated one: the rows are the host's to the last bit."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

import graphs
from imaging_samples import astronaut, encoded
from integration.workerkit import WorkerKit
from outboard.core.state import Coded, Picture
from outboard.devices.protocol import Done, Failed, Loaded
from outboard.imaging import tiles
from outboard.imaging.coded import Job, packed, write
from outboard.imaging.header import read_header
from outboard.imaging.tiles import Tiling
from outboard.repository import Input

SIZE = (96, 64)
ROW = SIZE[0] * SIZE[1] * 3
DECODES = "sim:thunderbolt4,decode=1"
_ids = itertools.count(1)


def same(tmp_path: Path, fit: str = "letterbox") -> Path:
    """A model that answers with its input."""
    return graphs.write_model(tmp_path, "same", graphs.identity(SIZE), graphs.toml("tensor", "tensor", SIZE, input=f'fit = "{fit}"'))


def photo(width: int = 700, height: int = 480, orientation: int = 1) -> bytes:
    return encoded(np.tile(astronaut(), (1, 2, 1))[:height, :width], orientation=orientation)


def place(
    worker: WorkerKit, body: bytes, tiling: Tiling | None = None, fit: str = "letterbox"
) -> tuple[Coded, np.ndarray, list[int], tuple[Picture, ...]]:
    """A JPEG in the slab for a device's decoder; its rows as the host makes them, their offsets, and the pictures they are cut from."""
    given = Input(size=SIZE, fit=fit)  # type: ignore[arg-type]
    header = read_header(body, max_pixels=10**8)
    plan = tiles.plan(header.width, header.height, given, tiling, 128) if tiling else None
    layout = tiles.layout(plan, header, given) if plan else None
    job = Job(header, plan, layout)
    host = np.zeros(job.shape(given), np.uint8)
    job.fill(body, given, host)
    head, frame = packed(job), next(_ids)
    offset = worker.allocator.alloc(host.nbytes + len(head) + len(body))
    write(head, body, worker.slab.view(offset + host.nbytes, (len(head) + len(body),)))
    source = Coded(frame, offset, host.nbytes, offset + host.nbytes, len(head) + len(body))
    if layout is None:
        return source, host, [offset + i * ROW for i in range(len(host))], ()
    picture = host[: layout.picture].reshape(-1, layout.pitch // 3, 3)
    rows = []
    for start in layout.starts:
        line, at = divmod(start, layout.pitch)
        whole = start >= layout.picture
        rows.append(host[start:].reshape(SIZE[1], SIZE[0], 3) if whole else picture[line : line + SIZE[1], at // 3 : at // 3 + SIZE[0]])
    return source, np.stack(rows), [offset + start for start in layout.starts], (Picture(frame, offset, layout.picture, layout.pitch),)


def pixels_of(answers: np.ndarray) -> np.ndarray:
    """float [n, 3, h, w] of 0..1 -> uint8 [n, h, w, 3]"""
    return np.round(answers.transpose(0, 2, 3, 1) * 255).astype(np.uint8)


@pytest.mark.parametrize("fit", ["letterbox", "stretch", "crop"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_rows_decoded_on_the_device_are_those_of_the_host(tmp_path: Path, fit: str, orientation: int) -> None:
    with WorkerKit(tmp_path / "cache", DECODES) as worker:
        network = worker.load(same(tmp_path, fit))
        assert isinstance(network, Loaded), network
        assert network.decoder is not None and network.decoder.seconds(1_000_000) >= 0.9e-3, "it takes at least the modelled time"
        frames = [place(worker, photo(width, 480, orientation), fit=fit) for width in (700, 501)]
        worker.submit(network, (SIZE[1], SIZE[0], 3), [o for f in frames for o in f[2]], (), tuple(f[0] for f in frames))
        done = worker.expect(Done)
        np.testing.assert_array_equal(pixels_of(worker.outputs(done)["output"]), np.concatenate([f[1] for f in frames]))
        assert done.uploaded == sum(f[0].length for f in frames), "only the JPEGs cross the link"
        assert done.decoding >= 0.9e-3 * (700 + 501) * 480 / 1e6


@pytest.mark.parametrize("tile", [0, 300], ids=["cut as they are", "resized"])
def test_tiles_of_one_picture_are_decoded_once_in_however_many_batches_they_come(tmp_path: Path, tile: int) -> None:
    with WorkerKit(tmp_path / "cache", DECODES) as worker:
        network = worker.load(same(tmp_path))
        assert isinstance(network, Loaded), network
        source, rows, offsets, pictures = place(worker, photo(), Tiling(size=tile))
        assert bool(pictures) == (tile == 0)
        half = len(offsets) // 2
        worker.submit(network, (SIZE[1], SIZE[0], 3), offsets[:half], pictures, (source,))
        first = worker.expect(Done)
        answers = [worker.outputs(first)["output"]]
        worker.submit(network, (SIZE[1], SIZE[0], 3), offsets[half:], pictures, (source,))
        second = worker.expect(Done)
        answers.append(worker.outputs(second)["output"])
        np.testing.assert_array_equal(pixels_of(np.concatenate(answers)), rows)
        assert first.uploaded == source.length and second.uploaded == 0
        assert first.decoding > 0 and second.decoding == 0


@pytest.mark.parametrize("tiling", [None, Tiling(whole=False)], ids=["whole", "tiles"])
def test_rows_that_the_host_has_decoded_share_a_batch_with_those_of_the_device(tmp_path: Path, tiling: Tiling | None) -> None:
    with WorkerKit(tmp_path / "cache", DECODES) as worker:
        network = worker.load(same(tmp_path))
        assert isinstance(network, Loaded), network
        source, rows, offsets, pictures = place(worker, photo(), tiling)
        other, host_rows, host_offsets, host_pictures = place(worker, photo(600), tiling)
        given, header = Input(size=SIZE), read_header(photo(600), max_pixels=10**8)
        plan = tiles.plan(header.width, header.height, given, tiling, 128) if tiling else None
        job = Job(header, plan, tiles.layout(plan, header, given) if plan else None)
        job.fill(photo(600), given, worker.slab.view(other.offset, job.shape(given)))
        mixed = [host_offsets[0], offsets[0], host_offsets[-1]]
        worker.submit(network, (SIZE[1], SIZE[0], 3), mixed, (*pictures, *host_pictures), (source,))
        done = worker.expect(Done)
        expected = np.stack([host_rows[0], rows[0], host_rows[-1]])
        np.testing.assert_array_equal(pixels_of(worker.outputs(done)["output"]), expected)
        assert done.uploaded > source.length


def test_of_a_batch_the_rows_that_cannot_be_decoded_are_named_and_the_next_batch_is_answered(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", DECODES) as worker:
        network = worker.load(same(tmp_path))
        assert isinstance(network, Loaded), network
        good, other = place(worker, photo()), place(worker, photo(600))
        bad = place(worker, photo(640))
        damaged = worker.slab.view(bad[0].source + bad[0].length // 2, (bad[0].length // 4,))
        damaged[...] = 0
        shape = (SIZE[1], SIZE[0], 3)
        worker.submit(network, shape, [*good[2], *bad[2], *other[2]], (), (good[0], bad[0], other[0]))
        failed = worker.expect(Failed)
        assert (failed.kind, failed.undecoded) == ("decode", [1]), failed
        worker.submit(network, shape, [*good[2], *other[2]], (), (good[0], other[0]))
        done = worker.expect(Done)
        np.testing.assert_array_equal(pixels_of(worker.outputs(done)["output"]), np.concatenate([good[1], other[1]]))
        assert done.uploaded == 0, "what was decoded beside it is still there"


def test_a_picture_for_which_the_device_has_no_room_is_left_to_the_host(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", DECODES + ",vram=4MiB") as worker:
        network = worker.load(same(tmp_path))
        assert isinstance(network, Loaded) and network.decoder is not None, network
        source, _, offsets, pictures = place(worker, photo(), Tiling())
        assert source.nbytes > 4 * 2**20 / 32
        worker.submit(network, (SIZE[1], SIZE[0], 3), offsets[:2], pictures, (source,))
        failed = worker.expect(Failed)
        assert (failed.kind, failed.undecoded) == ("decode", [0, 1]) and "no room" in failed.message, failed


def test_a_device_without_a_decoder_says_so(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:thunderbolt4") as worker:
        network = worker.load(same(tmp_path))
        assert isinstance(network, Loaded) and network.decoder is None, network
