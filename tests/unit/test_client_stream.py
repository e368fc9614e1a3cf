"""The books of a stream, its wire format, and how the JPEG quality follows the uplink."""

from __future__ import annotations

import random
import struct
from collections import Counter

import numpy as np
import pytest

from outboard_client import Bundle, BundleResult, Drop, Frame, Part, Problem, Result, Uplink
from outboard_client import frames as wire
from outboard_client.answers import Answer
from outboard_client.ledger import LINK_LOST, NEWER, Ledger
from outboard_client.transit import Transit

ANSWER = Answer()


def frames(ledger: Ledger, n: int) -> list[int]:
    return [ledger.register(Frame(b"x")) for _ in range(n)]


def sent(ledger: Ledger) -> list[int]:
    out = []
    while taken := ledger.take():
        out.append(taken[0])
    return out


def given_out(ledger: Ledger) -> list[int]:
    out = []
    while outcome := ledger.pop():
        out.append(outcome.seq)
        ledger.keep(outcome.seq)
    return out


def test_outcomes_leave_in_the_order_of_the_frames() -> None:
    ledger = Ledger(live=False)
    assert frames(ledger, 4) == sent(ledger) == [1, 2, 3, 4]
    ledger.settle(Result(3, ANSWER, 0))
    ledger.settle(Drop(2, "undecodable"))
    assert given_out(ledger) == []
    ledger.settle(Result(1, ANSWER, 0))
    assert given_out(ledger) == [1, 2, 3] and ledger.held == 3
    assert (ledger.registered, ledger.answered, ledger.dropped, ledger.unsettled) == (4, 2, Counter(undecodable=1), 1)


def test_an_outcome_counts_once() -> None:
    ledger = Ledger(live=False)
    frames(ledger, 2)
    sent(ledger)
    assert ledger.settle(Result(1, ANSWER, 0))
    assert not ledger.settle(Drop(1, "late"))
    assert isinstance(ledger.pop(), Result)
    ledger.keep(1)
    assert not ledger.settle(Result(1, ANSWER, 0))
    assert (ledger.answered, ledger.doubles, ledger.dropped.total()) == (1, 2, 0)


def test_after_a_lost_link_only_what_the_server_lacks_is_sent_again() -> None:
    ledger = Ledger(live=False)
    frames(ledger, 6)
    for _ in range(5):
        ledger.take()
    ledger.settle(Result(1, ANSWER, 0))
    ledger.link_up(3, resumed=True)
    assert ledger.in_flight == 2, "2 and 3 are at the server"
    assert sent(ledger) == [4, 5, 6]


def test_with_a_new_session_everything_without_an_outcome_is_sent_again() -> None:
    ledger = Ledger(live=False)
    frames(ledger, 4)
    sent(ledger)
    ledger.settle(Result(2, ANSWER, 0))
    ledger.link_up(0, resumed=False)
    assert sent(ledger) == [1, 3, 4]


def test_live_keeps_the_newest_and_says_what_became_of_the_others() -> None:
    ledger = Ledger(live=True)
    frames(ledger, 5)
    assert ledger.dropped == {NEWER: 4} and sent(ledger) == [5]
    assert frames(ledger, 1) == [6] and ledger.dropped == {NEWER: 4}, "5 may be at the server: its outcome is not ours to make"
    ledger.link_up(4, resumed=True)
    assert sent(ledger) == [6] and ledger.dropped == {NEWER: 4, LINK_LOST: 1}
    ledger.link_up(6, resumed=True)
    assert sent(ledger) == [] and ledger.in_flight == 1
    ledger.settle(Result(6, ANSWER, 0))
    assert given_out(ledger) == [1, 2, 3, 4, 5, 6]


def test_the_server_is_told_of_its_own_outcomes_only() -> None:
    """It refuses to resume after a seq that it never saw."""
    ledger = Ledger(live=True)
    frames(ledger, 2)
    sent(ledger)
    ledger.settle(Result(2, ANSWER, 0))
    frames(ledger, 3)
    assert given_out(ledger) == [1, 2, 3, 4] and (ledger.held, ledger.acknowledged) == (4, 2)
    sent(ledger)
    ledger.settle(Drop(5, "superseded"))
    assert given_out(ledger) == [5] and ledger.acknowledged == 5


