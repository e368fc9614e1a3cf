"""Streams without any I/O: turns between stations, newest wins, one outcome for each frame in order, and coming back."""

from __future__ import annotations

import random

import pytest

from engine_kit import Kit
from outboard.core import commands as c
from outboard.core.fair import FairQueue
from outboard.core.state import Network, Sender
from outboard.core.streams import Bounds, Clock, Stream

LIVE = Sender("drone", live="drone.m")


# ---------------------------------------------------------------- turns


def queue_of(**senders: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue(lambda item, sub: True)
    seq = 0
    for sender, n in senders.items():
        for _ in range(n):
            seq += 1
            queue.push(sender, float(seq), seq, sender)
    return queue


def served(queue: FairQueue[str], n: int) -> str:
    out = []
    while len(out) < n and (found := queue.first()) is not None:
        out.append(queue.pop(found[0])[0])
    return "".join(out)


def test_senders_take_turns_however_much_each_has_waiting() -> None:
    assert served(queue_of(a=6, b=2, c=3), 11) == "abcabcacaaa"


def test_a_single_sender_is_served_by_due_time() -> None:
    queue: FairQueue[str] = FairQueue(lambda item, sub: True)
    for due, seq, item in ((3.0, 1, "c"), (1.0, 2, "a"), (1.0, 3, "b")):
        queue.push("x", due, seq, item)
    assert served(queue, 3) == "abc"


def test_who_comes_back_after_a_pause_is_next_and_has_saved_nothing_up() -> None:
    queue = queue_of(a=100)
    assert served(queue, 50) == "a" * 50
    for seq in range(200, 210):
        queue.push("b", float(seq), seq, "b")
    assert served(queue, 6) in ("bababa", "ababab")


def test_what_costs_more_counts_for_more() -> None:
    queue: FairQueue[str] = FairQueue(lambda item, sub: True)
    for seq in range(12):
        queue.push("4K", 0.0, seq, "K", cost=3.0)
        queue.push("small", 0.0, 100 + seq, "s", cost=1.0)
    assert served(queue, 12).count("K") == 3


def test_dead_entries_are_not_served_and_take_nobodys_turn() -> None:
    dead: set[str] = set()
    queue: FairQueue[str] = FairQueue(lambda item, sub: item not in dead)
    for seq, item in enumerate(["a1", "a2", "b1"]):
        queue.push(item[0], 0.0, seq, item)
    dead.update({"a1", "b1"})
    assert served(queue, 3) == "a2"


def test_a_station_of_60_fps_does_not_starve_one_of_5() -> None:
    """Its ten times larger backlog notwithstanding, the slow station's frame leaves with the next batches."""
    kit = Kit(Network("m", max_rows=1))
    kit.up("cpu", slots=1)
    for _ in range(40):
        kit.admit(sender=Sender("fast"))
    slow = kit.admit(sender=Sender("slow"))
    for fill in kit.all(c.Fill):
        kit.engine.filled(kit.now, fill.frame)
    for _ in range(4):
        kit.done()
        for fill in kit.all(c.Fill):
            if not kit.engine.frames.get(fill.frame) or kit.engine.frames[fill.frame].filled:
                continue
            kit.engine.filled(kit.now, fill.frame)
    assert kit.end(slow) == "answered by cpu"


# ---------------------------------------------------------------- live: the newest wins


def busy(**options) -> Kit:
    """A CPU of one slot that needs 200 ms for a row, and runs one now."""
    kit = Kit(Network("m", max_rows=1), **options)
    kit.add("cpu", slots=1)
    kit.load("cpu", costs=[(1, 0.2)])
    kit.frame()
    return kit


def test_a_newer_frame_takes_the_place_of_one_that_waits_to_be_decoded() -> None:
    kit = busy()
    first, second, third = (kit.admit(sender=LIVE) for _ in range(3))
    assert (kit.end(first), kit.end(second), kit.end(third)) == ("superseded", "superseded", "")
    assert not [f for f in kit.all(c.Fill) if f.frame in (first, second, third)], "decoded while the device is busy"


def test_a_live_frame_is_decoded_just_before_the_device_is_free() -> None:
    kit = busy()
    frame = kit.admit(sender=LIVE, fill_cost=0.01)
    kit.wait(0.1)
    assert kit.last(c.Fill).frame != frame
    newer = kit.admit(sender=LIVE, fill_cost=0.01)
    kit.wait(0.08)  # 20 ms before the end: twice its decode time and 5 ms
    assert kit.end(frame) == "superseded" and kit.last(c.Fill).frame == newer


def test_a_late_device_gets_its_live_frame_when_it_is_free() -> None:
    """The estimate was too long: the batch ended early, and the frame is decoded at once."""
    kit = busy()
    frame = kit.admit(sender=LIVE)
    kit.now += 0.05
    kit.done()
    assert kit.last(c.Fill).frame == frame


def test_streams_do_not_take_each_others_places_nor_those_of_requests() -> None:
    kit = busy()
    request = kit.admit()
    one, other = kit.admit(sender=LIVE), kit.admit(sender=Sender("station", live="station.m"))
    kit.admit(sender=LIVE)
    assert [kit.end(f) for f in (request, one, other)] == ["", "superseded", ""]


def test_where_rows_are_cheaper_together_one_batch_is_decoded_ahead_and_all_of_it_answered() -> None:
    kit = Kit(Network("m", max_rows=8))
    kit.up("gpu:0", slots=1)  # the knee is 8, in 18 ms
    kit.frame()
    frames = []
    for _ in range(8):
        frames.append(kit.admit(sender=LIVE))
        assert kit.last(c.Fill).frame == frames[-1]
        kit.engine.filled(kit.now, frames[-1])
    waits = kit.admit(sender=LIVE)
    kit.done()
    assert len(kit.last(c.Dispatch).offsets) == 8
    kit.done()
    assert all(kit.end(f) == "answered by gpu:0" for f in frames) and not kit.end(waits)


def test_when_a_device_is_lost_only_the_newest_of_its_live_frames_go_to_the_cpu() -> None:
    kit = Kit(Network("m", max_rows=4))
    kit.add("cpu", slots=1)
    kit.load("cpu", costs=[(1, 0.2), (2, 0.4), (4, 0.8)])
    kit.up("gpu:0", slots=2)
    batch = [kit.frame(sender=LIVE) for _ in range(2)]
    requests = [kit.frame() for _ in range(2)]
    kit.dies("gpu:0", explained=True)
    ends = [kit.end(f) for f in batch]
    assert ends.count("superseded") == 1 and ends[0] == "superseded", ends
    for _ in range(3):
        kit.done()
    assert kit.end(batch[1]) == "answered by cpu" and all(kit.end(f) == "answered by cpu" for f in requests)


def test_of_a_frame_in_tiles_the_next_one_is_decoded_when_the_last_rows_are_taken() -> None:
    """Two live stations, frames of 80 rows, a device that needs 2 s for one: age is within two frames' time, and the device never idle."""
    kit = Kit(Network("m", max_rows=1), fill_slots=2)
    kit.add("cpu", slots=2)
    kit.load("cpu", costs=[(1, 0.05)])
    begun: dict[int, float] = {}
    due: list[tuple[float, c.Fill | c.Dispatch]] = []
    ages: list[float] = []
    rows = seen = 0
    for step in range(30_000):
        kit.wait(0.001)
        if step % 66 == 0:
            for name in ("north", "south"):
                begun[kit.admit(rows=80, allowed=60.0, sender=Sender(name, live=name), fill_cost=0.1)] = kit.now
        for item in [d for d in due if d[0] <= kit.now]:
            due.remove(item)
            if isinstance(item[1], c.Fill):
                kit.engine.filled(kit.now, item[1].frame)
            else:
                kit.done(item[1], 0.05)
        kit.take()
        for command in kit.seen[seen:]:
            match command:
                case c.Fill():
                    due.append((kit.now + 0.1, command))
                case c.Dispatch():
                    due.append((kit.now + 0.05, command))
                case c.RowDone():
                    rows += 1
                    if command.last:
                        ages.append(kit.now - begun[command.frame])
            seen += 1
    assert max(ages) < 2 * 80 * 0.05 / 2, ages
    assert rows > 0.95 * 2 * 30 / 0.05, "the device was left idle"


def test_a_frame_without_a_deadline_waits_for_ever_but_is_not_put_off_for_ever() -> None:
    kit = busy()
    patient = kit.admit(allowed=float("inf"))
    kit.engine.filled(kit.now, patient)
    assert kit.engine.frames[patient].due == kit.now + 30.0
    kit.wait(29)
    assert kit.end(patient) == ""
    kit.done()
    kit.done()
    assert kit.end(patient) == "answered by cpu"


def test_of_many_live_streams_each_gets_its_share() -> None:
    """Three at 30 fps, a device for 10: each is answered as often as the others, and always with its newest frame."""
    kit = Kit(Network("m", max_rows=1))
    kit.add("cpu", slots=1)
    kit.load("cpu", costs=[(1, 0.1)])
    begun: dict[int, tuple[str, float]] = {}
    running: list[tuple[float, c.Dispatch]] = []
    answered: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    seen = 0
    for step in range(6000):
        kit.wait(0.001)
        if step % 33 == 0:
            for name in answered:
                begun[kit.admit(sender=Sender(name, live=name), fill_cost=0.002)] = name, kit.now
        while running and running[0][0] <= kit.now:
            kit.done(running.pop(0)[1], 0.1)
        kit.take()
        for command in kit.seen[seen:]:
            match command:
                case c.Fill():
                    kit.engine.filled(kit.now, command.frame)
                case c.Dispatch():
                    running.append((kit.now + 0.1, command))
                case c.RowDone():
                    name, at = begun[command.frame]
                    answered[name].append(kit.now - at)
            seen += 1
    counts = [len(ages) for ages in answered.values()]
    assert sum(counts) >= 55 and max(counts) - min(counts) <= 2, counts
    assert max(age for ages in answered.values() for age in ages[1:]) < 0.2, "an old frame was answered"


# ---------------------------------------------------------------- one outcome for each frame, in order


def stream(policy: str = "live", **bounds: int) -> Stream:
    return Stream(policy, Bounds(**bounds), 0.0)


def test_outcomes_leave_in_the_order_of_seq_however_frames_settle() -> None:
    rng = random.Random(3)
    s = stream()
    left, waiting, told = list(range(1, 301)), [], []
    while left or waiting:
        if left and (rng.random() < 0.5 or not waiting):
            waiting.append(left.pop(0))
            assert s.take(0.0, waiting[-1], 10)
        else:
            seq = waiting.pop(rng.randrange(len(waiting)))
            s.settle(0.0, seq, b"%d" % seq, reason="stale" if rng.random() < 0.3 else None)
        told += [o.seq for o in s.tell()]
        f = s.figures
        assert f.received == f.answered + f.dropped.total() + len(waiting)
    assert told == list(range(1, 301)) and s.waiting == 0


def test_a_seq_that_the_stream_has_is_not_taken_twice() -> None:
    s = stream()
    assert s.take(0.0, 5, 1) and not s.take(0.0, 5, 1) and not s.take(0.0, 3, 1) and s.take(0.0, 9, 1)
    assert s.figures.received == 2 and s.last == 9


def test_a_client_that_comes_back_is_told_what_it_lacks_and_nothing_else() -> None:
    s = stream()
    s.attach(0)
    for seq in (1, 2, 3, 4):
        s.take(0.0, seq, 1)
    s.settle(0.0, 1, b"1")
    s.settle(0.0, 2, b"2")
    assert [o.seq for o in s.tell()] == [1, 2]
    s.detach(1.0)
    s.settle(2.0, 3, b"3")
    assert s.can_resume(1)
    s.attach(1)
    assert [o.text for o in s.tell()] == [b"2", b"3"]
    s.settle(3.0, 4, b"4")
    assert [o.text for o in s.tell()] == [b"4"] and s.tell() == []


def test_who_acknowledges_cannot_go_back_behind_it() -> None:
    s = stream()
    s.attach(0)
    for seq in (1, 2):
        s.take(0.0, seq, 1)
        s.settle(0.0, seq, b"x")
    s.tell()
    s.acknowledge(1)
    assert not s.can_resume(0) and s.can_resume(1) and s.can_resume(2) and not s.can_resume(3)


@pytest.mark.parametrize("bounds", [{"kept": 10}, {"kept_bytes": 30}])
def test_told_outcomes_are_forgotten_beyond_the_bounds_and_then_the_stream_cannot_be_resumed_from_before(bounds) -> None:
    s = stream(**bounds)
    s.attach(0)
    for seq in range(1, 21):
        s.take(0.0, seq, 1)
        s.settle(0.0, seq, b"abc")
        s.tell()
    assert not s.can_resume(9) and s.can_resume(10)
    s.attach(10)
    assert [o.seq for o in s.tell()] == list(range(11, 21))


def test_untold_outcomes_are_never_forgotten_while_the_client_is_there_it_must_read_first() -> None:
    s = stream(kept=10)
    s.attach(0)
    for seq in range(1, 31):
        assert s.full() == (seq > 10)
        s.take(0.0, seq, 1)  # a driver would have stopped at 10
        s.settle(0.0, seq, b"x")
    assert [o.seq for o in s.tell()] == list(range(1, 31)) and not s.full()


def test_while_nobody_is_there_the_bounds_hold() -> None:
    s = stream(kept=10)
    s.attach(0)
    for seq in range(1, 31):
        s.take(0.0, seq, 1)
    s.detach(1.0)
    for seq in range(1, 31):
        s.settle(2.0, seq, b"x")
    assert not s.can_resume(0) and s.can_resume(20)


def test_lossless_is_full_at_its_window_and_live_is_not() -> None:
    for policy, bounds, full in (
        ("lossless", {"window": 3}, True),
        ("lossless", {"window_bytes": 30}, True),
        ("live", {"window": 3}, False),
    ):
        s = stream(policy, **bounds)
        for seq in (1, 2, 3):
            assert not s.full()
            s.take(0.0, seq, 10)
        assert s.full() == full
        s.settle(0.0, 2, b"x")
        assert s.full() == full, "an outcome that waits for an earlier one frees nothing"
        s.settle(0.0, 1, b"x")
        assert not s.full()


def test_stop_names_the_frames_without_an_outcome_and_takes_no_more() -> None:
    s = stream()
    for seq in (1, 2, 3):
        s.take(0.0, seq, 1)
    s.settle(0.0, 2, b"2")
    for seq in s.stop():
        s.settle(0.0, seq, b"stopped", reason="stopped")
    assert not s.take(1.0, 4, 1) and not s.done
    assert [o.reason for o in s.tell()] == ["stopped", None, "stopped"] and s.done


def test_two_outcomes_for_a_frame_are_a_mistake_that_shows() -> None:
    s = stream()
    s.take(0.0, 1, 1)
    s.take(0.0, 2, 1)
    s.settle(0.0, 2, b"x")
    with pytest.raises(AssertionError, match="two outcomes"):
        s.settle(0.0, 2, b"y")


def test_a_stream_without_frames_is_offline() -> None:
    s = stream()
    s.take(10.0, 1, 1)
    assert (s.status(12.9), s.status(13.0)) == ("receiving", "offline")
    s.stop()
    assert s.status(10.0) == "stopped"


def test_figures_count_the_last_seconds() -> None:
    s = stream()
    for i in range(100):
        s.take(i * 0.1, i + 1, 1)
        s.settle(i * 0.1, i + 1, b"x", age=0.001 * i)
    assert s.figures.rate(9.95) == pytest.approx(10, rel=0.05) and s.figures.rate(60.0) == 0
    assert s.figures.age(0.5) == pytest.approx(0.05) and s.figures.age(0.99) == pytest.approx(0.099)


# ---------------------------------------------------------------- clocks


def test_the_quickest_exchange_tells_the_clock_best() -> None:
    clock = Clock()
    assert clock.offset is None and clock.age(100.0, 101.5) == 1.5
    clock.exchanged(sent=100.0, theirs=3700.9, now=101.0)  # an hour ahead, and the way there took most of the second
    clock.exchanged(sent=200.0, theirs=3800.01, now=200.02)
    assert clock.offset == pytest.approx(3600.0)
    assert clock.age(3900.0, 300.25) == pytest.approx(0.25)


def test_an_age_is_never_negative_and_impossible_exchanges_are_ignored() -> None:
    clock = Clock()
    clock.exchanged(sent=50.0, theirs=0.0, now=40.0)
    clock.exchanged(sent=50.0, theirs=0.0, now=500.0)
    assert clock.offset is None and clock.age(200.0, 100.0) == 0.0
