"""How many batches an accelerator holds at once: as many as what was measured says that it takes, and no more."""

from __future__ import annotations

import random

import pytest

from engine_kit import Kit
from outboard.core import commands as c
from outboard.core.costs import BatchCost, Costs
from outboard.core.pipeline import HAND_OVER, LATE, LEAD, LEADS, choose, interval, lead, observed
from outboard.core.state import PIPELINE, Network

MIB = 1 << 20


def costs(compute: float, up: float, down: float, memory: int = 0) -> list[BatchCost]:
    """One row of each batch: seconds of computing it, of its way there and back."""

    def cost(rows: int) -> BatchCost:
        alone = rows * (up + compute + down)
        return BatchCost(rows, max(rows * max(up, compute, down), alone / PIPELINE), alone, rows * up, rows * memory)

    return [cost(rows) for rows in (1, 2, 4, 8)]


def depth(compute: float, up: float, down: float, hand_over: float = 0.0) -> int:
    return choose(Costs(costs(compute, up, down)), PIPELINE, hand_over, lambda _: 1).depth


def test_a_pipeline_is_as_deep_as_keeps_its_slowest_part_busy() -> None:
    assert depth(compute=0.1, up=0.0002, down=0.0001) == 1, "a second batch at once would give 0.3 %"
    assert depth(compute=0.010, up=0.002, down=0.001) == 2, "the upload under the compute"
    assert depth(compute=0.001, up=0.001, down=0.0008) == 3, "upload, compute and download of three batches"


def test_messages_between_the_processes_are_hidden_too() -> None:
    assert depth(compute=0.0018, up=0.0002, down=0.0001) == 2
    assert depth(compute=0.0018, up=0.0002, down=0.0001, hand_over=HAND_OVER) == 2
    assert depth(compute=0.0018, up=0.0008, down=0.0005, hand_over=HAND_OVER) == 3, "for two, 4.6 ms of a round are too many"
    assert depth(compute=0.400, up=0.001, down=0.001, hand_over=HAND_OVER) == 1


def test_the_chosen_depth_answers_as_many_rows_as_the_deepest_one() -> None:
    for compute, up, down in [(0.1, 0.001, 0.001), (0.01, 0.009, 0.001), (0.003, 0.003, 0.003), (0.001, 0.02, 0.0)]:
        model = Costs(costs(compute, up, down))
        chosen = choose(model, PIPELINE, 0.0, lambda _: 1)
        assert interval(model, 1, chosen.depth) <= 1.02 * interval(model, 1, PIPELINE)


