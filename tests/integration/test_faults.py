"""Faults of a simulated device that strike in a chosen phase, under load; and what is known of a device that came back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import graphs
from integration.serverkit import Server, serving
from integration.test_failover import SIM, Load, colour, load, means, outboard, picture, play, repository, serves, worker


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = repository(tmp_path_factory.mktemp("models"))
    with serving(models, "--device", SIM + ",power=180", "--max-losses", "1000") as running:
        serves(running)
        yield running


def play_in(server: Server, fault: str, phase: str) -> None:
    answer = server.client.post("/v1/devices/sim:0/fault", json={"fault": fault, "phase": phase})
    assert answer.status_code == 200, answer.text
    assert (answer.json()["fault"], answer.json()["phase"]) == (fault, phase)


def restart(server: Server) -> None:
    for fault in ("unplug", "replug"):
        play(server, fault)


def strikes(server: Server, books: Load, fault: str, phase: str) -> None:
    """Have the fault strike in its phase, see the device lost by it, and the device back."""
    before = server.device("sim:0")["losses"]
    play_in(server, fault, phase)
    if phase in ("starting", "warming"):
        restart(server)
        before += 1
    if (fault, phase) == ("hang", "starting"):  # its time limit is a minute: see that all goes on without it, and pull the cable
        time.sleep(1.0)
        assert server.device("sim:0")["state"] == "starting"
        restart(server)
    server.until(lambda: server.device("sim:0")["losses"] > before, what=f"{fault} while {phase} is noticed")
    books.go_on(server)
    play(server, "replug")
    serves(server)
    served = books.devices["sim:0"]
    server.until(lambda: books.devices["sim:0"] > served + 10, what="the device answers again")


@pytest.mark.parametrize("fault, phase", [("unplug", "uploading"), ("sticky", "computing"), ("hang", "computing")])
def test_a_fault_in_a_phase_loses_no_answer(server: Server, fault: str, phase: str) -> None:
    with load(server) as books:
        strikes(server, books, fault, phase)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["unplug", "hang", "sticky"])
def test_every_fault_in_every_phase_loses_no_answer(server: Server, fault: str) -> None:
    for phase in ("starting", "warming", "idle", "uploading", "computing", "returning"):
        with load(server, clients=1 if phase == "idle" else 4) as books:
            strikes(server, books, fault, phase)


def test_the_command_pulls_the_cable_in_a_phase_and_refuses_what_is_none(server: Server) -> None:
    losses = server.device("sim:0")["losses"]
    done = outboard(server, "unplug", "sim:0", "--phase", "idle")
    assert done.returncode == 0 and "when it is idle" in done.stdout, done.stderr
    server.until(lambda: server.device("sim:0")["losses"] == losses + 1)
    server.until(lambda: server.device("sim:0")["why"] == "unplugged (simulated)")
    assert outboard(server, "replug", "sim:0").returncode == 0
    serves(server)
    wrong = outboard(server, "unplug", "sim:0", "--phase", "lunch")
    assert wrong.returncode == 1 and "uploading" in wrong.stderr


def test_a_power_limit_that_differs_after_the_return_is_told_until_it_is_accepted(server: Server) -> None:
    assert server.device("sim:0")["power_limit_w"] == 180 and server.device("sim:0")["why"] is None
    play(server, "hot")
    restart(server)
    serves(server)
    device = server.device("sim:0")
    assert device["state"] == "serving" and device["power_limit_w"] == 60
    assert "its power limit is 60 W since it came back, it was 180 W" in device["why"] and "nvidia-smi -pl 180" in device["why"]
    assert "its power limit is 60 W" in server.log
    assert "60 W" in " ".join(outboard(server, "devices").stdout.split())
    play(server, "clear")
    restart(server)
    serves(server)
    assert server.device("sim:0")["why"] is None and server.device("sim:0")["power_limit_w"] == 180


def test_without_a_standby_the_device_is_held_to_what_it_answered_before(tmp_path: Path) -> None:
    graphs.write_model(tmp_path, "means", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32), rest='[run]\nstandby = "none"'))
    with serving(tmp_path, "--device", SIM) as server:
        server.until(lambda: server.model("means")["devices"] == ["sim:0"], what="only the device holds it")
        assert "nothing proves its answers of means@" in server.log
        assert means(server.predict("means", picture(colour(5)))) == colour(5)
        play(server, "wrong-answers")
        server.until(lambda: server.device("sim:0")["state"] == "quarantined", what="its own earlier answers convict it")
        assert "it answers wrongly" in server.device("sim:0")["why"]
        refused = server.predict("means", picture(colour(5)), deadline_ms=500)
        assert refused.status_code in (503, 504), refused.text
        assert worker(server, "sim:0") is None
        play(server, "clear")
        server.client.post("/v1/devices/sim:0/reset")
        server.until(lambda: server.model("means")["devices"] == ["sim:0"])
        assert means(server.predict("means", picture(colour(6)))) == colour(6)
