"""Streams over real links: one outcome for each frame, whatever happens to the link, the device or the frame."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as sync_connect

from failing_link import linked
from integration.pictures import encoded, scene
from integration.serverkit import Server
from integration.streamkit import Station, address, bundle, hear, now_us, packed, running, stream_server, talk

JPEG = encoded(scene(64, 48, 8, 8, 16))
BLOCK = encoded(scene(640, 480, 100, 120, 60))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its device needs 2 ms for a batch."""
    with stream_server(tmp_path_factory.mktemp("quick"), batch_ms=2, streams_offline=0.6, streams_kept=200) as server:
        yield server


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its device needs 100 ms for a batch; bounds are small and pings quick."""
    small = {"streams_window": 4, "streams_kept": 20, "streams_kept_seconds": 1.5, "streams_heartbeat": 0.3}
    small |= {"streams_ping": 0.2, "streams_pong": 0.5, "limits_message": 200_000, "streams_max": 12}
    with stream_server(tmp_path_factory.mktemp("tight"), batch_ms=100, **small) as server:
        yield server


def figures(server: Server, stream: str) -> dict:
    found = server.client.get(f"/v1/streams/{stream}").json()
    assert found["received"] == found["processed"] + sum(found["dropped"].values()) + found["waiting"], found
    return found


# ---------------------------------------------------------------- frames and outcomes


def test_a_client_that_knows_nothing_sends_images_and_gets_answers_in_order(quick: Server) -> None:
    with talk(quick, "finder", policy="lossless") as link:
        for image in (BLOCK, b"no image", BLOCK):
            link.send(image)
        answers = [hear(link) for _ in range(3)]
    assert [a["seq"] for a in answers] == [1, 2, 3]
    alone = quick.predict("finder", BLOCK).json()
    assert answers[0]["detections"] == answers[2]["detections"] == alone["detections"]
    assert answers[0]["type"] == "result" and answers[0]["device"] == "sim:0" and answers[0]["simulated"]
    assert answers[1] | {"age_ms": 0} == {
        "type": "drop", "seq": 2, "reason": "undecodable", "age_ms": 0, "problem": quick.predict("finder", b"no image").json()
    }  # fmt: skip


def test_the_subprotocol_carries_seq_capture_time_and_meta(quick: Server) -> None:
    with talk(quick, "rgb", framed=True, policy="lossless") as link:
        assert link.subprotocol == "outboard.frames"
        link.send(packed(7, JPEG, captured=now_us() - 5_000_000, meta={"lat": 48.1, "tags": [1, None]}))
        link.send(packed(9, JPEG, captured=0))
        link.send(packed(9, JPEG))
        link.send(packed(3, JPEG))
        link.send(packed(12, JPEG))
        first, second, third = (hear(link) for _ in range(3))
    assert [first["seq"], second["seq"], third["seq"]] == [7, 9, 12], "a seq that the server has is not taken twice"
    assert first["meta"] == {"lat": 48.1, "tags": [1, None]} and "meta" not in second
    assert 5000 <= first["age_ms"] < 35_000 and second["age_ms"] < 30_000


@pytest.mark.parametrize(
    "query",
    ["policy=best", "max_age_ms=0", "max_age_ms=never", "policy=lossless&max_age_ms=5", "station=a/b", "station=", "session=..", "after=3",
     "min_score=2", "deadline_ms=5", "colour=red", "expect=a,a", "session=ab&after=-1"],
)  # fmt: skip
def test_a_bad_query_is_refused_before_the_upgrade(quick: Server, query: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        talk(quick, "rgb", **dict(pair.split("=", 1) for pair in query.split("&")))
    response = refused.value.response
    assert response.status_code == 422 and response.headers["content-type"] == "application/problem+json"
    assert json.loads(response.body)["type"] == "bad_option"


def test_an_unknown_model_is_refused_before_the_upgrade(quick: Server) -> None:
    with pytest.raises(InvalidStatus) as refused:
        talk(quick, "nothing")
    assert refused.value.response.status_code == 404


def test_no_more_streams_than_the_server_takes(tight: Server) -> None:
    with contextlib.ExitStack() as links:
        for i in range(12):
            links.enter_context(talk(tight, "rgb", station=f"s{i}"))
        with pytest.raises(InvalidStatus) as refused:
            talk(tight, "rgb")
        assert refused.value.response.status_code == 503 and json.loads(refused.value.response.body)["type"] == "too_many_streams"


def test_hello_tells_the_limits_and_state_where_frames_run(tight: Server) -> None:
    with talk(tight, "rgb", station="drone") as link:
        hello, state = hear(link, "hello"), hear(link, "state")
    assert hello["stream"] == "drone.rgb" and not hello["resumed"] and hello["last"] == 0 and hello["policy"] == "live"
    assert hello["limits"] == {
        "message": 200_000, "window": 4, "window_bytes": 64 << 20, "kept": 20, "kept_bytes": 8 << 20, "kept_seconds": 1.5,
        "heartbeat_seconds": 0.3,
    }  # fmt: skip
    assert state == {"type": "state", "device": "sim:0", "degraded": False, "why": None}


@pytest.mark.parametrize("text", ["hello", '{"type": "pong"}', '{"seq": 3}', '{"type": "ack", "seq": "x"}'])
def test_text_that_breaks_the_protocol_ends_the_link_with_a_reason(quick: Server, text: str) -> None:
    with talk(quick, "rgb") as link:
        link.send(text)
        with pytest.raises(ConnectionClosed) as closed:
            hear(link, "never")
    assert closed.value.rcvd.code == 1008 and "text message" in closed.value.rcvd.reason


@pytest.mark.parametrize(("message", "why"), [(b"short", "20 bytes"), (packed(0, JPEG), "seq is 0")])
def test_a_frame_without_a_seq_ends_the_link(quick: Server, message: bytes, why: str) -> None:
    with talk(quick, "rgb", framed=True) as link:
        link.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            hear(link, "never")
    assert closed.value.rcvd.code == 1008 and why in closed.value.rcvd.reason


@pytest.mark.parametrize(
    "message",
    [
        packed(1, b"")[:16] + (1000).to_bytes(4, "big") + b"{}",
        packed(1, b"")[:16] + (2).to_bytes(4, "big") + b"[]" + JPEG,
        packed(1, JPEG, parts=[]),
    ],
    ids=["longer than the message", "not an object", "a bundle of nothing"],
)
def test_a_frame_whose_header_cannot_be_read_is_dropped_by_its_seq(quick: Server, message: bytes) -> None:
    with talk(quick, "rgb", framed=True) as link:
        link.send(message)
        drop = hear(link)
        link.send(packed(2, JPEG))
        assert hear(link)["seq"] == 2
    assert (drop["type"], drop["seq"], drop["reason"], drop["problem"]["type"]) == ("drop", 1, "undecodable", "bad_frame")


@pytest.mark.parametrize("nbytes", [200_001, 5_000_000])
def test_a_message_above_the_limit_is_told_so_not_just_cut(tight: Server, nbytes: int) -> None:
    with talk(tight, "rgb") as link:
        hear(link, "hello")
        with pytest.raises(ConnectionClosed) as closed:
            link.send(b"x" * nbytes)
            hear(link, "never")
    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009 and "200000" in closed.value.rcvd.reason


def test_a_raw_4k_frame_of_25_megabytes_is_taken(quick: Server) -> None:
    """S03: uvicorn's own limit is 16 MiB."""
    pixels = np.full((2160, 3840, 3), (255, 0, 51), np.uint8)
    with talk(quick, "rgb", framed=True, policy="lossless") as link:
        link.send(bundle(1, {"front": ({"type": "array", "dtype": "uint8", "shape": list(pixels.shape)}, pixels.tobytes())}))
        answer = hear(link)["parts"]["front"]
    assert answer["image"] == {"width": 3840, "height": 2160, "orientation": 1}
    assert answer["outputs"][0]["data"] == pytest.approx([1, 0, 0.2], abs=1e-3)


