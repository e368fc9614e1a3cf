"""Tables in terminals of any width."""

from __future__ import annotations

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from outboard import tables

MODELS = [
    {
        "name": name,
        "state": "ready",
        "task": "classification",
        "backend": "onnx",
        "devices": ["cpu", "sim:0"],
        "input": {"width": 224, "height": 224},
        "license": "Apache-2.0 AND CC-BY-4.0",
        "source": "https://example.org/a/very/long/address/of/the/weights.onnx",
        "error": None,
    }
    for name in ("efficientnet_lite0", "efficientnet_lite0_torch", "yolov2_tiny")
]
QUARANTINED = {
    "id": "sim:0",
    "name": "simulated eGPU over thunderbolt4, 8 GiB",
    "state": "quarantined",
    "simulated": True,
    "concurrency": 2,
    "losses": 4,
    "why": "lost 4 times within 10 minutes",
}


def quarantined() -> dict:
    """Lost 3 minutes ago, tried again in a little more than 12."""
    now = datetime.now(UTC)
    return QUARANTINED | {
        "until": (now + timedelta(minutes=12, seconds=20)).isoformat(),
        "last_loss": {"at": (now - timedelta(minutes=3)).isoformat(), "why": "unplugged (simulated)"},
    }


def printed(show, entries, width: int) -> str:
    out = Console(file=io.StringIO(), width=width)
    show(out, entries)
    return out.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_names_and_states_of_models_stay_whole(width: int) -> None:
    lines = printed(tables.print_models, MODELS, width).splitlines()
    assert all(len(line) <= width for line in lines)
    for m in MODELS:
        line = next(x for x in lines if x.split()[:1] == [m["name"]])
        assert "classification" in line and "ready" in line


def test_a_narrow_terminal_leaves_out_what_matters_least() -> None:
    narrow, wide = printed(tables.print_models, MODELS, 80), printed(tables.print_models, MODELS, 200)
    assert "Source" not in narrow and "On" in narrow
    assert "Source" in wide and "weights.onnx" in wide


def test_what_is_wrong_with_a_model_is_one_line() -> None:
    broken = MODELS[0] | {"state": "failed", "error": {"file": "m/model.toml", "key": "task", "expected": "tensor " * 30, "message": ""}}
    shown = printed(tables.print_models, [broken], 200)
    assert "m/model.toml: task: expected tensor" in shown


@pytest.mark.parametrize("width", [80, 160])
def test_a_device_shows_its_quarantine_and_its_history(width: int) -> None:
    shown = " ".join(printed(tables.print_devices, [quarantined()], width).split())
    assert "sim:0" in shown and "quarantined, 12 min left" in shown and " 4 " in shown
    assert "lost 4 times" in shown


def test_the_last_loss_is_told_with_its_age() -> None:
    shown = printed(tables.print_devices, [quarantined()], 250)
    assert "last lost 3 min ago: unplugged (simulated)" in shown
