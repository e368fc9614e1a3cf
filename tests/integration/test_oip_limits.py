"""What bounds an answer of the Open Inference Protocol: its size, its client's patience to read it, and what waits beside it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import graphs
import tensor_graphs as tensors
from integration import pictures
from integration.oipkit import OipServer, oip_serving

pytestmark = pytest.mark.timeout(120)

MIB = 1 << 20


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OipServer]:
    """Gives answers of 24 MiB at most, and cuts off who reads nothing for two seconds. `ramp` gives a mebibyte for a row of 4 bytes."""
    models = tmp_path_factory.mktemp("strict")
    nodes = [tensors.helper.make_node("Add", ["x", "ramp"], ["y"])]
    value = tensors.TensorProto.FLOAT
    ramp = {"ramp": np.arange(MIB // 4, dtype=np.float32)[None]}
    tensors.write(models, "ramp", tensors.graph(nodes, [("x", value, ["n", 1])], [("y", value, ["n", MIB // 4])], ramp))
    tensors.write(models, "wide", tensors.same("FP32", ["n", "width"]))
    tensors.write(models, "words", tensors.same("BYTES", ["n", 1]))
    limits = {"OUTBOARD_LIMITS_ANSWER": "24MiB", "OUTBOARD_LIMITS_BODY_SECONDS": "2", "OUTBOARD_LIMITS_FRAME_MEMORY": "64MiB"}
    with oip_serving(models, env=limits) as running:
        yield running


def asked(x: np.ndarray, **parameters: object) -> dict:
    head = {"inputs": [{"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}]}
    encoded = json.dumps(head | {"parameters": {"binary_data_output": True} | parameters}).encode()
    return {"content": encoded + x.tobytes(), "headers": {"Inference-Header-Content-Length": str(len(encoded))}}


def infer(oip: OipServer, model: str, x: np.ndarray, **parameters: object) -> httpx.Response:
    return httpx.post(f"{oip.server.url}/v2/models/{model}/infer", timeout=60, **asked(x, **parameters))


def starts(rows: int) -> np.ndarray:
    return np.arange(rows, dtype=np.float32)[:, None]


def test_a_large_answer_is_whole(strict: OipServer) -> None:
    answer = infer(strict, "ramp", starts(20))
    assert answer.status_code == 200, answer.text
    y = np.frombuffer(answer.content[int(answer.headers["inference-header-content-length"]) :], np.float32).reshape(20, -1)
    np.testing.assert_array_equal(y, np.arange(MIB // 4) + starts(20))


def test_a_large_answer_is_whole_as_json(strict: OipServer) -> None:
    x = np.random.default_rng(7).standard_normal((4, 10_000)).astype(np.float32)
    x[3, 9_000] = np.nan
    answer = infer(strict, "wide", x, binary_data_output=False).json()["outputs"][0]
    assert answer["shape"] == [4, 10_000] and answer["parameters"] == {"non_finite": 1}
    assert answer["data"][39_000] is None
    np.testing.assert_array_equal(np.array(answer["data"], np.float32).reshape(4, -1), x)


def test_a_large_answer_is_whole_over_grpc(strict: OipServer) -> None:
    x = tritonclient.grpc.InferInput("x", [20, 1], "FP32").set_data_from_numpy(starts(20))
    with tritonclient.grpc.InferenceServerClient(strict.grpc) as client:
        np.testing.assert_array_equal(client.infer("ramp", [x]).as_numpy("y"), np.arange(MIB // 4) + starts(20))


@pytest.mark.parametrize("json_numbers", [False, True])
def test_an_answer_that_is_too_large_is_refused_before_it_is_made(strict: OipServer, json_numbers: bool) -> None:
    rows = 6 if json_numbers else 25
    refused = infer(strict, "ramp", starts(rows), binary_data_output=not json_numbers)
    assert refused.status_code == 413
    said = refused.json()["error"]
    assert f"the answer to {rows} rows takes" in said and str(24 * MIB) in said and "[limits] answer" in said
    stats = httpx.get(f"{strict.server.url}/v2/models/ramp/stats").json()["model_stats"][0]
    assert not any(batch["batch_size"] == rows for batch in stats["batch_stats"])


def test_an_answer_that_turns_out_too_large_is_refused(strict: OipServer) -> None:
    """Its width is free: nobody knows before the first rows are there."""
    refused = infer(strict, "wide", np.zeros((1000, 1500), np.float32), binary_data_output=False)
    assert refused.status_code == 413 and "the answer to 1000 rows takes 30000000 bytes" in refused.json()["error"]


def test_over_grpc_an_answer_that_is_too_large_is_refused(strict: OipServer) -> None:
    x = tritonclient.grpc.InferInput("x", [25, 1], "FP32").set_data_from_numpy(starts(25))
    with tritonclient.grpc.InferenceServerClient(strict.grpc) as client:
        with pytest.raises(InferenceServerException, match="the answer to 25 rows takes") as e:
            client.infer("ramp", [x])
    assert e.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


def metric(oip: OipServer, name: str) -> float:
    found = [line for line in httpx.get(f"{oip.server.url}/metrics").text.splitlines() if line.startswith(name + " ")]
    return float(found[0].split()[1])


def test_who_does_not_read_an_answer_is_cut_off_and_its_memory_is_free_again(strict: OipServer) -> None:
    """Four of them would fill what bodies and answers may take: then others are refused, and only for as long as these do not read."""
    before = metric(strict, "outboard_answers_unread_total")
    request = asked(starts(20))
    length = request["headers"]["Inference-Header-Content-Length"]
    head = f"POST /v2/models/ramp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(request['content'])}\r\n"
    whole = f"{head}Inference-Header-Content-Length: {length}\r\n\r\n".encode() + request["content"]
    host, port = strict.http.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(4)]
    for connection in silent:
        connection.sendall(whole)
    time.sleep(1)
    refused = infer(strict, "ramp", starts(20))
    assert refused.status_code == 503 and "bodies and answers" in refused.json()["error"] and refused.headers["retry-after"]
    strict.server.until(lambda: infer(strict, "ramp", starts(20)).status_code == 200, what="the memory to be free")
    strict.server.until(lambda: metric(strict, "outboard_answers_unread_total") == before + 3, what="three to be cut off")
    refusal, *cut = sorted(received(connection) for connection in silent)
    assert refusal < 1000 and all(MIB < nbytes < 20 * MIB for nbytes in cut)


def received(connection: socket.socket) -> int:
    """Bytes until the end of the connection, or until nothing more comes."""
    nbytes = 0
    with connection:
        connection.settimeout(0.5)
        try:
            while piece := connection.recv(MIB):
                nbytes += len(piece)
        except (TimeoutError, ConnectionError):
            pass
    return nbytes


def test_who_reads_slowly_but_steadily_gets_it_all(strict: OipServer) -> None:
    x = starts(4)
    host, port = strict.http.split(":")
    request = asked(x)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        connection.connect((host, int(port)))
        head = f"POST /v2/models/ramp/infer HTTP/1.0\r\nHost: localhost\r\nContent-Length: {len(request['content'])}\r\n"
        length = request["headers"]["Inference-Header-Content-Length"]
        connection.sendall(f"{head}Inference-Header-Content-Length: {length}\r\n\r\n".encode() + request["content"])
        got = bytearray()
        began = time.monotonic()
        while piece := connection.recv(64 << 10):
            got += piece
            time.sleep(max(0.0, len(got) / (1.2 * MIB) - (time.monotonic() - began)))
    assert time.monotonic() - began > 3
    np.testing.assert_array_equal(np.frombuffer(got[-4 * MIB :], np.float32).reshape(4, -1), np.arange(MIB // 4) + x)


def test_a_grpc_stream_that_is_not_read_is_ended(strict: OipServer) -> None:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[4, 1])
    request = service_pb2.ModelInferRequest(model_name="ramp", inputs=[tensor], raw_input_contents=[starts(4).tobytes()])
    before = metric(strict, "outboard_answers_unread_total")
    with grpc.insecure_channel(strict.grpc, [("grpc.max_receive_message_length", -1)]) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter([request] * 40))
        strict.server.until(lambda: metric(strict, "outboard_answers_unread_total") == before + 1, what="the stream to be ended")
        with pytest.raises(grpc.RpcError) as e:
            for _ in call:
                pass
    assert e.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED and "was not read within 2 s" in e.value.details()
    assert infer(strict, "ramp", starts(20)).status_code == 200  # what they held is free


def test_too_many_class_names_are_refused_before_the_work(strict: OipServer) -> None:
    outputs = [{"name": "y", "parameters": {"classification": 10_000, "binary_data": True}}]
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [11, 1], "data": [0] * 11}], "outputs": outputs}
    before = httpx.get(f"{strict.server.url}/v2/models/ramp/stats").json()["model_stats"][0]["execution_count"]
    refused = httpx.post(f"{strict.server.url}/v2/models/ramp/infer", json=body)
    assert refused.status_code == 400 and "110000 strings" in refused.json()["error"]
    assert httpx.get(f"{strict.server.url}/v2/models/ramp/stats").json()["model_stats"][0]["execution_count"] == before


# ---------------------------------------------------------------- what is left of a refused request


@pytest.mark.parametrize("way", ["picture", "several pictures", "picture by /v2", "tensor", "late tensor", "tensor by gRPC"])
def test_a_refused_request_leaves_none_of_its_bytes(oip: OipServer, way: str) -> None:
    """An exception's traceback holds the frames that it passed, and their arguments: in a cycle they waited for the garbage collector,
    which comes by numbers of objects, not by their size (seen: 8 GB after 90 refused gRPC calls of 30 MB)."""
    broken = pictures.encoded(np.random.default_rng(0).integers(0, 255, (1500, 2000, 3), np.uint8), "PNG")[:-1_000_000]
    zeros = np.zeros((2_000_000, 1), np.float32)
    url = oip.server.url

    def refused() -> None:
        match way:
            case "picture":
                assert httpx.post(f"{url}/v1/models/rgb/predict", content=broken).status_code == 422
            case "several pictures":
                answer = httpx.post(f"{url}/v1/models/rgb/predict", files=[("image", broken)] * 2).json()
                assert [one["status"] for one in answer["results"]] == [422, 422]
            case "picture by /v2":
                headers = {"Inference-Header-Content-Length": "0"}
                assert httpx.post(f"{url}/v2/models/rgb/infer", content=broken, headers=headers).status_code == 400
            case "tensor":
                assert infer(oip, "same_fp32", zeros).status_code == 400
            case "late tensor":
                assert infer(oip, "same_fp32", zeros[: 65_536 * 4].reshape(-1, 4), timeout=100_000).status_code in (503, 504)
            case "tensor by gRPC":
                x = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])
                request = service_pb2.ModelInferRequest(model_name="same_fp32", inputs=[x], raw_input_contents=[zeros.tobytes()])
                with pytest.raises(grpc.RpcError):
                    stub.ModelInfer(request)

    front = psutil.Process(oip.server.process.pid)
    with grpc.insecure_channel(oip.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for _ in range(4):
            refused()
        before = front.memory_full_info().uss
        for _ in range(20):
            refused()
        assert front.memory_full_info().uss - before < 64 * MIB


# ---------------------------------------------------------------- what waits beside it


def test_a_short_deadline_is_not_refused_for_work_that_is_due_later(tmp_path: Path) -> None:
    """A device of 2.8 ms a batch of 16, kept busy by one client's 8192 rows: another model's row is due before them, and is answered."""
    for name in ("many", "few"):
        tensors.write(tmp_path, name, tensors.same("FP32"))
    with oip_serving(tmp_path, "--device", "sim:thunderbolt4,compute=2+0.05") as oip:
        over = threading.Event()
        large: list[int] = []

        def keep_busy() -> None:
            while not over.is_set():
                large.append(infer(oip, "many", np.ones((8192, 4), np.float32)).status_code)

        busy = threading.Thread(target=keep_busy)
        busy.start()
        time.sleep(0.5)
        waits = []
        try:
            answers = []
            for timeout in [200_000] * 30 + [30_000_000] * 10:
                sent = time.monotonic()
                answers.append(infer(oip, "few", np.ones((1, 4), np.float32), timeout=timeout).status_code)
                waits.append(time.monotonic() - sent)
        finally:
            over.set()
            busy.join()
    assert answers == [200] * 40 and set(large) == {200}
    # 8192 rows take 1.4 s; three parts of 20 ms and a batch may lie before a row that is not urgent.
    assert sorted(waits[30:])[5] < 0.4, waits


def test_a_request_that_cannot_be_done_in_time_is_refused_at_once(tmp_path: Path) -> None:
    tensors.write(tmp_path, "sleeper", graphs.sleeper(100), "[batching]\nmax = 1\n")
    with oip_serving(tmp_path) as oip:
        given = httpx.get(f"{oip.server.url}/v2/models/sleeper").json()["inputs"][0]
        given["shape"][0] = 200
        given["data"] = [0] * int(np.prod(given["shape"]))
        body = {"inputs": [given], "parameters": {"deadline_ms": 2000}}
        began = time.monotonic()
        refused = httpx.post(f"{oip.server.url}/v2/models/sleeper/infer", json=body, timeout=60)
        assert refused.status_code == 503 and "its own take about" in refused.json()["error"], refused.text
        assert time.monotonic() - began < 2
