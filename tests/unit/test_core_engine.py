"""The engine's behaviours, one by one."""

from __future__ import annotations

import pytest

from engine_kit import COSTS, SHAPE, Kit
from outboard.core import commands as c
from outboard.core.engine import ISOLATION
from outboard.core.failback import FailbackPolicy
from outboard.core.state import Layout, Network, Picture, Sender

ROW = SHAPE[0] * SHAPE[1] * SHAPE[2]


def ready(*devices: str, **options: object) -> Kit:
    """Model `m` is ready on these devices."""
    kit = Kit(**options)  # type: ignore[arg-type]
    for device in devices:
        kit.up(device)
    return kit


# ---------------------------------------------------------------- batches


def test_a_frame_is_filled_dispatched_and_answered() -> None:
    kit = ready("cpu")
    frame = kit.frame(rows=2)
    batch = kit.last(c.Dispatch)
    assert (batch.device, batch.network, batch.shape) == ("cpu", "m", SHAPE)
    assert batch.offsets == [0, ROW]
    kit.done()
    assert [(r.row, r.index, r.last) for r in kit.all(c.RowDone)] == [(0, 0, False), (1, 1, True)]
    assert kit.engine.frames == {} and kit.engine.memory.used == 0
    assert kit.end(frame) == "answered by cpu"


def test_rows_that_are_cut_out_of_a_picture_take_its_memory_once_and_find_it_on_any_device() -> None:
    kit = ready("cpu", "gpu:0")
    layout = Layout(nbytes=6000, picture=5000, pitch=100, starts=(0, 7, 2000, 5000))
    first = kit.frame(rows=4, layout=layout)
    offset = kit.engine.frames[first].offset
    assert kit.engine.memory.used == 8192, "whole pages"
    batch = kit.last(c.Dispatch)
    assert (batch.device, batch.offsets) == ("gpu:0", [offset + start for start in layout.starts])
    assert batch.pictures == (Picture(first, offset, 5000, 100),)
    kit.dies("gpu:0", explained=True)
    again = kit.last(c.Dispatch)
    assert (again.device, again.offsets, again.pictures) == ("cpu", batch.offsets, batch.pictures)
    kit.done()
    assert kit.end(first) == "answered by cpu" and kit.engine.memory.used == 0


def test_a_batch_names_the_picture_of_each_of_its_frames_once() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    frames = [
        kit.frame(rows=2, layout=Layout(5768, 5000, 100, (0, 5000))),
        kit.frame(),
        kit.frame(rows=2, layout=Layout(5000, 5000, 100, (0, 9))),
    ]
    kit.done()
    batch = kit.last(c.Dispatch)
    assert len(batch.offsets) == 5 and [p.id for p in batch.pictures] == [frames[0], frames[2]]


def test_an_idle_device_waits_for_nobody_and_a_busy_one_gathers_a_batch() -> None:
    kit = ready("cpu", "gpu:0")
    for _ in range(5):
        kit.frame()
    assert [len(d.offsets) for d in kit.all(c.Dispatch)] == [1]
    kit.done()
    assert [len(d.offsets) for d in kit.all(c.Dispatch)] == [1, 4]


def test_a_batch_ends_at_the_knee() -> None:
    kit = ready("cpu", "gpu:0")
    for _ in range(12):
        kit.frame()
    kit.done()
    assert len(kit.last(c.Dispatch).offsets) == 8


def test_a_batch_is_kept_small_enough_for_its_most_urgent_row() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    urgent = kit.frame(allowed=0.0255)
    for _ in range(6):
        kit.frame()
    kit.wait(0.011)
    kit.done()
    batch = kit.last(c.Dispatch)
    assert len(batch.offsets) < 7 and batch.offsets[0] == kit.engine.frames[urgent].offset


def test_rows_that_would_be_late_make_room_for_those_that_need_not_be() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    late = [kit.frame(allowed=0.0225) for _ in range(2)]  # 11 ms behind the first, and 11 for itself: one of them alone would just do
    for _ in range(6):
        kit.frame(allowed=0.029)
    kit.wait(0.011)
    kit.done()
    assert [kit.end(frame) for frame in late] == ["deadline_missed"] * 2
    assert all(r.retry_after and r.retry_after >= 0.1 for r in kit.all(c.Refuse))
    assert len(kit.last(c.Dispatch).offsets) == 6