def test_no_link_deflates_what_is_compressed_already(quick: Server) -> None:
    """S23, whatever the client offers."""
    with sync_connect(address(quick.url, "rgb", policy="lossless"), compression="deflate", close_timeout=2) as link:
        assert "permessage-deflate" in link.request.headers["Sec-WebSocket-Extensions"]
        assert "Sec-WebSocket-Extensions" not in link.response.headers
        link.send(JPEG)
        assert hear(link)["type"] == "result"


def test_many_frames_settle_out_of_order_and_leave_in_order(quick: Server) -> None:
    """Large pictures take longer to decode than small ones: answers overtake each other inside."""
    large = encoded(np.random.default_rng(1).integers(0, 255, (1500, 2000, 3), np.uint8))
    with talk(quick, "rgb", policy="lossless") as link:
        for i in range(60):
            link.send(large if i % 7 == 0 else JPEG if i % 5 else b"none")
        assert [hear(link)["seq"] for _ in range(60)] == list(range(1, 61))


# ---------------------------------------------------------------- live and lossless


async def test_live_answers_the_newest_and_drops_what_the_device_cannot_do(tight: Server) -> None:
    """S04, S05: 30 frames a second, a device for 10."""
    station = Station(tight.url, "slow", policy="live", station="live", window=1000)
    with running(station):
        for seq in range(1, 61):
            station.give(seq, JPEG)
            await asyncio.sleep(1 / 30)
        await station.finish(20)
    kinds = station.kinds()
    assert kinds.total() == 60 and set(kinds) == {"result", "superseded"} and kinds["result"] >= 8, kinds
    assert station.outcomes[60]["type"] == "result", "the newest frame was not answered"
    assert station.order == list(range(1, 61))
    assert sorted(station.ages)[len(station.ages) // 2] < 0.5, station.ages
    found = figures(tight, "live.slow")
    assert (found["received"], found["processed"]) == (60, kinds["result"]) and found["dropped"] == {"superseded": kinds["superseded"]}


async def test_lossless_answers_everything_and_reads_no_more_than_its_window(tight: Server) -> None:
    station = Station(tight.url, "slow", policy="lossless", station="patient", window=1000)
    most = 0
    with running(station):
        for seq in range(1, 31):
            station.give(seq, JPEG)
        while station.open:
            await asyncio.sleep(0.1)
            waiting = (await asyncio.to_thread(figures, tight, "patient.slow"))["waiting"] if station.links else 0
            most = max(most, waiting)
    assert station.kinds() == {"result": 30} and station.order == list(range(1, 31))
    assert 1 < most <= 4, f"{most} frames waited in the server, its window is 4"
    assert station.links == 1 and not station.codes, "3 s of back-pressure with pings of 0.2 s cost the link"


def test_while_the_device_stalls_the_link_of_a_live_stream_stays(tight: Server) -> None:
    """S01: pongs behind queued frames are read all the same."""
    with talk(tight, "slow") as link:
        for _ in range(100):
            link.send(JPEG)
        began = time.monotonic()
        kinds = Counter(hear(link)["type"] for _ in range(100))
        while time.monotonic() - began < 2.0:
            hear(link, "hb")
    assert kinds.total() == 100 and kinds["result"] >= 1


def test_frames_older_than_max_age_are_dropped_as_stale(quick: Server) -> None:
    with talk(quick, "rgb", framed=True, max_age_ms=2000) as link:
        link.send(packed(1, JPEG, captured=now_us() - 3_000_000))
        old = hear(link)
        link.send(packed(2, JPEG))
        young = hear(link)
    assert (old["type"], old["reason"]) == ("drop", "stale") and old["age_ms"] >= 3000
    assert young["type"] == "result"


def test_age_is_corrected_by_the_clients_clock(quick: Server) -> None:
    """A clock that is an hour ahead, told in answers to heartbeats."""
    with talk(quick, "rgb", framed=True, station="ahead", max_age_ms=5000) as link:
        hour = 3_600_000_000
        beat = hear(link, "hb")
        link.send(json.dumps({"type": "hb", "at": beat["at"], "clock": now_us() + hour}))
        link.send(packed(1, JPEG, captured=now_us() + hour - 1_000_000))
        assert 1000 <= hear(link)["age_ms"] < 5000
    assert figures(quick, "ahead.rgb")["clock_offset_ms"] == pytest.approx(3_600_000, abs=2000)


async def test_a_greedy_station_does_not_starve_a_modest_one(tight: Server) -> None:
    """Three lossless streams that always have frames waiting, and one that sends five: its frames wait for a turn, not for a backlog."""
    greedy = [Station(tight.url, "slow", policy="lossless", station=f"greedy{i}", window=100) for i in range(3)]
    modest = Station(tight.url, "slow", policy="lossless", station="modest")
    with running(greedy[0]), running(greedy[1]), running(greedy[2]), running(modest):
        for seq in range(1, 30):
            for station in greedy:
                station.give(seq, JPEG)
        await asyncio.sleep(1)
        for seq in range(1, 6):
            modest.give(seq, JPEG)
            await modest.finish(30)
        answered = [len(station.outcomes) for station in greedy]
    # First in, first out would put each frame behind 12 of theirs: 60 and more of theirs for its five.
    assert sum(answered) < 50 and max(answered) - min(answered) <= 4, answered


# ---------------------------------------------------------------- links that fail


async def test_over_a_link_that_is_cut_every_frame_has_one_outcome_in_order(quick: Server) -> None:
    """S07, in short: the long test does it for a minute."""
    async with linked(quick.url) as (line, url):
        station = Station(url, "rgb", policy="lossless", station="cut")
        with running(station):
            for seq in range(1, 301):
                station.give(seq, JPEG)
                await asyncio.sleep(0.01)
                if seq % 60 == 0:
                    line.cut()
            await station.finish(30)
    assert station.kinds() == {"result": 300} and station.order == list(range(1, 301))
    assert station.links >= 5 and station.resumed == station.links - 1
    found = figures(quick, "cut.rgb")
    assert (found["received"], found["processed"]) == (300, 300), "a frame was taken twice, or lost"


def test_a_session_that_is_gone_is_not_resumed(tight: Server) -> None:
    with talk(tight, "rgb", session="0123456789abcdef", after=7) as link:
        hello = hear(link, "hello")
    assert not hello["resumed"] and hello["last"] == 0 and hello["session"] != "0123456789abcdef"
    with talk(tight, "rgb", station="brief") as link:
        session = hear(link, "hello")["session"]
    tight.until(lambda: tight.client.get("/v1/streams/brief.rgb").status_code == 404, what="the session to end")
    with talk(tight, "rgb", session=session, after=0) as link:
        assert not hear(link, "hello")["resumed"]


def test_what_was_forgotten_is_not_resumed_but_what_is_kept_is(tight: Server) -> None:
    with talk(tight, "rgb", framed=True, policy="lossless") as link:
        session = hear(link, "hello")["session"]
        for seq in range(1, 31):
            link.send(packed(seq, JPEG))
        while hear(link)["seq"] < 30:
            pass
    query = {"policy": "lossless", "session": session}
    with talk(tight, "rgb", framed=True, **query, after=12) as link:
        hello = hear(link, "hello")
        assert hello["resumed"] and hello["last"] == 30 and [hear(link)["seq"] for _ in range(18)] == list(range(13, 31))
        link.send(json.dumps({"type": "ack", "seq": 29}))
        link.send(packed(31, JPEG))
        assert hear(link)["seq"] == 31
    with talk(tight, "rgb", framed=True, **query, after=5) as link:
        assert not hear(link, "hello")["resumed"], "outcomes 6 to 10 were beyond the bound of 20"


def test_what_leaves_during_a_takeover_reaches_the_new_connection(quick: Server) -> None:
    """Outcomes are ready all the time; none of them may be told to the connection that has just lost the stream."""
    for _ in range(40):
        with talk(quick, "rgb", framed=True, policy="lossless") as old:
            session = hear(old, "hello")["session"]
            for seq in range(1, 61):
                old.send(packed(seq, JPEG))
            hear(old)
            with talk(quick, "rgb", framed=True, policy="lossless", session=session, after=1) as new:
                hello = hear(new, "hello")
                assert hello["resumed"]
                for seq in range(hello["last"] + 1, 61):
                    new.send(packed(seq, JPEG))
                assert [hear(new)["seq"] for _ in range(59)] == list(range(2, 61))


def test_another_connection_takes_the_stream_over(quick: Server) -> None:
    with talk(quick, "rgb", framed=True) as old:
        session = hear(old, "hello")["session"]
        old.send(packed(1, JPEG))
        assert hear(old)["seq"] == 1
        with talk(quick, "rgb", framed=True, session=session, after=0) as new:
            assert hear(new, "hello")["resumed"] and hear(new)["seq"] == 1
            with pytest.raises(ConnectionClosed) as closed:
                hear(old, "never")
            assert closed.value.rcvd.code == 4001
            new.send(packed(2, JPEG))
            assert hear(new)["seq"] == 2


def test_stop_drops_what_waits_at_once_and_closes(tight: Server) -> None:
    """S09. The window is 4, so the stop is read while four frames wait."""
    with talk(tight, "slow", framed=True, policy="lossless", station="stops") as link:
        for seq in range(1, 4):
            link.send(packed(seq, JPEG))
        link.send('{"type": "stop"}')
        began = time.monotonic()
        ends = [hear(link) for _ in range(3)]
        with pytest.raises(ConnectionClosed) as closed:
            hear(link, "never")
    assert closed.value.rcvd.code == 1000 and ends[-1]["reason"] == "stopped" and time.monotonic() - began < 10
    assert figures(tight, "stops.slow")["status"] == "stopped"


def test_a_client_that_is_killed_is_noticed(tight: Server) -> None:
    with talk(tight, "slow", station="killed") as link:
        hear(link, "hello")
        assert figures(tight, "killed.slow")["connected"]
        link.socket.shutdown(socket.SHUT_RDWR)
        tight.until(lambda: not figures(tight, "killed.slow")["connected"], what="the dead client to be noticed")


async def test_a_client_behind_a_dead_cable_is_noticed_by_its_pongs(tight: Server) -> None:
    async with linked(tight.url) as (line, url):
        station = Station(url, "rgb", station="silent")
        with running(station):
            await asyncio.to_thread(tight.until, lambda: tight.client.get("/v1/streams/silent.rgb").status_code == 200)
            line.up.clear()
            await asyncio.to_thread(tight.until, lambda: not figures(tight, "silent.rgb")["connected"], 20, "the silence to be noticed")
            line.up.set()


def test_a_client_that_does_not_read_is_not_read_from(quick: Server) -> None:
    """Outcomes that nobody takes do not pile up: 200 are kept, the rest waits in the client."""
    with socket.create_connection((quick.url.split(":")[1].strip("/"), int(quick.url.rsplit(":", 1)[1]))) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.sendall(
            b"GET /v1/models/rgb/stream?station=deaf HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        raw.settimeout(10)
        assert raw.recv(1000).startswith(b"HTTP/1.1 101 ")
        frame = b"\x82\xfe" + (1000).to_bytes(2, "big") + b"\0\0\0\0" + b"x" * 1000  # a binary message that is no image: a long drop
        raw.settimeout(2)
        sent = 0
        with pytest.raises(TimeoutError):
            while sent < 200_000:
                raw.sendall(frame)
                sent += 1
        found = figures(quick, "deaf.rgb")
        assert found["received"] < sent and found["waiting"] == 0


# ---------------------------------------------------------------- devices that fail


async def test_an_unplug_in_a_stream_degrades_it_and_loses_nothing(tight: Server) -> None:
    station = Station(tight.url, "rgb", policy="lossless", station="cabled")
    with running(station):
        for seq in range(1, 101):
            station.give(seq, JPEG)
            await asyncio.sleep(0.03)
            if seq == 30:
                await asyncio.to_thread(tight.client.post, "/v1/devices/sim:0/fault", json={"fault": "unplug"})
            if seq == 70:
                await asyncio.to_thread(tight.client.post, "/v1/devices/sim:0/fault", json={"fault": "replug"})
        await station.finish(60)
        await asyncio.to_thread(tight.until, lambda: tight.device("sim:0")["state"] == "serving", 60, "the device to serve again")
        await station.until(lambda: station.states[-1]["device"] == "sim:0")
    assert station.kinds() == {"result": 100} and station.order == list(range(1, 101)) and station.links == 1
    assert any(o["degraded"] and o["device"] == "cpu" for o in station.outcomes.values())
    lost = next(s for s in station.states if s["degraded"])
    assert lost["device"] == "cpu" and "unplugged" in lost["why"] and "sim:0" in lost["why"]
    assert not station.states[-1]["degraded"]


# ---------------------------------------------------------------- memory


@pytest.mark.long
async def test_when_memory_is_full_live_drops_and_lossless_waits(tmp_path) -> None:
    noise = encoded(np.random.default_rng(1).integers(0, 255, (400, 400, 3), np.uint8))  # some 180 kB; streams may hold 2 MiB of them
    with stream_server(tmp_path / "m", batch_ms=100, limits_frame_memory="4MiB") as server:
        patient = Station(server.url, "slow", policy="lossless", station="patient", window=1000)
        live = Station(server.url, "rgb", policy="live", station="live")
        with running(patient), running(live):
            for seq in range(1, 31):
                patient.give(seq, noise)
            await asyncio.to_thread(server.until, lambda: b"stream_memory_bytes 1." in server.client.get("/metrics").content)
            for seq in range(1, 21):
                live.give(seq, noise)
                await asyncio.sleep(0.02)
            await patient.finish(60)
            await live.finish(60)
        assert patient.kinds() == {"result": 30}
        assert live.kinds()["memory_full"] > 0 and live.kinds().total() == 20, live.kinds()
        held = float(re.search(r"^outboard_stream_memory_bytes (\S+)", server.client.get("/metrics").text, re.M)[1])
        assert held <= 2 * len(noise) + 1000, "only the newest picture of each stream is still held"


# ---------------------------------------------------------------- bundles


def test_a_bundle_is_answered_together_each_part_by_its_model(quick: Server) -> None:
    green = np.zeros((60, 80, 3), np.uint8)
    green[..., 1] = 255
    row = np.array([1.5, -2, 0, 4], "<f4")
    parts = {
        "front": ({"type": "image"}, JPEG),
        "left": ({"type": "array", "dtype": "uint8", "shape": [60, 80, 3]}, green.tobytes()),
        "numbers": ({"type": "array", "dtype": "float32", "shape": [4], "model": "numbers", "input": "x"}, row.tobytes()),
        "rear": ({"type": "image"}, JPEG[:200]),
        "other": ({"type": "array", "dtype": "float32", "shape": [4], "model": "rgb"}, row.tobytes()),
    }
    with talk(quick, "rgb", framed=True, policy="lossless", expect="front,left,lidar,rear") as link:
        link.send(bundle(1, parts, meta={"tick": 17}))
        answer = hear(link)
    assert (answer["type"], answer["seq"], answer["meta"], answer["missing"]) == ("result", 1, {"tick": 17}, ["lidar"])
    got = answer["parts"]
    assert list(got) == list(parts)
    assert got["front"]["outputs"][0]["data"] == quick.predict("rgb", JPEG).json()["outputs"][0]["data"]
    assert got["left"]["outputs"][0]["data"] == pytest.approx([0, 1, 0], abs=1e-3)
    assert got["left"]["image"] == {"width": 80, "height": 60, "orientation": 1}
    assert got["numbers"]["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [4], "data": [1.5, -2.0, 0.0, 4.0]}]
    assert got["rear"]["type"] == "image_truncated" and got["rear"]["status"] == 422
    assert got["other"]["type"] == "bad_input" and "uint8" in got["other"]["detail"]


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"name": "a", "type": "image", "length": 5}], "add up to 5"),
        ([{"name": "a", "type": "image", "length": 4}, {"name": "a", "type": "image", "length": 4}], "same name"),
        ([{"name": "a", "type": "video", "length": 8}], "expected image or array"),
        ([{"name": "a", "type": "array", "length": 8, "dtype": "float32", "shape": [3]}], "would have 12"),
        ([{"name": "a", "type": "array", "length": 8, "dtype": "object", "shape": [1]}], "number type"),
        ([{"name": "a", "type": "image", "length": -1}, {"name": "b", "type": "image", "length": 9}], "add up"),
        ([{"name": str(i), "type": "image", "length": 0} for i in range(17)], "1 to 16"),
    ],
)
def test_a_bundle_whose_parts_do_not_fit_is_dropped_with_the_reason(quick: Server, parts: list[dict], why: str) -> None:
    with talk(quick, "rgb", framed=True) as link:
        link.send(packed(1, b"12345678", parts=parts))
        drop = hear(link)
    assert drop["reason"] == "undecodable" and drop["problem"]["type"] == "bad_frame" and why in drop["problem"]["detail"]


