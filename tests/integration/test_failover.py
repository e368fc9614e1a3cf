"""Somebody pulls the cable of a real server with a simulated device: who gets which answer, and what the operator sees."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np
import pytest

import graphs
from integration.pictures import encoded
from integration.serverkit import Server, serving

SIM = "sim:thunderbolt4,vram=8GiB,compute=8+4"
ROOT = Path(__file__).resolve().parents[2]
UNPLUG = ROOT / "loadtests" / "unplug.py"


def repository(folder: Path) -> Path:
    graphs.write_model(folder, "means", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    graphs.write_model(folder, "touchy", graphs.dies_of_poison(), graphs.toml("tensor", "tensor", (32, 32)))
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the default limits for the tests that leave its device serving and its history forgotten."""
    with serving(repository(tmp_path_factory.mktemp("models")), "--device", SIM) as running:
        serves(running)
        yield running


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    yield shared
    for fault in ("clear", "replug"):
        play(shared, fault)
    shared.client.post("/v1/devices/sim:0/reset")
    serves(shared)


def serves(server: Server) -> None:
    """Wait until the device serves every model."""
    server.until(lambda: all("sim:0" in server.model(m)["devices"] for m in ("means", "touchy")), what="the device serves every model")


def play(server: Server, fault: str) -> None:
    assert server.client.post("/v1/devices/sim:0/fault", json={"fault": fault}).status_code == 200


def outboard(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "outboard", *arguments, "--url", server.url], capture_output=True, text=True, timeout=30)


def colour(n: int) -> tuple[int, int, int]:
    return (n * 37 % 256, n * 91 % 256, n % 256)


def picture(color: tuple[int, int, int]) -> bytes:
    return encoded(np.full((32, 32, 3), color, np.uint8), "PNG")


def means(response: httpx.Response) -> tuple[int, ...]:
    return tuple(round(255 * x) for x in response.json()["outputs"][0]["data"])


class Load:
    """Clients that ask all the time. `devices` counts the right answers by device, `bad` holds everything else."""

    def __init__(self) -> None:
        self.devices: Counter[str] = Counter()
        self.bad: list[str] = []

    def __call__(self, server: Server, numbers: Iterator[int], stop: threading.Event, model: str) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not stop.is_set():
                wanted = colour(next(numbers))
                try:
                    response = client.post(f"/v1/models/{model}/predict", content=picture(wanted))
                except httpx.TransportError as e:
                    self.bad.append(repr(e))
                    continue
                if response.status_code != 200:
                    self.bad.append(response.text)
                elif means(response) != wanted:
                    self.bad.append(f"{wanted} was answered as {means(response)} by {response.json()['device']}")
                else:
                    self.devices[response.json()["device"]] += 1

    def answered(self) -> int:
        return self.devices.total()

    def go_on(self, server: Server) -> None:
        """Wait for fifty more answers."""
        enough = self.answered() + 50
        server.until(lambda: self.answered() > enough, what="the load goes on")


@contextmanager
def load(server: Server, clients: int = 4, model: str = "means") -> Iterator[Load]:
    """Everything that is asked inside the block is answered rightly, or the test fails."""
    books, stop, numbers = Load(), threading.Event(), itertools.count()
    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(books, server, numbers, stop, model) for _ in range(clients)]
        try:
            server.until(lambda: books.answered() > 20, what="the load runs")
            yield books
        finally:
            stop.set()
        for future in futures:
            future.result()
    assert not books.bad, books.bad[:3]


def worker(server: Server, device: str) -> int | None:
    """The process id of the device's worker."""
    for pid in server.workers():
        if f"--device\0{device}\0" in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    return None


@pytest.mark.parametrize(
    ("cycles", "faults"),
    [(1, "unplug"), pytest.param(10, "unplug,hang,sticky,kill,stop", marks=[pytest.mark.long, pytest.mark.timeout(300)])],
)
def test_nothing_is_lost_doubled_or_wrong_however_the_device_goes(tmp_path: Path, cycles: int, faults: str) -> None:
    """A hung device and one with sticky errors are played by test_faults.py, and a worker is killed here below."""
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, UNPLUG, "--cycles", str(cycles), "--faults", faults, "--rest", "0", "--json", report],
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    told = json.loads(report.read_text())
    counts = {name: told[name] for name in ("lost", "wrong", "doubled", "refused", "broken", "early")}
    assert counts == {"lost": 0, "wrong": [], "doubled": 0, "refused": {}, "broken": {}, "early": 0}, done.stdout
    assert {c["fault"] for c in told["cycles"]} == set(faults.split(","))
    answered = Counter()
    for second in told["seconds"]:
        answered[second["device"]] += second["answers"]
    assert answered["cpu"] > 20 and answered["sim:0"] > 20, "both have served"


