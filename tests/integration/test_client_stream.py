"""FrameStream against a real server: one outcome for each frame, in order, over links that fail."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import graphs
from failing_link import linked
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving
from outboard_client import Backoff, Bundle, BundleResult, Drop, Frame, FrameStream, Part, Problem, Result, StreamLost, Uplink

FINDER = "finder_yolov8"


def picture(n: int) -> bytes:
    """Its block is at x = 4 (n mod 60)."""
    return encoded(scene(320, 240, 4 * (n % 60), 80, 40))


PICTURES = [picture(n) for n in range(60)]


def right(outcome: Result) -> bool:
    (found,) = outcome.answer.detections
    return abs(found.box[0] - 4 * (outcome.answer.meta["n"] % 60)) <= 3


def quick() -> Backoff:
    return Backoff(first=0.05, most=0.2)


async def numbered(count: int, fps: float = 0.0) -> AsyncIterator[Frame]:
    began = time.monotonic()
    for n in range(1, count + 1):
        if fps:
            await asyncio.sleep(max(0.0, began + n / fps - time.monotonic()))
        yield Frame(PICTURES[n % 60], meta={"n": n})


async def collect(stream: FrameStream, frames) -> list:
    return [outcome async for outcome in stream.run(frames)]


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (figures are read, not awaited)
            await asyncio.sleep(0.02)


def balanced(stream: FrameStream, outcomes: list, count: int) -> None:
    """Exactly one outcome for each frame, in order; and the stream's own figures say the same."""
    assert [o.seq for o in outcomes] == list(range(1, count + 1))
    figures = stream.figures
    answered = sum(not isinstance(o, Drop) for o in outcomes)
    assert (figures.sent, figures.answered, sum(figures.dropped.values()), figures.unanswered) == (count, answered, count - answered, 0)


async def test_lossless_answers_every_frame_in_order(server: Server) -> None:
    stream = FrameStream(FINDER, server.url, policy="lossless", station="test", min_score=0.5)
    outcomes = await collect(stream, numbered(100))
    balanced(stream, outcomes, 100)
    assert all(isinstance(o, Result) and right(o) and 0 <= o.age < 30 for o in outcomes)
    figures = stream.figures
    assert (figures.answered, figures.links, figures.doubles) == (100, 1, 0) and figures.device == "cpu" and not figures.degraded
    assert set(figures.age_ms) == {"p50", "p95", "p99"}