def test_where_memory_is_short_fewer_and_larger_batches_are_chosen_if_that_gives_more() -> None:
    """Rows are cheap beside a batch: eight at once by themselves are quicker than four and four."""
    per_batch = Costs([BatchCost(n, 0.020 + 0.001 * n, 0.022 + 0.001 * n) for n in (1, 2, 4, 8)])
    assert choose(per_batch, 2, 0.0, lambda depth: 8 // depth).depth == 1
    assert choose(per_batch, 2, 0.0, lambda depth: 8).depth == 2
    assert choose(per_batch, 3, 0.0, lambda depth: 8 if depth == 1 else 0).depth == 1, "no second one fits"
    assert choose(per_batch, 3, 0.0, lambda depth: 8 // depth, fixed_rows=4).depth == 2, "all of them have four rows"


def test_the_hand_over_is_believed_slowly_and_outliers_little() -> None:
    assert observed(0.001, 10.0) < 0.0013 and observed(0.001, -5.0) < 0.001
    seen = HAND_OVER
    for _ in range(100):
        seen = observed(seen, 0.0004)
    assert seen == pytest.approx(0.0004, rel=0.05)


@pytest.mark.parametrize(("compute", "at_once"), [(0.5, 1), (0.020, 2), (0.0018, 3)])
def test_the_engine_sends_so_many_batches_at_once(compute: float, at_once: int) -> None:
    kit = Kit(Network("m", max_rows=1))
    kit.add("gpu:0", slots=PIPELINE)
    kit.load("gpu:0", costs(compute, 0.0008, 0.0005))  # type: ignore[arg-type]
    kit.check("gpu:0")
    for _ in range(4):
        kit.frame()
    kit.wait(0.9 * compute)  # by now whatever is to be sent before the first one's end was
    assert len(kit.all(c.Dispatch)) == at_once
    kit.done(kit.all(c.Dispatch)[0], compute)
    kit.wait(0.9 * compute)
    assert len(kit.all(c.Dispatch)) == at_once + 1


def test_short_memory_makes_the_pipeline_shallower_before_the_batch_fails() -> None:
    kit = Kit(Network("m", max_rows=8))
    kit.add("gpu:0", slots=PIPELINE)
    kit.load("gpu:0", costs(0.002, 0.001, 0.001, memory=100 * MIB))  # type: ignore[arg-type]
    kit.check("gpu:0")
    device, found = kit.engine.devices["gpu:0"], []
    for free in (4000, 250, 120):
        kit.engine.device_memory(kit.now, "gpu:0", kit.generation("gpu:0"), 8000 * MIB, free * MIB)
        found.append(kit.engine._depth(device, "m"))
    assert found[0] == 3 and found[0] >= found[1] >= found[2] == 1


def test_a_network_whose_batches_come_singly_is_not_overtaken_for_ever() -> None:
    kit = Kit(Network("long", max_rows=1), Network("short", max_rows=1))
    kit.add("gpu:0", slots=PIPELINE)
    generation = kit.generation("gpu:0")
    kit.engine.hello(kit.now, "gpu:0", generation)
    kit.engine.loaded(kit.now, "gpu:0", generation, "long", costs(0.3, 0.0001, 0.0001))
    kit.engine.loaded(kit.now, "gpu:0", generation, "short", costs(0.010, 0.002, 0.001))
    kit.check("gpu:0")
    first = kit.frame("short", allowed=10)
    waits = kit.frame("long", allowed=5)
    later = [kit.frame("short", allowed=20) for _ in range(3)]
    kit.wait(0.012)
    assert {batch.network for batch in kit.all(c.Dispatch)} == {"short"}, "the long one waits until it has the card to itself"
    kit.done(kit.all(c.Dispatch)[0], 0.013)
    kit.wait(0.001)
    assert kit.end(first) == "answered by gpu:0"
    assert [batch.network for batch in kit.all(c.Dispatch)] == ["short", "long", "short"], "a short one beside it, which may be second"
    kit.done(kit.all(c.Dispatch)[1], 0.3)
    assert kit.end(waits) == "answered by gpu:0" and not kit.end(later[-1])


def test_a_single_row_is_not_held_back_for_ever_by_full_batches_of_another_network() -> None:
    """Just in time is never, where a batch that needs no company is always sent before."""
    kit = Kit(Network("busy", max_rows=1), Network("rare", max_rows=8), fill_slots=1000)
    kit.add("gpu:0", slots=PIPELINE)
    kit.load("gpu:0", [BatchCost(n, 0.010 + 0.001 * n, 0.012 + 0.001 * n) for n in (1, 2, 4, 8)])  # type: ignore[arg-type]
    kit.check("gpu:0")
    for _ in range(3):
        kit.frame("busy", allowed=5)
    rare = kit.frame("rare", allowed=5)
    for _ in range(40):
        kit.frame("busy", allowed=5)
        kit.wait(0.010)
        kit.done(next(b for b in kit.all(c.Dispatch) if b.batch in kit.engine.devices["gpu:0"].running))
        if kit.end(rare):
            break
    else:
        pytest.fail("0.4 s long 40 rows that came later were answered before it")


def test_rows_that_wait_behind_a_late_batch_wait_for_its_end_and_not_for_a_timer_that_moves_along() -> None:
    """The card has so much to do after the late batch that nothing need be sent yet, but only just: each look found it so once more, and
    the next one was due at once (seen: 4,600 in half a millisecond)."""
    kit = Kit(Network("m", max_rows=8))
    kit.add("gpu:0", slots=PIPELINE)
    upload = 0.0028 - 0.05 * 2 * 0.0043 - HAND_OVER  # of which what the card has to do after the late batch is hardly more
    kit.load("gpu:0", [BatchCost(n, 0.0028 + 1e-6 * n, 0.0028 + upload + 1e-6 * n) for n in (1, 2, 4, 8)])  # type: ignore[arg-type]
    kit.check("gpu:0")
    kit.frame()
    kit.frame()
    kit.wait(0.003)  # by now the second one was sent, just in time
    kit.frame()
    late = kit.all(c.Dispatch)[0]
    ticks, end = 0, kit.now + 0.1
    while (at := kit.engine.next_timer()) is not None and at <= end and ticks < 1000:
        kit.now = at
        kit.engine.tick(at)
        ticks += 1
    assert len(kit.all(c.Dispatch)) == 2, "the third row waits for company"
    assert ticks < 10
    kit.now = end
    kit.done(late, 0.1)
    kit.wait(0.0028)
    assert len(kit.all(c.Dispatch)) == 3, "and is on its way before the card has nothing to do"


def test_the_lead_settles_where_few_batches_are_late() -> None:
    """Batches need an exponentially distributed time to get there: the share that is late is the one that was chosen."""
    rng, seconds, late = random.Random(1), LEAD, 0
    for n in range(4000):
        missed = rng.expovariate(1 / 0.003) > seconds
        seconds = lead(seconds, missed)
        late += missed and n >= 1000
    assert late / 3000 == pytest.approx(LATE, rel=0.15)
    for missed, bound in ((True, LEADS[1]), (False, LEADS[0])):
        for _ in range(2000):
            seconds = lead(seconds, missed)
        assert seconds == bound


@pytest.mark.parametrize("late", [True, False])
def test_a_pipeline_that_was_idle_gets_its_next_batch_earlier(late: bool) -> None:
    kit = Kit()
    kit.up("gpu:0", slots=PIPELINE)
    before: list[float] = []  # how long before the end of the one that runs the next batch is sent
    for _ in range(25):
        kit.frame()
        running, ends = kit.last(c.Dispatch), kit.now + 0.011
        kit.wait(0.001)
        kit.frame()
        assert kit.last(c.Dispatch) is running, "it waits for company"
        while kit.last(c.Dispatch) is running:
            kit.wait(0.00005)
        before.append(ends - kit.now)
        kit.wait(ends - kit.now)
        kit.done(running, 0.011)
        kit.wait(0.011)
        kit.done(seconds=0.012 if late else 0.011, idle=0.001 if late else 0.0)
    assert before[-1] - before[0] > 0.001 if late else before[0] - before[-1] > 0.0001, (before[0], before[-1])
    assert kit.engine.devices["gpu:0"].networks["m"].costs.expected(1) == pytest.approx(0.011, rel=0.01), "idle time is no batch's cost"
