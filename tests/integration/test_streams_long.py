"""Streams for a minute or more: stalls, cuts, overload, simulators. Each prints its figures (run with -s)."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

import graphs
import tensor_graphs
from failing_link import linked
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving
from integration.streamkit import Station, running, stream_server
from outboard_client import Bundle, BundleResult, Frame, FrameStream, Part, Result

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
JPEG = encoded(scene(640, 480, 100, 100, 60))


def share(values: list[float], of: float) -> float:
    return sorted(values)[min(int(of * len(values)), len(values) - 1)]


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A device for 5 frames a second, one at a time, and the protocol's own pings."""
    with stream_server(tmp_path_factory.mktemp("slow"), batch_ms=200) as server:
        yield server


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with stream_server(tmp_path_factory.mktemp("quick"), batch_ms=20) as server:
        yield server


async def test_live_stays_young_at_six_times_what_the_device_can_do(slow: Server) -> None:
    """S04, S06: 30 frames a second for 60 s, a device for 5."""
    station = Station(slow.url, "slow", policy="live", station="overload", window=10_000)
    newest: list[float] = []  # at every moment, how old the newest answer is
    with running(station):
        began = asyncio.get_running_loop().time()
        sent: dict[int, float] = {}
        for seq in range(1, 1801):
            await asyncio.sleep(max(0.0, began + seq / 30 - asyncio.get_running_loop().time()))
            sent[seq] = time.time()
            station.give(seq, JPEG)
            if seq > 30:
                answered = next((s for s in reversed(station.order) if station.outcomes[s]["type"] == "result"), None)
                newest.append(time.time() - sent[answered] if answered else 60.0)
        await station.finish(30)
    kinds = station.kinds()
    print(
        f"\n1800 frames in 60 s: {dict(kinds)}; age of an answer when it comes: p50 {share(station.ages, 0.5) * 1e3:.0f} ms, p99 "
        f"{share(station.ages, 0.99) * 1e3:.0f}, most {max(station.ages) * 1e3:.0f}; of the newest one at any moment: p50 "
        f"{share(newest, 0.5) * 1e3:.0f}, p99 {share(newest, 0.99) * 1e3:.0f}, most {max(newest) * 1e3:.0f}"
    )
    assert kinds.total() == 1800 and station.order == list(range(1, 1801)) and set(kinds) == {"result", "superseded"}
    assert kinds["result"] >= 240, "the device was left idle"
    assert share(station.ages, 0.5) < 0.5


async def test_the_clients_live_stream_stays_young_at_six_times_what_the_device_can_do(slow: Server) -> None:
    """S04 from end to end: `FrameStream`, 30 frames a second for 60 s, a device for 5."""
    stream = FrameStream("slow", slow.url, policy="live", station="client")

    async def camera() -> AsyncIterator[Frame]:
        began = asyncio.get_running_loop().time()
        for n in range(1800):
            await asyncio.sleep(max(0.0, began + n / 30 - asyncio.get_running_loop().time()))
            yield Frame(JPEG)

    outcomes = [outcome async for outcome in stream.run(camera())]
    ages = [o.age for o in outcomes if isinstance(o, Result)][5:]
    figures = stream.figures
    print(
        f"\n1800 frames in 60 s: {len(ages)} answers, dropped {figures.dropped}; age of an answer p50 {share(ages, 0.5) * 1e3:.0f} ms, "
        f"p99 {share(ages, 0.99) * 1e3:.0f}, most {max(ages) * 1e3:.0f}"
    )
    assert [o.seq for o in outcomes] == list(range(1, 1801)) and figures.links == 1
    assert len(ages) >= 240, "the device was left idle"
    assert share(ages, 0.5) < 0.4 and share(ages, 0.99) < 1.0, "200 ms in the device, and as much again until it takes the next one"


async def test_cut_every_two_seconds_for_a_minute_every_frame_has_exactly_one_outcome(quick: Server) -> None:
    """S07."""
    async with linked(quick.url) as (line, url):
        station = Station(url, "rgb", policy="lossless", station="cut")
        with running(station):
            began = asyncio.get_running_loop().time()
            cuts = 0
            for seq in range(1, 901):
                await asyncio.sleep(max(0.0, began + seq / 15 - asyncio.get_running_loop().time()))
                station.give(seq, JPEG)
                if seq % 30 == 0:
                    line.cut()
                    cuts += 1
            await station.finish(120)
        entry = quick.client.get("/v1/streams/cut.rgb").json()
    links = f"{station.links} links ({station.resumed} resumed)"
    print(f"\n900 frames, {cuts} cuts, {links}, {station.repeats} outcomes told twice: {dict(station.kinds())}")
    assert station.kinds() == {"result": 900} and station.order == list(range(1, 901)) and cuts == 30
    assert station.links > 25 and station.resumed == station.links - 1
    assert (entry["received"], entry["processed"], entry["dropped"]) == (900, 900, {})