def test_outcomes_may_come_before_their_frames_are_read_from_the_spool_again() -> None:
    ledger = Ledger(live=False, after=7)
    assert not ledger.settle(Result(7, ANSWER, 0)), "held from before"
    assert ledger.settle(Result(9, ANSWER, 0)) and ledger.settle(Drop(8, "failed"))
    assert given_out(ledger) == []
    for seq in (8, 9, 10):
        ledger.register(Frame(b"x", seq=seq))
    assert sent(ledger) == [10] and given_out(ledger) == [8, 9]
    assert (ledger.registered, ledger.answered, ledger.dropped.total()) == (3, 1, 1)
    with pytest.raises(ValueError, match="must grow"):
        ledger.register(Frame(b"x", seq=10))


def test_the_bytes_that_are_held_are_known() -> None:
    ledger = Ledger(live=False)
    ledger.register(Frame(b"12345"))
    ledger.register(Frame(np.zeros((2, 2, 3), np.uint8)))
    ledger.replace(2, Frame(b"123"))
    assert ledger.nbytes == 8
    ledger.settle(Result(1, ANSWER, 0))
    assert ledger.nbytes == 3


STEPS = ["frame", "send", "cut", "new session", "answer", "drop", "twice", "pop"]


def test_a_live_frame_keeps_its_bytes_until_the_server_has_read_a_newer_one() -> None:
    ledger = Ledger(live=True)
    for n in range(3):
        ledger.register(Frame(bytes(10 + n)))
        ledger.take()
    assert ledger.nbytes == 33
    ledger.read(2)
    assert ledger.nbytes == 23 and ledger.in_flight == 3, "2 may have to be sent again: nobody knows about 3"
    ledger.link_up(0, resumed=False)
    assert ledger.take() == (3, ledger.frame(3)) and len(ledger.frame(3).image) == 12 and ledger.dropped == {LINK_LOST: 2}
    ledger.read(3)
    assert len(ledger.frame(3).image) == 12


def test_no_more_is_on_the_way_than_the_server_reads_in_a_moment() -> None:
    transit = Transit()
    sent = 0
    for ms in range(0, 1000, 33):  # 30 fps, and nothing is read
        if transit.room(ms / 1e3):
            sent += 1
            transit.sent(sent, ms / 1e3)
    assert sent == 4, "for a tenth of a second"
    transit.read(3, 1.0)
    assert len(transit) == 1 and transit.room(1.0)
    transit.cut()
    assert len(transit) == 0


