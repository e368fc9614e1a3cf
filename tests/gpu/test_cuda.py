"""Both backends on an NVIDIA GPU. Skipped, with the reason, where there is none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_graphs as graphs
import tensor_graphs as tensors
from integration import test_worker_pictures as pictures_of_a_worker
from integration.tensorkit import outputs
from integration.workerkit import WorkerKit
from outboard.devices.protocol import Loaded, Ping, Pong

HEIGHT, WIDTH = 6, 8
PROBE = (
    "from cuda.bindings import runtime as r; import uuid; e, p = r.cudaGetDeviceProperties(0); "
    "print('GPU-' + str(uuid.UUID(bytes=bytes(p.uuid.bytes))) if int(e) == 0 else 'none: ' + e.name)"
)


def _gpu() -> str:
    """The first GPU's UUID; "none: why" without one. Asked in a process of its own: this one stays free of CUDA."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() or "none: " + (done.stderr.strip().splitlines() or ["no CUDA bindings"])[-1]


GPU = _gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPU.startswith("none"), reason=f"no NVIDIA GPU is usable here ({GPU})")]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerKit]:
    with WorkerKit(tmp_path / "cache", GPU) as kit:
        yield kit


def pictures(n: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (n, HEIGHT, WIDTH, 3), np.uint8))


def test_the_device_tells_its_name_memory_and_measured_link(worker: WorkerKit) -> None:
    hello = worker.hello
    assert hello.uuid == GPU and hello.name
    assert 0 < hello.memory_free <= hello.memory_total
    assert hello.h2d_bytes_per_s > 1e8 and hello.d2h_bytes_per_s > 1e8
    worker.send(Ping(1))
    assert worker.expect(Pong).memory_free > 0


@pytest.mark.parametrize("frozen", ["n", 1, 3])
def test_an_onnx_graph_runs_on_cuda_and_agrees_with_the_cpu(worker: WorkerKit, tmp_path: Path, frozen: int | str) -> None:
    graph = graphs.convolution() if frozen == "n" else graphs.channel_means((frozen, 3, HEIGHT, WIDTH))
    folder = graphs.folder(tmp_path, graph)
    network = worker.load(folder)
    assert isinstance(network, Loaded), network
    assert network.provider == "CUDAExecutionProvider"
    with WorkerKit(tmp_path / "cpu") as host:
        reference = host.load(folder)
        for n in (1, 2, 4):
            got, want = worker.run(network, pictures(n))["y"], host.run(reference, pictures(n))["y"]
            assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()


@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-3), ("fp16", 2e-2), ("bf16", 2e-2)])
def test_a_torch_export_runs_on_cuda_in_every_precision(worker: WorkerKit, tmp_path: Path, precision: str, tolerance: float) -> None:
    pytest.importorskip("torch", reason="the `torch` extra is not installed")
    from integration.test_worker_torch import expected, exported

    folder = exported(tmp_path)
    (folder / "model.toml").write_text((folder / "model.toml").read_text() + f'precision = "{precision}"\n')
    network = worker.load(folder)
    assert isinstance(network, Loaded), network
    for n in (1, 2):
        answers = worker.run(network, pictures(n))
        for got, want in zip(answers.values(), expected(pictures(n)), strict=True):
            assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def test_rows_across_the_slab_s_pinned_chunks_arrive_whole(tmp_path: Path) -> None:
    chunk = 64 * 1024 * 1024
    with WorkerKit(tmp_path / "cache", GPU, slab_bytes=2 * chunk) as worker:
        network = worker.load(graphs.folder(tmp_path, graphs.channel_means()))
        assert isinstance(network, Loaded), network
        image = pictures(1)[0]
        offset = chunk - image.nbytes // 2
        worker.slab.view(offset, image.shape)[...] = image
        worker.submit(network, image.shape, [offset])
        done = worker.receive()
        assert np.allclose(worker.outputs(done)["y"], image.mean((0, 1)) / 255, atol=1e-4)  # type: ignore[arg-type]


def test_tensors_of_several_dtypes_and_strings_reach_the_gpu(worker: WorkerKit, tmp_path: Path) -> None:
    mixed = worker.load(tensors.write(tmp_path, "mixed", tensors.mixed()))
    assert isinstance(mixed, Loaded), mixed
    assert mixed.provider == "CUDAExecutionProvider"
    for rows in (1, 3):
        x = np.random.default_rng(0).standard_normal((rows, 5), np.float32)
        k, z = np.arange(rows), np.ones((rows, 3, 1))
        assert np.allclose(outputs(worker, mixed, x, k, z)["sums"], x + k[:, None] + 3, atol=1e-5)
    words = worker.load(tensors.write(tmp_path, "words", tensors.words_to_numbers()))
    assert isinstance(words, Loaded), words
    assert outputs(worker, words, np.array([[b"cat", b"dog"]], object))["y"].tolist() == [[1, 2]]
    half = worker.load(tensors.write(tmp_path, "half", tensors.same("FP16")))
    x = np.array([[1.5, np.inf, -0.0, 7]], np.float16)
    assert outputs(worker, half, x)["y"].tobytes() == x.tobytes()


def test_tiles_are_cut_on_the_gpu_out_of_lines_that_crossed_the_link_once(worker: WorkerKit, tmp_path: Path) -> None:
    uploaded = pictures_of_a_worker.compare(worker, graphs.folder(tmp_path, graphs.convolution()))
    pitch, row = pictures_of_a_worker.PITCH, pictures_of_a_worker.ROW
    assert uploaded == [2 * 9 * pitch + row, 2 * 1 * pitch + row, 5 * row]