def test_a_pipeline_takes_its_next_batch_when_it_must_lest_it_fall_idle() -> None:
    kit = ready("cpu")
    kit.up("gpu:0", slots=2)
    for _ in range(3):
        kit.frame()
    assert [len(d.offsets) for d in kit.all(c.Dispatch)] == [1]
    kit.wait(0.0105)
    assert [len(d.offsets) for d in kit.all(c.Dispatch)] == [1, 2], "shortly before the first ends, and together"


def test_events_that_come_late_and_together_teach_no_wrong_costs() -> None:
    kit = ready("cpu")
    kit.up("gpu:0", slots=2)
    for _ in range(40):
        kit.frame()
        kit.frame()
        kit.wait(0.010)
        first, second = kit.all(c.Dispatch)[-2:]
        kit.wait(0.5)  # the front was held up: it hears of both at once
        kit.engine.heard(kit.now, "gpu:0", 1)
        for batch in (first, second):
            kit.done(batch, seconds=0.011)
    costs = kit.engine.devices["gpu:0"].networks["m"].costs
    assert costs is not None and costs.expected(1) == pytest.approx(0.011, rel=0.01)


def test_rows_of_different_shapes_never_share_a_batch() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    for shape in (SHAPE, (8, 8, 3), SHAPE):
        kit.frame(shape=shape)
    kit.done()
    kit.done()
    assert [(d.shape, len(d.offsets)) for d in kit.all(c.Dispatch)[1:]] == [(SHAPE, 2), ((8, 8, 3), 1)]


def test_free_cores_share_what_waits() -> None:
    kit = Kit()
    kit.add("cpu", slots=2)
    kit.engine.hello(kit.now, "cpu", 1)
    frame = kit.admit(rows=6)
    kit.engine.filled(kit.now, frame)
    kit.engine.loaded(kit.now, "cpu", 1, "m", COSTS)
    assert [len(d.offsets) for d in kit.all(c.Dispatch)] == [3, 3]


def test_a_model_that_asks_for_a_delay_waits_for_company_but_not_past_the_deadline() -> None:
    kit = Kit(Network("m", max_rows=8, max_delay=0.5))
    kit.up("cpu")
    kit.frame()
    assert kit.all(c.Dispatch) == []
    kit.wait(0.51)
    assert len(kit.all(c.Dispatch)) == 1
    kit.done()
    hurried = kit.frame(allowed=0.2)
    kit.wait(0.18)
    kit.done()
    assert kit.end(hurried) == "answered by cpu"


def test_held_rows_of_one_shape_do_not_lengthen_the_wait_of_another() -> None:
    kit = Kit(Network("m", max_rows=8, max_delay=0.5))
    kit.up("cpu")
    kit.frame(shape=(8, 8, 3))
    kit.wait(0.4)
    kit.frame()
    kit.wait(0.11)
    assert [d.shape for d in kit.all(c.Dispatch)] == [(8, 8, 3)]


# ---------------------------------------------------------------- admission and decoding


def test_a_frame_that_cannot_be_done_in_time_is_refused_before_any_work() -> None:
    kit = ready("cpu")
    frame = kit.admit(allowed=0.005)
    assert kit.end(frame) == "overloaded" and kit.all(c.Fill) == []
    refusal = kit.last(c.Refuse)
    assert refusal.retry_after is not None and "11 ms" in refusal.detail


def test_what_is_due_later_is_not_before_it() -> None:
    """600 rows for minutes wait, a second and more of work; a frame that is due in 100 ms goes first, and is not refused for them."""
    kit = Kit(Network("m", max_rows=8), Network("n", max_rows=8))
    kit.up("cpu")
    kit.frame("n", rows=100, allowed=300)
    kit.admit("n", rows=500, allowed=300)
    assert kit.end(kit.admit("n", allowed=0.1)) == ""
    urgent = kit.frame(allowed=0.1)
    kit.done(kit.all(c.Dispatch)[0])
    kit.done(kit.last(c.Dispatch))
    assert kit.end(urgent) == "answered by cpu"
    assert kit.end(kit.admit(rows=60, allowed=0.1)) == "overloaded"  # its own rows take longer
    assert kit.end(kit.admit("n", rows=8, allowed=1.0)) == ""


def test_rows_that_keep_a_device_busy_for_a_while_are_known() -> None:
    kit = Kit(Network("m", max_rows=8))
    assert kit.engine.rows_within("m", 0.1) == 0
    kit.up("cpu")
    assert kit.engine.rows_within("m", 0.09) == 40  # five batches of 8 rows in 18 ms
    assert kit.engine.rows_within("m", 0.001) == 8  # a full batch