def test_a_long_way_may_hold_what_it_takes_to_fill_it() -> None:
    """A satellite's 600 ms: at 30 fps 18 frames are on the way, and none of them waits."""
    transit, sent = Transit(), []
    for n in range(120):
        now = n / 30
        while sent and sent[0][1] + 0.6 <= now:
            transit.read(*sent.pop(0)[:1], now)
        if transit.room(now):
            transit.sent(n + 1, now)
            sent.append((n + 1, now))
    assert 18 <= len(transit) <= 22


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_each_frame_has_one_outcome_in_order(live: bool, seed: int) -> None:
    """Against a server that does what docs/stream-protocol.md says, over links that lose what was sent last."""
    server: dict[int, str | None] = {}  # seq received in this session -> outcome
    path: list[int] = []  # on the way, not received
    given: list[int] = []

    class Watched(Ledger):
        def settle(self, outcome) -> bool:
            if isinstance(outcome, Drop) and outcome.here:
                assert outcome.seq not in server and outcome.seq not in path, "the server has it, or may have it"
            return super().settle(outcome)

    ledger = Watched(live=live)

    def deliver(seq: int) -> None:
        kind = server[seq]
        ledger.settle(Result(seq, ANSWER, 0) if kind == "answer" else Drop(seq, "failed"))

    rng = random.Random(seed)
    for step in [*rng.choices(STEPS, [8, 8, 1, 1, 4, 1, 1, 2], k=300), "end"]:
        if step == "frame":
            ledger.register(Frame(b"x"))
        elif step == "send" and (taken := ledger.take()):
            path.append(taken[0])
        elif step in ("cut", "new session"):
            for seq in path[: rng.randint(0, len(path))]:  # the rest is lost with the link
                server[seq] = None
            path.clear()
            if step == "new session":
                server = {}
            assert ledger.acknowledged <= max(server, default=0) or step == "new session", "it would not be resumed"
            ledger.link_up(max(server, default=0), resumed=step == "cut")
            for seq in [s for s, kind in server.items() if kind and s > ledger.acknowledged]:
                deliver(seq)
        elif step in ("answer", "drop"):
            for seq in path:
                server[seq] = None
            path.clear()
            if waiting := [s for s, kind in server.items() if kind is None]:
                server[waiting[0]] = step
                deliver(waiting[0])
        elif step == "twice":
            for seq in [s for s, kind in server.items() if kind]:
                deliver(seq)
        elif step == "pop":
            given += given_out(ledger)
        elif step == "end":
            while ledger.unsettled:
                for seq in [*path, *sent(ledger)]:
                    server[seq] = None
                path.clear()
                for seq in [s for s, kind in server.items() if kind is None]:
                    server[seq] = "answer"
                    deliver(seq)
            given += given_out(ledger)
        assert all(ledger.dropped[reason] == 0 or live for reason in (NEWER, LINK_LOST))
        assert ledger.registered == ledger.answered + ledger.dropped.total() + ledger.unsettled
    assert given == list(range(1, ledger.registered + 1))
    if not live:
        assert ledger.dropped.total() == ledger.dropped["failed"]


def test_the_wire_format_is_the_documented_one() -> None:
    message = wire.pack(7, 1_790_000_000_000_123, b"JPEG", {"lat": 48.1})
    seq, captured, length = struct.unpack(">QQI", message[:20])
    assert (seq, captured) == (7, 1_790_000_000_000_123)
    assert message[20 : 20 + length] == b'{"meta":{"lat":48.1}}' and message[20 + length :] == b"JPEG"
    assert wire.pack(1, 2, b"x") == struct.pack(">QQI", 1, 2, 0) + b"x"
    with pytest.raises(ValueError, match="at most 65536"):
        wire.pack(1, 2, b"x", {"a": "b" * 70_000})


def test_a_bundle_is_its_parts_one_after_the_other() -> None:
    imu = np.arange(6, dtype=np.float32)
    view = np.zeros((4, 5, 3), np.uint8)[:, ::-1]
    data, parts = wire.encoded_bundle(Bundle({"front": b"JPEG", "left": view, "imu": Part(imu.astype(">f4"), model="imu_filter")}))
    assert data == b"JPEG" + view.tobytes() + imu.tobytes(), "little-endian, C order"
    assert parts == [
        {"name": "front", "type": "image", "length": 4},
        {"name": "left", "type": "array", "dtype": "uint8", "shape": [4, 5, 3], "length": 60},
        {"name": "imu", "type": "array", "dtype": "float32", "shape": [6], "length": 24, "model": "imu_filter"},
    ]
    with pytest.raises(ValueError, match="expected numbers"):
        wire.encoded_bundle(Bundle({"a": np.array(["text"])}))


