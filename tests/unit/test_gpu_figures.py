"""Figures of GPUs from NVML's process to the metrics. The library under that process is a fake: there is no GPU here."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outboard.devices import discovery
from outboard.http.listings import device_entry
from outboard.runtime import Runtime
from outboard.telemetry import gpus, metrics
from two_gpus import FIRST, SECOND, two_gpus

FAKE = Path(__file__).resolve().parents[1] / "fakes" / "nvml"
EGPU, TIGHT_LIPPED = FIRST, SECOND
CARD = {
    "name": "NVIDIA GeForce RTX 3060",
    "busId": "00000000:52:00.0",
    "temperature": 83,
    "power": 168250,
    "limit": 170000,
    "utilization": 97,
    "memory": [12 << 30, 5 << 30],
    "reasons": 0x04 | 0x20,
    "generation": 3,
    "width": 4,
}
#: A card that tells nothing that it need not.
BARE = {"name": "NVIDIA T400", "busId": "00000000:01:00.0", "temperature": 40, "memory": [2 << 30, 1 << 30]}


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with two_gpus(tmp_path) as runtime:
        yield runtime
        gpus.show({})


def fake(monkeypatch: pytest.MonkeyPatch, cards: dict[str, dict[str, Any]]) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("FAKE_NVML", json.dumps(cards))


def samples() -> dict[str, dict[tuple[str, ...], float]]:
    """What /metrics says of GPUs: by name, by (device, reason)."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            if sample.name.startswith("outboard_gpu_"):
                key = (sample.labels["device"], *filter(None, [sample.labels.get("reason")]))
                found.setdefault(sample.name.removeprefix("outboard_gpu_"), {})[key] = sample.value
    return found


async def test_what_nvml_tells_is_a_metric_and_what_it_does_not_tell_is_none(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {EGPU: CARD, TIGHT_LIPPED: BARE})
    await discovery.check_driver(runtime)
    told = samples()
    assert told["temperature_celsius"] == {("cuda:0",): 83, ("cuda:1",): 40}
    assert told["power_watts"] == {("cuda:0",): 168.25} and told["power_limit_watts"] == {("cuda:0",): 170}
    assert told["utilization_ratio"] == {("cuda:0",): 0.97}
    assert told["memory_used_bytes"][("cuda:0",)] == 5 << 30 and told["memory_free_bytes"][("cuda:0",)] == 7 << 30
    assert told["pcie_link_generation"] == {("cuda:0",): 3} and told["pcie_link_width"] == {("cuda:0",): 4}
    assert {key[1] for key, on in told["throttle_reason"].items() if on} == {"power_cap", "sw_thermal"}
    assert ("cuda:0", "hw_thermal") in told["throttle_reason"] and ("cuda:1", "hw_thermal") not in told["throttle_reason"]
    assert [d.state for d in runtime.engine.devices.values()] == ["serving", "serving"]


async def test_the_labels_are_those_of_dcgm_exporter(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {EGPU: CARD})
    await discovery.check_driver(runtime)
    family = next(f for f in text_string_to_metric_families(metrics.exposition().decode()) if f.name == "outboard_gpu_temperature_celsius")
    labels = {"device": "cuda:0", "UUID": EGPU, "pci_bus_id": "00000000:52:00.0", "modelName": "NVIDIA GeForce RTX 3060"}
    assert [sample.labels for sample in family.samples] == [labels]


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (Debian: prometheus)")
async def test_promtool_minds_nothing_but_how_dcgm_exporter_spells_model_name(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {EGPU: CARD, TIGHT_LIPPED: BARE})
    await discovery.check_driver(runtime)

    def said(text: str) -> set[str]:
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
        return {line.partition(" ")[2] for line in (done.stdout + done.stderr).splitlines() if line}

    text = metrics.exposition().decode()
    assert said(text) == {"label names should be written in 'snake_case' not 'camelCase'"}
    assert said(text.replace("modelName=", "model_name=")) == set()


async def test_a_card_that_is_lost_has_no_figures_any_more(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {EGPU: CARD, TIGHT_LIPPED: BARE})
    await discovery.check_driver(runtime)
    assert device_entry(runtime, "cuda:0")["gpu"]["temperature_c"] == 83
    assert device_entry(runtime, "cuda:0")["link"]["pcie_width"] == 4
    fake(monkeypatch, {EGPU: {**CARD, "error": 15}, TIGHT_LIPPED: BARE})
    await discovery.check_driver(runtime)
    assert runtime.engine.devices["cuda:0"].state == "lost"
    assert samples()["temperature_celsius"] == {("cuda:1",): 40}
    assert device_entry(runtime, "cuda:0")["gpu"] is None


async def test_where_nvml_hangs_there_are_no_figures_rather_than_old_ones(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, {EGPU: CARD, TIGHT_LIPPED: BARE})
    await discovery.check_driver(runtime)
    assert samples()
    await discovery.check_driver(runtime, [sys.executable, "-c", "import time; time.sleep(60)"], limit=0.2)
    assert not samples()


async def test_promtool_minds_nothing_but_dcgm_exporters_own_spelling(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    fake(monkeypatch, {EGPU: CARD, TIGHT_LIPPED: BARE})
    await discovery.check_driver(runtime)
    command = [promtool, "check", "metrics"]
    checked = await asyncio.to_thread(subprocess.run, command, input=metrics.exposition(), capture_output=True, check=False)
    said = checked.stderr.decode()
    about = {line.partition(" ")[0] for line in said.splitlines()}
    assert about == {f"outboard_gpu_{name}" for name in samples()}
    assert {line.partition(" ")[2] for line in said.splitlines()} == {"label names should be written in 'snake_case' not 'camelCase'"}


def test_the_fake_has_no_function_that_the_real_library_lacks() -> None:
    real = pytest.importorskip("pynvml")
    names = [n.name for n in ast.parse((FAKE / "pynvml.py").read_text()).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    public = [name for name in names if not name.startswith("_")]
    assert len(public) > 10 and not [name for name in public if not hasattr(real, name)]