def test_no_frame_is_admitted_for_a_model_that_nothing_can_run() -> None:
    kit = Kit()
    assert kit.end(kit.admit()) == "model_not_ready"
    kit.add("cpu")
    kit.engine.hello(kit.now, "cpu", 1)
    waiting = kit.admit()
    assert kit.end(waiting) == ""
    kit.engine.load_failed(kit.now, "cpu", 1, "m", "no such operator")
    assert kit.end(waiting) == "model_not_ready" and "no such operator" in kit.last(c.Refuse).detail


def test_a_frame_larger_than_all_memory_says_what_to_raise() -> None:
    kit = ready("cpu", slab_bytes=8192)
    assert kit.end(kit.admit(shape=(64, 64, 3))) == "frame_too_large"
    assert "12288 bytes" in kit.last(c.Refuse).detail and "frame_memory" in kit.last(c.Refuse).detail


def test_a_full_memory_makes_frames_wait_in_order() -> None:
    kit = ready("cpu", slab_bytes=3 * 4096)
    large, small = kit.frame(rows=8), kit.admit(rows=16)
    later = kit.admit(rows=1, allowed=20.0)
    assert [f.frame for f in kit.all(c.Fill)] == [large], "a small late frame would starve a large early one"
    kit.done()
    assert [f.frame for f in kit.all(c.Fill)] == [large, small]
    kit.engine.filled(kit.now, small)
    for _ in range(2):
        kit.done()
    assert kit.end(small) == "answered by cpu"
    assert kit.last(c.Fill).frame == later


def test_one_models_many_frames_leave_decode_threads_to_another_model() -> None:
    kit = Kit(Network("busy", max_rows=1), Network("m", max_rows=8), fill_slots=4)
    kit.up("cpu")
    for _ in range(200):
        frame = kit.admit("busy", allowed=30.0)
        if kit.last(c.Fill).frame == frame:
            kit.engine.filled(kit.now, frame)
    other = kit.admit("m", allowed=60.0)
    assert kit.last(c.Fill).frame == other


def test_rows_that_leave_for_a_device_make_room_for_decoding_at_once() -> None:
    kit = Kit(Network("m", max_rows=1), fill_slots=1)
    kit.up("cpu")
    for _ in range(20):
        frame = kit.admit()
        if kit.last(c.Fill).frame == frame:
            kit.engine.filled(kit.now, frame)
    fills = len(kit.all(c.Fill))
    kit.done()
    assert len(kit.all(c.Fill)) == fills + 1


def test_an_image_that_cannot_be_decoded_gives_its_memory_back() -> None:
    kit = ready("cpu")
    frame = kit.admit()
    kit.engine.fill_failed(kit.now, frame, "not_an_image", "no")
    assert kit.end(frame) == "not_an_image" and kit.engine.memory.used == 0


def test_a_deadline_ends_a_frame_and_its_late_answer_is_dropped() -> None:
    kit = ready("cpu")
    frame = kit.frame(allowed=0.05)
    kit.wait(0.06)
    assert kit.end(frame) == "deadline_missed" and "it was running" in kit.last(c.Refuse).detail
    assert kit.engine.memory.used > 0, "the worker still reads it"
    kit.done()
    assert kit.all(c.RowDone) == [] and kit.engine.memory.used == 0


@pytest.mark.parametrize("phase", ["filling", "waiting", "running"])
def test_a_client_may_leave_at_any_time(phase: str) -> None:
    kit = ready("cpu")
    if phase == "waiting":
        kit.frame()
    frame = kit.admit() if phase == "filling" else kit.frame()
    kit.engine.leave(kit.now, frame)
    kit.engine.leave(kit.now, frame)
    assert kit.end(frame) == "client_left"
    if phase == "filling":
        kit.engine.filled(kit.now, frame)
    else:
        kit.done(kit.all(c.Dispatch)[0])
    assert kit.engine.memory.used == 0 and kit.engine.frames == {}


def test_draining_ends_every_frame() -> None:
    kit = ready("cpu")
    frames = [kit.frame(), kit.frame(), kit.admit()]
    kit.engine.drain(kit.now)
    assert [kit.end(f) for f in frames] == ["shutting_down"] * 3


# ---------------------------------------------------------------- batches that fail


def test_one_bad_row_does_not_fail_its_neighbours() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    frames = [kit.frame() for _ in range(4)]
    kit.done()
    kit.fail("input")
    alone = kit.all(c.Dispatch)[-4:]
    assert [len(d.offsets) for d in alone] == [1] * 4
    for i, batch in enumerate(alone):
        kit.fail("input", batch) if i == 2 else kit.done(batch)
    assert [kit.end(f) for f in frames] == ["answered by gpu:0", "answered by gpu:0", "bad_input", "answered by gpu:0"]