def test_what_the_server_says_is_read() -> None:
    hello = wire.decode('{"type": "hello", "session": "s", "resumed": true, "last": 5, "limits": {"message": 9, "new": 1}, "more": []}')
    assert isinstance(hello, wire.Hello) and (hello.session, hello.resumed, hello.last, hello.limits.message) == ("s", True, 5, 9)
    said = wire.decode('{"type": "result", "seq": 3, "age_ms": null, "model": "m", "detections": [], "meta": {"a": 1}}')
    result = wire.outcome(said, 0.5)
    assert isinstance(result, Result) and result.answer.detections == [] and result.answer.meta == {"a": 1} and result.age == 0.5
    drop = wire.outcome(wire.decode('{"type": "drop", "seq": 4, "reason": "undecodable", "problem": {"detail": "no image"}}'), 0)
    assert drop == Drop(4, "undecodable", "no image")
    assert wire.decode('{"type": "something new"}') is None
    bundle = wire.outcome(
        wire.decode(
            '{"type": "result", "seq": 5, "missing": ["rear"], "parts": {"front": {"model": "m", "detections": []},'
            ' "left": {"type": "image_truncated", "status": 422, "detail": "cut"}}}'
        ),
        0,
    )
    assert isinstance(bundle, BundleResult) and bundle.missing == ["rear"] and bundle.parts["front"].detections == []
    assert isinstance(bundle.parts["left"], Problem) and bundle.parts["left"].slug == "image_truncated"


def link(
    bytes_per_s: float, uplink: Uplink, frames: int, *, size=20_000, in_flight: int = 4, server: float = 0.0, clock: list[float]
) -> float:
    """Send frames of `size` bytes a step of quality over a link of that rate, to a server that takes `server` seconds for each, one after
    the other. The fps that was held."""
    began, link_free, server_free = clock[0], clock[0], clock[0]
    pending: list[tuple[float, int, float]] = []  # answered at, seq, at the server since
    for n in range(frames):
        now = max(clock[0], began + n / uplink.fps)
        while pending and (pending[0][0] <= now or len(pending) >= in_flight):
            answered, seq, there = pending.pop(0)
            now = max(now, answered)
            uplink.arrived(seq, there)
        clock[0] = now
        seq, nbytes = int(now * 1e6) * 1000 + n, size * uplink.quality
        uplink.sent(seq, nbytes, now)
        link_free = max(link_free, now) + nbytes / bytes_per_s
        server_free = max(server_free, link_free) + server
        pending.append((server_free, seq, link_free))
    for answered, seq, there in pending:
        clock[0] = max(clock[0], answered)
        uplink.arrived(seq, there)
    return frames / (clock[0] - began)


def test_the_quality_follows_the_uplink_down_and_up() -> None:
    uplink, clock = Uplink(fps=15, lowest=40, highest=90), [100.0]
    link(1e9, uplink, 50, clock=clock)
    assert uplink.quality == 90 and uplink.bytes_per_s == 0
    link(15e6, uplink, 60, clock=clock)  # 15 MB/s hold 15 frames of 0.8 MB with a fifth to spare: quality 40
    assert 40 <= uplink.quality <= 52
    assert link(15e6, uplink, 300, clock=clock) > 14.0
    assert uplink.quality <= 52
    link(1e9, uplink, 100, clock=clock)
    assert uplink.quality == 90


def test_on_a_link_that_carries_nothing_the_rate_falls_and_the_quality_stays_at_its_lowest() -> None:
    uplink = Uplink(fps=15, lowest=40, highest=90)
    assert link(1e6, uplink, 50, clock=[0.0]) < 1.5 and uplink.quality == 40
    assert uplink.bytes_per_s == pytest.approx(1e6, rel=0.05)
    with pytest.raises(ValueError, match="expected 1 <="):
        Uplink(lowest=90, highest=50)


def test_a_slow_server_is_not_taken_for_a_slow_link() -> None:
    uplink = Uplink(fps=15, lowest=40, highest=90)
    assert link(1e9, uplink, 60, server=1.0, clock=[0.0]) < 1.1 and uplink.quality == 90


def test_a_new_link_is_measured_anew() -> None:
    uplink = Uplink()
    uplink.sent(1, 1_000_000, 0.0)
    uplink.cut()
    uplink.arrived(1, 60.0)
    uplink.sent(2, 1_000_000, 61.0)
    uplink.arrived(2, 61.1)
    assert uplink.quality == 90 and uplink.bytes_per_s == 0