def test_of_live_bundles_the_newest_wins_whole_bundles_at_a_time(tight: Server) -> None:
    parts = {name: ({"type": "image"}, JPEG) for name in ("a", "b", "c")}
    with talk(tight, "slow", framed=True) as link:
        for seq in range(1, 21):
            link.send(bundle(seq, parts))
        ends = [hear(link) for _ in range(20)]
    results = [e for e in ends if e["type"] == "result"]
    assert 2 <= len(results) < 20 and ends[-1]["type"] == "result" and [e["seq"] for e in ends] == list(range(1, 21))
    assert all(set(e["parts"]) == {"a", "b", "c"} and all("outputs" in p for p in e["parts"].values()) for e in results)
    assert {e["reason"] for e in ends if e["type"] == "drop"} == {"superseded"}


# ---------------------------------------------------------------- watching


def test_the_list_shows_each_stream_and_when_it_is_offline(quick: Server) -> None:
    with talk(quick, "rgb", station="seen", policy="lossless") as link:
        for _ in range(5):
            link.send(JPEG)
            hear(link)
        entry = figures(quick, "seen.rgb")
        assert (entry["status"], entry["received"], entry["processed"], entry["policy"]) == ("receiving", 5, 5, "lossless")
        assert entry["age_ms"]["p50"] > 0 and entry["device"] == "sim:0" and entry["last_seq"] == 5
        assert "seen.rgb" in [s["id"] for s in quick.client.get("/v1/streams").json()["streams"]]
        quick.until(lambda: figures(quick, "seen.rgb")["status"] == "offline", what="offline")
    assert quick.client.get("/v1/streams/nobody.rgb").json()["type"] == "stream_not_found"


