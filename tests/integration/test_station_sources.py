"""Videos and RTSP as a station reads them: a real RTSP server, servers that hang, addresses where nothing listens."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from outboard_client import Backoff, SourceFailed
from outboard_client.station.sources import Reading, open_source

av = pytest.importorskip("av", reason="the extra `video` is not installed")

GI = """
import gi
gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import Gst, GstRtspServer
Gst.init(None)
raise SystemExit(not (Gst.ElementFactory.find("x264enc") and Gst.ElementFactory.find("rtph264pay")))
"""
HAS_RTSP = Path("/usr/bin/python3").exists() and subprocess.run(["/usr/bin/python3", "-c", GI], capture_output=True).returncode == 0
needs_rtsp = pytest.mark.skipif(not HAS_RTSP, reason="gst-rtsp-server is not installed: see .ci/run")


def readers() -> list[psutil.Process]:
    """Reading processes that are left."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "outboard_client.station.reader" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not readers()


def quick(**changes) -> Reading:
    return Reading(backoff=lambda: Backoff(first=0.05, most=0.1), **changes)


@contextlib.contextmanager
def rtsp(*flags: str) -> Iterator[tuple[int, subprocess.Popen]]:
    program = Path(__file__).with_name("rtsp_server.py")
    process = subprocess.Popen(["/usr/bin/python3", str(program), *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def listening(behave) -> Iterator[int]:
    """A TCP server that does `behave(connection)` with each connection, in a thread of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=behave, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]


def video(path: Path, frames: int, *, fps: int = 10, size: tuple[int, int] = (64, 48)) -> Path:
    """An H.264 file whose n-th frame has the grey value 8 n."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream("libx264", rate=fps, options={"crf": "1", "g": "5"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for n in range(frames):
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), 8 * n, np.uint8), format="rgb24")
            frame.pts, frame.time_base = n, Fraction(1, fps)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


def grey(image: bytes) -> float:
    return float(np.asarray(Image.open(io.BytesIO(image))).mean())


async def all_of(source, taken: set[str] | None = None, at_most: int = 10_000) -> list:
    found = []
    async with contextlib.aclosing(source.frames(taken or set())) as frames:
        async for one in frames:
            found.append(one)
            if len(found) == at_most:
                break
    return found


async def test_lossless_gives_every_frame_of_a_video_in_order(tmp_path: Path) -> None:
    source = open_source(str(video(tmp_path / "a.mp4", 25)), Reading(live=False))
    found = await all_of(source)
    assert [round(grey(one.image) / 8) for one in found] == list(range(25))
    assert [one.key for one in found] == [str(n) for n in range(25)]
    assert found[10].meta == {"source": str(tmp_path / "a.mp4"), "index": 10, "time": 1.0}
    assert (source.figures.frames, source.figures.width, source.figures.height, source.figures.corrupted) == (25, 64, 48, 0)


async def test_a_video_goes_on_behind_what_was_taken_before(tmp_path: Path) -> None:
    source = open_source(str(video(tmp_path / "a.mp4", 25)), Reading(live=False))
    assert [one.key for one in await all_of(source, {"0", "21"})] == ["22", "23", "24"]


async def test_fps_thins_out_and_longest_shrinks(tmp_path: Path) -> None:
    path = video(tmp_path / "a.mp4", 30, size=(96, 64))
    source = open_source(str(path), Reading(live=False, fps=2.5, longest=48, quality=lambda: 95))
    found = await all_of(source)
    assert [one.meta["index"] for one in found] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert Image.open(io.BytesIO(found[0].image)).size == (48, 32)


@pytest.mark.long
async def test_live_plays_a_video_at_its_speed_and_skips_what_nobody_asked_for(tmp_path: Path) -> None:
    source = open_source(str(video(tmp_path / "a.mp4", 30)), Reading(live=True))
    indices = []
    async with contextlib.aclosing(source.frames(set())) as frames:
        async for one in frames:
            indices.append(one.meta["index"])
            age = time.time() - one.captured / 1e6
            assert age < 1.0, f"a frame {age} s old was given as the newest"
            await asyncio.sleep(0.45)  # a consumer at 2 fps of a video with 10
    assert indices == sorted(set(indices)) and len(indices) <= 12 and indices[-1] == 29
    assert source.figures.skipped == 30 - len(indices)


