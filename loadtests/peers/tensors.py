"""FP32 tensors [1, 3, 224, 224] by the Open Inference Protocol: Outboard, Triton and the model alone, side by side in interleaved rounds.

    .venv/bin/python loadtests/peers/tensors.py --target binary:triton=1.0 --target shared:loop=0.90

`binary`: the tensor travels in the request (602 kB), `shared`: it lies in system shared memory and the request names it. The loop is the
same network on one thread a core over tensors that lie ready: `loop` one tensor at a time as the requests bring them, `best-loop` in the
batch size that is fastest, which no server knows to come. wrk posts in a closed loop from the same cores.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from statistics import median
from typing import Annotated

import httpx
import numpy as np
import onnxruntime
import typer
from rich.console import Console
from rich.table import Table

import prepare
from measure import Meter, drive, running, tree
from sides import CACHE, PROCESSES, SERVERS, Side

SHAPE = (1, 3, 224, 224)
COUNT = 8
HEAD = 320  # bytes: wrk sets the header's length once for all bodies
BINARY, SHARED, LOOP, BEST_LOOP = "binary", "shared", "loop", "best-loop"
MODEL_TOML = """task = "tensor"
backend = "onnx"
file = "mobilenet_v3_small.onnx"
[output]
decoder = "tensor"
[batching]
max = 8
"""
OUTPUT = [{"name": "y", "parameters": {"binary_data": True}}]


def inputs() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(SHAPE, np.float32) for _ in range(COUNT)]


def open_model(onnx: Path) -> onnxruntime.InferenceSession:
    """On one thread that sleeps while it waits, as work.py's."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(onnx), options, providers=["CPUExecutionProvider"])


def loop(onnx: Path, batch: int, seconds: float, start, rates) -> None:
    session = open_model(onnx)
    x = np.concatenate([inputs()[i % COUNT] for i in range(batch)])
    for _ in range(3):
        session.run(None, {"x": x})
    start.wait()
    done, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        session.run(None, {"x": x})
        done += batch
    rates.put(done / elapsed)


def measure_loop(onnx: Path, batch: int, seconds: float) -> dict:
    spawn = multiprocessing.get_context("spawn")
    start, rates = spawn.Barrier(PROCESSES), spawn.Queue()
    workers = [spawn.Process(target=loop, args=(onnx, batch, seconds, start, rates), daemon=True) for _ in range(PROCESSES)]
    for worker in workers:
        worker.start()
    fps = sum(rates.get() for _ in workers)
    for worker in workers:
        worker.join()
    return {"side": LOOP, "workload": f"batch {batch}", "fps": fps}


def request(parameters: dict, data: bytes = b"") -> bytes:
    given = {"name": "x", "shape": SHAPE, "datatype": "FP32", "parameters": parameters}
    return json.dumps({"inputs": [given], "outputs": OUTPUT}).encode().ljust(HEAD) + data


@contextmanager
def registered(base: str, tensors: list[np.ndarray]) -> Iterator[None]:
    """The tensors in a shared memory region that the server knows as "tensors"."""
    memory = shared_memory.SharedMemory(create=True, size=sum(x.nbytes for x in tensors))
    try:
        np.concatenate(tensors, out=np.ndarray((COUNT, *SHAPE[1:]), np.float32, memory.buf))
        register = {"key": f"/{memory.name}", "offset": 0, "byte_size": memory.size}
        httpx.post(f"{base}/v2/systemsharedmemory/region/tensors/register", json=register).raise_for_status()
        yield
    finally:
        memory.close()
        memory.unlink()


def check(side: Side, base: str, bodies: list[Path], expected: list[np.ndarray]) -> None:
    """Every side computes the same."""
    for body, want in zip(bodies, expected, strict=True):
        response = httpx.post(base + side.path, content=body.read_bytes(), headers=side.headers, timeout=30)
        length = int(response.headers.get("inference-header-content-length", 0))
        got = np.frombuffer(response.content[length:], np.float32) if response.status_code == 200 else np.zeros(0, np.float32)
        if got.size != want.size or not np.allclose(got, want.reshape(-1), rtol=1e-3, atol=1e-4):
            sys.exit(
                f"{side.name} answers {response.status_code} for {body.name}: {response.content[:300]!r}; it does not do the same work"
            )