def test_out_of_memory_teaches_a_cap_and_fails_nobody() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    frames = [kit.frame() for _ in range(8)]
    kit.done()
    kit.fail("oom")
    while any(not kit.end(f) for f in frames):
        assert len(kit.last(c.Dispatch).offsets) <= 4
        kit.done()
    assert {kit.end(f) for f in frames} == {"answered by gpu:0"}


def test_a_row_that_the_device_cannot_run_gets_a_second_opinion_from_the_cpu() -> None:
    kit = ready("cpu", "gpu:0")
    good, bad = kit.frame(), kit.frame()
    kit.fail("unknown")
    kit.fail("unknown")
    kit.done(kit.isolated())
    assert kit.end(good) == f"answered by {ISOLATION}"
    kit.fail("unknown", kit.isolated())
    assert kit.end(bad) == "inference_failed"
    assert kit.state("gpu:0") == "serving"


def test_rows_that_the_cpu_cannot_run_either_cost_the_device_nothing() -> None:
    kit = ready("cpu", "gpu:0")
    bad = []
    for _ in range(5):
        bad.append(kit.frame())
        kit.fail("unknown", [d for d in kit.all(c.Dispatch) if d.device == "gpu:0"][-1])
        kit.fail("unknown", kit.isolated())
    assert {kit.end(f) for f in bad} == {"inference_failed"}
    assert kit.state("gpu:0") == "serving"


def test_what_the_cpu_began_while_the_device_was_away_is_told_as_degraded() -> None:
    kit = ready("cpu")
    kit.add("gpu:0")
    frame = kit.frame()
    batch = kit.last(c.Dispatch)
    assert batch.device == "cpu"
    kit.back("gpu:0")
    kit.done(batch)
    assert kit.end(frame) == "answered by cpu" and [d.degraded for d in kit.all(c.RowDone)] == [True]


def test_a_device_that_fails_fast_does_not_win_the_traffic() -> None:
    kit = ready("cpu", "gpu:0")
    for _ in range(3):
        kit.frame()
        kit.fail("unknown", [d for d in kit.all(c.Dispatch) if d.device == "gpu:0"][-1])
    assert kit.state("gpu:0") == "lost" and "3 rows in succession" in kit.engine.devices["gpu:0"].why
    kit.frame()
    assert kit.last(c.Dispatch).device == "cpu"


# ---------------------------------------------------------------- placement, golden check, standby


def test_accelerators_take_the_work_and_the_cpu_stands_by() -> None:
    kit = ready("cpu", "gpu:0")
    assert (kit.state("cpu"), kit.state("gpu:0")) == ("standby", "serving")
    kit.frame()
    assert kit.last(c.Dispatch).device == "gpu:0"


def test_a_device_serves_only_after_its_golden_check() -> None:
    kit = ready("cpu")
    kit.add("gpu:0")
    kit.load("gpu:0")
    kit.frame()
    assert kit.last(c.Dispatch).device == "cpu" and kit.state("gpu:0") == "warming"
    kit.check("gpu:0")
    kit.frame()
    assert kit.last(c.Dispatch).device == "gpu:0"


def test_a_device_that_answers_wrongly_is_quarantined_and_says_why() -> None:
    kit = ready("cpu")
    kit.add("gpu:0")
    kit.load("gpu:0")
    kit.check("gpu:0", ok=False)
    assert kit.state("gpu:0") == "quarantined" and "off by 0.3" in kit.engine.devices["gpu:0"].why
    kit.frame()
    assert kit.last(c.Dispatch).device == "cpu"
    kit.wait(61.0)
    assert kit.state("gpu:0") == "starting"


def test_the_golden_check_waits_for_the_cpus_answer() -> None:
    kit = Kit()
    kit.add("cpu")
    kit.add("gpu:0")
    kit.load("gpu:0")
    assert kit.all(c.CheckGolden) == []
    kit.load("cpu")
    assert [check.device for check in kit.all(c.CheckGolden)] == ["gpu:0"]


@pytest.mark.parametrize("why", ["the CPU does not hold it", "the CPU is ejected", "the CPU cannot load it"])
def test_the_golden_check_does_not_wait_for_an_answer_that_will_not_come(why: str) -> None:
    kit = Kit(Network("m", max_rows=8, standby="none" if why == "the CPU does not hold it" else "hot"))
    kit.add("cpu")
    kit.add("gpu:0")
    kit.load("gpu:0")
    if why == "the CPU is ejected":
        kit.engine.eject(kit.now, "cpu")
    elif why == "the CPU cannot load it":
        kit.engine.hello(kit.now, "cpu", 1)
        kit.engine.load_failed(kit.now, "cpu", 1, "m", "no")
    kit.check("gpu:0")
    assert kit.engine.ready_on("m") == ["gpu:0"]


