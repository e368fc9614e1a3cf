"""The worker process with torch networks on the CPU."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the `torch` extra is not installed")
pytest.importorskip("torchvision", reason="the `torch` extra is not installed")

from integration.workerkit import WorkerKit  # noqa: E402
from outboard.devices.protocol import Done, Loaded, LoadFailed  # noqa: E402

HEIGHT, WIDTH = 6, 8
MANIFEST = """task = "tensor"
backend = "torch"
file = "{file}"
{more}[input]
size = [8, 6]
mean = [0.485, 0.456, 0.406]
std = [0.229, 0.224, 0.225]
[output]
decoder = "tensor"
[batching]
max = 2
[run]
compile = {compile}
"""


class Small(torch.nn.Module):
    """A convolution and channel means; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.convolution(x).relu().mean((2, 3)), x.mean((2, 3))


def exported(root: Path, *, compiled: bool = False, frozen: bool = False) -> Path:
    folder = root / "small"
    folder.mkdir()
    shapes = None if frozen else ({0: torch.export.Dim("n", min=1, max=64)},)
    program = torch.export.export(Small().eval(), (torch.zeros(2, 3, HEIGHT, WIDTH),), dynamic_shapes=shapes)
    torch.export.save(program, folder / "small.pt2")
    (folder / "model.toml").write_text(MANIFEST.format(file="small.pt2", more="", compile=str(compiled).lower()))
    return folder


def pictures(n: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (n, HEIGHT, WIDTH, 3), np.uint8))


def expected(images: list[np.ndarray]) -> list[np.ndarray]:
    x = (np.stack(images).astype(np.float32) / 255 - np.float32([0.485, 0.456, 0.406])) / np.float32([0.229, 0.224, 0.225])
    with torch.no_grad():
        return [t.numpy() for t in Small().eval()(torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2))))]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerKit]:
    """One for the tests that compile nothing: importing torch takes seconds, and what is refused must not hurt what comes after it."""
    with WorkerKit(tmp_path_factory.mktemp("cache")) as kit:
        yield kit


@pytest.mark.parametrize("frozen", [False, True])
def test_an_export_archive_answers_as_the_module_did(worker: WorkerKit, tmp_path: Path, frozen: bool) -> None:
    network = worker.load(exported(tmp_path, frozen=frozen))
    assert isinstance(network, Loaded), network
    assert network.provider == "torch eager" and network.fixed_rows == (2 if frozen else 0)
    assert [name for name, _, _ in network.outputs] == ["output_0", "output_1"]
    for n in (1, 2, 3):
        answers = worker.run(network, pictures(n))
        for got, want in zip(answers.values(), expected(pictures(n)), strict=True):
            assert np.allclose(got, want, atol=1e-5)


def test_a_file_that_is_no_archive_is_refused(worker: WorkerKit, tmp_path: Path) -> None:
    folder = exported(tmp_path)
    (folder / "small.pt2").write_bytes((folder / "small.pt2").read_bytes()[:1000])
    failed = worker.load(folder)
    assert isinstance(failed, LoadFailed) and failed.key == "file" and "torch.export" in failed.expected


def test_an_archive_of_another_size_is_refused_with_its_size(worker: WorkerKit, tmp_path: Path) -> None:
    folder = exported(tmp_path)
    (folder / "model.toml").write_text((folder / "model.toml").read_text().replace("[8, 6]", "[9, 6]"))
    failed = worker.load(folder)
    assert isinstance(failed, LoadFailed) and (failed.key, failed.expected) == ("input.size", "[8, 6]")


