"""One measurement: start a server, see that it does the same work as the bare loop, drive it with wrk, end it. Or run the loop itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from sides import CACHE, HERE, PROCESSES, Side, python, work_environment

LOOP = "loop"


class Meter:
    """Shares of one core from here until `read`: of the processes given, of ended children (wrk, the loop), of everything else."""

    def __init__(self, processes: list[psutil.Process]):
        self.processes = processes
        self.began = time.perf_counter(), cpu_seconds(processes), children_seconds(), machine_seconds()

    def read(self) -> dict[str, float]:
        began, server, children, machine = self.began
        wall = time.perf_counter() - began
        server, children = cpu_seconds(self.processes) - server, children_seconds() - children
        other = machine_seconds() - machine - server - children
        return {"server_cpu": server / wall, "children_cpu": children / wall, "other_cpu": other / wall}


def measure_server(
    side: Side, files: dict[str, list[Path]], expected: dict, model: Path, connections: int, seconds: float
) -> Iterator[dict]:
    with running(side, model, CACHE / f"{side.name}.log") as (base, server):
        for workload, jpegs in files.items():
            bodies = [CACHE / "bodies" / f"{side.name}-{jpeg.name}" for jpeg in jpegs]
            for body, jpeg in zip(bodies, jpegs, strict=True):
                body.parent.mkdir(exist_ok=True)
                body.write_bytes(side.body(jpeg.read_bytes()))
            check_agreement(side.name, workload, classes(side, base, bodies), expected[workload])
            drive(side, base, bodies, connections, max(2, seconds / 4))  # warm up
            meter = Meter(tree(server))
            figures = drive(side, base, bodies, connections, seconds)
            yield {"side": side.name, "workload": workload, **figures, **meter.read()}


def measure_loop(files: dict[str, list[Path]], model: Path, batches: list[int], seconds: float) -> Iterator[dict]:
    for workload, jpegs in files.items():
        for batch in batches:
            meter = Meter([])
            figures = run_loop(seconds, PROCESSES, batch, jpegs, model)
            yield {"side": LOOP if batch == 1 else f"{LOOP}, batch {batch}", "workload": workload, **figures, **meter.read()}


def reference(files: dict[str, list[Path]], model: Path) -> dict[str, list[list[int]]]:
    """Workload -> the classes of each picture by the bare loop's own code."""
    return {workload: run_loop(0, 1, 1, jpegs, model)["classes"] for workload, jpegs in files.items()}


def run_loop(seconds: float, processes: int, batch: int, jpegs: list[Path], model: Path) -> dict:
    argv = [python("python"), str(HERE / "loop.py"), str(seconds), str(processes), str(batch), *map(str, jpegs)]
    run = subprocess.run(argv, env=work_environment(model), capture_output=True, text=True, timeout=seconds + 120, check=False)
    if run.returncode:
        sys.exit(f"the bare loop failed:\n{run.stderr}")
    return json.loads(run.stdout)


@contextmanager
def running(side: Side, model: Path, log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start a server; yields its base URL and process. Ends all of its processes afterwards."""
    port = free_port()
    with log.open("wb") as output:
        server = psutil.Popen(
            side.command(port),
            env=work_environment(model) if side.uses_work else None,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    known: list[psutil.Process] = []
    try:
        wait_ready(side, f"http://127.0.0.1:{port}", server, log)
        known = tree(server)
        yield f"http://127.0.0.1:{port}", server
    finally:
        known += tree(server) if server.is_running() else []
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(5)
        except psutil.TimeoutExpired:
            pass  # mosec waits for idle connections; whoever stays is killed below
        for process in known:
            if process.is_running():
                process.kill()


def wait_ready(side: Side, base: str, server: psutil.Popen, log: Path, seconds: float = 90) -> None:
    end = time.monotonic() + seconds
    while True:
        if server.poll() is not None or time.monotonic() > end:
            sys.exit(f"{side.name} did not become ready in {seconds:.0f} s (exit status {server.poll()}); see {log}")
        try:
            if not httpx.get(base + side.ready).is_server_error:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)


def classes(side: Side, base: str, bodies: list[Path]) -> list[list[int]]:
    """The class ids that a server answers for each body, best first."""
    out = []
    for body in bodies:
        response = httpx.post(base + side.path, content=body.read_bytes(), headers=side.headers, timeout=30)
        if response.status_code != 200:
            sys.exit(f"{side.name} answers {response.status_code} for {body.name}: {response.text[:300]}")
        out.append([entry["class_id"] for entry in side.answer(response.json())["classes"]])
    return out


def check_agreement(side: str, workload: str, got: list[list[int]], expected: list[list[int]]) -> None:
    """Same best class for every picture. Resizing may differ by a grey level, so the two best of a near tie may have changed places."""
    for i, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        if ours[0] not in theirs[:2] or theirs[0] not in ours[:2]:
            sys.exit(f"{side} answers classes {ours} for {workload} picture {i}, the bare loop {theirs}: they do not do the same work")


def drive(side: Side, base: str, bodies: list[Path], connections: int, seconds: float) -> dict:
    """One run of wrk: {"fps", "p50_ms", "p99_ms", "answers", "bad"}."""
    headers = [f"@{name}={value}" for name, value in side.headers.items()]
    argv = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{round(seconds)}s",
        "--timeout",
        "30s",
        "-s",
        str(HERE / "post.lua"),
        base + side.path,
        "--",
    ]
    run = subprocess.run([*argv, *headers, *map(str, bodies)], capture_output=True, text=True, timeout=seconds + 60, check=False)
    for line in run.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    sys.exit(f"wrk against {side.name} failed: {run.stdout}{run.stderr}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def tree(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def machine_seconds() -> float:
    times = psutil.cpu_times()  # user and nice hold guest and guest_nice already
    return times.user + times.nice + times.system + times.irq + times.softirq


def children_seconds() -> float:
    """Of this program's children that have ended."""
    times = os.times()
    return times.children_user + times.children_system