def test_figures_of_streams_are_no_labels(quick: Server) -> None:
    """O01."""
    metrics = quick.client.get("/metrics").text
    assert 'outboard_stream_frames_total{model="rgb",outcome="answered"}' in metrics and "outboard_frame_age_seconds_count" in metrics
    assert "seen" not in metrics and "cut.rgb" not in metrics


def test_events_are_sent_as_they_happen(quick: Server) -> None:
    with talk(quick, "rgb", station="events", policy="lossless") as link:
        hear(link, "hello")
        with quick.client.stream("GET", "/v1/streams/events.rgb/events") as events:
            assert events.headers["content-type"].startswith("text/event-stream") and events.headers["x-accel-buffering"] == "no"
            lines = events.iter_lines()
            assert next(lines) == "event: state"
            link.send(JPEG)
            link.send(b"none")
            found = [line for line in (next(lines) for _ in range(10)) if line]
    kinds = [line.split(": ", 1)[1] for line in found if line.startswith("event")]
    data = [json.loads(line.split(": ", 1)[1]) for line in found if line.startswith("data")]
    assert kinds == ["result", "drop"] and [d["type"] for d in data] == ["state", "result", "drop"]
    assert [line for line in found if line.startswith("id")] == ["id: 1", "id: 2"]


def test_events_of_a_silent_stream_and_of_the_page_pass_through_a_proxy(tight: Server) -> None:
    """H18: no proxy holds them back, or takes them for dead."""
    with talk(tight, "slow", station="silent") as link:
        hear(link, "hello")
        with tight.client.stream("GET", "/v1/streams/silent.slow/events") as events:
            lines = events.iter_lines()
            told = [next(lines) for _ in range(7)]
    assert told[0] == "event: state" and told[3::2] == [": still here", ": still here"]
    with tight.client.stream("GET", "/v1/events") as page:
        for headers in (events.headers, page.headers):
            assert headers["x-accel-buffering"] == "no" and "no-cache" in headers["cache-control"]