def test_the_fourth_loss_in_ten_minutes_means_quarantine_until_an_operator_ends_it(server: Server) -> None:
    with load(server) as books:
        for _ in range(4):
            server.until(lambda: server.device("sim:0")["state"] in ("starting", "warming", "serving"))
            play(server, "unplug")
            play(server, "replug")
        device = server.device("sim:0")
        assert device["state"] == "quarantined" and device["why"] == "lost 4 times in 10 minutes, last: unplugged (simulated)"
        left = (datetime.fromisoformat(device["until"]) - datetime.now(UTC)).total_seconds()
        assert 55 < left < 62, device["until"]
        metrics = server.client.get("/metrics").text
        assert 'outboard_device_state{device="sim:0",state="quarantined"} 1.0' in metrics
        assert 'outboard_device_quarantined{device="sim:0",reason="losses"} 1.0' in metrics
        assert 'outboard_device_quarantined{device="sim:0",reason="wrong_answers"} 0.0' in metrics
        assert f'outboard_device_lost_total{{device="sim:0"}} {device["losses"]}.0' in metrics
        ready = server.client.get("/readyz").json()
        assert ready["degraded"] and "sim:0" in ready["why"]
        before = books.devices["sim:0"]
        books.go_on(server)
        assert books.devices["sim:0"] <= before + 4, "only what was on its way"
        listed = outboard(server, "devices")
        assert listed.returncode == 1 and "quarantined" in listed.stdout and "lost 4 times" in " ".join(listed.stdout.split())
        assert outboard(server, "devices", "reset", "sim:0").returncode == 0
        serves(server)
        before = books.devices["sim:0"]
        server.until(lambda: books.devices["sim:0"] > before, what="the device answers again")


def test_a_device_that_came_back_answering_wrongly_serves_no_single_answer(server: Server) -> None:
    with load(server) as books:
        play(server, "wrong-answers")
        before = books.devices["sim:0"]
        server.until(lambda: server.device("sim:0")["state"] == "quarantined", what="the golden check finds it")
        assert "it answers wrongly" in server.device("sim:0")["why"]
        metrics = server.client.get("/metrics").text
        assert 'outboard_device_quarantined{device="sim:0",reason="wrong_answers"} 1.0' in metrics
        books.go_on(server)
        assert books.devices["sim:0"] <= before + 4, "only what was on its way"


def test_an_ejected_device_hands_over_without_a_failed_request_and_comes_back_on_reset(server: Server) -> None:
    with load(server) as books:
        done = outboard(server, "eject", "sim:0")
        assert done.returncode == 0 and "safe to unplug" in done.stdout, done.stderr
        assert server.device("sim:0")["state"] == "ejected" and worker(server, "sim:0") is None
        play(server, "unplug")
        play(server, "replug")
        time.sleep(0.7)
        assert server.device("sim:0")["state"] == "ejected", "it stays away until it is asked back"
        assert outboard(server, "devices", "reset", "sim:0").returncode == 0
        serves(server)
        before = books.devices["sim:0"]
        server.until(lambda: books.devices["sim:0"] > before)


def test_answers_say_who_gave_them_and_that_they_are_degraded(server: Server) -> None:
    answer = server.predict("means", picture(colour(1))).json()
    assert (answer["device"], answer["degraded"]) == ("sim:0", False)
    play(server, "unplug")
    answer = server.predict("means", picture(colour(1))).json()
    assert (answer["device"], answer["degraded"]) == ("cpu", True)
    refused = server.predict("means", picture(colour(1)), strict_device="true")
    assert refused.status_code == 503 and refused.json()["type"] == "device_unavailable"


def test_the_cpu_may_die_too_while_nobody_else_serves(server: Server) -> None:
    with load(server) as books:
        play(server, "unplug")
        server.until(lambda: books.devices["cpu"] > 10)
        pid = worker(server, "cpu")
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        server.until(lambda: server.device("cpu")["losses"] > 0 and server.device("cpu")["state"] == "serving")
        books.go_on(server)


def test_a_picture_that_kills_its_worker_is_refused_and_costs_its_neighbours_nothing(server: Server) -> None:
    poison = picture(graphs.POISON)
    losses = server.device("sim:0")["losses"]
    with load(server, model="touchy"):
        culprit = server.predict("touchy", poison)
        assert culprit.status_code == 422 and culprit.json()["type"] == "poison_frame", culprit.text
        assert server.device("sim:0")["losses"] == losses + 1, "it killed the device's worker once, the other time the disposable one"
        serves(server)
        began = time.perf_counter()
        again = server.predict("touchy", poison)
        assert again.status_code == 422 and again.json()["type"] == "poison_frame" and time.perf_counter() - began < 1
        assert server.device("sim:0")["losses"] == losses + 1, "it was not run again"


def test_the_deaths_of_poison_do_not_count_towards_quarantine(tmp_path: Path) -> None:
    with serving(repository(tmp_path), "--device", SIM, "--max-losses", "0") as server:
        serves(server)
        assert server.predict("touchy", picture(graphs.POISON)).json()["type"] == "poison_frame"
        serves(server)
        assert server.device("sim:0")["losses"] == 1


def test_a_worker_that_cannot_be_killed_and_goes_on_writing_changes_nothing(tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("unkillable.py"))]
    with serving(repository(tmp_path), "--device", SIM, program=program) as server:
        serves(server)
        with load(server, clients=8) as books:
            books.go_on(server)
            stuck = worker(server, "sim:0")
            play(server, "unplug")
            play(server, "replug")
            serves(server)
            before = books.devices["sim:0"]
            server.until(lambda: books.devices["sim:0"] > before + 50, what="its successor answers")
            assert stuck in server.workers(), "the first one still lives"
            server.until(lambda: stuck not in server.workers(), what="the first one has ended at last")
            books.go_on(server)
        server.until(lambda: "outboard_frame_memory_bytes 0.0" in server.client.get("/metrics").text, what="the frame memory is given back")
