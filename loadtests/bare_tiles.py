"""What this machine answers without a server: pictures decoded, cut into tiles and run through a network in a bare loop on every core."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from outboard import repository
from outboard.imaging import tiles
from outboard.imaging.decode import decode
from outboard.imaging.header import read_header
from outboard.resources import cores
from outboard.worker import onnx_graph


def frames_per_second(model: Path, jpegs: Sequence[bytes], tiling: tiles.Tiling, seconds: float) -> float:
    """`model` is the folder of its model.toml. As the server does it: JPEGs decoded no further than the tiles need, uint8 rows, and as many
    frames at once as this process may use cores."""
    (network,) = repository.read(model).networks.values()
    graph, picture = onnx_graph.read(network)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    graph = onnx_graph.with_uint8_input(graph, picture, network.input)
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    width, height = network.input.size
    done = [0] * cores()
    end = time.perf_counter() + seconds

    def work(thread: int) -> None:
        while time.perf_counter() < end:
            jpeg = jpegs[(done[thread] * len(done) + thread) % len(jpegs)]
            header = read_header(jpeg, max_pixels=1 << 30)
            plan = tiles.plan(header.width, header.height, network.input, tiling, 1 << 20)
            rows = np.empty((plan.rows, height, width, 3), np.uint8)
            tiles.cut(plan, decode(jpeg, header, min_size=tiles.decode_size(plan, header, network.input)), header, network.input, rows)
            session.run(None, {onnx_graph.PIXELS: rows})
            done[thread] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(done))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / (time.perf_counter() - began)