async def test_every_kind_of_source_and_image_is_taken(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(picture(0))
    array = np.asarray(scene(320, 240, 0, 80, 40))
    for source in ([path, array, str(path)], (x for x in (path, array, picture(0)))):
        outcomes = await collect(FrameStream(FINDER, server.url, policy="lossless"), source)
        assert len(outcomes) == 3 and all(o.answer.detections[0].box[0] <= 3 for o in outcomes)


async def test_a_frame_that_is_no_image_is_dropped_and_the_others_are_answered(server: Server, tmp_path: Path) -> None:
    bad = [b"no image at all", tmp_path / "nowhere.jpg", np.zeros((3, 3)), PICTURES[0][:-100], Frame(PICTURES[0], meta="x" * 70_000)]
    frames = list(itertools.chain.from_iterable((PICTURES[0], x) for x in bad))
    stream = FrameStream(FINDER, server.url, policy="lossless")
    outcomes = await collect(stream, frames)
    balanced(stream, outcomes, 10)
    assert [isinstance(o, Result) for o in outcomes] == [True, False] * 5
    drops = [o for o in outcomes if isinstance(o, Drop)]
    assert [d.reason for d in drops] == ["undecodable", "not_an_image", "not_an_image", "undecodable", "too_large"]
    assert [d.here for d in drops] == [False, True, True, False, True] and all(d.detail for d in drops)


async def test_live_keeps_the_newest_and_accounts_for_the_rest(server: Server) -> None:
    """A model that answers 6 a second, and a sender of 60."""
    stream = FrameStream("slow", server.url)
    outcomes = await collect(stream, numbered(180, fps=60))
    balanced(stream, outcomes, 180)
    assert 5 <= stream.figures.answered < 120 and sum(stream.figures.dropped.values()) > 30
    ages = [o.age for o in outcomes if isinstance(o, Result)]
    assert np.median(ages) < 6 * 3 / stream.figures.answered, "older than six answers"


async def test_buffers_on_the_way_do_not_fill_with_old_live_frames(server: Server) -> None:
    """The link carries nothing for a second and takes everything: kernels' and proxies' buffers do."""
    async with linked(server.url) as (line, url):
        stream = FrameStream(FINDER, url, policy="live")

        async def camera() -> AsyncIterator[Frame]:
            async for frame in numbered(120, fps=60):
                if frame.meta["n"] == 30:
                    line.up.clear()
                elif frame.meta["n"] == 90:
                    line.up.set()
                yield frame

        outcomes = await collect(stream, camera())
    balanced(stream, outcomes, 120)
    stalled = outcomes[30:89]
    assert sum(isinstance(o, Drop) and o.here and o.reason == "newer_frame" for o in stalled) >= 40, "they were sent into a buffer"
    assert isinstance(outcomes[-1], Result)


async def test_a_lazy_live_stream_takes_a_frame_when_it_can_be_sent(server: Server) -> None:
    taken = 0

    async def camera() -> AsyncIterator[bytes]:
        nonlocal taken
        for n in range(40):
            taken += 1
            yield PICTURES[n]

    stream = FrameStream(FINDER, server.url, eager=False, in_flight=2)
    seen = 0
    async for _ in stream.run(camera()):
        seen += 1
        assert taken <= seen + 3
    assert seen == 40 and sum(stream.figures.dropped.get(r, 0) for r in ("newer_frame", "link_lost")) == 0


async def test_refusals_before_the_upgrade_are_problems(server: Server) -> None:
    for arguments, slug in (({"model": "nothing"}, "model_not_found"), ({"model": FINDER, "min_score": 7}, "bad_option")):
        with pytest.raises(Problem) as caught:
            await collect(FrameStream(url=server.url, **arguments), [PICTURES[0]])
        assert caught.value.slug == slug and caught.value.status in (404, 422) and caught.value.detail
    with pytest.raises(ValueError, match="expected 'live' or 'lossless'"):
        FrameStream(FINDER, server.url, policy="fast")  # type: ignore[arg-type]


async def test_without_a_server_a_stream_waits_or_gives_up_and_names_its_frames() -> None:
    stream = FrameStream(FINDER, "http://127.0.0.1:9", policy="lossless", backoff=quick(), give_up=0.5)
    with pytest.raises(StreamLost, match="no link for") as caught:
        await collect(stream, PICTURES[:3])
    assert caught.value.unanswered == [1, 2, 3]
    figures = stream.figures
    assert (figures.sent, figures.unanswered, figures.links) == (3, 3, 0) and figures.closed["ConnectionRefusedError"] >= 2


async def test_what_a_source_raises_reaches_the_caller(server: Server) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield PICTURES[0]
        raise RuntimeError("the camera fell into the sea")

    with pytest.raises(RuntimeError, match="sea"):
        await collect(FrameStream(FINDER, server.url), broken())


async def test_over_a_link_that_is_cut_again_and_again_every_frame_is_answered_once(server: Server) -> None:
    async with linked(server.url) as (link, url):
        stream = FrameStream(FINDER, url, policy="lossless", backoff=quick(), in_flight=16)

        async def cutting() -> None:
            while True:
                await asyncio.sleep(0.3)
                link.cut()

        cutter = asyncio.create_task(cutting())
        outcomes = await collect(stream, numbered(400, fps=80))
        cutter.cancel()
    balanced(stream, outcomes, 400)
    assert all(isinstance(o, Result) and right(o) for o in outcomes)
    assert stream.figures.links > 5 and stream.figures.resumed >= stream.figures.links - 2


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_over_a_link_that_is_cut_every_2_seconds_for_a_minute_every_frame_is_answered_once(server: Server) -> None:
    async with linked(server.url) as (link, url):
        stream = FrameStream(FINDER, url, policy="lossless")

        async def cutting() -> None:
            for _ in range(30):
                await asyncio.sleep(2)
                link.cut()

        cutter = asyncio.create_task(cutting())
        outcomes = await collect(stream, numbered(900, fps=15))
        await cutter
    balanced(stream, outcomes, 900)
    assert all(isinstance(o, Result) and right(o) for o in outcomes) and link.cuts > 29
    assert stream.figures.resumed >= stream.figures.links - 2


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_a_model_that_stalls_for_a_minute_costs_no_link(tmp_path: Path) -> None:
    """100 frames are on their way meanwhile; what the link says of itself are the server's heartbeats."""
    graphs.write_model(tmp_path, "stalling", graphs.sleeper(600), graphs.toml("tensor", "tensor", (32, 32), rest="[batching]\nmax = 1"))
    with serving(tmp_path) as server:
        stream = FrameStream("stalling", server.url, policy="lossless", in_flight=100)
        outcomes = await collect(stream, [PICTURES[0]] * 120)
    balanced(stream, outcomes, 120)
    assert all(isinstance(o, Result) for o in outcomes) and max(o.age for o in outcomes) > 15
    assert (stream.figures.links, stream.figures.closed) == (1, {})


@pytest.mark.long
async def test_thirty_frames_a_second_to_a_model_that_does_six_stay_young(server: Server) -> None:
    stream = FrameStream("slow", server.url)
    outcomes = await collect(stream, numbered(900, fps=30))
    balanced(stream, outcomes, 900)
    ages = [o.age for o in outcomes if isinstance(o, Result)]
    between = 30 / stream.figures.answered  # seconds between two answers, on this machine, now
    assert stream.figures.answered > 30 and np.median(ages) < 4 * between, f"median age {np.median(ages)}, {between} s between answers"


async def test_a_live_stream_is_resumed_too(server: Server) -> None:
    async with linked(server.url) as (link, url):
        stream = FrameStream(FINDER, url, backoff=quick())
        running = asyncio.create_task(collect(stream, numbered(150, fps=50)))
        for links in range(1, 4):
            await until(lambda: stream.figures.links == links and stream.figures.connected)  # noqa: B023
            await asyncio.sleep(0.4)
            link.cut()
        outcomes = await running
    balanced(stream, outcomes, 150)
    assert all(right(o) for o in outcomes if isinstance(o, Result)) and stream.figures.answered > 50
    assert stream.figures.resumed == stream.figures.links - 1 >= 3


@pytest.mark.long
async def test_a_server_that_is_killed_and_started_again_gets_what_it_had_not_answered(tmp_path: Path) -> None:
    graphs.write_model(tmp_path, FINDER, graphs.block_finder("yolov8"), graphs.toml("detection", "yolov8", (320, 320)))
    with serving(tmp_path) as first:
        port = first.url.rpartition(":")[2]
        stream = FrameStream(FINDER, first.url, policy="lossless", backoff=quick())
        running = asyncio.create_task(collect(stream, numbered(300, fps=60)))
        await until(lambda: stream.figures.answered >= 60)
        first.process.kill()
        first.process.wait()
        with serving(tmp_path, "--port", port):
            outcomes = await running
    balanced(stream, outcomes, 300)
    assert all(isinstance(o, Result) and right(o) for o in outcomes)
    assert stream.figures.links >= 2 and stream.figures.resumed == 0


@pytest.mark.long
async def test_a_stalled_link_loses_nothing(server: Server) -> None:
    async with linked(server.url) as (link, url):
        stream = FrameStream(FINDER, url, policy="lossless", backoff=quick(), silence=30)
        running = asyncio.create_task(collect(stream, numbered(120, fps=40)))
        await until(lambda: stream.figures.answered >= 20)
        await link.stall(3)
        outcomes = await running
    balanced(stream, outcomes, 120)
    assert all(map(right, outcomes)) and (stream.figures.links, stream.figures.closed) == (1, {})


@pytest.mark.long
async def test_a_link_that_went_silent_is_left(server: Server) -> None:
    """As when a NAT forgot the connection: no RST, no FIN, nothing."""
    async with linked(server.url) as (link, url):
        stream = FrameStream(FINDER, url, policy="lossless", backoff=quick(), silence=7)
        running = asyncio.create_task(collect(stream, numbered(60, fps=30)))
        await until(lambda: stream.figures.answered >= 20)
        link.up.clear()
        await until(lambda: stream.figures.closed)
        assert stream.figures.closed == {"TimeoutError": 1}
        link.up.set()
        outcomes = await running
    balanced(stream, outcomes, 60)
    assert all(map(right, outcomes)) and stream.figures.resumed >= 1


@pytest.mark.long
async def test_live_over_a_slow_uplink_lowers_the_quality_and_stays_young(server: Server) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)  # 150 to 350 kB as JPEG
    async with linked(server.url) as (link, url):
        link.bytes_per_s = 1.5e6
        uplink = Uplink(fps=10, lowest=20, highest=90)
        stream = FrameStream("rgb", url, uplink=uplink)

        seen: list[tuple[int, float]] = []

        async def camera() -> AsyncIterator[np.ndarray]:
            for _ in range(80):
                await asyncio.sleep(0.1)
                seen.append((uplink.quality, uplink.bytes_per_s))
                yield noise

        outcomes = await collect(stream, camera())
    balanced(stream, outcomes, 80)
    assert min(quality for quality, _ in seen) < 70
    assert 0.7e6 < np.median([rate for _, rate in seen if rate]) < 3e6
    assert np.median([o.age for o in outcomes if isinstance(o, Result)]) < 2.5