def test_cold_standby_is_loaded_when_the_accelerator_goes_and_unloaded_when_it_is_back() -> None:
    kit = Kit(Network("m", max_rows=8, standby="cold"))
    kit.up("cpu")
    kit.up("gpu:0")
    assert [(u.device, u.network) for u in kit.all(c.Unload)] == [("cpu", "m")] and kit.state("cpu") == "standby"
    kit.dies("gpu:0", explained=True)
    assert kit.last(c.Load).device == "cpu"


# ---------------------------------------------------------------- loss


def test_the_frames_of_a_lost_device_are_answered_by_the_cpu_degraded() -> None:
    kit = ready("cpu", "gpu:0")
    frames = [kit.frame() for _ in range(3)]
    kit.dies("gpu:0", explained=True)
    while any(not kit.end(f) for f in frames):
        kit.done()
    assert {kit.end(f) for f in frames} == {"answered by cpu"}
    assert all(r.degraded for r in kit.all(c.RowDone))
    assert kit.state("cpu") == "serving"


def test_memory_that_a_dying_worker_may_read_is_kept_until_it_is_gone() -> None:
    kit = ready("cpu", "gpu:0")
    frame = kit.frame()
    kit.engine.device_lost(kit.now, "gpu:0", 1, "unplugged", explained=True)
    kit.done()
    assert kit.end(frame) == "answered by cpu" and kit.engine.memory.used > 0
    kit.engine.worker_gone(kit.now, "gpu:0", 1)
    assert kit.engine.memory.used == 0


def test_nothing_that_an_old_generation_says_counts() -> None:
    kit = ready("cpu", "gpu:0")
    frame = kit.frame()
    late = kit.last(c.Dispatch)
    kit.engine.device_lost(kit.now, "gpu:0", 1, "unplugged", explained=True)
    kit.done(late)
    kit.engine.loaded(kit.now, "gpu:0", 1, "m", COSTS)
    kit.engine.golden_checked(kit.now, "gpu:0", 1, "m", True)
    assert kit.end(frame) == "" and kit.engine.ready_on("m") == ["cpu"]


def test_rows_of_an_overdue_batch_run_elsewhere_and_the_first_answer_wins() -> None:
    kit = ready("cpu", "gpu:0")
    frame = kit.frame()
    slow = kit.last(c.Dispatch)
    kit.wait(3 * 0.011 + 0.21)
    assert kit.state("gpu:0") == "suspect" and kit.last(c.Dispatch).device == "cpu"
    elsewhere = kit.last(c.Dispatch)
    kit.done(slow)
    assert kit.end(frame) == "answered by gpu:0" and kit.state("gpu:0") == "serving"
    kit.done(elsewhere)
    assert len(kit.all(c.RowDone)) == 1 and kit.engine.memory.used == 0


def test_a_device_that_measures_another_network_is_no_suspect_for_being_slow() -> None:
    """Seen at a cold start: 15 times in 36 s its rows were run again on the CPU, which made both slower."""
    kit = Kit(Network("m", max_rows=8))
    for device in ("cpu", "gpu:0"):
        kit.up(device)
    kit.engine.add_network(kit.now, Network("n", max_rows=8))
    frame = kit.frame()
    kit.wait(1.9)
    assert kit.state("gpu:0") == "serving"
    kit.wait(0.2)
    assert kit.state("gpu:0") == "suspect"  # a hang is found all the same
    kit.done(next(d for d in kit.all(c.Dispatch) if d.device == "gpu:0"))
    assert kit.state("gpu:0") == "serving" and kit.end(frame) == "answered by gpu:0"
    kit.engine.loaded(kit.now, "gpu:0", 1, "n", COSTS)
    kit.frame()
    kit.wait(0.4)
    assert kit.state("gpu:0") == "suspect"


def test_a_suspect_that_stays_silent_is_lost() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    kit.wait(3 * 0.011 + 0.21 + 3.1)
    assert kit.state("gpu:0") in ("lost", "starting") and kit.last(c.Kill).generation == 1


def test_a_suspect_that_fails_its_batch_gets_no_single_rows_and_clears_itself() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    frames = [kit.frame() for _ in range(4)]
    kit.done()
    slow = kit.last(c.Dispatch)
    kit.wait(0.5)
    assert kit.state("gpu:0") == "suspect"
    kit.fail("unknown", slow)
    assert kit.state("gpu:0") == "serving"
    kit.done([d for d in kit.all(c.Dispatch) if d.device == "cpu"][-1])
    assert {kit.end(f) for f in frames} == {"answered by cpu"}


