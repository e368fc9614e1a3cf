"""The objects that the engine asks: costs, timers, ready rows, loss history, memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outboard.core import in_time, measuring
from outboard.core.costs import Costs
from outboard.core.failback import FailbackPolicy, LossHistory
from outboard.core.memory import PAGE, Allocator, OutOfSlab
from outboard.core.ready import ReadyQueue
from outboard.core.state import Frame
from outboard.core.timers import Timers

# ---------------------------------------------------------------- costs


def test_costs_between_measured_sizes_are_linear_and_beyond_the_largest_proportional() -> None:
    costs = Costs([(1, 0.010), (4, 0.016), (8, 0.032)])
    assert costs.expected(1) == pytest.approx(0.010)
    assert costs.expected(3) == pytest.approx(0.014)
    assert costs.expected(16) == pytest.approx(0.064)


def test_the_knee_is_the_smallest_batch_within_five_percent_of_the_best_throughput() -> None:
    costs = Costs([(1, 0.010), (2, 0.012), (4, 0.0160), (8, 0.0310)])  # 100, 167, 250, 258 rows a second
    assert costs.knee(8) == 4
    assert costs.knee(3) == 3  # between measured sizes a batch costs what lies between them: 14 ms
    assert Costs([(1, 0.010), (2, 0.020), (4, 0.040)]).knee(4) == 1  # nothing is won by batching


def test_a_slower_device_is_believed_after_some_batches_for_every_size() -> None:
    costs = Costs([(1, 0.010), (2, 0.012), (4, 0.016), (8, 0.031)])
    for _ in range(60):
        costs.observe(4, 0.032)
    assert costs.expected(4) == pytest.approx(0.032, rel=0.1)
    assert costs.expected(1) == pytest.approx(0.020, rel=0.2), "a throttled card is slower for every size"


def test_one_outlier_moves_the_expectation_only_a_little() -> None:
    costs = Costs([(1, 0.010)])
    costs.observe(1, 10.0)
    assert costs.expected(1) < 0.012


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0.0, 1e6)), max_size=40))
def test_costs_stay_positive_and_finite_whatever_is_observed(observed: list[tuple[int, float]]) -> None:
    costs = Costs([(1, 0.010), (8, 0.031)])
    for rows, seconds in observed:
        costs.observe(rows, seconds)
    assert all(0 < seconds < 1e9 for _, seconds in costs.table())
    assert costs.knee(8) in (1, 8)


# ---------------------------------------------------------------- measuring


def test_no_larger_batch_is_tried_where_throughput_falls_batches_get_long_or_time_is_up() -> None:
    falls = {1: 0.010, 2: 0.012, 4: 0.030, 8: 0.010}
    assert [rows for rows, _ in measuring.table([1, 2, 4, 8], falls.get, lambda: False)] == [1, 2, 4]
    long = {1: 0.3, 2: 0.5, 4: 0.6}
    assert [rows for rows, _ in measuring.table([1, 2, 4], long.get, lambda: False)] == [1, 2]
    assert measuring.table([1, 2, 4], {1: 0.010, 2: 0.019, 4: 0.020}.get, lambda: True) == [(1, 0.010), (2, 0.019)]
    assert measuring.table([1, 2, 4], lambda rows: 0.01 if rows < 4 else None, lambda: False)[-1][0] == 2


def test_measuring_goes_on_however_late_it_is_while_larger_batches_pay() -> None:
    pays = {1: 0.016, 2: 0.024, 4: 0.040, 8: 0.072, 16: 0.136, 32: 0.264}
    assert [rows for rows, _ in measuring.table(list(pays), pays.get, lambda: True)] == [1, 2, 4, 8, 16]
    among_others = measuring.beside(pays, {1: 0.012}.get, lambda: True)  # the others are not run any more
    found = dict(measuring.table(list(pays), among_others, lambda: True))
    assert found == pytest.approx({rows: 0.75 * pays[rows] for rows in (1, 2, 4, 8, 16)})


def test_a_size_that_falls_is_run_twice_before_it_is_believed() -> None:
    seconds = iter([0.010, 0.040, 0.011, 0.012])
    assert measuring.table([1, 2, 4], lambda _: next(seconds), lambda: False) == [(1, 0.010), (2, 0.011), (4, 0.012)]


def test_the_bend_of_a_cost_curve_is_measured_and_a_straight_one_is_left_alone() -> None:
    def bent(rows: int) -> float:
        return max(0.010, 0.001 * rows)

    known = [(rows, bent(rows)) for rows in (1, 2, 4, 8, 16, 32)]
    assert (10, 0.010) in measuring.refined(known, bent, lambda: False)
    assert measuring.refined(known, bent, lambda: True) == known
    straight = [(rows, 0.010 + 0.001 * rows) for rows in (1, 2, 4, 8)]
    assert measuring.between(straight) is None and measuring.between(straight[:2]) is None


def test_a_batch_was_run_often_enough_when_two_runs_are_alike() -> None:
    assert not measuring.enough([0.010], 1) and not measuring.enough([0.010, 0.020], 2) and not measuring.enough([0.010, 0.010], 3)
    assert measuring.enough([0.010, 0.020, 0.0101], 2)
    assert measuring.enough([0.01 * 1.1**n for n in range(measuring.MOST_RUNS)], 2)


# ---------------------------------------------------------------- timers


def test_timers_come_up_in_order_and_each_key_has_one_time() -> None:
    timers = Timers()
    timers.set("a", 3.0)
    timers.set("b", 1.0)
    timers.set("a", 2.0)
    timers.set("c", 5.0)
    timers.cancel("c")
    assert timers.next() == 1.0
    assert [timers.due(4.0), timers.due(4.0), timers.due(4.0)] == ["b", "a", None]
    assert timers.next() is None


def test_cancelled_timers_do_not_pile_up() -> None:
    timers = Timers()
    for i in range(10_000):
        timers.set(("deadline", i), 30.0 + i)
        timers.cancel(("deadline", i))
    assert len(timers._heap) < 200


# ---------------------------------------------------------------- ready rows


def _frame(number: int, deadline: float, rows: int = 1) -> Frame:
    return Frame(number, "m", (1, 1, 3), rows, 3, 0.0, deadline, number, 0.0, waiting=set(range(rows)))


def test_rows_leave_the_queue_by_deadline_and_then_by_arrival() -> None:
    queue = ReadyQueue("m", (1, 1, 3))
    late, early, same = _frame(1, 9.0), _frame(2, 5.0, rows=2), _frame(3, 5.0)
    for frame in (late, same, early):
        for row in range(frame.rows):
            queue.push(frame, row)
    assert queue.head() is early
    assert [(f.id, row) for f, row in queue.take(3)] == [(2, 0), (2, 1), (3, 0)]
    assert len(queue) == 1


def test_a_withdrawn_row_is_not_taken_and_one_pushed_twice_is_taken_once() -> None:
    queue = ReadyQueue("m", (1, 1, 3))
    gone, again = _frame(1, 1.0), _frame(2, 2.0)
    queue.push(gone, 0)
    queue.withdraw(gone, 0)
    queue.push(again, 0)
    queue.push(again, 0)
    queue.withdraw(again, 0)
    queue.push(again, 0)
    assert len(queue) == 1
    assert [(f.id, row) for f, row in queue.take(9)] == [(2, 0)]
    assert len(queue) == 0 and queue.head() is None


# ---------------------------------------------------------------- loss history


def _history(**policy: float) -> LossHistory:
    return LossHistory(FailbackPolicy(**policy), random.Random(1))  # type: ignore[arg-type]


def test_attempts_come_at_growing_jittered_intervals_up_to_a_limit() -> None:
    history = _history()
    delays = [history.retry() for _ in range(12)]
    for n, delay in enumerate(delays):
        assert delay == pytest.approx(min(0.5 * 2**n, 30.0), rel=0.2)
    assert len(set(delays)) == 12, "jittered, so that several cards do not start in step"


def test_more_than_three_losses_in_ten_minutes_are_too_many() -> None:
    history = _history()
    for at in (0.0, 100.0, 200.0):
        history.lost(at, "unplugged")
        assert not history.quarantine_due()
    history.lost(300.0, "unplugged")
    assert history.quarantine_due()
    spread = _history()
    for n in range(20):
        spread.lost(n * 250.0, "unplugged")
        assert not spread.quarantine_due()


def test_quarantines_double_from_a_minute_to_an_hour_and_no_further() -> None:
    history, now = _history(), 0.0
    for _ in range(3):
        history.lost(now, "unplugged")
    lengths = []
    for _ in range(9):
        history.lost(now, "unplugged")
        assert history.quarantine_due(), "time in quarantine is no time without a loss"
        lengths.append(history.quarantine())
        now += lengths[-1] + 5.0
    assert lengths == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]


def test_a_device_that_served_long_enough_starts_afresh() -> None:
    history = _history()
    for _ in range(4):
        history.lost(0.0, "unplugged")
    assert history.quarantine() == 60
    history.lost(700.0, "unplugged")
    assert not history.quarantine_due()
    for _ in range(3):
        history.lost(701.0, "unplugged")
    assert history.quarantine() == 60


def test_a_loss_that_was_a_frames_fault_is_forgiven() -> None:
    history = _history()
    for at in (0.0, 1.0, 2.0, 3.0):
        history.lost(at, "died")
    history.quarantine()
    history.forgive(3.0, quarantined=True)
    assert not history.quarantine_due()
    history.lost(4.0, "died")
    assert history.quarantine() == 60


# ---------------------------------------------------------------- memory


def test_memory_is_counted_in_pages_and_comes_back_whole() -> None:
    memory = Allocator(10 * PAGE)
    a, b, c = memory.alloc(1), memory.alloc(PAGE + 1), memory.alloc(7 * PAGE)
    assert (a, b, c) == (0, PAGE, 3 * PAGE)
    assert memory.used == memory.size
    with pytest.raises(OutOfSlab, match="1 bytes wanted, 0 free"):
        memory.alloc(1)
    for offset in (b, a, c):
        memory.free(offset)
    assert memory.used == 0 and memory.alloc(10 * PAGE) == 0


@given(st.lists(st.one_of(st.integers(1, 5 * PAGE), st.integers(-8, -1)), max_size=80))
def test_stretches_never_overlap_and_nothing_leaks(steps: list[int]) -> None:
    """A positive step allocates so many bytes, a negative one frees some stretch."""
    memory = Allocator(16 * PAGE)
    held: dict[int, int] = {}
    for step in steps:
        if step > 0:
            try:
                offset = memory.alloc(step)
            except OutOfSlab:
                continue
            assert all(offset + step <= other or other + nbytes <= offset for other, nbytes in held.items())
            held[offset] = step
        elif held:
            offset = sorted(held)[step % len(held)]
            del held[offset]
            memory.free(offset)
        assert memory.used == sum(-(-nbytes // PAGE) * PAGE for nbytes in held.values())
    for offset in held:
        memory.free(offset)
    assert memory.alloc(16 * PAGE) == 0


def test_sizes_that_nobody_runs_never_get_cheaper_than_smaller_ones() -> None:
    costs = Costs([(1, 0.001), (2, 0.0011), (4, 0.0012)])
    rng = random.Random(5)
    for _ in range(20_000):
        costs.observe(3, rng.choice([0.0001, 0.0002, 0.004]))
        costs.observe(2, 0.002)
    seconds = [s for _, s in costs.table()]
    assert seconds == sorted(seconds)


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.integers(1, 9)), min_size=1, max_size=7))
def test_of_frames_that_count_only_whole_the_fewest_make_way(frames: list[tuple[float, int]]) -> None:
    frames = sorted(frames)
    left, rows = [seconds for seconds, _ in frames], [n for _, n in frames]

    def in_order(kept: Sequence[int]) -> bool:
        return all(sum(rows[j] for j in kept[: i + 1]) <= left[each] for i, each in enumerate(kept))

    late = in_time.too_many(left, rows, float)
    kept = [i for i in range(len(frames)) if i not in late]
    assert in_order(kept)
    assert not any(in_order(more) for more in combinations(range(len(frames)), len(kept) + 1))


def test_of_equal_frames_the_one_that_was_begun_stays() -> None:
    assert in_time.too_many([10.0, 10.0], [8, 3], float) == [0]
    assert in_time.too_many([10.0, 10.0], [8, 2], float) == []
