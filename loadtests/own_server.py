"""A server of a load test's own, with a simulated device: started by its command on a free port, ended with the test."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

DEVICE = "sim:0"


@contextmanager
def own_server(models: Path, device: str, *flags: str) -> Iterator[tuple[str, psutil.Process, Path]]:
    """(url, process, log) of a server with two devices: the CPU and `device`."""
    log = models / "server.log"
    command = [sys.executable, "-m", "outboard", "serve", "--models", models, "--port", "0", "--device", device, *flags]
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 120
        while not (found := re.search(r"listening on (http://[\w.:]+);", log.read_text())) or not _serves(found[1]):
            if server.poll() is not None or time.monotonic() > end:
                sys.exit(f"the server did not become ready (exit status {server.poll()}):\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield found[1], psutil.Process(server.pid), log
    finally:
        if server.poll() is not None:
            print(f"the server has ended, with status {server.returncode}")
        server.terminate()
        server.wait(30)


def _serves(url: str) -> bool:
    """Every model is loaded, and the device serves."""
    try:
        state = httpx.get(f"{url}/v1/devices/{DEVICE}", timeout=5).json()["state"]
        return state == "serving" and httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except (httpx.TransportError, KeyError):
        return False
