"""The worker process behind a modelled link: the same answers, and the faults that it plays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_graphs as graphs
from integration.workerkit import WorkerKit
from outboard.devices.protocol import Fault, Loaded, Ping


def pictures(n: int) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (n, 6, 8, 3), np.uint8))


def test_a_simulated_device_answers_truly_and_fails_as_told(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:thunderbolt4,vram=1GiB", concurrency=1) as worker:
        network = worker.load(graphs.folder(tmp_path, graphs.channel_means()))
        assert isinstance(network, Loaded), network
        assert "simulated" in worker.hello.name and worker.hello.h2d_bytes_per_s == 2.75e9
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


def test_a_hung_device_answers_no_ping_and_can_still_be_killed(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", "sim:oculink") as worker:
        worker.send(Fault("hang"))
        worker.send(Ping(1))
        with pytest.raises(TimeoutError):
            worker.receive(timeout=0.3)
