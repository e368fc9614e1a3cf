"""Does memory grow? Many requests of many sizes, and the memory of the front and of the workers meanwhile.

    .venv/bin/python loadtests/soak.py                     # starts `outboard serve --models models --device cpu` itself
    .venv/bin/python loadtests/soak.py --pid PID --url U   # a server that runs

Exit status 1: after the first 5,000 requests a process grows by more than 1 MB in 10,000, or an answer was bad. The slope is a
least-squares line through the samples, so that a single late allocation does not decide.
"""

from __future__ import annotations

import io
import itertools
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import psutil
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

SIZES = 97
KINDS = ("rss", "pss")


def pictures() -> list[tuple[str, bytes]]:
    """(content type, bytes) of one photograph in 97 sizes from 64x48 to 1600x1200, every third one as PNG, in an order without a trend."""
    from skimage import data

    photo = Image.fromarray(data.chelsea())
    rng = np.random.default_rng(0)
    out = []
    for i in range(SIZES):
        width = round(64 * 25 ** (i / (SIZES - 1)))
        size = (width, max(16, round(width * rng.uniform(0.5, 1))))
        kind = "PNG" if i % 3 == 0 else "JPEG"
        buffer = io.BytesIO()
        photo.resize(size).save(buffer, kind)
        out.append((f"image/{kind.lower()}", buffer.getvalue()))
    return [out[i] for i in rng.permutation(SIZES)]


def memory(server: psutil.Process) -> dict[str, dict[str, float]]:
    """Process -> {"rss", "pss"} in MB; "front", and "worker PID" for each worker. What a worker starts to compile a model in is left out:
    it grows while it compiles, and then ends."""
    out = {}
    for process in [server, *server.children()]:
        try:
            info = process.memory_full_info()
        except psutil.NoSuchProcess:
            continue
        out["front" if process == server else f"worker {process.pid}"] = {kind: getattr(info, kind) / 1e6 for kind in KINDS}
    return out


def slope(samples: list[tuple[int, dict]], process: str, kind: str, skip: int) -> float:
    """MB for each 10,000 requests, after the first `skip`."""
    points = [(done, sizes[process][kind]) for done, sizes in samples if done >= skip and process in sizes]
    if len(points) < 3:
        return float("nan")
    return float(np.polyfit(*np.array(points).T, 1)[0] * 10_000)


@contextmanager
def own_server(models: Path, device: str) -> Iterator[tuple[str, psutil.Process]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outboard = Path(sys.executable).parent / "outboard"
    server = subprocess.Popen([outboard, "serve", "--models", models, "--host", "127.0.0.1", "--port", str(port), "--device", device])
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 120
        while not _ready(url):
            if server.poll() is not None or time.monotonic() > end:
                sys.exit(f"the server did not become ready (exit status {server.poll()})")
            time.sleep(0.3)
        yield url, psutil.Process(server.pid)
    finally:
        server.terminate()
        server.wait(30)


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def drive(url: str, model: str, server: psutil.Process, requests: int, connections: int, every: int) -> tuple[list[tuple[int, dict]], int]:
    """Samples (requests done, memory) every so many requests, and the number of bad answers."""
    turn, lock = itertools.count(), threading.Lock()
    todo, samples, bad = pictures(), [(0, memory(server))], 0

    def client() -> None:
        nonlocal bad
        with httpx.Client(timeout=60) as http:
            while True:
                with lock:
                    i = next(turn)
                if i >= requests:
                    return
                kind, body = todo[i % len(todo)]
                answer = http.post(f"{url}/v1/models/{model}/predict", content=body, headers={"Content-Type": kind})
                with lock:
                    bad += answer.status_code != 200
                    if (i + 1) % every == 0:
                        samples.append((i + 1, memory(server)))

    threads = [threading.Thread(target=client) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return samples, bad


def main(
    models: Annotated[Path, typer.Option(help="the repository for a server of its own")] = Path("models"),
    model: Annotated[str, typer.Option(help="the model that gets the pictures")] = "efficientnet_lite0",
    device: Annotated[str, typer.Option(help="for a server of its own")] = "cpu",
    url: Annotated[str, typer.Option(help="of a server that runs; needs --pid")] = "",
    pid: Annotated[int, typer.Option(help="of that server's front process")] = 0,
    requests: Annotated[int, typer.Option(min=1)] = 20_000,
    skip: Annotated[int, typer.Option(help="requests before growth counts")] = 5_000,
    connections: Annotated[int, typer.Option(min=1)] = 8,
    limit: Annotated[float, typer.Option(help="MB for each 10,000 requests")] = 1.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write every sample here")] = None,
) -> None:
    if bool(url) != bool(pid):
        raise typer.BadParameter("--url and --pid belong together")
    every = max(1, min(250, requests // 40))
    began = time.monotonic()
    if url:
        samples, bad = drive(url, model, psutil.Process(pid), requests, connections, every)
    else:
        with own_server(models, device) as (own, server):
            samples, bad = drive(own, model, server, requests, connections, every)
    seconds = time.monotonic() - began

    table = Table("process", title=f"{requests} requests of {SIZES} sizes in {seconds:.0f} s, {bad} bad answers", title_justify="left")
    for heading in ("", "at start", f"after {skip}", "at the end", "MB per 10,000"):
        table.add_column(heading, justify="right")
    failures = [f"{bad} of {requests} answers were bad"] if bad else []
    processes = list(dict.fromkeys(process for _, sizes in samples for process in sizes))
    slopes = {}
    for process in processes:
        seen = [(done, sizes[process]) for done, sizes in samples if process in sizes]
        for kind in KINDS:
            grown = slopes[f"{process} {kind}"] = slope(samples, process, kind, skip)
            middle = next((sizes[kind] for done, sizes in seen if done >= skip), float("nan"))
            ends = [f"{value:.1f}" for value in (seen[0][1][kind], middle, seen[-1][1][kind])]
            table.add_row(process, kind.upper(), *ends, f"{grown:+.2f}")
            if kind == "rss" and not grown <= limit:  # NaN: too few samples to say
                failures.append(f"{process} grows by {grown:.2f} MB in 10,000 requests, wanted at most {limit:g}")
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps({"samples": samples, "slopes": slopes, "bad": bad, "seconds": seconds}))
    for failure in failures:
        print(f"missed: {failure}")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
