"""Users that send tensors over the Open Inference Protocol, `/v2/models/{model}/infer`, in its binary form.

    .venv/bin/locust -f loadtests/tensor_users.py --headless --host http://127.0.0.1:8000 --users 8 --run-time 30s

The tensors have the model's own inputs, one row each, with random values, and are made before the clock runs; where an input takes encoded
pictures (BYTES) it gets one of `--images`. `--arrivals` as for images.
"""

from __future__ import annotations

import msgspec
import numpy as np
from locust import events
from locust.contrib.fasthttp import ResponseContextManager
from locust.env import Environment
from urllib3 import request as http

import watch
from arrivals import Caller
from outboard_client.answers import DTYPES


@events.init.add_listener
def prepare(environment: Environment, **_) -> None:
    model, host = environment.parsed_options.model, environment.host
    answer = http("GET", f"{host}/v2/models/{model}", timeout=10)
    if answer.status != 200:
        raise SystemExit(f"--model {model}: {host} answers {answer.status}: {answer.data.decode()[:300]}")
    inputs = msgspec.json.decode(answer.data)["inputs"]
    photograph = watch.photographs(environment)[0][1] if any(tensor["datatype"] == "BYTES" for tensor in inputs) else b""
    Tensors.body, header_length = request_of(inputs, photograph)
    Tensors.headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(header_length)}


def request_of(inputs: list[dict], photograph: bytes) -> tuple[bytes, int]:
    """(body, bytes of its JSON header) of a request with one row for each input; free dimensions are 1."""
    rng = np.random.default_rng(0)
    described, chunks = [], []
    for tensor in inputs:
        kind, shape = tensor["datatype"], [max(1, int(n)) for n in tensor["shape"]]
        if kind == "BYTES":
            data = len(photograph).to_bytes(4, "little") + photograph
        else:
            data = (rng.random(shape) * (1 if kind.startswith("FP") else 2)).astype(DTYPES[kind]).tobytes()
        described.append({"name": tensor["name"], "datatype": kind, "shape": shape, "parameters": {"binary_data_size": len(data)}})
        chunks.append(data)
    header = msgspec.json.encode({"inputs": described, "parameters": {"binary_data_output": True}})
    return header + b"".join(chunks), len(header)


class Tensors(Caller):
    body = b""
    headers: dict[str, str] = {}

    def post(self) -> ResponseContextManager:
        path = f"/v2/models/{self.environment.parsed_options.model}/infer"
        return self.client.post(path, data=self.body, headers=self.headers, name="infer", catch_response=True)