@pytest.mark.long
async def test_images_are_made_to_fit_the_servers_limits(tmp_path: Path) -> None:
    """A message above the limit would cost the whole link, not only itself (close code 1009)."""
    graphs.write_model(tmp_path, "rgb", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32)))
    noise = np.random.default_rng(0).integers(0, 255, (300, 300, 3), np.uint8)
    with serving(tmp_path, env={"OUTBOARD_LIMITS_MESSAGE": "100KB"}) as server:
        stream = FrameStream("rgb", server.url, policy="lossless")
        png, alpha = encoded(noise, "PNG"), encoded(np.dstack([noise, noise[..., 0]]), "PNG")
        assert len(png) > 200_000
        outcomes = await collect(stream, [PICTURES[0], png, alpha, PICTURES[0]])
    balanced(stream, outcomes, 4)
    assert [isinstance(o, Result) for o in outcomes] == [True, True, False, True]
    assert outcomes[1].answer.image.width == 300 and outcomes[2].reason == "too_large" and "100000" in outcomes[2].detail
    assert stream.figures.links == 1


async def test_another_process_resumes_the_session(server: Server) -> None:
    """What a station does after a crash: its frames and its session are on disk, the outcomes up to 30 as well."""
    frames = [Frame(PICTURES[n % 60], meta={"n": n}, seq=n) for n in range(1, 81)]
    first = FrameStream(FINDER, server.url, policy="lossless", durable=True)
    held = []
    async for outcome in first.run(frames):
        held.append(outcome)
        if len(held) == 30:
            first.ack(25)  # 26 to 30 were not safe yet
            break
    second = FrameStream(FINDER, server.url, policy="lossless", session=first.session, after=25, durable=True)
    rest = []
    async for outcome in second.run(frames[25:]):
        rest.append(outcome)
        second.ack(outcome.seq)
    assert [o.seq for o in rest] == list(range(26, 81)) and all(map(right, rest))
    assert second.figures.resumed == 1 and second.figures.answered == 55