async def test_a_minute_of_work_in_flight_costs_no_link(tmp_path) -> None:
    """S01, with the pings that killed the link there: one every 2 s, 2 s for its pong. 100 frames are in flight, the device needs 60 s."""
    with stream_server(tmp_path / "models", batch_ms=600, streams_ping=2, streams_pong=2, streams_window=16) as server:
        station = Station(server.url, "slow", policy="lossless", station="stalled", window=1000)
        with running(station):
            began = time.monotonic()
            for seq in range(1, 101):
                station.give(seq, JPEG)
            await station.finish(180)
            took = time.monotonic() - began
    print(f"\n100 frames at once, {took:.1f} s of work: {station.links} link, closed {dict(station.codes)}, {dict(station.kinds())}")
    assert station.kinds() == {"result": 100} and station.order == list(range(1, 101))
    assert station.links == 1 and not station.codes and took > 55


async def test_a_link_that_stalls_for_a_minute_survives(quick: Server) -> None:
    """With 100 frames on the way, and the server's own pings."""
    async with linked(quick.url) as (line, url):
        station = Station(url, "rgb", policy="lossless", station="stalled", window=1000)
        with running(station):
            station.give(1, JPEG)
            await station.finish(30)
            line.up.clear()
            for seq in range(2, 102):
                station.give(seq, JPEG)
            await asyncio.sleep(60)
            assert len(station.order) == 1
            line.up.set()
            await station.finish(60)
    print(f"\n100 frames in a link that stalls for 60 s: {station.links} link, closed {dict(station.codes)}, {dict(station.kinds())}")
    assert station.links == 1 and not station.codes and station.kinds() == {"result": 101}


def simulator_models(folder) -> object:
    """A picture model that takes 800x600 down to 64x64, and one that takes numbers."""
    means = graphs.toml("tensor", "tensor", (64, 64), input='fit = "stretch"')
    graphs.write_model(folder, "means", graphs.channel_means((64, 64)), means)
    tensor_graphs.write(folder, "numbers", tensor_graphs.same("FP32", ["n", 6]))
    return folder


@pytest.mark.parametrize("raw", [False, True], ids=["JPEG", "pixels"])
async def test_a_simulator_in_lock_step_at_60_hertz(tmp_path, raw: bool) -> None:
    """Four cameras of 800x600 and an array each tick, one bundle at a time, on the CPU; the next tick at its time, or when the last one is
    answered. What a machine does in a second is printed: a share of that time is not for a test to ask."""
    rng = np.random.default_rng(7)
    pictures = [scene(800, 600, int(rng.integers(0, 700)), 50, 60) for _ in range(4)]
    cameras = {name: p if raw else encoded(p, quality=85) for name, p in zip("abcd", pictures, strict=True)}
    with serving(simulator_models(tmp_path / "models"), "--device", "cpu") as server:
        stream = FrameStream("means", server.url, policy="lossless", station="simulator", expect=[*cameras, "imu"])
        answered = asyncio.Semaphore(1)
        started: list[float] = []
        late = 0

        async def ticks() -> AsyncIterator[Frame]:
            nonlocal late
            began = time.perf_counter()
            for tick in range(1, 3601):
                await answered.acquire()
                await asyncio.sleep(max(0.0, began + tick / 60 - time.perf_counter()))
                started.append(time.perf_counter())
                late += started[-1] > began + (tick + 1) / 60
                imu = Part(np.full(6, tick, np.float32), model="numbers")
                yield Frame(Bundle({**cameras, "imu": imu}), meta={"tick": tick})

        took: list[float] = []
        inside = Counter[str]()  # the server's own account of one camera, ms
        async for outcome in stream.run(ticks()):
            took.append(time.perf_counter() - started[-1])
            answered.release()
            assert isinstance(outcome, BundleResult) and outcome.missing == [] and outcome.seq == len(took)
            assert outcome.meta == {"tick": len(took)} and outcome.parts["imu"].outputs[0].data == [len(took)] * 6
            inside.update(outcome.parts["a"].timing_ms)
        rate = len(took) / (started[-1] - started[0])
    print(
        f"\n{len(took)} ticks of 4 cameras 800x600 ({'pixels' if raw else 'JPEG'}) and an array: {rate:.1f} Hz, {late} ticks late; p50 "
        f"{share(took, 0.5) * 1e3:.1f} ms, p99 {share(took, 0.99) * 1e3:.1f}, most {max(took) * 1e3:.0f}; of one camera in the server, ms: "
        + ", ".join(f"{stage} {ms / len(took):.1f}" for stage, ms in inside.items())
    )
    assert len(took) == 3600 and stream.figures.links == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler: nothing can be compiled")