def test_the_newest_picture_with_and_without_what_was_found(quick: Server) -> None:
    with talk(quick, "finder", station="camera") as link:
        hear(link, "hello")
        assert quick.client.get("/v1/streams/camera.finder/latest.jpg").status_code == 404
        link.send(BLOCK)
        hear(link)
        plain = quick.client.get("/v1/streams/camera.finder/latest.jpg")
        drawn = quick.client.get("/v1/streams/camera.finder/latest.jpg?draw=1")
        png = encoded(scene(64, 48, 8, 8, 16), "PNG")
        link.send(png)
        hear(link)
        made = quick.client.get("/v1/streams/camera.finder/latest.jpg")
    assert plain.content == BLOCK and plain.headers["x-outboard-seq"] == "1" and float(plain.headers["x-outboard-age-ms"]) >= 0
    assert drawn.headers["content-type"] == "image/jpeg" and drawn.content != BLOCK
    assert made.headers["x-outboard-seq"] == "2" and made.content[:3] == b"\xff\xd8\xff"


def test_a_viewer_that_does_not_read_holds_nobody_up(quick: Server) -> None:
    with talk(quick, "finder", station="viewed", policy="lossless") as link:
        link.send(BLOCK)
        hear(link)
        with (
            quick.client.stream("GET", "/v1/streams/viewed.finder/preview.mjpeg?fps=60&width=640") as asleep,
            quick.client.stream("GET", "/v1/streams/viewed.finder/preview.mjpeg?fps=60") as awake,
        ):
            assert asleep.headers["content-type"].startswith("multipart/x-mixed-replace")
            pieces = awake.iter_raw()
            assert b"Content-Type: image/jpeg" in next(pieces)
            for _ in range(50):
                link.send(BLOCK)
                assert hear(link)["type"] == "result"
            seen = b""
            while b"X-Outboard-Seq: 51" not in seen:
                seen += next(pieces)