@pytest.mark.parametrize("live", [True, False])
async def test_damaged_frames_are_counted_and_never_given(tmp_path: Path, live: bool) -> None:
    """A transport stream of which packets were lost, as over UDP: what the decoder makes up must not reach a model."""
    whole, holes = tmp_path / "whole.ts", bytearray()
    with av.open(str(whole), "w") as out:
        stream = out.add_stream("libx264", rate=10, options={"crf": "28", "g": "10"})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for n, frame in enumerate(av.open("testsrc2=size=320x240:rate=10:duration=4", format="lavfi").decode(video=0)):
            frame = frame.reformat(format="yuv420p")
            frame.pts, frame.time_base = n, Fraction(1, 10)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    clean = np.stack([f.to_ndarray(format="rgb24")[::4, ::4].astype(int) for f in av.open(str(whole)).decode(video=0)])
    packets, rng = whole.read_bytes(), np.random.default_rng(0)
    for at in range(0, len(packets), 188):
        if at < 188 * 60 or rng.random() > 0.02:
            holes += packets[at : at + 188]
    (tmp_path / "holes.ts").write_bytes(holes)
    source = open_source(str(tmp_path / "holes.ts"), Reading(live=live, quality=lambda: 95))
    found = await all_of(source)
    assert source.figures.corrupted >= 5 and len(found) >= 5
    assert len(found) + source.figures.corrupted + source.figures.skipped <= 40
    for one in found:
        pixels = np.asarray(Image.open(io.BytesIO(one.image)))[::4, ::4].astype(int)
        assert min(np.abs(clean - pixels).mean(axis=(1, 2, 3))) < 5, f"frame {one.meta['index']} is not one that was sent"


