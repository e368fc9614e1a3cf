"""The load tests measure what they say: Locust's count is the server's, targets that are missed fail, and the stream's soak is clean."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import graphs
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving

ROOT = Path(__file__).resolve().parents[2]
LOADTESTS = ROOT / "loadtests"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("models")
    graphs.write_model(folder, "rgb", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32)))
    with serving(folder, "--device", "sim:thunderbolt4,compute=2+1") as running:
        running.until(lambda: running.device("sim:0")["state"] == "serving", 60)
        yield running


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for n in range(4):
        (tmp_path / f"{n}.jpg").write_bytes(encoded(scene(640, 480, 40 * n, 80, 40)))
    return tmp_path


def locust(server: Server, users: str, images: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", LOADTESTS / users, "--headless", "--only-summary", "--host", server.url]
    command += ["--model", "rgb", "--images", images, "--run-time", "6s", "--users", "2", "--spawn-rate", "2", *flags]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=100, cwd=ROOT)


def counts(printed: str) -> tuple[int, int]:
    """(the server's count, Locust's)"""
    found = re.search(r"the server's own counter: (\d+); by Locust's: (\d+)", printed)
    assert found, printed
    return int(found[1]), int(found[2])


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("users", "flags"),
    [
        ("locustfile.py", ["--run-time", "3s"]),
        pytest.param("locustfile.py", ["--arrivals", "20"], marks=LONG),
        pytest.param("tensor_users.py", [], marks=LONG),
        pytest.param("stream_users.py", ["--fps", "15"], marks=LONG),
        pytest.param(
            "stream_users.py",
            ["--fps", "0", "--in-flight", "4", "--policy", "lossless", "--max-links-lost", "0", "--max-dropped", "0"],
            marks=LONG,
        ),
        pytest.param("stream_users.py", ["--fps", "0", "--in-flight", "1", "--bundle", "3", "--policy", "lossless"], marks=LONG),
    ],
)
def test_locust_counts_what_the_server_counts(server: Server, images: Path, users: str, flags: list[str]) -> None:
    done = locust(server, users, images, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    theirs, ours = counts(done.stdout)
    assert ours > 10 and abs(theirs - ours) <= 0.02 * ours + 2
    assert "p99.9" in done.stdout and "load generator: " in done.stdout and "device sim:0: " in done.stdout
    assert " decode threads" in done.stdout


@pytest.mark.long
def test_an_unplug_in_the_middle_is_seen_and_a_missed_target_fails(server: Server, images: Path) -> None:
    done = locust(server, "stream_users.py", images, "--fps", "20", "--unplug", "sim:0", "--unplug-after", "2", "--replug-after", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sim:0 -> cpu" in done.stdout
    fast = locust(server, "locustfile.py", images, "--min-fps", "100000", "--max-p99-turns", "0.1")
    assert fast.returncode == 1 and "wanted at least 100000" in fast.stdout and "wanted at most 0.1 turns of " in fast.stdout
    wrong = locust(server, "stream_users.py", images, "--model", "nothing")
    assert wrong.returncode == 1 and "model_not_found" in wrong.stdout + wrong.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", ["live", "lossless"])
def test_the_books_of_a_4k_stream_are_right_over_a_failing_link_and_an_unplug(policy: str) -> None:
    """`loadtests/stream_soak.py` for a minute, at a rate that a busy machine holds in `lossless` too."""
    fps, answered = ("15", "0.3") if policy == "live" else ("2", "1")
    command = [sys.executable, LOADTESTS / "stream_soak.py", "--seconds", "60", "--every", "10", "--stall", "2"]
    command += ["--policy", policy, "--fps", fps, "--min-answered", answered]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_soaks_network_finds_the_disc_wherever_it_is() -> None:
    import onnxruntime

    import stream_soak

    session = onnxruntime.InferenceSession(stream_soak.network(), providers=["CPUExecutionProvider"])
    for data, place in stream_soak.film((0, 20, 47)):
        pixels = np.asarray(Image.open(io.BytesIO(data)).resize(stream_soak.INPUT, Image.Resampling.BOX), np.float32) / 255
        x1, y1, x2, y2, score, kind = session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})[0][0, 0]
        scale = stream_soak.SIZE[0] / stream_soak.INPUT[0]
        assert abs((x1 + x2) / 2 * scale - place["x"]) < stream_soak.NEAR and abs((y1 + y2) / 2 * scale - place["y"]) < stream_soak.NEAR
        assert score > 0.1 and kind == 0


def test_the_soak_tells_a_worker_that_grows_from_one_that_comes_to_what_its_predecessor_had() -> None:
    import stream_soak

    def samples(last: Callable[[float], float]) -> stream_soak.Samples:
        """A worker of 170 MB, lost half way; the one that replaces it has `last(seconds)` MB."""
        return [(at, {"front": 300.0, **({"worker 1": 170.0} if at < 300 else {"worker 2": last(at)})}) for at in range(0, 600, 2)]

    stepping = samples(lambda at: 131.0 if at < 470 else 169.0)
    assert abs(stream_soak.growth(stepping, "worker 2", 400)) < 0.1
    beyond = samples(lambda at: 131.0 if at < 470 else 190.0)
    assert stream_soak.growth(beyond, "worker 2", 400) > 2
    leaking = samples(lambda at: 160.0 + 4 * (at - 300) / 60)
    assert stream_soak.growth(leaking, "worker 2", 400) > 2
    assert abs(stream_soak.growth(leaking, "front", 400)) < 0.1