def test_a_sticky_error_replaces_the_worker_and_blames_no_frame() -> None:
    kit = ready("cpu", "gpu:0")
    frame = kit.frame()
    kit.fail("sticky")
    assert kit.state("gpu:0") == "lost" and kit.last(c.Dispatch).device == "cpu"
    kit.done()
    assert kit.end(frame) == "answered by cpu"


def test_a_worker_that_answers_no_ping_is_lost() -> None:
    kit = ready("cpu", "gpu:0")
    for _ in range(10):
        kit.wait(1.0)
        kit.engine.heard(kit.now, "cpu", 1)
    assert kit.state("gpu:0") != "serving" and kit.state("cpu") == "serving"


def test_a_cpu_worker_that_dies_is_restarted_and_its_frames_wait() -> None:
    kit = ready("cpu")
    frame = kit.frame()
    kit.dies("cpu", explained=True)
    kit.wait(0.0)
    assert kit.state("cpu") == "starting"
    kit.back("cpu")
    kit.done()
    assert kit.end(frame) == "answered by cpu"


# ---------------------------------------------------------------- failback, quarantine, ejection


def test_a_model_that_kills_whatever_loads_it_is_given_up_and_its_neighbours_are_served() -> None:
    kit = Kit(Network("killer", max_rows=8), Network("m", max_rows=8))
    kit.add("cpu")
    for _ in range(3):
        generation = kit.generation("cpu")
        kit.engine.hello(kit.now, "cpu", generation)
        for load in [x for x in kit.all(c.Load) if x.generation == generation]:
            if load.network == "killer":
                break
            kit.engine.loaded(kit.now, "cpu", generation, load.network, COSTS)
        kit.dies("cpu")
        kit.wait(5.0)
    order = [x.network for x in kit.all(c.Load)]
    assert order == ["killer", "m", "m", "killer", "m", "killer"], "after its first victim it comes last"
    kit.load("cpu")
    given_up = kit.last(c.GiveUp)
    assert given_up.network == "killer" and "died 3 times while it loaded" in given_up.why
    kit.engine.load_failed(kit.now, "cpu", given_up.generation, "killer", given_up.why)
    assert kit.state("cpu") == "serving" and kit.engine.ready_on("m") == ["cpu"]
    assert kit.end(kit.admit("killer")) == "model_not_ready"


def test_a_sticky_error_while_loading_replaces_the_worker() -> None:
    kit = ready("cpu")
    kit.add("gpu:0")
    kit.engine.hello(kit.now, "gpu:0", 1)
    kit.engine.load_failed(kit.now, "gpu:0", 1, "m", "unspecified launch failure", sticky=True)
    assert kit.state("gpu:0") == "lost" and kit.last(c.Kill).device == "gpu:0"
    kit.wait(1.0)
    kit.back("gpu:0")
    assert kit.state("gpu:0") == "serving" and kit.engine.ready_on("m") == ["gpu:0", "cpu"]


def test_a_lost_device_comes_back_by_itself() -> None:
    kit = ready("cpu", "gpu:0")
    kit.dies("gpu:0", explained=True)
    kit.wait(0.7)
    assert kit.last(c.Start) == c.Start("gpu:0", 2)
    kit.engine.not_found(kit.now, "gpu:0", 2, "not on the bus")
    assert kit.state("gpu:0") == "lost"
    kit.engine.seen(kit.now, "gpu:0")
    kit.back("gpu:0")
    kit.frame()
    assert kit.last(c.Dispatch).device == "gpu:0" and kit.engine.devices["gpu:0"].history.total == 1


def test_a_flapping_device_is_kept_away_until_an_operator_vouches_for_it() -> None:
    kit = ready("cpu", "gpu:0")
    for _ in range(4):
        kit.dies("gpu:0", explained=True)
        if kit.state("gpu:0") == "lost":
            kit.wait(1.0)
            kit.back("gpu:0")
    assert kit.state("gpu:0") == "quarantined" and "lost 4 times in 10 minutes" in kit.engine.devices["gpu:0"].why
    assert kit.engine.devices["gpu:0"].until == pytest.approx(kit.now + 60)
    kit.engine.reset(kit.now, "gpu:0")
    kit.back("gpu:0")
    assert kit.state("gpu:0") == "serving"
    kit.dies("gpu:0", explained=True)
    assert kit.state("gpu:0") == "lost", "the past is forgotten"


