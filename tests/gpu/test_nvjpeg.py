"""JPEGs that a real GPU decodes by nvJPEG; skipped, and said so, without one."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from gpu.test_cuda import GPU
from imaging_samples import astronaut, encoded
from integration.workerkit import WorkerKit
from outboard.core.state import Coded, Picture
from outboard.devices.protocol import Done, Failed, Loaded
from outboard.imaging import tiles
from outboard.imaging.coded import Job, packed, write
from outboard.imaging.header import read_header
from outboard.imaging.tiles import Tiling
from outboard.repository import Input

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPU.startswith("none"), reason=f"no NVIDIA GPU is usable here ({GPU})")]

SIZE = (224, 160)
SHAPE = (SIZE[1], SIZE[0], 3)
MANIFEST = f"""task = "tensor"
backend = "torch"
file = "same.pt2"
[input]
size = [{SIZE[0]}, {SIZE[1]}]
[output]
decoder = "tensor"
[batching]
max = 4
[run]
compile = false
"""
_ids = itertools.count(1)


def same(root: Path) -> Path:
    """A torch model that answers with its input."""
    torch = pytest.importorskip("torch", reason="the `torch` extra is not installed")
    pytest.importorskip("torchvision", reason="the `torch` extra is not installed")

    class Same(torch.nn.Module):
        def forward(self, x):
            return x + 0.0

    folder = root / "same"
    folder.mkdir()
    dynamic = ({0: torch.export.Dim("n", min=1, max=64)},)
    program = torch.export.export(Same().eval(), (torch.zeros(2, 3, SIZE[1], SIZE[0]),), dynamic_shapes=dynamic)
    torch.export.save(program, folder / "same.pt2")
    (folder / "model.toml").write_text(MANIFEST)
    return folder


def photo(width: int, height: int) -> np.ndarray:
    return np.ascontiguousarray(np.tile(astronaut(), (1 + height // 512, 1 + width // 512, 1))[:height, :width])


def place(worker: WorkerKit, body: bytes, tiling: Tiling | None = None) -> tuple[Coded, Job, np.ndarray]:
    """The JPEG in the slab, and the memory that the host would have filled."""
    given = Input(size=SIZE)
    header = read_header(body, max_pixels=10**8)
    plan = tiles.plan(header.width, header.height, given, tiling, 128) if tiling else None
    job = Job(header, plan, tiles.layout(plan, header, given) if plan else None)
    host = np.zeros(job.shape(given), np.uint8)
    job.fill(body, given, host)
    head = packed(job)
    offset = worker.allocator.alloc(host.nbytes + len(head) + len(body))
    write(head, body, worker.slab.view(offset + host.nbytes, (len(head) + len(body),)))
    return Coded(next(_ids), offset, host.nbytes, offset + host.nbytes, len(head) + len(body)), job, host


def compare(got: np.ndarray, host: np.ndarray) -> None:
    pixels = got.transpose(0, 2, 3, 1) * 255
    assert np.abs(pixels - host).mean() < 2.0


@pytest.fixture
def worker(tmp_path: Path):
    with WorkerKit(tmp_path / "cache", GPU, slab_bytes=256 << 20) as kit:
        yield kit


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("kind", ["colour", "grey", "progressive"])
def test_rows_are_the_hosts_but_for_rounding(worker: WorkerKit, tmp_path: Path, orientation: int, kind: str) -> None:
    network = worker.load(same(tmp_path))
    assert isinstance(network, Loaded), network
    assert network.decoder is not None, "its rows of the measured pictures agree with the host's"
    pixels = photo(1920, 1080)
    body = encoded(pixels[..., 0] if kind == "grey" else pixels, orientation=orientation, progressive=kind == "progressive")
    frames = [place(worker, body), place(worker, encoded(photo(1003, 701)))]
    worker.submit(network, SHAPE, [f[0].offset for f in frames], (), tuple(f[0] for f in frames))
    done = worker.expect(Done)
    compare(next(iter(worker.outputs(done).values())), np.concatenate([f[2] for f in frames]))
    assert done.decoding > 0


def test_tiles_are_cut_out_of_the_decoded_picture(worker: WorkerKit, tmp_path: Path) -> None:
    network = worker.load(same(tmp_path))
    assert isinstance(network, Loaded), network
    source, job, host = place(worker, encoded(photo(1200, 800)), Tiling())
    layout = job.layout
    assert layout is not None
    picture = Picture(source.id, source.offset, layout.picture, layout.pitch)
    rows = layout.starts[:3]
    worker.submit(network, SHAPE, [source.offset + start for start in rows], (picture,), (source,))
    done = worker.expect(Done)
    lines = host[: layout.picture].reshape(-1, layout.pitch // 3, 3)
    places = [(start // layout.pitch, start % layout.pitch // 3) for start in rows]
    compare(next(iter(worker.outputs(done).values())), np.stack([lines[y : y + SIZE[1], x : x + SIZE[0]] for y, x in places]))


def test_what_nvjpeg_refuses_is_left_to_the_host_and_the_context_lives(worker: WorkerKit, tmp_path: Path) -> None:
    network = worker.load(same(tmp_path))
    assert isinstance(network, Loaded), network
    bad, _, _ = place(worker, encoded(photo(640, 480)))
    worker.slab.view(bad.source + bad.length // 2, (bad.length // 4,))[...] = 0xFF
    worker.submit(network, SHAPE, [bad.offset], (), (bad,))
    answer = worker.receive()
    assert isinstance(answer, Done) or (isinstance(answer, Failed) and answer.kind == "decode"), answer
    good, _, host = place(worker, encoded(photo(640, 480)))
    worker.submit(network, SHAPE, [good.offset], (), (good,))
    compare(next(iter(worker.outputs(worker.expect(Done)).values())), host)


def test_what_a_4k_photograph_costs_here_and_there(worker: WorkerKit, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the figures by which the server would choose."""
    network = worker.load(same(tmp_path))
    assert isinstance(network, Loaded) and network.decoder is not None, network
    body = encoded(photo(3840, 2160))
    given = Input(size=SIZE)
    _, job, host = place(worker, body)
    began = time.perf_counter()
    job.fill(body, given, host)
    here = time.perf_counter() - began
    there = network.decoder.seconds(3840 * 2160)
    with capsys.disabled():
        print(f"\n4K, {len(body) / 1e6:.2f} MB: host {here * 1e3:.1f} ms on one thread, nvJPEG {there * 1e3:.1f} ms")