# ---------------------------------------------------------------- by HTTP


def parts_of(images: list[bytes], delimiter: bytes, *, length: bool, newline: bytes = b"\r\n", close: bool = True) -> bytes:
    out = b""
    for image in images:
        head = [delimiter, b"Content-Type: image/jpeg", *([b"Content-Length: %d" % len(image)] if length else [])]
        out += newline.join(head) + newline * 2 + image + newline
    return out + (delimiter + b"--" + newline if close else b"")


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize(
    ("kind", "delimiter"),
    [
        ("multipart/x-mixed-replace;boundary=cut", b"--cut"),
        ("multipart/x-mixed-replace; boundary=--cut", b"--cut"),
        ('multipart/x-mixed-replace; boundary="cut"', b"--cut"),
        ("", b"--ffmpeg"),
    ],
)
def test_frames_by_post_as_cameras_send_them(quick: Server, kind: str, delimiter: bytes, length: bool) -> None:
    def chunks() -> Iterator[bytes]:
        body = parts_of([JPEG, b"none", JPEG], delimiter, length=length)
        yield from (body[i : i + 700] for i in range(0, len(body), 700))

    headers = {"content-type": kind} if kind else {}
    response = quick.client.post("/v1/models/rgb/stream?policy=lossless", content=chunks(), headers=headers)
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    said = [line for line in lines if line["type"] != "hb"]
    assert [line["type"] for line in said] == ["hello", "state", "result", "drop", "result", "end"]
    assert [line["seq"] for line in said[2:5]] == [1, 2, 3]
    assert said[-1] == {"type": "end", "received": 3, "answered": 2, "dropped": {"undecodable": 1}}


