"""Rows that a worker cuts out of pictures in the slab."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_graphs as graphs
from integration.workerkit import WorkerKit
from outboard.core.state import Picture
from outboard.devices.protocol import Done, Loaded

HEIGHT, WIDTH = 6, 8
ROW = HEIGHT * WIDTH * 3
LINES, PITCH = 40, 3 * 100


def place(worker: WorkerKit, n: int) -> tuple[Picture, np.ndarray]:
    """A picture in the slab, and its pixels."""
    pixels = np.random.default_rng(n).integers(0, 256, (LINES, PITCH // 3, 3), np.uint8)
    (offset,) = worker.place([pixels])
    return Picture(n, offset, LINES * PITCH, PITCH), pixels


def compare(worker: WorkerKit, folder: Path) -> list[int]:
    """Rows of two pictures and one that lies whole, in two batches, have the answers of the same rows that lie apart; returns the bytes
    that each batch has sent over the link, those that lie apart last."""
    network = worker.load(folder)
    assert isinstance(network, Loaded), network
    (first, a), (second, b) = place(worker, 1), place(worker, 2)
    whole = np.random.default_rng(3).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8)
    (at,) = worker.place([whole])
    uploaded = []
    for lines in (0, 3), (3, 4):
        tiles = [(picture, pixels, line, 11 * line) for picture, pixels in ((first, a), (second, b)) for line in lines]
        offsets = [picture.offset + line * PITCH + 3 * left for picture, _, line, left in tiles]
        apart = [pixels[line : line + HEIGHT, left : left + WIDTH] for _, pixels, line, left in tiles]
        worker.submit(network, whole.shape, [*offsets, at], (first, second))
        done = worker.expect(Done)
        uploaded.append(done.uploaded)
        got = worker.outputs(done)["y"]
        worker.submit(network, whole.shape, worker.place([*apart, whole]))
        done = worker.expect(Done)
        np.testing.assert_array_equal(got, worker.outputs(done)["y"])
    return [*uploaded, done.uploaded]


@pytest.mark.parametrize("device", ["cpu", "sim:thunderbolt4", "sim:oculink,vram=512KiB"])
def test_rows_cut_out_of_pictures_have_the_answers_of_rows_that_lie_apart(tmp_path: Path, device: str) -> None:
    with WorkerKit(tmp_path / "cache", device) as worker:
        uploaded = compare(worker, graphs.folder(tmp_path, graphs.convolution()))
    if device == "cpu":
        assert uploaded == [0, 0, 0]
    elif device == "sim:thunderbolt4":  # lines 0 to 9 of both pictures; then line 9, as the others are there
        assert uploaded == [2 * 9 * PITCH + ROW, 2 * 1 * PITCH + ROW, 5 * ROW]
    else:  # two pictures do not fit the part of its memory that is for them
        assert uploaded == [9 * PITCH + 3 * ROW, 1 * PITCH + 3 * ROW, 5 * ROW]


def test_a_row_outside_its_picture_fails_and_the_next_batch_does_not(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:thunderbolt4") as worker:
        network = worker.load(graphs.folder(tmp_path, graphs.channel_means()))
        assert isinstance(network, Loaded), network
        picture, pixels = place(worker, 1)
        worker.submit(network, (HEIGHT, WIDTH, 3), [picture.offset + (LINES - HEIGHT + 1) * PITCH], (picture,))
        failed = worker.receive()
        assert getattr(failed, "kind", "") == "input" and "leaves its picture" in failed.message, failed
        worker.submit(network, (HEIGHT, WIDTH, 3), [picture.offset], (picture,))
        got = worker.outputs(worker.expect(Done))["y"]
        assert np.allclose(got, pixels[:HEIGHT, :WIDTH].mean((0, 1)) / 255, atol=1e-4)
