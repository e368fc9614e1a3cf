"""The `outboard-station` command against a real server: every frame once, over crashes of the station, of the server and of the link."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import graphs
from failing_link import linked
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving

FINDER = "finder_yolov8"
STATION = [sys.executable, "-m", "outboard_client.station.cli"]


def folder(path: Path, count: int) -> Path:
    """Pictures whose block is at x = 4 (n mod 60)."""
    path.mkdir()
    kept = [encoded(scene(320, 240, 4 * n, 80, 40)) for n in range(60)]
    for n in range(count):
        (path / f"{n:04}.jpg").write_bytes(kept[n % 60])
    return path


def station(*arguments: object, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STATION, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)


def started(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([*STATION, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in _whole(path)]


def complete(results: list[dict], count: int) -> None:
    """Each picture answered rightly, once, in order."""
    assert [r["seq"] for r in results] == list(range(1, count + 1))
    assert [r["meta"]["file"] for r in results] == [f"{n:04}.jpg" for n in range(count)]
    for n, result in enumerate(results):
        (found,) = result["detections"]
        assert abs(found["box"][0] - 4 * (n % 60)) <= 3


def test_a_folder_is_answered_into_a_file_and_sidecars(server: Server, tmp_path: Path) -> None:
    source = folder(tmp_path / "flight", 30)
    out = tmp_path / "out.ndjson"
    arguments = ["run", source, "--model", FINDER, "--url", server.url, "--policy", "lossless", "--out", out, "--sidecar", source, "--json"]
    done = station(*arguments, "--min-score", "0.5")
    assert done.returncode == 0, done.stderr
    complete(lines(out), 30)
    assert json.loads((source / "0007.jpg.json").read_text())["detections"][0]["label"]
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    last = figures[-1]
    assert last["frames"]["sent"] == last["frames"]["answered"] == 30 and last["frames"]["dropped"] == {} and last["source"]["frames"] == 30
    assert last["device"]["id"] == "cpu" and last["link"]["state"] in ("up", "down")
    (source / "0100.jpg").write_bytes(b"no image")
    again = station(*arguments)
    assert again.returncode == 1, "lossless, and one frame has no answer"
    results = lines(out)[30:]
    assert [r["seq"] for r in results] == list(range(31, 62)) and results[-1] | {"detail": ""} == {
        "type": "drop",
        "seq": 61,
        "reason": "undecodable",
        "detail": "",
    }


def test_a_station_that_is_killed_at_any_moment_leaves_each_frame_answered_once(server: Server, tmp_path: Path) -> None:
    count, rng = 150, random.Random(5)
    source, spool = folder(tmp_path / "flight", count), tmp_path / "spool"
    arguments = ["run", source, "--model", FINDER, "--url", server.url, "--policy", "lossless", "--spool", spool, "--fps", "60"]
    kills = 0
    for _ in range(3):
        process = started(*arguments)
        before = len(_whole(spool / "results.ndjson"))
        end = time.monotonic() + 60
        while len(_whole(spool / "results.ndjson")) < before + 10 and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.3))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
    done = station(*arguments)
    assert done.returncode == 0, done.stderr
    assert kills >= 2, "the station was done before it could be killed"
    complete(lines(spool / "results.ndjson"), count)
    waiting = station("spool", spool, "--json")
    assert json.loads(waiting.stdout)["frames"] == 0 and json.loads(waiting.stdout)["held"] == count
    again = station(*arguments)
    assert again.returncode == 0 and "taken before" in again.stderr
    complete(lines(spool / "results.ndjson"), count)


def _whole(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.long
def test_the_spool_holds_what_is_filmed_while_the_server_is_away(tmp_path: Path) -> None:
    """The server is killed with frames on their way; the station takes frames in meanwhile, is killed too, and finds a new server."""
    models = tmp_path / "models"
    models.mkdir()
    graphs.write_model(models, FINDER, graphs.block_finder("yolov8"), graphs.toml("detection", "yolov8", (320, 320)))
    count = 120
    source, spool = folder(tmp_path / "flight", count), tmp_path / "spool"
    with serving(models) as first:
        port = first.url.rpartition(":")[2]
        arguments = ["run", source, "--model", FINDER, "--url", first.url, "--policy", "lossless", "--spool", spool, "--fps", "40"]
        process = started(*arguments)
        first.until(lambda: len(_whole(spool / "results.ndjson")) >= 20, 60)
        first.process.kill()
        first.process.wait()
        time.sleep(1.5)
        process.kill()
        process.communicate()
    waiting = json.loads(station("spool", spool, "--json").stdout)
    assert waiting["frames"] > 10, "taken in while nobody answered"
    with serving(models, "--port", port):
        done = station(*arguments)
    assert done.returncode == 0, done.stderr
    complete(lines(spool / "results.ndjson"), count)


@pytest.mark.long
async def test_over_a_link_that_is_cut_every_second(server: Server, tmp_path: Path) -> None:
    source, spool = folder(tmp_path / "flight", 100), tmp_path / "spool"
    async with linked(server.url) as (link, url):
        arguments = ["run", source, "--model", FINDER, "--url", url, "--policy", "lossless", "--spool", spool, "--fps", "30", "--json"]
        process = await asyncio.create_subprocess_exec(*STATION, *map(str, arguments), stdout=asyncio.subprocess.PIPE)
        running = asyncio.create_task(process.communicate())
        while not running.done():
            await asyncio.sleep(1)
            link.cut()
        stdout, _ = await running
    assert process.returncode == 0
    complete(lines(spool / "results.ndjson"), 100)
    assert json.loads(stdout.splitlines()[-1])["link"]["links"] >= 2


@pytest.mark.long
def test_a_full_spool_makes_a_folder_wait_and_loses_nothing(server: Server, tmp_path: Path) -> None:
    source, spool = folder(tmp_path / "flight", 40), tmp_path / "spool"
    size = sum(f.stat().st_size for f in source.iterdir())
    limit = (16 << 20) + size // 4
    done = station(
        "run", source, "--model", FINDER, "--url", server.url, "--policy", "lossless", "--spool", spool, "--spool-limit", limit, "--json"
    )
    assert done.returncode == 0, done.stderr
    complete(lines(spool / "results.ndjson"), 40)
    assert all(json.loads(line)["spool"]["bytes"] <= size // 4 for line in done.stdout.splitlines())


@pytest.mark.long
def test_live_video_shows_the_device_and_its_loss(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="the extra `video` is not installed")
    graphs.write_model(tmp_path, FINDER, graphs.block_finder("yolov8"), graphs.toml("detection", "yolov8", (320, 320)))
    with serving(tmp_path, "--device", "sim:thunderbolt4,compute=2+1") as server:
        server.until(lambda: server.device("sim:0")["state"] == "serving")
        video = "lavfi:testsrc2=size=640x480:rate=15:duration=60"
        process = started("run", video, "--model", FINDER, "--url", server.url, "--json", "--every", "0.3")
        figures: list[dict] = []
        assert process.stdout is not None
        stdout = process.stdout
        reading = threading.Thread(target=lambda: figures.extend(json.loads(line) for line in stdout))
        reading.start()
        server.until(lambda: figures and figures[-1]["device"]["id"] == "sim:0" and figures[-1]["frames"]["answered"] > 10, 60)
        server.client.post("/v1/devices/sim:0/fault", json={"fault": "unplug"})
        server.until(lambda: figures[-1]["device"] | {"why": ""} == {"id": "cpu", "degraded": True, "why": ""}, 60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        reading.join()
    last = figures[-1]["frames"]
    assert last["sent"] == last["answered"] + sum(last["dropped"].values()) + last["unanswered"]
    assert figures[-1]["device"]["why"] and figures[-1]["source"]["size"] == [640, 480]


@pytest.mark.long
def test_plain_lines_where_there_is_no_terminal_and_a_screen_where_there_is_one(server: Server, tmp_path: Path) -> None:
    source = folder(tmp_path / "flight", 5)
    arguments = [*map(str, ["run", source, "--model", FINDER, "--url", server.url, "--policy", "lossless"])]
    plain = station(*arguments)
    assert plain.returncode == 0 and "sent 5 answered 5 dropped 0" in plain.stdout.splitlines()[-1] and "\x1b" not in plain.stdout
    controller, terminal = os.openpty()
    process = subprocess.Popen([*STATION, *arguments], stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(controller, 65536):
            shown += chunk
    except OSError:
        pass  # Linux: EIO when the other end is closed
    assert process.wait(30) == 0 and b"5 sent = 5 answered" in shown


def test_what_cannot_work_is_told_at_once(server: Server, tmp_path: Path) -> None:
    source = folder(tmp_path / "flight", 2)
    wrong = [
        (["run", tmp_path / "nothing", "--model", FINDER], 2, "no such folder or file"),
        (["run", source, "--model", FINDER, "--policy", "fast"], 2, "expected live or lossless"),
        (["run", source, "--model", FINDER, "--spool", tmp_path / "s"], 2, "needs --policy lossless"),
        (
            ["run", source, "--model", FINDER, "--policy", "lossless", "--spool", tmp_path / "s", "--spool-limit", "lots"],
            2,
            "such as 500MB",
        ),
        (["run", source, "--model", FINDER, "--url", "localhost:1"], 2, "expected http"),
        (["run", source, "--model", FINDER, "--policy", "lossless", "--spool", tmp_path / "t", "--spool-limit", 16_777_225], 1, "not fit"),
        (["run", source, "--model", "nothing", "--url", server.url], 1, "model_not_found"),
        (["run", source, "--model", FINDER, "--url", "http://127.0.0.1:9", "--give-up", "0.1"], 1, "no link for"),
        (["run", "rtsp://127.0.0.1:1/x", "--model", FINDER, "--url", server.url], 1, "refused"),
    ]
    running = [(started(*arguments), code, said) for arguments, code, said in wrong]
    for process, code, said in running:
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == code and said in " ".join(stderr.split()), stderr


@pytest.mark.long
def test_every_command_has_an_example_in_its_help() -> None:
    for command in ("run", "check", "spool"):
        shown = station(command, "--help")
        assert shown.returncode == 0 and f"outboard-station {command}" in shown.stdout.split("Example")[1]
