"""A real server whose simulated card is short of memory: who is answered, by what, and what the operator reads."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import graphs
from integration.pictures import encoded
from integration.serverkit import Server, serving
from integration.test_failover import play

PICTURE = encoded(np.full((320, 320, 3), 60, np.uint8))


def model(folder: Path, name: str, side: int) -> None:
    graphs.write_model(folder, name, graphs.channel_means((side, side)), graphs.toml("tensor", "tensor", (side, side)))


def batches(server: Server, name: str) -> dict:
    return server.device("sim:0")["batches"][name]


def test_another_program_that_takes_the_memory_step_by_step_fails_no_request(tmp_path: Path) -> None:
    model(tmp_path / "models", "means", 320)  # each row needs 7 MiB there
    device, cache = "sim:thunderbolt4,vram=96MiB,compute=6+1", {"OUTBOARD_CACHE": str(tmp_path / "cache")}
    with serving(tmp_path / "models", "--device", device, env=cache) as server:
        server.until(lambda: "sim:0" in server.model("means")["devices"], what="the device serves")
        assert server.device("sim:0")["memory"]["headroom_bytes"] == 12 << 20
        first = batches(server, "means")["most_rows"]
        assert first > 2
        answers: list[tuple[int, str, bool]] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                answer = server.predict("means", PICTURE)
                body = answer.json()
                answers.append((answer.status_code, body.get("device", body.get("detail")), body.get("degraded", True)))

        askers = [threading.Thread(target=ask) for _ in range(12)]
        for asker in askers:
            asker.start()
        try:
            for taken in (30, 50, 65):
                play(server, f"vram={taken}MiB")
                most = (96 - 12 - taken) // 7
                server.until(lambda m=most: batches(server, "means")["most_rows"] <= m, what=f"the cap beside {taken} MiB")
                assert "sim:0" in server.model("means")["devices"]
            play(server, "vram=90MiB")
            starved = server.until(lambda: batches(server, "means")["state"] == "starved" and batches(server, "means"), what="nothing fits")
            assert "MiB of 96 MiB are free, 12 MiB of them left to other programs" in starved["why"]
            server.until(lambda: answers[-1][1:] == ("cpu", True), what="the CPU answers, degraded")
            play(server, "clear")
            server.until(lambda: answers[-1][1:] == ("sim:0", False), what="the device answers again")
        finally:
            stop.set()
            for asker in askers:
                asker.join()
        assert Counter(status for status, _, _ in answers) == {200: len(answers)}, Counter(answers)
        assert server.device("sim:0")["losses"] == 0


def test_a_model_that_does_not_fit_beside_another_is_served_by_the_cpu(tmp_path: Path) -> None:
    model(tmp_path, "small", 320)
    model(tmp_path, "large", 640)  # a row needs 28 MiB
    with serving(tmp_path, "--device", "sim:thunderbolt4,vram=24MiB") as server:
        server.until(lambda: "sim:0" in server.model("small")["devices"], what="the device serves the small one")
        server.until(lambda: batches(server, "large")["state"] == "failed", what="the large one is refused")
        refused = batches(server, "large")
        assert "out of memory" in refused["why"] and "of 24 MiB are free" in refused["why"]
        large, small = (server.predict(name, PICTURE).json() for name in ("large", "small"))
        assert (large["device"], large["degraded"]) == ("cpu", True)
        assert (small["device"], small["degraded"]) == ("sim:0", False)


@pytest.mark.long
def test_the_next_start_begins_with_what_was_measured(tmp_path: Path) -> None:
    """What test_profile_command.py shows of a profile, of what servers measure themselves, and of a file that is damaged."""
    model(tmp_path / "models", "means", 320)
    device, cache = "sim:oculink,compute=5+1", {"OUTBOARD_CACHE": str(tmp_path / "cache")}
    tables = []
    for start in range(3):
        with serving(tmp_path / "models", "--device", device, env=cache) as server:
            server.until(lambda s=server: "sim:0" in s.model("means")["devices"], what="the device serves")
            tables.append(batches(server, "means"))
            known = [server.device(d)["batches"]["means"]["measuring"]["stored"] for d in ("sim:0", "cpu")]
            assert known == [start == 1] * 2, server.log
        if start == 1:
            for profile in (tmp_path / "cache" / "profiles").glob("*/*.json"):
                profile.write_text('{"key": ')
    first, again = (table.pop("measuring")["seconds"] for table in tables[:2])
    assert tables[0] == tables[1], "the same decisions, from the stored costs"
    assert again < first / 3, "a batch or two instead of all sizes"
    assert "cannot be read" in server.log and tables[2]["seconds"], "damaged profiles are measured anew"