def test_answers_come_while_frames_are_still_sent(quick: Server) -> None:
    """Full duplex: the second frame is sent when the first one's answer is here."""
    host, port = quick.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as raw:

        def send(data: bytes) -> None:
            raw.sendall(b"%x\r\n%s\r\n" % (len(data), data))

        raw.sendall(
            b"POST /v1/models/rgb/stream HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/x-mixed-replace;boundary=b\r\n"
            b"Accept: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        lines = raw.makefile("rb")
        for seq in (1, 2, 3):
            send(parts_of([JPEG], b"--b", length=True, close=False))
            while f'"seq":{seq},'.encode() not in (line := lines.readline()):
                assert line
        raw.sendall(b"0\r\n\r\n")
        assert any(b'"type":"end","received":3,"answered":3' in line for line in lines)


@pytest.mark.parametrize(
    ("kind", "body", "status", "slug"),
    [
        ("image/jpeg", JPEG, 415, "unsupported_media_type"),
        ("multipart/x-mixed-replace;boundary=b", b"", 400, "bad_multipart"),
        ("multipart/x-mixed-replace;boundary=b", JPEG * 100, 400, "bad_multipart"),
        ("multipart/x-mixed-replace;boundary=other", parts_of([b"x" * 20000], b"--b", length=False), 400, "bad_multipart"),
    ],
)
def test_a_post_that_is_no_stream_is_refused(quick: Server, kind: str, body: bytes, status: int, slug: str) -> None:
    response = quick.client.post("/v1/models/rgb/stream", content=body, headers={"content-type": kind})
    assert (response.status_code, response.json()["type"]) == (status, slug)
    assert quick.client.post("/v1/models/rgb/stream?policy=x", content=body, headers={"content-type": kind}).status_code in (415, 422)
    assert quick.client.post("/v1/models/none/stream", content=body, headers={"content-type": kind}).status_code in (415, 404)


def test_real_ffmpeg_posts_a_film_and_somebody_else_reads_the_answers(quick: Server) -> None:
    """S12. ffmpeg reads nothing of the answer; /events tells."""
    film = ["-f", "lavfi", "-i", "testsrc=size=640x360:rate=25:duration=2", "-c:v", "mjpeg", "-q:v", "4", "-f", "mpjpeg"]
    for number in (1, 2):  # the second time the station takes its old name again
        url = f"{quick.url}/v1/models/rgb/stream?station=film&policy=lossless"
        subprocess.run(["ffmpeg", "-v", "error", *film, url], check=True, timeout=60)
        quick.until(lambda: figures(quick, "film.rgb")["processed"] == 50, what=f"every frame of run {number}")
    assert quick.client.get("/v1/streams/film.rgb/latest.jpg").headers["x-outboard-seq"] == "50"
