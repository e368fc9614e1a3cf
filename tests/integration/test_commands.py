"""The commands against a server with a simulated device, and a pipeline model asked in odd ways."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

import graphs
from integration.serverkit import Server, serving
from outboard.cli import app

ROOT = Path(__file__).resolve().parents[2]


def outboard(server: Server, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"OUTBOARD_URL": server.url})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    graphs.write_model(models, "m", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    with serving(models, "--device", "sim:thunderbolt4") as running:
        yield running


def test_plugging_in_does_not_bring_an_ejected_device_back_and_says_what_does(server: Server) -> None:
    assert outboard(server, "eject", "sim:0").exit_code == 0
    done = outboard(server, "replug", "sim:0")
    assert done.exit_code == 0 and "outboard devices reset sim:0" in done.stdout
    assert outboard(server, "devices", "reset", "sim:0").exit_code == 0
    server.until(lambda: server.device("sim:0")["state"] == "serving", 60)
    done = outboard(server, "replug", "sim:0")
    assert "it serves once it has proved itself" in done.stdout


def test_plugging_in_does_not_end_a_quarantine_and_says_what_does(server: Server) -> None:
    server.client.post("/v1/devices/sim:0/fault", json={"fault": "wrong-answers"})
    server.until(lambda: server.device("sim:0")["state"] == "quarantined", 60)
    done = outboard(server, "replug", "sim:0")
    assert "tried again when its quarantine ends" in done.stdout and "outboard devices reset sim:0" in done.stdout
    server.client.post("/v1/devices/sim:0/fault", json={"fault": "clear"})
    assert outboard(server, "devices", "reset", "sim:0").exit_code == 0
    server.until(lambda: server.device("sim:0")["state"] == "serving", 60)


def test_a_lost_device_is_listed_with_its_loss(server: Server) -> None:
    assert outboard(server, "unplug", "sim:0").exit_code == 0
    done = outboard(server, "devices")
    line = next(x for x in done.stdout.splitlines() if x.startswith("sim:0"))
    assert done.exit_code == 1 and "lost" in line and "unplugged (simulated)" in line
    outboard(server, "replug", "sim:0")
    server.until(lambda: server.device("sim:0")["state"] == "serving", 60)
    line = next(x for x in outboard(server, "devices").stdout.splitlines() if x.startswith("sim:0"))
    assert "serving" in line and "ago: unplugged (simulated)" in line


def test_devices_that_there_are_not_are_named_with_those_that_there_are(server: Server) -> None:
    for device in ("cuda:0", "a b", "sim:0?x=1"):
        done = outboard(server, "eject", device)
        assert done.exit_code == 1 and "known: cpu, sim:0" in done.stderr


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not list((ROOT / "models" / "ocr").glob("*.onnx")) or not (ROOT / ".cache" / "samples" / "page.png").is_file():
        pytest.skip("the models were not fetched; run `make models`")
    models = tmp_path_factory.mktemp("ocr")
    shutil.copytree(ROOT / "models" / "ocr", models / "ocr")
    with serving(models, "--device", "cpu") as running:
        yield running


@pytest.mark.long
def test_the_times_of_a_pipeline_add_up_to_its_total(reading: Server) -> None:
    page = (ROOT / ".cache" / "samples" / "page.png").read_bytes()
    for _ in range(3):
        timing = reading.predict("ocr", page).json()["timing_ms"]
        parts = sum(value for name, value in timing.items() if name != "total")
        assert abs(parts - timing["total"]) < 0.1, timing  # each is rounded to 0.01


@pytest.mark.long
@pytest.mark.parametrize("options", [{"tile": "auto"}, {"top_k": "0"}, {"min_score": "2"}, {"lines": "3"}, {"overlap": "0.5"}])
def test_options_that_a_pipeline_does_not_take_are_refused(reading: Server, options: dict[str, str]) -> None:
    page = (ROOT / ".cache" / "samples" / "page.png").read_bytes()
    response = reading.predict("ocr", page, **options)
    assert response.status_code == 422 and response.json()["type"] == "bad_option"
    assert next(iter(options)) in response.json()["detail"] or "tile" in response.json()["detail"]


@pytest.mark.long
def test_a_pipeline_takes_the_options_that_every_model_takes(reading: Server) -> None:
    page = (ROOT / ".cache" / "samples" / "page.png").read_bytes()
    answer = reading.predict("ocr", page, top_k=2, min_score=0.9, deadline_ms=30000, strict_device="true").json()
    assert len(answer["texts"]) == 2 and min(t["score"] for t in answer["texts"]) >= 0.9
    response = reading.predict("ocr", page, deadline_ms=1)
    assert response.status_code in (503, 504) and response.json()["type"] in ("overloaded", "deadline_missed")
