"""Costs that are kept: for what they speak, and what becomes of damaged ones; what memory they say a batch needs."""

from __future__ import annotations

import msgspec
import pytest

from outboard.core.costs import BatchCost, Costs
from outboard.core.device_memory import DeviceMemory, MemoryNeed
from outboard.core.link import Link, fit
from outboard.profiles import KEPT, Key, Profile, Store

KEY = Key("GPU-1", "ocr/det", "sha256:0123456789ab", "CUDAExecutionProvider", "onnxruntime-gpu 1.31.1", 2, 1)
LINK = Link(2.7e9, 2.6e9, 3e-5, 3e-5, 2.6e9, 2.5e9)
COSTS = [BatchCost(1, 0.01, 0.012, 0.001, 5 << 20), BatchCost(2, 0.012, 0.014, 0.002, 9 << 20)]
PROFILE = Profile(KEY, "RTX 3060", 1.7e9, COSTS, 0, 1 << 20, LINK)


def test_a_profile_is_found_by_exactly_what_it_speaks_for(tmp_path) -> None:
    store = Store(tmp_path)
    assert store.get(KEY) is None
    store.put(PROFILE)
    assert store.get(KEY) == PROFILE and list(Store(tmp_path).all()) == [PROFILE]
    for other in ("uuid", "model", "version", "provider", "libraries"):
        assert store.get(msgspec.structs.replace(KEY, **{other: "another"})) is None, other
    assert store.get(msgspec.structs.replace(KEY, concurrency=3)) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"schema": 1}', b"\xff\xfe", "another schema", "no costs"])
def test_a_damaged_profile_is_none(tmp_path, content, caplog) -> None:
    store = Store(tmp_path)
    store.put(PROFILE)
    (path,) = tmp_path.glob("profiles/*/*.json")
    if content == "another schema":
        content = msgspec.json.encode(msgspec.structs.replace(PROFILE, schema=999))
    elif content == "no costs":
        content = msgspec.json.encode(msgspec.structs.replace(PROFILE, costs=[]))
    path.write_bytes(content)
    with caplog.at_level("INFO"):
        assert store.get(KEY) is None and list(store.all()) == []
    assert "measured anew" in caplog.text
    store.put(PROFILE)
    assert store.get(KEY) == PROFILE


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, caplog) -> None:
    (tmp_path / "profiles").write_text("in the way")
    Store(tmp_path).put(PROFILE)
    assert "cannot be kept" in caplog.text


def test_old_versions_do_not_pile_up(tmp_path) -> None:
    store = Store(tmp_path)
    for i in range(KEPT + 5):
        store.put(msgspec.structs.replace(PROFILE, key=msgspec.structs.replace(KEY, version=f"sha256:{i:012x}")))
    assert len(list(store.all())) == KEPT


def test_memory_of_a_batch_is_a_line_that_no_measurement_lies_above() -> None:
    need = MemoryNeed.fit([(1, 30), (2, 50), (4, 90), (8, 170)])
    assert need is not None and (need.fixed, need.per_row) == (10, 20)
    assert need.rows(170, 16) == 8 and need.rows(169, 16) == 7 and need.rows(29, 16) == 0 and need.rows(10_000, 16) == 16
    lumpy = [(1, 64), (2, 64), (4, 128), (8, 192)]
    need = MemoryNeed.fit(lumpy)
    assert need is not None and all(need.of(rows) >= nbytes - 1 for rows, nbytes in lumpy)
    assert MemoryNeed.fit([(1, 0), (2, 0)]) is None


def test_headroom_is_left_and_what_batches_hold_is_theirs_again() -> None:
    memory = DeviceMemory(total=8 << 30, free=2 << 30, held=1 << 30, headroom=512 << 20)
    assert memory.for_batches() == (3 << 30) - (512 << 20)
    assert memory.for_batches(running=1 << 30) == (2 << 30) - (512 << 20)
    assert "3072 MiB of 8192 MiB are free" in memory.describe()


def test_a_link_is_its_rate_and_its_latency() -> None:
    sizes = (64 << 10, 512 << 10, 4 << 20, 32 << 20)
    rate, latency = fit([(n, 25e-6 + n / 2.75e9) for n in sizes])
    assert rate == pytest.approx(2.75e9) and latency == pytest.approx(25e-6)
    assert fit([(n, 1e-3) for n in sizes]) == (sizes[-1] / 1e-3, pytest.approx(1e-3, rel=0.2))
    assert LINK.resembles(Link(2.6e9, 2.7e9, 0, 0, 1, 1)) and not LINK.resembles(Link(5.6e9, 2.6e9, 0, 0, 1, 1))


def test_a_batch_that_finds_the_device_idle_is_judged_by_its_latency() -> None:
    costs = Costs([BatchCost(n, 0.010 + n * 0.001, 0.020 + n * 0.002) for n in (1, 2, 4, 8)])
    for _ in range(100):
        costs.observe(4, costs.latency(4), alone=True)
    assert costs.expected(4) == pytest.approx(0.014, rel=0.01)
    assert costs.largest_within(0.0301, 8) == 5 and costs.largest_within(1.0, 8) == 8 and costs.largest_within(0.001, 8) == 0


def test_two_outliers_are_no_trend_and_three_are() -> None:
    costs = Costs([(n, 0.010) for n in (1, 2, 4)])
    for _ in range(50):
        costs.observe(2, 0.010)
    for _ in range(2):
        costs.observe(2, 1.0)
    assert costs.expected(1) == pytest.approx(0.010, rel=0.03)
    for _ in range(120):
        costs.observe(2, 0.020)
    assert costs.expected(1) == pytest.approx(0.020, rel=0.1)