def measure(side: Side, onnx: Path, expected: list[np.ndarray], workloads: list[str], connections: int, seconds: float) -> Iterator[dict]:
    tensors = inputs()
    with running(side, onnx, CACHE / f"{side.name}.log") as (base, server), registered(base, tensors):
        for workload in workloads:
            bodies = []
            for i, x in enumerate(tensors):
                where = {"shared_memory_region": "tensors", "shared_memory_offset": i * x.nbytes, "shared_memory_byte_size": x.nbytes}
                bodies.append(CACHE / "bodies" / f"tensor-{workload}-{i}")
                bodies[-1].parent.mkdir(exist_ok=True)
                bodies[-1].write_bytes(request(where) if workload == SHARED else request({"binary_data_size": x.nbytes}, x.tobytes()))
            check(side, base, bodies, expected)
            drive(side, base, bodies, connections, max(2, seconds / 4))
            meter = Meter(tree(server))
            yield {"side": side.name, "workload": workload, **drive(side, base, bodies, connections, seconds), **meter.read()}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    seconds: Annotated[float, typer.Option(min=1, help="of each measurement")] = 6,
    connections: Annotated[int, typer.Option(min=1)] = 16,
    sides: Annotated[str, typer.Option(help="comma-separated")] = "outboard,triton",
    workloads: Annotated[str, typer.Option(help="comma-separated")] = f"{BINARY},{SHARED}",
    target: Annotated[
        list[str] | None, typer.Option(help="WORKLOAD:SIDE=RATIO that outboard must reach; SIDE also loop, best-loop")
    ] = None,
) -> None:
    """Exit status 1: a target was missed."""
    if not shutil.which("wrk"):
        sys.exit("wrk is not installed (Debian: apt-get install wrk)")
    small = prepare.images(CACHE / "data")["small"]
    onnx = prepare.repository(CACHE / "data" / "models", small)
    models = CACHE / "data" / "tensor-models"
    (models / "tensor").mkdir(parents=True, exist_ok=True)
    shutil.copy(onnx, models / "tensor" / onnx.name)
    (models / "tensor" / "model.toml").write_text(MODEL_TOML + f"# {hashlib.sha256(onnx.read_bytes()).hexdigest()}\n")
    os.environ["OUTBOARD_OIP_SHARED_MEMORY"] = "true"
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(HEAD)}
    of_tensors = {
        name: replace(SERVERS[name], path="/v2/models/tensor/infer", ready="/v2/health/ready", headers=headers) for name in sides.split(",")
    }
    if "outboard" in of_tensors:
        command = SERVERS["outboard"].command
        ours = str(models)
        of_tensors["outboard"] = replace(
            of_tensors["outboard"],
            command=lambda port: [ours if part == str(CACHE / "data" / "models") else part for part in command(port)],
        )
    session = open_model(onnx)
    expected = [session.run(None, {"x": x})[0] for x in inputs()]
    rows: list[dict] = []
    for turn in range(rounds):
        order = [LOOP, *of_tensors] if turn % 2 == 0 else [*reversed(of_tensors), LOOP]
        for name in order:
            measured = (
                [measure_loop(onnx, batch, seconds) for batch in (1, 4, 8)]
                if name == LOOP
                else measure(of_tensors[name], onnx, expected, workloads.split(","), connections, seconds)
            )
            rows += [{"round": turn, **row} for row in measured]
    show(rows)
    failures = [text for text in target or [] if not _reached(rows, text)]
    for text in failures:
        print(f"missed: {text}")
    raise typer.Exit(1 if failures else 0)


def rate(rows: list[dict], turn: int, side: str, workload: str) -> float:
    of_loop = [r["fps"] for r in rows if r["round"] == turn and r["side"] == LOOP]
    if side in (LOOP, BEST_LOOP):
        return of_loop[0] if side == LOOP else max(of_loop)
    return next(r["fps"] for r in rows if r["round"] == turn and r["side"] == side and r["workload"] == workload)


def ratio(rows: list[dict], side: str, other: str, workload: str) -> float:
    """The median over the rounds."""
    turns = sorted({row["round"] for row in rows})
    return median(rate(rows, t, side, workload) / rate(rows, t, other, workload) for t in turns)


def _reached(rows: list[dict], text: str) -> bool:
    what, _, wanted = text.partition("=")
    workload, _, other = what.partition(":")
    return ratio(rows, "outboard", other or LOOP, workload) >= float(wanted)


def show(rows: list[dict]) -> None:
    table = Table("side", "workload", title="FP32 [1, 3, 224, 224], Open Inference Protocol over HTTP", title_justify="left")
    for heading in ("fps", "low-high", "/ loop", "/ best loop", "p50 ms", "p99 ms", "bad", "server CPU", "wrk CPU", "other CPU"):
        table.add_column(heading, justify="right")
    for side, workload in dict.fromkeys((row["side"], row["workload"]) for row in rows):
        mine = [row for row in rows if (row["side"], row["workload"]) == (side, workload)]
        rates = [row["fps"] for row in mine]
        cells = [f"{median(rates):.0f}", f"{min(rates):.0f}-{max(rates):.0f}"]
        if side != LOOP:
            cells += [f"{ratio(rows, side, other, workload):.2f}" for other in (LOOP, BEST_LOOP)]
            cells += [f"{median(row[key] for row in mine):.1f}" for key in ("p50_ms", "p99_ms")]
            cells += [str(sum(row["bad"] for row in mine))]
            cells += [f"{median(row[key] for row in mine):.0%}" for key in ("server_cpu", "children_cpu", "other_cpu")]
        table.add_row(side, workload, *cells)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


if __name__ == "__main__":
    typer.run(main)