def test_ejecting_hands_the_work_over_and_the_device_stays_away() -> None:
    kit = ready("cpu", "gpu:0")
    frame = kit.frame()
    kit.engine.eject(kit.now, "gpu:0")
    assert kit.last(c.Kill).device == "gpu:0"
    kit.done()
    assert kit.end(frame) == "answered by cpu"
    kit.engine.worker_gone(kit.now, "gpu:0", 1)
    kit.engine.seen(kit.now, "gpu:0")
    kit.wait(100.0)
    assert kit.state("gpu:0") == "ejected" and kit.engine.memory.used == 0


# ---------------------------------------------------------------- poison


def test_the_frame_that_kills_its_worker_is_refused_and_its_neighbours_are_answered() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    frames = [kit.frame() for _ in range(3)]
    kit.done()
    kit.dies("gpu:0")
    assert kit.last(c.Start).device == ISOLATION, "the standby CPU is not risked"
    for frame in frames:
        batch = kit.isolated()
        if frame == frames[1]:
            kit.dies(ISOLATION)
        else:
            kit.done(batch)
    assert [kit.end(f) for f in frames] == [f"answered by {ISOLATION}", "poison_frame", f"answered by {ISOLATION}"]
    assert "died 2 times" in kit.last(c.Refuse).detail


def test_known_poison_is_refused_for_a_while() -> None:
    kit = ready("cpu")
    kit.engine.remember_poison(kit.now, b"digest")
    assert kit.end(kit.admit(digest=b"digest")) == "poison_frame"
    kit.wait(601.0)
    assert kit.end(kit.admit(digest=b"digest")) == ""


def test_deaths_by_poison_do_not_quarantine_the_device() -> None:
    kit = ready("cpu", "gpu:0", failback=FailbackPolicy(max_losses=1))
    for _ in range(3):
        kit.frame()
        kit.dies("gpu:0")
        kit.isolated()
        kit.dies(ISOLATION)
        kit.wait(1.0)
        assert kit.state("gpu:0") == "starting"
        kit.back("gpu:0")
    assert kit.state("gpu:0") == "serving"


def isolation_dies_loading(kit: Kit) -> None:
    """The disposable worker comes up, and dies before its network is loaded."""
    assert kit.state(ISOLATION) == "starting"
    kit.engine.hello(kit.now, ISOLATION, kit.generation(ISOLATION))
    assert kit.last(c.Load).device == ISOLATION
    kit.dies(ISOLATION)


def test_an_isolation_worker_that_dies_loading_is_tried_later_each_time_and_then_its_suspects_are_refused() -> None:
    kit = ready("cpu", "gpu:0")
    frame = kit.frame(allowed=60.0)
    kit.dies("gpu:0")
    starts, waits = [kit.now], []
    for _ in range(4):
        isolation_dies_loading(kit)
        assert kit.state(ISOLATION) == "off" and kit.end(frame) == "", "not at once again"
        while kit.state(ISOLATION) == "off":
            kit.wait(0.1)
        starts.append(kit.now)
        waits.append(starts[-1] - starts[-2])
    assert [round(w) for w in waits[1:]] == [1, 2, 4] and 0.4 < waits[0] < 0.7
    isolation_dies_loading(kit)
    assert kit.end(frame) == "inference_failed"
    assert kit.last(c.Refuse).detail.endswith("could not be started: it died")
    kit.wait(30.0)
    assert kit.state(ISOLATION) == "off" and kit.generation(ISOLATION) == 5, "nobody is left to try"


def test_suspects_of_another_model_do_not_fall_with_one_that_cannot_be_tried() -> None:
    kit = Kit(Network("m", max_rows=8), Network("n", max_rows=8))
    for device in ("cpu", "gpu:0"):
        kit.up(device, **({"slots": 2} if device != "cpu" else {}))
    bad, good = kit.frame("m", allowed=90.0), kit.frame("n", allowed=90.0)
    kit.dies("gpu:0")
    for _ in range(5):
        while kit.state(ISOLATION) == "off":
            kit.wait(0.1)
        isolation_dies_loading(kit)
    assert kit.end(bad) == "inference_failed" and kit.end(good) == ""
    while kit.state(ISOLATION) == "off":
        kit.wait(0.1)
    kit.done(kit.isolated())
    assert kit.end(good) == f"answered by {ISOLATION}"


