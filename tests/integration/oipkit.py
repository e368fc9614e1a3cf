"""A repository of tensor models for the tests of the Open Inference Protocol, and tensors of each datatype."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np

import graphs
import tensor_graphs as tensors
from integration.serverkit import Server, serving

STRANGE = [np.nan, np.inf, -np.inf, -0.0]
#: A tensor [2, 4] of each datatype, extremes and strange values included.
SAMPLES: dict[str, np.ndarray] = {
    "BOOL": np.array([[True, False, True, True], [False, False, True, False]]),
    **{f"INT{n}": np.array([[np.iinfo(f"int{n}").min, np.iinfo(f"int{n}").max, 0, 1], [2, 3, 4, 5]], f"int{n}") for n in (8, 16, 32, 64)},
    **{f"UINT{n}": np.array([[0, np.iinfo(f"uint{n}").max, 0, 1], [2, 3, 4, 5]], f"uint{n}") for n in (8, 16, 32, 64)},
    **{f"FP{n}": np.array([STRANGE, [np.finfo(f"float{n}").smallest_subnormal, 0.1, -1e4, 3]], f"float{n}") for n in (16, 32, 64)},
    "BF16": np.array([STRANGE, [1e-38, 7, -2.25, 3e38]], ml_dtypes.bfloat16),
    "BYTES": np.array([[b"cat", b"", "Füchse".encode(), b"a" * 300], [b"x\x00y", b"1", b"2", b"3"]], object),
}


def repository(folder: Path) -> Path:
    for datatype in SAMPLES:
        tensors.write(folder, f"same_{datatype.lower()}", tensors.same(datatype))
    tensors.write(folder, "wide", tensors.same("FP32", ["n", "width"]))
    tensors.write(folder, "row_sums", tensors.row_sums())
    tensors.write(folder, "simple", tensors.add_and_subtract())
    tensors.write(folder, "fixed4", tensors.add_and_subtract(4))
    tensors.write(folder, "mixed", tensors.mixed())
    tensors.write(folder, "softmax", tensors.softmax_over_rows())
    tensors.write(folder, "scalar", tensors.scalar_times_vector())
    tensors.write(folder, "trees", tensors.trees())
    tensors.write(folder, "numbered_trees", tensors.trees([7, 8, 9]))
    tensors.write(folder, "words", tensors.words_to_numbers())
    tensors.write(folder, "sparse", tensors.sparse_dot())
    tensors.write(folder, "pairs", tensors.needs_even_length())
    tensors.write(folder, "small_batches", tensors.same("FP32"), "[batching]\nmax = 2\n")
    graphs.write_model(folder, "rgb", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32), input='fit = "stretch"'))
    finder = graphs.block_finder("yolov8")
    graphs.write_model(folder, "finder", finder, graphs.toml("detection", "yolov8", (320, 320)))
    tensors.write(folder, "slow", graphs.sleeper(300), "[batching]\nmax = 1\n")  # without [input] it takes its tensor as it is
    return folder


class OipServer:
    """A running server with both protocols. `http` and `grpc` are host:port."""

    def __init__(self, server: Server):
        self.server = server
        self.http = server.url.removeprefix("http://")
        found = server.until(lambda: re.search(r"gRPC listens on ([\w.:\[\]]+)", server.log), what="gRPC")
        assert isinstance(found, re.Match)
        self.grpc = found[1]


@contextmanager
def oip_serving(models: Path, *flags: str, shared_memory: bool = True, env: dict[str, str] | None = None) -> Iterator[OipServer]:
    env = ({"OUTBOARD_OIP_SHARED_MEMORY": "true"} if shared_memory else {}) | (env or {})
    with serving(models, "--device", "cpu", "--grpc-port", "0", *flags, env=env) as server:
        yield OipServer(server)
