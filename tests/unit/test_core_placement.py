"""Which device takes rows that wait: by what each offers, and by what the engine makes of it."""

from __future__ import annotations

import random

import pytest

from engine_kit import Kit
from outboard.core import commands as c
from outboard.core.costs import BatchCost
from outboard.core.placement import Offer, surplus
from outboard.core.state import Sender

#: A GPU that needs 10 ms for a batch of up to 8, and a CPU that needs 40 ms for each row.
GPU = [BatchCost(n, 0.010, 0.010) for n in (1, 2, 4, 8)]
CPU = [(1, 0.040), (2, 0.080)]


def both(**config: object) -> Kit:
    kit = Kit(spill_beside=("gpu",), **config)
    kit.add("cpu", slots=2)
    kit.load("cpu", CPU)
    kit.add("gpu:0")
    kit.load("gpu:0", GPU)  # type: ignore[arg-type]
    kit.check("gpu:0")
    return kit


def flood(kit: Kit, frames: int, **options: object) -> list[int]:
    """So many frames at once, decoded as far as the engine wants them to be."""
    admitted = [kit.admit(**options) for _ in range(frames)]  # type: ignore[arg-type]
    filled: set[int] = set()
    while new := {f.frame for f in kit.all(c.Fill)} - filled:
        for frame in sorted(new):
            kit.engine.filled(kit.now, frame)
        filled |= new
    return admitted


def devices(kit: Kit) -> list[tuple[str, int]]:
    return [(d.device, len(d.offsets)) for d in kit.all(c.Dispatch)]


def test_the_cpu_stands_by_while_the_gpu_answers_earlier() -> None:
    kit = both()
    flood(kit, 16)
    assert devices(kit) == [("gpu:0", 1)], "15 rows wait: the GPU has them answered in 30 ms"


def test_what_a_busy_gpu_would_answer_later_spills_over_and_is_not_degraded() -> None:
    kit = both()
    frames = flood(kit, 60)
    assert devices(kit)[0] == ("gpu:0", 1) and ("cpu", 1) in devices(kit)
    batch = next(d for d in kit.all(c.Dispatch) if d.device == "cpu")
    kit.wait(0.04)
    kit.done(batch, 0.04)
    answered = next(d for d in kit.all(c.RowDone) if d.device == "cpu")
    assert answered.frame in frames and not answered.degraded


def test_nothing_spills_over_where_the_setting_says_so_or_a_frame_is_strict() -> None:
    kit = both()
    flood(kit, 60, sender=Sender(strict=True))
    assert {device for device, _ in devices(kit)} == {"gpu:0"}
    off = Kit(spill_beside=())
    for device, costs in (("cpu", CPU), ("gpu:0", GPU)):
        off.add(device)
        off.load(device, costs)  # type: ignore[arg-type]
        off.check(device)
    flood(off, 60)
    assert {device for device, _ in devices(off)} == {"gpu:0"}


def test_of_two_cards_the_one_that_answers_first_takes_the_rows() -> None:
    kit = Kit()
    for device, seconds in (("gpu:0", 0.050), ("gpu:1", 0.010)):
        kit.add(device, rank=int(device[-1]), slots=2)
        kit.load(device, [(n, seconds) for n in (1, 2, 4, 8)])
        kit.check(device)
    kit.frame()
    assert devices(kit) == [("gpu:1", 1)], "though the slower one has the lower rank"
    flood(kit, 60)
    assert {device for device, _ in devices(kit)} == {"gpu:0", "gpu:1"}, "until it has so much to do that the other answers earlier"


def test_rows_left_to_a_device_that_does_not_answer_are_taken_by_another() -> None:
    kit = Kit(silence=60.0)
    for device, seconds in (("gpu:0", 0.050), ("gpu:1", 0.010)):
        kit.add(device, rank=int(device[-1]))
        kit.load(device, [(n, seconds) for n in (1, 2, 4, 8)])
        kit.check(device)
    kit.frame()
    late = kit.frame()
    assert devices(kit) == [("gpu:1", 1)], "20 ms there are less than 50 here"
    kit.wait(0.5)
    taken = next(d for d in kit.all(c.Dispatch) if d.device == "gpu:0")
    kit.done(taken)
    assert kit.end(late) == "answered by gpu:0"


@pytest.mark.parametrize("seed", range(200))
def test_among_any_devices_somebody_takes_the_rows(seed: int) -> None:
    rng = random.Random(seed)
    offers = [Offer(rng.choice([0, rng.random()]), rng.random(), rng.random(), rng.randint(1, 8)) for _ in range(rng.randint(1, 5))]
    waiting = rng.randint(1, 40)
    taken = [surplus(own, [o for o in offers if o is not own], waiting) for own in offers]
    quickest = min(range(len(offers)), key=lambda i: offers[i].first)
    assert taken[quickest] == waiting
    assert all(0 <= n <= waiting for n in taken)
