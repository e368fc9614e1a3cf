"""The worker process behind a modelled link: the same answers, and the faults that it plays."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import onnx_graphs as graphs
from integration.workerkit import WorkerKit
from outboard.devices.protocol import Done, Fault, Loaded, Ping


def pictures(n: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (n, 6, 8, 3), np.uint8))


def test_a_simulated_device_answers_truly_and_fails_as_told(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:thunderbolt4,vram=1GiB", concurrency=1) as worker:
        network = worker.load(graphs.folder(tmp_path, graphs.channel_means()))
        assert isinstance(network, Loaded), network
        assert "simulated" in worker.hello.name and worker.hello.h2d_bytes_per_s == pytest.approx(2.75e9, rel=0.05)
        expected = np.stack([p.mean((0, 1)) / 255 for p in pictures(3)])
        assert np.allclose(worker.run(network, pictures(3))["y"], expected, atol=1e-5)
        worker.send(Fault("oom"))
        assert worker.run_fails(network, pictures(1)).kind == "oom"
        worker.send(Fault("clear"))
        assert np.allclose(worker.run(network, pictures(3))["y"], expected, atol=1e-5)
        worker.send(Fault("sticky"))
        assert worker.run_fails(network, pictures(1)).kind == "sticky"
        worker.send(Fault("clear"))
        assert worker.run_fails(network, pictures(1)).kind == "sticky"  # for as long as the process lives


def test_batches_of_a_full_pipeline_tell_what_each_took_by_itself_however_late_they_are_heard(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:oculink,compute=60+0", concurrency=2) as worker:
        network = worker.load(graphs.folder(tmp_path, graphs.channel_means()))
        assert isinstance(network, Loaded), network
        for picture in pictures(4):
            worker.submit(network, picture.shape, worker.place([picture]))
        time.sleep(0.5)  # whoever should read the answers is held up, and finds all of them
        done = [worker.expect(Done) for _ in range(4)]
        assert all(d.took.own >= 0.05 for d in done), [d.took.own for d in done]
        assert max(d.took.seconds for d in done) > 1.6 * 0.06, "it waited for the one before it"


def test_a_worker_that_starts_hot_or_behind_a_bad_cable_says_so(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:oculink,power=180,fault=hot") as worker:
        assert worker.hello.power_limit_w == 60
    with WorkerKit(tmp_path / "cache", "sim:oculink,power=180,fault=slow-link") as worker:
        assert worker.hello.power_limit_w == 180 and worker.hello.h2d_bytes_per_s == pytest.approx(6.6e8, rel=0.2)


def test_a_hung_device_answers_no_ping_and_can_still_be_killed(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:oculink") as worker:
        worker.send(Fault("hang"))
        worker.send(Ping(1))
        with pytest.raises(TimeoutError):
            worker.receive(timeout=0.3)