def test_weights_that_do_not_fit_their_builder_are_refused_by_key(worker: WorkerKit, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torchvision.models import squeezenet1_1

    folder = tmp_path / "squeezenet"
    folder.mkdir()
    (folder / "model.toml").write_text(
        MANIFEST.format(file="w.safetensors", more='builder = "torchvision:squeezenet1_1"\n', compile="false")
    )
    weights = squeezenet1_1().state_dict()
    weights["nonsense"] = weights.pop("classifier.1.bias")
    save_file(weights, folder / "w.safetensors")
    failed = worker.load(folder)
    assert isinstance(failed, LoadFailed)
    assert "1 keys missing: classifier.1.bias" in failed.message and "1 keys unexpected: nonsense" in failed.message


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: nothing can be compiled")
def test_eager_serves_until_compiled_code_agrees_and_is_faster(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache") as worker:
        network = worker.load(exported(tmp_path, compiled=True))
        assert isinstance(network, Loaded) and network.provider == "torch eager"
        before = worker.run(network, pictures(2))
        again = worker.expect(Loaded, timeout=500)
        assert again.provider == "torch compiled" and again.version == network.version
        for n in (1, 2, 3):  # 3 is no bucket: it runs eager
            answers = worker.run(again, pictures(n))
            for got, want in zip(answers.values(), expected(pictures(n)), strict=True):
                assert np.allclose(got, want, atol=1e-4)
        worker.submit(again, pictures(1)[0].shape, worker.place(pictures(2)))
        assert worker.expect(Done).recompilations == 0
    assert before.keys() == answers.keys()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: nothing can be compiled")
def test_nothing_is_compiled_anew_after_the_warm_up_and_it_would_be_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outboard import repository
    from outboard.worker.backend_torch import CompiledBackend, TorchBackend
    from outboard.worker.devices import CpuDevice
    from outboard.worker.networks import LoadedNetwork

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    spec, device = repository.read(exported(tmp_path, compiled=True)), CpuDevice()
    network = spec.networks[""]
    backend = CompiledBackend(TorchBackend(network, spec, device, 1), network, device, [1, 2])
    loaded = LoadedNetwork(spec, network, backend, device)
    images = pictures(5)
    memory = np.stack(images).reshape(-1)
    for n in (1, 2, 3, 5, 2, 1):  # 3 and 5 are no buckets
        answers = loaded.run(memory, [i * images[0].nbytes for i in range(n)], (HEIGHT, WIDTH, 3))
        assert np.allclose(answers["output_0"], expected(images[:n])[0], atol=1e-4)
    assert backend.recompilations == 0 == loaded.recompiled()
    backend._eager.run_with(backend._forward, np.stack(images[:3]))  # as if 3 rows were not kept from the compiled code
    assert backend.recompilations == 1
    assert (loaded.recompiled(), loaded.recompiled()) == (1, 0), "told once"


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: nothing can be compiled")
def test_libraries_that_a_killed_compiler_left_half_written_are_compiled_again(tmp_path: Path) -> None:
    folder, cache = exported(tmp_path, compiled=True), tmp_path / "cache"
    for _ in range(2):
        with WorkerKit(cache) as worker:
            assert isinstance(worker.load(folder), Loaded)
            assert worker.expect(Loaded, timeout=500).provider == "torch compiled"
        libraries = list(cache.rglob("*.main.so"))
        assert libraries
        for library in libraries:
            library.write_bytes(b"")


def said(capfd: pytest.CaptureFixture[str], words: str) -> str:
    """What the worker has written until these words came: it compiles beside its work. Without them: until it has had its time."""
    log, end = "", time.monotonic() + 60
    while words not in log and time.monotonic() < end:
        log += capfd.readouterr().err
        time.sleep(0.05)
    return log


def test_without_a_folder_for_compiled_code_eager_serves_and_the_log_says_what_to_set(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with WorkerKit(Path("/proc/outboard")) as worker:
        network = worker.load(exported(tmp_path, compiled=True))
        assert isinstance(network, Loaded) and network.provider == "torch eager", network
        answers = worker.run(network, pictures(2))
        assert np.allclose(answers["output_0"], expected(pictures(2))[0], atol=1e-5)
        log = said(capfd, "compiled code cannot be kept")
        worker.send_stop_and_wait()
    assert "compiled code cannot be kept: /proc/outboard/inductor cannot be written" in log and "OUTBOARD_CACHE" in log


def test_without_a_compiler_eager_goes_on_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with WorkerKit(tmp_path / "cache") as worker:
        network = worker.load(exported(tmp_path, compiled=True))
        assert isinstance(network, Loaded) and network.provider == "torch eager"
        answers = worker.run(network, pictures(2))
        assert np.allclose(answers["output_0"], expected(pictures(2))[0], atol=1e-5)
        log = said(capfd, "stays eager")
        worker.send_stop_and_wait()
    assert "stays eager" in log
