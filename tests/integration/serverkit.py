"""A real server for tests: started by its command, on a free port, ended with the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx


class Server:
    """A running `outboard serve`. `client` talks to it; `log` is what it has printed so far."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: list[str]):
        self.process = process
        self.url = url
        self._log = log
        self.client = httpx.Client(base_url=url, timeout=60)

    @property
    def log(self) -> str:
        return "".join(self._log)

    def predict(self, model: str, body: bytes, content_type: str = "application/octet-stream", **options: object) -> httpx.Response:
        return self.client.post(f"/v1/models/{model}/predict", content=body, headers={"content-type": content_type}, params=options)

    def device(self, device: str) -> dict:
        return self.client.get(f"/v1/devices/{device}").json()

    def model(self, model: str) -> dict:
        return self.client.get(f"/v1/models/{model}").json()

    def workers(self) -> list[int]:
        """Process ids of the worker processes."""
        found = []
        for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            if b"outboard.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        return found

    def until(self, condition, seconds: float = 30.0, what: str = "") -> object:
        """Wait until `condition()` is true and return its value."""
        end = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < end, f"not within {seconds} s: {what or condition}\n{self.log[-3000:]}"
            time.sleep(0.02)
        return value


@contextmanager
def serving(
    models: Path,
    *flags: str,
    ready: bool = True,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    program: Sequence[str] = (sys.executable, "-m", "outboard"),
) -> Iterator[Server]:
    """Serve `models` on a free port; with `ready`, wait until every model is served or refused. `program` stands for the command."""
    command: Sequence[str] = [*program, "serve", "--models", str(models), "--port", "0", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        cwd=cwd,
    )
    log: list[str] = []

    def drain() -> None:
        assert process.stdout is not None
        log.extend(iter(process.stdout.readline, ""))

    threading.Thread(target=drain, daemon=True).start()
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"listening on (http://[\w.:]+);", "".join(log))):
            assert process.poll() is None and time.monotonic() < end, f"the server did not start:\n{''.join(log)}"
            time.sleep(0.02)
        server = Server(process, found[1], log)
        if ready:
            server.until(lambda: server.client.get("/readyz").status_code == 200, 90, "ready")
        yield server
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