async def test_a_model_that_is_compiled_meanwhile_costs_no_stream_its_link(tmp_path) -> None:
    """S02: four streams run, with pings of 1 s, while a torch model with `compile` is put into the repository."""
    torch = pytest.importorskip("torch")
    models = tmp_path / "models"

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)))

        def forward(self, x):
            return self.layers(x).relu().mean((2, 3))

    program = torch.export.export(Mixed().eval(), (torch.zeros(2, 3, 32, 32),), dynamic_shapes=({0: torch.export.Dim("n", min=1, max=64)},))
    lag = 0.0
    with stream_server(models, batch_ms=5, streams_ping=1, streams_pong=2, cache=tmp_path / "cache") as server:
        stations = [Station(server.url, "rgb", policy="live", station=f"s{n}") for n in range(4)]
        with contextlib.ExitStack() as stack:
            for station in stations:
                stack.enter_context(running(station))
            seq, end = 0, None
            while end is None or time.monotonic() < end:
                seq += 1
                for station in stations:
                    station.give(seq, JPEG)
                await asyncio.sleep(0.1)
                if seq == 20:
                    rest = '[batching]\nmax = 2\n[run]\ncompile = true\nstandby = "hot"'
                    toml = graphs.toml("tensor", "tensor", (32, 32), rest=rest).replace('backend = "onnx"', 'backend = "torch"')
                    (tmp_path / "mixed").mkdir()
                    torch.export.save(program, tmp_path / "mixed" / "mixed.pt2")
                    (tmp_path / "mixed" / "model.toml").write_text(toml.replace("model.onnx", "mixed.pt2"))
                    (tmp_path / "mixed").rename(models / "mixed")
                if seq % 5 == 0:
                    told = (await asyncio.to_thread(server.client.get, "/metrics")).text
                    lag = max(lag, float(re.search(r"^outboard_loop_lag_seconds (\S+)", told, re.M)[1]))
                    if end is None and re.search(r"mixed.*compiled", server.log):
                        end = time.monotonic() + 3
                assert seq < 3000, server.log[-3000:]
            for station in stations:
                await station.finish(60)
    print(f"\n{seq} frames of 4 streams while a model was loaded and compiled; the event loop was at most {lag * 1e3:.0f} ms late")
    for station in stations:
        assert station.links == 1 and not station.codes and station.order == list(range(1, seq + 1))


async def test_an_unplug_and_replug_in_a_minute_of_lossless_frames(quick: Server) -> None:
    """4 frames a second; the cable is out for 15 s; the link is cut in the middle of that, too."""
    async with linked(quick.url) as (line, url):
        station = Station(url, "rgb", policy="lossless", station="both")
        with running(station):
            for seq in range(1, 241):
                station.give(seq, JPEG)
                await asyncio.sleep(0.25)
                if seq == 60:
                    await asyncio.to_thread(quick.client.post, "/v1/devices/sim:0/fault", json={"fault": "unplug"})
                if seq == 90:
                    line.cut()
                if seq == 120:
                    await asyncio.to_thread(quick.client.post, "/v1/devices/sim:0/fault", json={"fault": "replug"})
            await station.finish(60)
    devices = [station.outcomes[seq]["device"] for seq in station.order]
    changes = [device for i, device in enumerate(devices) if i == 0 or devices[i - 1] != device]
    print(f"\n240 frames: {dict(station.kinds())}, devices {changes}, {station.links} links, oldest answer {max(station.ages):.2f} s")
    assert station.kinds() == {"result": 240} and station.order == list(range(1, 241))
    assert changes[0] == changes[-1] == "sim:0" and "cpu" in changes and station.links == 2
