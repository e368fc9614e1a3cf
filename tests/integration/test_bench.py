"""`outboard bench` against servers whose speed is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import graphs
import tensor_graphs
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving
from outboard.bench.load import percentile
from outboard.bench.payload import drawn
from outboard.cli import app

SHORT = ("--seconds", "0.5s", "--warm-up", "0.1s")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    graphs.write_model(folder, "means", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32)))
    tensor_graphs.write(folder, "sums", tensor_graphs.add_and_subtract())
    return folder


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Whose card needs 20 ms for a batch, of whatever size. It measures that itself: it does not believe another run's profile."""
    cache = {"OUTBOARD_CACHE": str(tmp_path_factory.mktemp("cache"))}
    with serving(models, "--device", "sim:thunderbolt4,compute=20+0.01", env=cache) as running:
        running.until(lambda: running.device("sim:0")["state"] == "serving", what="the device serves")
        yield running


def bench(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"OUTBOARD_URL": url})


def measured(server: Server, *arguments: str) -> dict[str, Any]:
    done = bench(server.url, *arguments, "--json", *SHORT)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_one_connection_waits_for_each_batch(server: Server) -> None:
    found = measured(server, "means", "--connections", "1", "--size", "64x48")
    assert 20 <= found["latency_ms"]["p50"] <= found["latency_ms"]["p95"] <= found["latency_ms"]["max"]
    assert 0 < found["fps"] <= 50 and found["answered"] == found["devices"]["sim:0"]
    assert found["server_ms"]["infer"] >= 20 and found["simulated"] and not found["refused"]
    assert [d["id"] for d in found["hardware"]] == ["sim:0"] and found["hardware"][0]["link"]["h2d_bytes_per_s"] > 0
    assert found["hardware"][0]["most_rows"] >= 1 and found["host"]["decode_threads"] > found["host"]["cores"] > 0


def test_more_connections_share_batches(server: Server) -> None:
    one = measured(server, "means", "--connections", "1", "--size", "64x48")["fps"]
    # Three tries: half a second on a machine that does something else shows nothing.
    assert any(measured(server, "means", "--connections", "8", "--size", "64x48")["fps"] > 1.3 * one for _ in range(3))


def test_a_rate_is_kept_whatever_the_answers_do(server: Server) -> None:
    found = measured(server, "means", "--rate", "30", "--size", "64x48")
    assert 10 <= found["answered"] <= 16 and not found["not_sent"] and found["latency_ms"]["p50"] >= 20


def test_photographs_are_sent_in_turn_and_one_that_is_none_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "good.jpg").write_bytes(encoded(scene(64, 48, 5, 5, 20)))
    (tmp_path / "bad.jpg").write_bytes(b"no picture")
    done = bench(server.url, "means", str(tmp_path / "good.jpg"), str(tmp_path / "bad.jpg"), *SHORT)
    assert done.exit_code == 1 and "not answered: not_an_image" in done.stdout and "for example:" in done.stdout


def test_tensors_are_random_numbers_of_the_right_shape(server: Server) -> None:
    found = measured(server, "sums", "--connections", "2")
    assert found["answered"] > 0 and not found["refused"]


def test_a_missed_target_is_the_answer_no(server: Server) -> None:
    done = bench(server.url, "means", "--connections", "1", "--size", "64x48", "--min-fps", "1000", "--max-p99", "1ms", *SHORT)
    assert done.exit_code == 1 and "at least 1000" in done.stdout and "p99 is" in done.stdout


def test_what_cannot_be_measured_is_told_at_once(server: Server, tmp_path: Path) -> None:
    assert "no model" in bench(server.url, "none").stderr and bench(server.url, "none").exit_code == 1
    assert bench(server.url, "means", "--device", "cpu").exit_code == 2
    assert "--size" in (wrong := bench(server.url, "means", "--size", "huge")).stderr and wrong.exit_code == 2
    assert bench(server.url, "means", str(tmp_path / "absent.jpg")).exit_code == 2
    gone = bench("http://127.0.0.1:9", "means")
    assert gone.exit_code == 1 and "http://127.0.0.1:9" in gone.stderr


def test_without_a_url_a_server_is_started_and_ended(models: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "means", "--models", str(models), "--device", "cpu", "--size", "64x48", *SHORT])
    assert done.exit_code == 0, done.output
    assert "means:" in done.stdout and "cpu (" in done.stdout and "100% of the answers" in done.stdout
    assert "p99.9" in done.stdout and "batches of at most " in done.stdout and " decode threads" in done.stdout


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "means", "--models", str(tmp_path / "none")])
    assert done.exit_code == 1 and "no such folder" in done.stderr


def test_percentiles_are_values_that_were_measured() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 0.999, 1.0)] == [50, 95, 99, 100, 100]
    assert percentile([7], 0.5) == 7


def test_the_drawn_picture_is_as_heavy_as_a_photograph() -> None:
    assert 0.12 < len(drawn(1280, 720)) / (1280 * 720) < 0.3