def test_the_isolation_worker_is_ended_when_nobody_is_suspected_any_more() -> None:
    kit = ready("cpu", "gpu:0")
    kit.frame()
    kit.dies("gpu:0")
    kit.done(kit.isolated())
    kit.wait(10.0)
    assert kit.state(ISOLATION) == "serving"
    kit.wait(11.0)
    assert kit.state(ISOLATION) == "off" and c.Kill(ISOLATION, 1) in kit.all(c.Kill)


# ---------------------------------------------------------------- networks that come and go


def test_a_retired_network_is_unloaded_after_its_last_frame() -> None:
    kit = ready("cpu")
    frame = kit.frame()
    kit.engine.add_network(kit.now, Network("m2", max_rows=8))
    assert kit.last(c.Load).network == "m2"
    kit.engine.retire_network(kit.now, "m")
    assert kit.all(c.Retired) == []
    kit.done()
    assert kit.end(frame) == "answered by cpu"
    assert kit.all(c.Retired) == [c.Retired("m")] and kit.last(c.Unload).network == "m"


def test_a_network_retired_while_it_loads_leaves_the_device_serving() -> None:
    kit = Kit()
    kit.add("cpu")
    kit.engine.hello(kit.now, "cpu", 1)
    assert kit.state("cpu") == "warming"
    kit.engine.retire_network(kit.now, "m")
    assert kit.state("cpu") == "serving"
    kit.engine.loaded(kit.now, "cpu", 1, "m", COSTS)
    assert kit.engine.ready_on("m") == []


@pytest.mark.parametrize(("rows", "kept"), [(1, 16), (8, 2), (80, 1)])
def test_of_a_live_stream_that_a_lost_device_gives_back_one_batch_of_rows_is_kept_whatever_a_frame_has(rows, kept):
    """A frame in tiles has many rows: so many frames as a batch has rows would keep the CPU busy for seconds with old ones."""
    kit = Kit(Network("m", max_rows=64))
    kit.add("cuda:0", slots=2)
    kit.load("cuda:0", [(n, 0.004 + 0.0002 * n) for n in (1, 4, 16, 64)])
    kit.check("cuda:0")
    kit.add("cpu")
    kit.load("cpu", [(n, 0.04 + 0.002 * n) for n in (1, 4, 16)])  # the knee of 16 rows
    kit.check("cpu")
    filled, answered = [], 0
    for n in range(60):
        kit.admit(rows=rows, sender=Sender("drone", "drone.m"))
        for fill in kit.all(c.Fill)[len(filled) :]:
            filled.append(fill.frame)
            kit.engine.filled(kit.now, fill.frame)
        if n % 9 == 8:  # a device that holds several batches, and is late
            kit.done(kit.all(c.Dispatch)[answered], 0.0168)
            answered += 1
        kit.wait(0.002)
    held = [frame for frame in filled if not kit.end(frame)]
    kit.dies("cuda:0", explained=True)
    assert len(held) > kept
    assert [kit.end(frame) for frame in held] == ["superseded"] * (len(held) - kept) + [""] * kept


def test_a_live_frame_takes_the_place_of_an_older_one_also_where_the_work_of_both_would_be_too_much():
    """Refused as overload, it would leave the older one to be answered (seen with 4K frames in 85 tiles: half of the newest were)."""
    kit = Kit(Network("m", max_rows=1))
    kit.add("cpu")
    kit.load("cpu", [(1, 1.0)])
    kit.check("cpu")
    drone = Sender("drone", "drone.m")
    running, older, newer = (kit.admit(rows=12, allowed=30, sender=drone) for _ in range(3))
    assert [kit.end(frame) for frame in (running, older, newer)] == ["", "superseded", ""]
    assert kit.end(kit.admit(rows=12, allowed=30)) == "overloaded"


def test_rows_of_a_batch_that_fails_where_there_is_no_memory_left_for_the_network_run_elsewhere() -> None:
    """Each alone on the device that cannot run a single one, they ended the engine (seed 85291215959)."""
    kit = Kit(Network("m", max_rows=2))
    kit.up("cpu", slots=2)
    kit.up("gpu:0", slots=3)
    alone = kit.frame()
    pair = kit.frame(rows=2)
    kit.wait(0.05)
    one, two = kit.all(c.Dispatch)
    assert [(b.device, len(b.offsets)) for b in (one, two)] == [("gpu:0", 1), ("gpu:0", 2)]
    kit.fail("oom", one)
    assert kit.all(c.Starved)
    kit.fail("input", two)
    for batch in [b for b in kit.all(c.Dispatch) if b.device == "cpu"]:
        kit.done(batch)
    assert (kit.end(alone), kit.end(pair)) == ("answered by cpu", "answered by cpu")
