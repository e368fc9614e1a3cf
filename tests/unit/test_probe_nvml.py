"""NVML as a sign of loss: asked in a process of its own, which may hang or say that a card is gone that sysfs still shows."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from outboard.devices import discovery, probe
from outboard.runtime import Runtime
from two_gpus import FIRST, SECOND, two_gpus

LOST, WELL = FIRST, SECOND


def asks(script: str) -> list[str]:
    return [sys.executable, "-c", script]


def says(answer: object) -> list[str]:
    return asks(f"print({json.dumps(answer)!r})")


HANGS = asks("import time; time.sleep(60)")


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with two_gpus(tmp_path, "0000:00:00.0", "0000:01:00.0") as runtime:
        yield runtime


def states(runtime: Runtime) -> list[tuple[str, str]]:
    return [(d.state, d.why) for d in runtime.engine.devices.values()]


async def test_a_card_that_nvml_has_given_up_is_lost_and_its_neighbour_is_not(runtime: Runtime) -> None:
    await discovery.check_driver(runtime, says({"gone": {LOST: "NVML says that it is lost"}}))
    assert states(runtime) == [("lost", "NVML says that it is lost"), ("serving", "")]


async def test_where_nvml_hangs_only_a_card_that_owes_an_answer_is_lost_and_nobody_waits(runtime: Runtime) -> None:
    began = time.monotonic()
    await discovery.check_driver(runtime, HANGS, limit=0.3)
    assert [state for state, _ in states(runtime)] == ["serving", "serving"]
    runtime.engine.devices["cuda:1"].state = "suspect"
    await discovery.check_driver(runtime, HANGS, limit=0.3)
    assert states(runtime) == [("serving", ""), ("lost", "its batch is overdue, and NVML hangs")]
    assert time.monotonic() - began < 20


async def test_a_loss_that_was_noticed_meanwhile_is_not_counted_twice(runtime: Runtime) -> None:
    asked = asyncio.ensure_future(
        discovery.check_driver(runtime, asks(f"import time; time.sleep(1); print({json.dumps({'gone': {LOST: 'gone'}})!r})"))
    )
    await asyncio.sleep(0.1)
    runtime.lose("cuda:0", "its worker died")
    await asked
    assert runtime.engine.devices["cuda:0"].history.total == 1


@pytest.mark.parametrize("answer", ["", "no JSON", "[1]", "raise SystemExit(3)"])
async def test_a_probe_that_fails_convicts_nobody(runtime: Runtime, answer: str) -> None:
    await discovery.check_driver(runtime, asks(answer if answer.startswith("raise") else f"print({answer!r})"))
    assert [state for state, _ in states(runtime)] == ["serving", "serving"]


async def test_without_a_driver_nvml_convicts_nobody() -> None:
    assert (await probe.nvml(["GPU-no-such"])).gone in ({}, {"GPU-no-such": "NVML does not find it"})
