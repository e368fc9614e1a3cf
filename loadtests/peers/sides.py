"""The servers that are compared: how each is started, what it is sent and how its answer reads."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outboard" / "peers"
TRITON_HEAD = 256  # bytes
PROCESSES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Side:
    name: str
    about: str
    command: Callable[[int], list[str]]  #: port -> argv
    path: str  #: of the route that takes a picture
    ready: str = "/"  #: a route that answers with no server error (5xx) once requests may come
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "image/jpeg"})
    body: Callable[[bytes], bytes] = lambda jpeg: jpeg
    answer: Callable[[dict], dict] = lambda document: document  #: JSON -> {"classes": [{"class_id"}, ...]}, best first

    uses_work: bool = True  #: it runs work.py, with `work_environment`


def work_environment(model: Path) -> dict[str, str]:
    """What work.py and the peers around it are told."""
    return os.environ | {
        "MODEL": str(model),
        "PROCESSES": str(PROCESSES),
        "PYTHONPATH": str(HERE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def python(environment: str) -> str:
    """The interpreter of a virtual environment that setup.sh made."""
    path = CACHE / environment / "bin" / "python"
    if not (CACHE / environment / "complete").exists():
        sys.exit(f"{path} is not installed; run {HERE / 'setup.sh'} first")
    return str(path)


def _outboard(port: int) -> list[str]:
    command = Path(sys.executable).parent / "outboard"
    return [
        str(command),
        "serve",
        "--models",
        str(CACHE / "data" / "models"),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
    ]


def _mosec(port: int) -> list[str]:
    return [
        python("python"),
        str(HERE / "serve_mosec.py"),
        "--address",
        "127.0.0.1",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--timeout",
        "60000",
    ]


def _triton(port: int) -> list[str]:
    return [python("triton"), str(HERE / "serve_triton.py"), str(port), str(CACHE / "triton-repository")]


def _naive(port: int) -> list[str]:
    return [
        python("python"),
        "-m",
        "uvicorn",
        "--app-dir",
        str(HERE),
        "serve_naive:app",
        "--port",
        str(port),
        "--log-level",
        "error",
        "--no-access-log",
    ]


def _triton_body(jpeg: bytes) -> bytes:
    """Open Inference Protocol with a binary tensor: a JSON head whose length a header states, then the bytes.

    wrk sets headers once and the pictures differ in size, so the head is padded to one width.
    """
    head = {
        "inputs": [{"name": "image", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(jpeg) + 4}}],
        "outputs": [{"name": "answer", "parameters": {"binary_data": False}}],
    }
    return json.dumps(head).encode().ljust(TRITON_HEAD) + struct.pack("<I", len(jpeg)) + jpeg


def _multipart(jpeg: bytes) -> bytes:
    head = b'--PICTURE\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'
    return head + jpeg + b"\r\n--PICTURE--\r\n"


SERVERS = {
    side.name: side
    for side in (
        Side(
            "outboard",
            "this project, as `outboard serve`",
            _outboard,
            "/v1/models/mobilenet_v3_small/predict",
            ready="/readyz",
            uses_work=False,
        ),
        Side("mosec", "mosec 0.9.8, one worker a core", _mosec, "/inference"),
        Side(
            "triton",
            "Triton (nvidia-pytriton 0.7.0), Python backend, one instance a core",
            _triton,
            "/v2/models/jpeg/infer",
            ready="/v2/health/ready",
            headers={"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(TRITON_HEAD)},
            body=_triton_body,
            answer=lambda document: json.loads(document["outputs"][0]["data"][0]),
        ),
        Side(
            "naive",
            "FastAPI 0.165, one synchronous endpoint",
            _naive,
            "/predict",
            headers={"Content-Type": "multipart/form-data; boundary=PICTURE"},
            body=_multipart,
        ),
    )
}