async def test_a_taken_over_session_is_given_up(server: Server) -> None:
    first = FrameStream(FINDER, server.url, policy="lossless", durable=True)

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield PICTURES[0]
            await asyncio.sleep(0.05)

    running = asyncio.create_task(collect(first, endless()))
    await until(lambda: first.figures.answered)
    second = FrameStream(FINDER, server.url, policy="lossless", session=first.session, after=0)
    taking = asyncio.create_task(collect(second, endless()))
    with pytest.raises(StreamLost, match="4001"):
        await running
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)


async def test_a_stream_that_is_left_stops_at_the_server(server: Server) -> None:
    stream = FrameStream("slow", server.url, policy="lossless", station="leaver")
    async for _ in stream.run(numbered(200)):
        break

    def gone() -> bool:
        listed = server.client.get("/v1/streams").json()["streams"]
        return not any(s["id"] == "leaver.slow" and s["waiting"] for s in listed)

    await asyncio.to_thread(server.until, gone, 20)


async def test_a_stream_that_is_left_in_the_middle_of_a_large_frame_stops_at_the_server(server: Server) -> None:
    """It goes in fragments, and nothing can be said before the last one has gone."""
    noise = np.random.default_rng(0).integers(0, 255, (700, 1000, 3), np.uint8)

    async def frames() -> AsyncIterator[Frame]:
        while True:
            yield Frame(Bundle({"noise": noise}))

    async with linked(server.url) as (line, url):
        line.bytes_per_s = 8e6  # a quarter of a second each
        stream = FrameStream("rgb", url, policy="lossless", station="large")
        outcomes = stream.run(frames())
        async for outcome in outcomes:
            assert isinstance(outcome, BundleResult) and "outputs" in msgspec.to_builtins(outcome.parts["noise"])
            if outcome.seq == 2:
                break
        await outcomes.aclose()
        await asyncio.to_thread(
            server.until, lambda: server.client.get("/v1/streams/large.rgb").json()["status"] == "stopped", 20, "the stream to stop"
        )


async def test_bundles_are_answered_together(server: Server) -> None:
    views = {
        "front": PICTURES[3],
        "left": np.asarray(scene(320, 240, 40, 80, 40)),
        "means": Part(np.zeros((32, 32, 3), np.uint8), model="rgb"),
    }
    stream = FrameStream(FINDER, server.url, policy="lossless", expect=["front", "left", "means", "rear"])
    outcomes = await collect(
        stream, [Frame(Bundle(views), meta={"tick": n}) for n in range(5)] + [Frame(Bundle(views | {"left": b"broken"}))]
    )
    assert [type(o) for o in outcomes] == [BundleResult] * 6
    for n, outcome in enumerate(outcomes[:5]):
        assert outcome.meta == {"tick": n} and outcome.missing == ["rear"]
        assert abs(outcome.parts["front"].detections[0].box[0] - 12) <= 3
        assert abs(outcome.parts["left"].detections[0].box[0] - 40) <= 3
        assert outcome.parts["means"].outputs is not None
    assert isinstance(outcomes[5].parts["left"], Problem) and outcomes[5].parts["front"].detections