async def test_what_is_no_video_is_an_error_and_not_an_empty_stream(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(b"this is no video" * 100)
    with pytest.raises(SourceFailed, match=r"a\.mp4: InvalidDataError"):
        await all_of(open_source(str(tmp_path / "a.mp4"), quick()))


@pytest.mark.parametrize("address", ["rtsp://127.0.0.1:1/x", "http://127.0.0.1:1/x.mjpeg"])
async def test_an_address_where_nothing_listens_is_an_error_within_10_seconds(address: str) -> None:
    began = time.monotonic()
    with pytest.raises(SourceFailed, match="refused"):
        await all_of(open_source(address, Reading()))
    assert time.monotonic() - began < 10


async def test_a_server_that_stops_in_the_middle_of_a_reply_is_given_up_in_time() -> None:
    def half_a_reply(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(b"RTSP/1.0 200 OK\r\nCSeq: 1\r\nPub")
        time.sleep(60)

    with listening(half_a_reply) as port:
        began = time.monotonic()
        with pytest.raises(SourceFailed, match="no frame for 2 s"):
            await all_of(open_source(f"rtsp://127.0.0.1:{port}/x", Reading(first_frame=2)))
        assert time.monotonic() - began < 8


@pytest.mark.long
async def test_a_camera_that_goes_silent_is_opened_again_and_shown_as_offline_meanwhile(tmp_path: Path) -> None:
    """An MJPEG camera that sends three frames and then hangs, with its connection open."""
    picture = io.BytesIO()
    Image.new("RGB", (32, 32)).save(picture, "JPEG")
    part = b"--f\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n%s\r\n" % (picture.tell(), picture.getvalue())
    connections = 0

    def camera(connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: multipart/x-mixed-replace; boundary=f\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(30):
                connection.sendall(part)
                time.sleep(0.05)
            time.sleep(60)

    with listening(camera) as port:
        source = open_source(f"http://127.0.0.1:{port}/video.mjpeg", quick(stall=3.5))
        states = []
        stop = threading.Event()

        def look() -> None:
            while not stop.wait(0.1):
                states.append(source.figures.state)

        looking = threading.Thread(target=look)
        looking.start()
        async with contextlib.aclosing(source.frames(set())) as frames:
            async for _ in frames:
                if source.figures.restarts == 1:
                    break
        stop.set()
        looking.join()
    assert connections >= 2 and source.figures.why == "no frame for 3.5 s"
    assert "online" in states and "offline" in states


@pytest.mark.long
async def test_failing_sources_are_retried_without_growing() -> None:
    """An address where nothing listens, again and again: one process at a time, none left, nothing kept."""
    source = open_source("rtsp://127.0.0.1:1/x", quick(keep_trying=True))
    waiting = asyncio.ensure_future(anext(source.frames(set())))
    descriptors = {}
    for _ in range(600):
        await asyncio.sleep(0.05)
        assert len(readers()) <= 1
        descriptors[source.figures.restarts] = psutil.Process().num_fds()
        if source.figures.restarts >= 5:
            break
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert "refused" in source.figures.why and source.figures.state == "opening" and source.figures.restarts >= 5
    assert max(descriptors.values()) <= descriptors[min(descriptors)] + 6


@needs_rtsp
async def test_rtsp_frames_arrive_over_tcp_and_a_lost_server_is_found_again() -> None:
    with rtsp() as (port, process):
        source = open_source(f"rtsp://127.0.0.1:{port}/test", quick(stall=3))
        found = []
        with contextlib.ExitStack() as again:
            async with contextlib.aclosing(source.frames(set())) as frames:
                async for one in frames:
                    found.append(one)
                    if len(found) == 10:  # the server dies, and another one comes up in its place
                        assert source.figures.corrupted == 0
                        process.kill()
                        process.wait()
                        again.enter_context(rtsp(f"--port={port}"))
                        lost = time.time()
                    elif len(found) > 10 and one.captured / 1e6 > lost + 1:
                        break
        assert source.figures.restarts >= 1
        assert Image.open(io.BytesIO(found[0].image)).size == (320, 240)
        assert all(np.asarray(Image.open(io.BytesIO(one.image))).max() > 200 for one in found), "the white ball is there"
        assert source.figures.corrupted <= source.figures.restarts, "the frame that the server was sending when it was killed"
        assert all(time.time() - one.captured / 1e6 < 30 for one in found)
    with pytest.raises(SourceFailed, match="refused"):
        await all_of(open_source(f"rtsp://127.0.0.1:{port}/test", Reading()))


@needs_rtsp
@pytest.mark.long
async def test_rtsp_wants_the_right_password_and_the_right_path() -> None:
    with rtsp("--password") as (port, _):
        assert len(await all_of(open_source(f"rtsp://me:secret@127.0.0.1:{port}/test", Reading()), at_most=3)) == 3
        for wrong in (f"rtsp://me:wrong@127.0.0.1:{port}/test", f"rtsp://127.0.0.1:{port}/test"):
            with pytest.raises(SourceFailed, match="Unauthorized") as caught:
                await all_of(open_source(wrong, Reading()))
            assert "wrong" not in str(caught.value)
        with pytest.raises(SourceFailed, match="NotFound|not found|404"):
            await all_of(open_source(f"rtsp://me:secret@127.0.0.1:{port}/nothing", Reading()))


@pytest.mark.long
def test_a_killed_station_leaves_no_reading_process(tmp_path: Path) -> None:
    """Not even one that hangs in a read: a server that accepts and says nothing."""
    with listening(lambda connection: time.sleep(60)) as port:
        command = [sys.executable, "-m", "outboard_client.station.cli", "check", f"rtsp://127.0.0.1:{port}/x"]
        station = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while not (children := station.children()):
            assert time.monotonic() < end
            time.sleep(0.05)
        time.sleep(1.5)
        station.kill()
        station.wait()
        end = time.monotonic() + 10
        while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):  # a zombie is its adopter's to bury
            assert time.monotonic() < end
            time.sleep(0.05)


def check(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "outboard_client.station.cli", "check", *arguments], capture_output=True, text=True, timeout=60
    )


def test_the_check_command_says_what_comes_or_why_not(tmp_path: Path) -> None:
    good = check("lavfi:testsrc2=size=160x120:rate=10", "--json", "--seconds", "1")
    assert good.returncode == 0 and json.loads(good.stdout)["width"] == 160
    bad = check("rtsp://127.0.0.1:1/x", "--json")
    assert bad.returncode == 1 and json.loads(bad.stdout)["ok"] is False and "refused" in bad.stderr
    assert check(str(tmp_path / "nothing")).returncode == 2
    assert check(str(tmp_path)).returncode == 1
