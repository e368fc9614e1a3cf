"""`outboard profile`: measures without a server, and what it measured is what a server begins with."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import graphs
from integration.serverkit import serving
from outboard.core.pipeline import HAND_OVER
from outboard.core.state import PIPELINE
from outboard.devices.simulated import LATENCY, LINKS
from outboard.settings import size
from outboard.worker.simulated import ACTIVATION_COPIES

DEVICE = "sim:thunderbolt4,vram=512MiB,compute=20+2,decode=1"


def profile(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outboard", "profile", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OUTBOARD_CACHE": str(cache)})


@pytest.fixture
def models(tmp_path: Path) -> Path:
    graphs.write_model(tmp_path / "models", "means", graphs.channel_means((64, 64)), graphs.toml("tensor", "tensor", (64, 64)))
    return tmp_path / "models"


def test_the_table_tells_costs_link_memory_and_the_batch_that_is_used(models: Path, tmp_path: Path) -> None:
    picture = tmp_path / "profile.png"
    flags = ("--models", str(models), "--device", DEVICE, "--deadline", "40ms")
    with ThreadPoolExecutor() as pool:  # it takes the time that it gives itself, whatever it measures
        told = pool.submit(profile, "means", *flags, "--json", cache=tmp_path / "other")
        done = profile("means", *flags, "--plot", str(picture), cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "at most 16 rows fit the memory" in done.stdout and "meet the deadline" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "JPEG decoder: " in done.stdout
    answer = json.loads(told.result().stdout)["profiles"][0]
    assert answer["decoder"]["seconds_per_megapixel"] > 0
    assert answer["link"]["h2d_bytes_per_s"] == pytest.approx(2.75e9, rel=0.05)
    assert answer["memory"]["batch_bytes"]["per_row"] == pytest.approx(64 * 64 * 3 * 4 * 6, rel=0.05)
    assert answer["batch"] <= answer["deadline_cap"] < answer["vram_cap"] == 16
    with serving(models, "--device", DEVICE, env={"OUTBOARD_CACHE": str(tmp_path / "cache")}) as server:
        server.until(lambda: "sim:0" in server.model("means")["devices"], what="the device serves")
        assert server.device("sim:0")["batches"]["means"]["measuring"]["stored"], "the server begins with the profile"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing",), "there is no model 'nothing'"),
        (("means", "--device", "sim:parallel-port"), "'parallel-port' is no link"),
        (("means", "--deadline", "soon"), "expected a time such as 200ms"),
    ],
)
def test_what_cannot_be_measured_is_said(models: Path, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    done = profile(*words, "--models", str(models), cache=tmp_path / "cache")
    assert done.returncode == 2 and said in " ".join(done.stderr.split())


def test_a_device_that_is_not_there_is_no_wrong_usage(models: Path, tmp_path: Path) -> None:
    done = profile("means", "--models", str(models), "--device", "cuda:7", cache=tmp_path / "cache")
    assert done.returncode == 1 and "shows no such GPU" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("link", "batch_ms", "row_ms", "vram"),
    [
        ("thunderbolt3", 30, 2, "256MiB"),
        ("thunderbolt4", 12, 6, "512MiB"),
        ("thunderbolt5", 50, 1, "1GiB"),
        ("oculink", 5, 15, "256MiB"),
        ("pcie4x16", 20, 4, "12MiB"),
    ],
)
def test_a_live_device_is_measured_and_its_batch_chosen_within_five_percent_of_the_truth(
    tmp_path: Path, link: str, batch_ms: float, row_ms: float, vram: str
) -> None:
    side, most = 128, 16
    graphs.write_model(tmp_path / "models", "means", graphs.channel_means((side, side)), graphs.toml("tensor", "tensor", (side, side)))
    device = f"sim:{link},vram={vram},compute={batch_ms}+{row_ms}"
    done = profile("means", "--models", str(tmp_path / "models"), "--device", device, "--json", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)["profiles"][0]
    h2d, d2h = LINKS[link]
    row_bytes = side * side * 3
    memory = row_bytes * 4 * ACTIVATION_COPIES  # of a row

    def alone(rows: int) -> float:
        return LATENCY + rows * row_bytes / h2d + (batch_ms + rows * row_ms) / 1e3

    def busy(rows: int) -> float:
        return max((batch_ms + rows * row_ms) / 1e3, alone(rows) / PIPELINE)

    near = functools.partial(pytest.approx, rel=0.05)
    measured = answer["link"]
    assert measured["h2d_bytes_per_s"] == near(h2d) and measured["d2h_bytes_per_s"] == near(d2h)
    assert measured["both_h2d_bytes_per_s"] == near(h2d) and measured["both_d2h_bytes_per_s"] == near(d2h)
    assert answer["memory"]["batch_bytes"]["per_row"] == near(memory)
    for cost in answer["batches"]:
        assert cost["alone"] == near(alone(cost["rows"])) and cost["seconds"] == near(busy(cost["rows"])), cost
        assert cost["memory"] == near(cost["rows"] * memory)
    free = size(vram) - size(vram) // 8

    def rate(rows: int, depth: int) -> float:
        return rows / max((batch_ms + rows * row_ms) / 1e3, (alone(rows) + HAND_OVER) / depth) if depth * rows * memory <= free else 0.0

    best = max(rate(rows, depth) for rows in range(1, most + 1) for depth in range(1, PIPELINE + 1))
    assert rate(answer["batch"], answer["at_once"]) >= 0.95 * best
