"""A server for one benchmark: started by its command on a free port, ended with it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

#: Seconds until every model is loaded or refused: the first time a compiled one takes long.
PATIENCE = 600.0


class NotStarted(Exception):
    """What the server said last."""


@contextmanager
def own_server(models: Path | None, devices: Sequence[str]) -> Iterator[str]:
    """Its URL, once every model is served or refused. Raises NotStarted."""
    command = [sys.executable, "-m", "outboard", "serve", "--port", "0", "--log-format", "json"]
    command += ["--models", str(models)] if models else []
    for device in devices:
        command += ["--device", device]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    url: list[str] = []
    last: deque[str] = deque(maxlen=5)
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for text in process.stderr:
            try:
                line = json.loads(text)
            except ValueError:  # a library's own words, or a refusal before the log begins
                line = {"message": text.strip()}
            if "url" in line:
                url.append(line["url"])
                ready.set()
            if line.get("level", "error") in ("warning", "error", "critical"):
                last.append(line["message"])
        ready.set()  # it has ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        ready.wait(PATIENCE)
        if not url:
            raise NotStarted("; ".join(last) or f"it was not ready within {PATIENCE:.0f} s")
        yield url[0]
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
