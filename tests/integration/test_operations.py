"""The server as a process: its health under load, clients that leave, workers that die, wrong starts."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

import graphs
from integration.conftest import small_models
from integration.pictures import encoded
from integration.serverkit import Server, serving

PICTURE = encoded(np.full((32, 32, 3), 200, np.uint8), "PNG")


def outboard(*arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outboard", *arguments], capture_output=True, text=True, timeout=30, cwd=cwd, env={**os.environ, **env}
    )


def test_health_is_answered_while_the_models_are_busy(server: Server) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        work = [pool.submit(server.predict, "slow", PICTURE) for _ in range(16)]
        with httpx.Client(base_url=server.url) as other:
            times = []
            while not all(w.done() for w in work):
                began = time.perf_counter()
                assert other.get("/livez").status_code == 200 and other.get("/readyz").status_code == 200
                times.append(time.perf_counter() - began)
        assert all(w.result().status_code == 200 for w in work)
    assert len(times) > 5 and sorted(times)[len(times) // 2] < 0.1, sorted(times)


def test_the_port_answers_while_models_still_load(tmp_path: Path) -> None:
    with serving(small_models(tmp_path), ready=False) as server:
        assert server.client.get("/livez").status_code == 200
        body = server.client.get("/readyz")
        assert body.status_code in (200, 503)
        response = server.predict("slow", PICTURE)
        assert response.status_code in (200, 404, 503)
        server.until(lambda: server.client.get("/readyz").status_code == 200)


def frames(server: Server, outcome: str, model: str = "slow") -> float:
    """The counter of frames with this outcome, over all devices."""
    lines = server.client.get("/metrics").text.splitlines()
    return sum(
        float(x.rsplit(" ", 1)[1])
        for x in lines
        if x.startswith("outboard_frames_total") and f'outcome="{outcome}"' in x and f'model="{model}"' in x
    )


def test_work_whose_client_has_left_is_dropped(server: Server) -> None:
    answered, left = frames(server, "answered"), frames(server, "client_left")
    host, port = server.url.removeprefix("http://").split(":")
    sockets = []
    for _ in range(12):
        s = socket.create_connection((host, int(port)))
        s.sendall(b"POST /v1/models/slow/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(PICTURE) + PICTURE)
        sockets.append(s)
    time.sleep(0.25)
    for s in sockets:
        s.close()
    server.until(lambda: frames(server, "answered") + frames(server, "client_left") >= answered + left + 12, what="every frame has ended")
    assert frames(server, "client_left") - left >= 6, "most of the frames had not begun when their clients left"
    server.until(lambda: "outboard_frame_memory_bytes 0.0" in server.client.get("/metrics").text, what="the frame memory is given back")


def test_a_client_that_leaves_in_the_middle_of_its_upload_harms_nobody(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as s:
        s.sendall(b"POST /v1/models/rgb/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        s.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
    assert server.predict("rgb", PICTURE).status_code == 200
    assert "ClientDisconnect" not in server.log and "POST /v1/models/rgb/predict failed" not in server.log


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Takes bodies of 1 MiB that arrive within two seconds."""
    models = tmp_path_factory.mktemp("models")
    graphs.write_model(models, "m", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    with serving(models, env={"OUTBOARD_LIMITS_BODY": "1MiB", "OUTBOARD_LIMITS_BODY_SECONDS": "2"}) as running:
        yield running


def test_a_body_over_the_limit_is_refused_however_it_is_sent(tight: Server) -> None:
    def chunks():
        for _ in range(64):
            yield bytes(1 << 16)

    for content in (bytes(2 << 20), chunks()):
        response = tight.client.post("/v1/models/m/predict", content=content)
        assert response.status_code == 413 and response.json()["type"] == "body_too_large"


def test_a_body_that_does_not_arrive_in_time_is_given_up(tight: Server) -> None:
    host, port = tight.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as s:
        s.sendall(b"POST /v1/models/m/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        assert b" 408 " in s.recv(4096).splitlines()[0]


def test_a_worker_that_dies_is_replaced_and_no_request_is_lost(tmp_path: Path) -> None:
    graphs.write_model(tmp_path, "slow", graphs.sleeper(150), graphs.toml("tensor", "tensor", (32, 32), rest="[batching]\nmax = 1"))
    graphs.write_model(tmp_path, "rgb", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32)))
    with serving(tmp_path) as server:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            work = [pool.submit(server.predict, "slow", PICTURE) for _ in range(16)]
            time.sleep(0.4)
            for pid in server.workers():
                os.kill(pid, signal.SIGKILL)
            codes = [w.result().status_code for w in work]
        assert codes == [200] * 16
        device = server.device("cpu")
        assert device["losses"] == 1 and "SIGKILL" in device["last_loss"]["why"]
        server.until(lambda: server.device("cpu")["state"] == "serving")
        assert server.predict("rgb", PICTURE).status_code == 200


def test_workers_end_with_the_server_even_when_it_is_killed(tmp_path: Path) -> None:
    graphs.write_model(tmp_path, "m", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    with serving(tmp_path) as server:
        workers = server.workers()
        assert workers
        server.process.kill()
        server.process.wait()
        server.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 5, "the workers are gone")


def test_strict_device_refuses_what_another_device_would_have_to_answer(tmp_path: Path) -> None:
    graphs.write_model(tmp_path, "m", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    with serving(tmp_path, "--device", "cuda:7") as server:
        ready = server.client.get("/readyz").json()
        assert ready["degraded"] and "cuda:7" in ready["why"]
        assert server.client.get("/readyz", params={"strict": 1}).status_code == 503
        assert server.device("cuda:7")["state"] == "lost"
        answer = server.predict("m", PICTURE).json()
        assert (answer["device"], answer["degraded"]) == ("cpu", True)
        refused = server.predict("m", PICTURE, strict_device="true")
        assert refused.status_code == 503 and refused.json()["type"] == "device_unavailable"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--workers", "4", "--models", "."], "one front process"),
        (["serve", "--models", "/nowhere"], "no such folder"),
        (["serve", "--port", "99999", "--models", "."], "65535"),
        (["serve", "--nonsense"], "No such option"),
    ],
)
def test_wrong_usage_says_what_was_expected_and_exits_2(arguments: list[str], says: str) -> None:
    done = outboard(*arguments)
    assert done.returncode == 2
    assert says in " ".join((done.stderr + done.stdout).split()), done.stderr


def test_commands_about_a_server_print_tables_and_json(server: Server) -> None:
    done = outboard("devices", "--url", server.url)
    assert done.returncode == 0 and "serving" in done.stdout
    done = outboard("models", "--json", OUTBOARD_URL=server.url)
    assert done.returncode == 0 and '"finder_yolov8"' in done.stdout
    done = outboard("models", "--url", "http://127.0.0.1:9")
    assert done.returncode == 1 and "outboard serve" in " ".join(done.stderr.split())


def test_the_front_and_its_imports_never_touch_a_device(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "onnxruntime" not in maps and "libtorch" not in maps and "libcuda" not in maps
