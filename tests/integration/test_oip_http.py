"""The Open Inference Protocol over HTTP, with tritonclient as its users have it, and by hand where a client would not go."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import tensor_graphs as tensors
from integration import pictures
from integration.oipkit import SAMPLES, OipServer, oip_serving

pytestmark = pytest.mark.timeout(120)

RED = pictures.encoded(pictures.scene(32, 32, 0, 0, 32))
BLUE = pictures.encoded(pictures.scene(32, 32, 0, 0, 32, (0, 0, 255)), "PNG")


@pytest.fixture(scope="module")
def client(oip: OipServer) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(oip.http, concurrency=8, connection_timeout=60, network_timeout=60)
    yield made
    made.close()


def tensor(name: str, array: np.ndarray, datatype: str = "", binary: bool = True) -> triton.InferInput:
    made = triton.InferInput(name, array.shape, datatype or np_to_triton_dtype(array.dtype))
    return made.set_data_from_numpy(array, binary_data=binary)


def output(name: str, binary: bool = True, classes: int = 0) -> triton.InferRequestedOutput:
    return triton.InferRequestedOutput(name, binary_data=binary, class_count=classes)


def post(oip: OipServer, path: str, content: bytes | None = None, **more: object) -> httpx.Response:
    return oip.server.client.post(path, content=content, **more)


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    return response.json()["error"]


def one_input(datatype: str = "FP32", shape: object = (1, 4), data: object = (1, 2, 3, 4), name: str = "x", **more: object) -> dict:
    return {"inputs": [{"name": name, "datatype": datatype, "shape": shape, "data": data}], **more}


# ---------------------------------------------------------------- health and metadata


def test_the_server_says_that_it_lives_and_is_ready(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready()


def test_server_metadata_name_the_extensions(client: triton.InferenceServerClient) -> None:
    found = client.get_server_metadata()
    assert found["name"] == "outboard"
    assert {"binary_tensor_data", "classification", "statistics", "model_repository", "system_shared_memory"} <= set(found["extensions"])


def test_model_metadata_come_from_the_graph(client: triton.InferenceServerClient) -> None:
    found = client.get_model_metadata("mixed")
    assert found["name"] == "mixed" and found["platform"] == "onnxruntime_onnx"
    assert found["inputs"] == [
        {"name": "x", "datatype": "FP32", "shape": [-1, -1]},
        {"name": "k", "datatype": "INT64", "shape": [-1]},
        {"name": "z", "datatype": "FP64", "shape": [-1, 3, 1]},
    ]
    assert found["outputs"] == [{"name": "sums", "datatype": "FP32", "shape": [-1, -1]}]


def test_a_version_can_be_named(client: triton.InferenceServerClient) -> None:
    (version,) = client.get_model_metadata("simple")["versions"]
    assert version.startswith("sha256:")
    assert client.get_model_metadata("simple", version)["versions"] == [version]
    assert client.is_model_ready("simple", version)
    x = np.arange(16, dtype=np.int32)[None]
    found = client.infer("simple", [tensor("INPUT0", x), tensor("INPUT1", x)], model_version=version)
    assert found.get_response()["model_version"] == version
    with pytest.raises(InferenceServerException, match="has no version '7'"):
        client.get_model_metadata("simple", "7")


def test_model_config_is_what_triton_clients_look_for(client: triton.InferenceServerClient) -> None:
    found = client.get_model_config("simple")
    assert found["max_batch_size"] == 16
    assert found["input"][0] == {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [16]}
    assert client.get_model_config("softmax")["max_batch_size"] == 0
    assert client.get_model_config("words")["input"][0]["data_type"] == "TYPE_STRING"


def test_an_unknown_model_is_named_and_is_not_ready(oip: OipServer, client: triton.InferenceServerClient) -> None:
    assert not client.is_model_ready("nothing")
    with pytest.raises(InferenceServerException, match="'nothing'") as e:
        client.get_model_metadata("nothing")
    assert e.value.status() == "404"
    assert "nothing" in refused(post(oip, "/v2/models/nothing/infer", b"{}"), 404)


def test_unknown_paths_and_methods_answer_in_the_protocols_form(oip: OipServer) -> None:
    assert "/v2/nowhere" in refused(oip.server.client.get("/v2/nowhere"), 404)
    assert "POST" in refused(oip.server.client.get("/v2/models/simple/infer"), 405)
    assert "PUT" in refused(oip.server.client.put("/v2/models/simple"), 405)


def test_a_head_says_how_long_the_answer_would_be(oip: OipServer) -> None:
    whole, head = (oip.server.client.request(method, "/v2") for method in ("GET", "HEAD"))
    assert head.status_code == 200 and head.content == b"" and head.headers["content-length"] == whole.headers["content-length"] != "0"


def test_what_is_refused_before_it_is_read_is_told_in_the_protocols_form(oip: OipServer) -> None:
    host, port = oip.http.split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc"
        )
        answer = b"".join(iter(lambda: connection.recv(4096), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"content-type: application/json\r\n" in head + b"\r\n"
    assert list(json.loads(body)) == ["error"]


# ---------------------------------------------------------------- every datatype


@pytest.mark.parametrize("datatype", SAMPLES)
def test_every_datatype_comes_back_bit_for_bit(client: triton.InferenceServerClient, datatype: str) -> None:
    sample = SAMPLES[datatype]
    found = client.infer(f"same_{datatype.lower()}", [tensor("x", sample, datatype)])
    got = found.as_numpy("y")
    assert found.get_output("y")["datatype"] == datatype and got.shape == (2, 4)
    if datatype == "BYTES":
        assert got.tolist() == sample.tolist()
    else:
        assert got.astype(sample.dtype).tobytes() == sample.tobytes()


@pytest.mark.parametrize("datatype", [d for d in SAMPLES if d not in ("FP16", "BF16")])
def test_every_datatype_as_json(client: triton.InferenceServerClient, datatype: str) -> None:
    sample = SAMPLES[datatype]
    if datatype == "BYTES":
        sample = np.array([[s.decode() for s in row] for row in sample], object)
    if datatype.startswith("FP"):
        sample = sample[1:]
    found = client.infer(f"same_{datatype.lower()}", [tensor("x", sample, datatype, binary=False)], outputs=[output("y", binary=False)])
    if datatype == "BYTES":
        assert found.get_output("y")["data"] == sample.reshape(-1).tolist()
    else:
        assert found.as_numpy("y").tobytes() == sample.tobytes()


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_half_floats_as_json(oip: OipServer, datatype: str) -> None:
    answer = post(
        oip, f"/v2/models/same_{datatype.lower()}/infer", json.dumps(one_input(datatype, data=[0.1, 2, -3.5, None])).encode()
    ).json()
    exact = float(np.array(0.1, SAMPLES[datatype].dtype))
    assert answer["outputs"][0]["data"] == [exact, 2.0, -3.5, None]


def test_what_json_has_no_word_for_is_null_and_counted(client: triton.InferenceServerClient) -> None:
    x = SAMPLES["FP32"]
    found = client.infer("same_fp32", [tensor("x", x)], outputs=[output("y", binary=False)])
    assert found.get_output("y")["data"][:4] == [None, None, None, -0.0]
    assert found.get_output("y")["parameters"] == {"non_finite": 3}


def test_many_numbers_cross_as_bytes_in_a_fraction_of_their_time_as_text(client: triton.InferenceServerClient) -> None:
    """H22: 100,000 floats both ways."""
    x = np.random.default_rng(0).standard_normal((1, 100_000)).astype(np.float32)

    def fastest(binary: bool) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            found = client.infer("wide", [tensor("x", x, binary=binary)], outputs=[output("y", binary=binary)])
            times.append(time.perf_counter() - began)
            assert found.as_numpy("y").tobytes() == x.tobytes()
        return min(times)

    assert fastest(binary=True) < fastest(binary=False) / 5


def test_nested_lists_are_taken_too(oip: OipServer) -> None:
    nested = one_input(shape=[2, 4], data=[[1, 2, 3, 4], [5, 6, 7, 8]])
    assert post(oip, "/v2/models/same_fp32/infer", json.dumps(nested).encode()).json()["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6, 7, 8]


# ---------------------------------------------------------------- shapes, batches, kinds of models


def test_two_inputs_and_two_outputs(client: triton.InferenceServerClient) -> None:
    a, b = np.arange(32, dtype=np.int32).reshape(2, 16), np.full((2, 16), 3, np.int32)
    found = client.infer("simple", [tensor("INPUT0", a), tensor("INPUT1", b, binary=False)])
    assert np.array_equal(found.as_numpy("OUTPUT0"), a + b) and np.array_equal(found.as_numpy("OUTPUT1"), a - b)


def test_inputs_may_come_in_any_order_and_outputs_be_chosen(client: triton.InferenceServerClient) -> None:
    a, b = np.arange(16, dtype=np.int32)[None], np.full((1, 16), 3, np.int32)
    found = client.infer("simple", [tensor("INPUT1", b), tensor("INPUT0", a)], outputs=[output("OUTPUT1")])
    assert np.array_equal(found.as_numpy("OUTPUT1"), a - b) and found.as_numpy("OUTPUT0") is None


def test_inputs_of_several_dtypes_and_ranks(client: triton.InferenceServerClient) -> None:
    for width in (5, 1, 17):
        x = np.random.default_rng(width).standard_normal((7, width), np.float32)
        k, z = np.arange(7), np.ones((7, 3, 1))
        found = client.infer("mixed", [tensor("x", x), tensor("k", k), tensor("z", z)])
        assert np.allclose(found.as_numpy("sums"), x + k[:, None] + 3, atol=1e-5)


def test_requests_of_other_shapes_at_once_do_not_disturb_each_other(client: triton.InferenceServerClient) -> None:
    def ask(width: int) -> bool:
        x = np.full((2, width), width, np.float32)
        found = client.infer("mixed", [tensor("x", x), tensor("k", np.zeros(2, np.int64)), tensor("z", np.zeros((2, 3, 1)))])
        return np.array_equal(found.as_numpy("sums"), x)

    pending = [client.async_infer("pairs", [tensor("x", np.ones((1, n), np.float32))]) for n in (2, 4, 6, 3)]
    assert all(ask(width) for width in range(1, 9))
    shapes = []
    for one in pending:
        try:
            shapes.append(one.get_result().as_numpy("y").shape)
        except InferenceServerException as e:
            shapes.append(e.status())
    assert shapes == [(1, 1, 2), (1, 2, 2), (1, 3, 2), "500"]


def test_a_request_with_more_rows_than_a_batch_is_split(client: triton.InferenceServerClient) -> None:
    x = np.random.default_rng(0).standard_normal((2500, 4), np.float32)
    assert np.array_equal(client.infer("small_batches", [tensor("x", x)]).as_numpy("y"), x)


def test_a_frozen_batch_answers_any_number_of_rows(client: triton.InferenceServerClient) -> None:
    for rows in (1, 3, 4, 9):
        a = np.arange(16 * rows, dtype=np.int32).reshape(rows, 16)
        assert np.array_equal(client.infer("fixed4", [tensor("INPUT0", a), tensor("INPUT1", a)]).as_numpy("OUTPUT0"), 2 * a)


def test_where_the_first_axis_is_no_batch_a_request_runs_as_it_is(client: triton.InferenceServerClient) -> None:
    x = np.array([[0, 1, 2], [0, 0, 0], [0, 0, 9]], np.float32)
    e = np.exp(x)
    assert np.allclose(client.infer("softmax", [tensor("x", x)]).as_numpy("y"), e / e.sum(0), atol=1e-6)


def test_a_model_without_any_batch_axis(client: triton.InferenceServerClient) -> None:
    b = np.arange(5, dtype=np.float32)
    found = client.infer("scalar", [tensor("a", np.array(3, np.float32)), tensor("b", b)])
    assert np.array_equal(found.as_numpy("y"), 3 * b)


def test_a_tree_ensembles_maps_come_as_a_tensor(client: triton.InferenceServerClient) -> None:
    x = np.array([[0, 0], [1, 0], [1, 1]], np.float32)
    found = client.infer("trees", [tensor("x", x)])
    assert found.as_numpy("label").tolist() == [b"cat", b"dog", b"fox"]
    assert np.array_equal(found.as_numpy("probabilities"), np.eye(3, dtype=np.float32))
    assert client.infer("numbered_trees", [tensor("x", x)]).as_numpy("label").tolist() == [7, 8, 9]


def test_text_goes_in(client: triton.InferenceServerClient) -> None:
    x = np.array([["cat", "Füchse"], ["", "dog" * 100]], object)
    assert client.infer("words", [tensor("x", x)]).as_numpy("y").tolist() == [[1, 3], [-1, -1]]


def test_sparse_rows_as_indices_and_values(client: triton.InferenceServerClient) -> None:
    indices, values = np.array([[3, 50, 0], [99, 1, 1]]), np.array([[1, 2, 7], [0.5, 1, 1]], np.float32)
    assert client.infer("sparse", [tensor("indices", indices), tensor("values", values)]).as_numpy("score").tolist() == [103.0, 51.5]


def test_classification_names_the_best(client: triton.InferenceServerClient) -> None:
    found = client.infer("trees", [tensor("x", np.array([[1, 1], [0, 0]], np.float32))], outputs=[output("probabilities", classes=2)])
    assert found.as_numpy("probabilities").tolist() == [[b"1.000000:2:fox", b"0.000000:0:cat"], [b"1.000000:0:cat", b"0.000000:1:dog"]]


# ---------------------------------------------------------------- pictures


def test_pictures_as_bytes_go_to_a_model_that_takes_images(client: triton.InferenceServerClient) -> None:
    images = np.array([RED, BLUE], object)
    found = client.infer("rgb", [tensor("image", images)])
    assert np.allclose(found.as_numpy("means"), [[1, 0, 0], [0, 0, 1]], atol=0.02)
    assert (
        json.loads(client.infer("rgb", [tensor("image", images[:1])], outputs=[output("answer")]).as_numpy("answer")[0])["model"] == "rgb"
    )


def test_a_detectors_answer_is_the_one_of_predict(oip: OipServer, client: triton.InferenceServerClient) -> None:
    picture = pictures.encoded(pictures.scene(640, 480, 100, 80, 120))
    answer = json.loads(client.infer("finder", [tensor("image", np.array([[picture]], object))]).as_numpy("answer")[0])
    direct = oip.server.predict("finder", picture, "image/jpeg").json()
    assert answer["detections"] == direct["detections"] and len(answer["detections"]) == 1


def test_a_raw_body_is_one_tensor_or_one_picture(oip: OipServer) -> None:
    header = {"Inference-Header-Content-Length": "0"}
    x = np.arange(4, dtype=np.float32)
    answer = post(oip, "/v2/models/same_fp32/infer", x.tobytes(), headers=header)
    length = int(answer.headers["inference-header-content-length"])
    assert json.loads(answer.content[:length])["outputs"][0]["shape"] == [1, 4] and answer.content[length:] == x.tobytes()
    assert post(oip, "/v2/models/rgb/infer", RED, headers=header).status_code == 200
    assert "3 bytes" in refused(post(oip, "/v2/models/same_fp32/infer", b"abc", headers=header))


def test_a_broken_picture_is_told_by_its_place(client: triton.InferenceServerClient) -> None:
    images = np.array([RED, b"no picture"], object)
    with pytest.raises(InferenceServerException, match="image 1: ") as e:
        client.infer("rgb", [tensor("image", images)])
    assert e.value.status() == "400"


def test_a_tensor_model_takes_no_picture_by_predict(oip: OipServer) -> None:
    answer = oip.server.predict("simple", RED, "image/jpeg")
    assert answer.status_code == 422 and "/v2/models/simple/infer" in answer.json()["detail"]


# ---------------------------------------------------------------- ids, parameters, compression


def test_request_ids_come_back(client: triton.InferenceServerClient) -> None:
    x = tensor("x", np.zeros((1, 4), np.float32))
    assert client.infer("same_fp32", [x], request_id="réquest 7").get_response()["id"] == "réquest 7"
    assert "id" not in client.infer("same_fp32", [x]).get_response()


def test_the_answer_says_where_it_was_made(client: triton.InferenceServerClient) -> None:
    found = client.infer("same_fp32", [tensor("x", np.zeros((1, 4), np.float32))]).get_response()
    assert found["parameters"] == {"device": "cpu", "degraded": False}


def test_unknown_parameters_are_passed_over_and_sequences_refused(client: triton.InferenceServerClient) -> None:
    x = tensor("x", np.zeros((1, 4), np.float32))
    assert client.infer("same_fp32", [x], parameters={"colour": "blue"}, priority=1).as_numpy("y") is not None
    with pytest.raises(InferenceServerException, match="sequence_id"):
        client.infer("same_fp32", [x], sequence_id=5, sequence_start=True)


def test_binary_is_chosen_for_all_outputs_or_for_each(oip: OipServer) -> None:
    def shapes_of(asked: dict) -> list[bool]:
        answer = post(oip, "/v2/models/simple/infer", json.dumps(asked).encode())
        length = answer.headers.get("inference-header-content-length")
        outputs = json.loads(answer.content[: int(length)] if length else answer.content)["outputs"]
        return ["data" in o for o in outputs]

    inputs = [{"name": f"INPUT{i}", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16} for i in (0, 1)]
    assert shapes_of({"inputs": inputs}) == [True, True]
    assert shapes_of({"inputs": inputs, "parameters": {"binary_data_output": True}}) == [False, False]
    chosen = [{"name": "OUTPUT0"}, {"name": "OUTPUT1", "parameters": {"binary_data": False}}]
    assert shapes_of({"inputs": inputs, "outputs": chosen, "parameters": {"binary_data_output": True}}) == [False, True]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_bodies_may_be_compressed_both_ways(client: triton.InferenceServerClient, algorithm: str) -> None:
    x = np.ones((64, 4), np.float32)
    found = client.infer("same_fp32", [tensor("x", x)], request_compression_algorithm=algorithm, response_compression_algorithm=algorithm)
    assert np.array_equal(found.as_numpy("y"), x)


def test_an_answer_is_compressed_only_for_who_asks_for_one_way(oip: OipServer) -> None:
    body = json.dumps(one_input()).encode()
    plain = post(oip, "/v2/models/same_fp32/infer", body, headers={"accept-encoding": "gzip, deflate, br"})
    packed = post(oip, "/v2/models/same_fp32/infer", body, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers and packed.headers["content-encoding"] == "gzip"
    assert plain.json()["outputs"] == packed.json()["outputs"]


def test_a_compressed_bomb_is_refused(oip: OipServer) -> None:
    bomb = gzip.compress(bytes(200 << 20), 9)
    assert len(bomb) < 1 << 20
    assert "decompressed" in refused(post(oip, "/v2/models/same_fp32/infer", bomb, headers={"content-encoding": "gzip"}), 413)
    twice = gzip.compress(b"{}") + gzip.compress(b"{}")
    assert "follow the gzip body" in refused(post(oip, "/v2/models/same_fp32/infer", twice, headers={"content-encoding": "gzip"}))
    assert "not gzip" in refused(post(oip, "/v2/models/same_fp32/infer", b"plain", headers={"content-encoding": "gzip"}))
    cut = zlib.compress(json.dumps(one_input()).encode())[:-8]
    assert "too early" in refused(post(oip, "/v2/models/same_fp32/infer", cut, headers={"content-encoding": "deflate"}))
    assert "brotli" in refused(post(oip, "/v2/models/same_fp32/infer", b"{}", headers={"content-encoding": "brotli"}))


# ---------------------------------------------------------------- what is wrong is named (M28)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (one_input(name="z"), "input 'z' does not exist"),
        ({"inputs": []}, "input 'x' is missing"),
        ({"inputs": one_input()["inputs"] * 2}, "input 'x' is given twice"),
        (one_input("FP64"), "input 'x' is FP64, expected FP32"),
        (one_input("FP31"), "FP31"),
        (one_input(shape=[1, 5], data=[0] * 5), r"input 'x' has shape [1, 5], expected [-1, 4]"),
        (one_input(shape=[4]), r"input 'x' has shape [4], expected [-1, 4]"),
        (one_input(shape=[0, 4], data=[]), "no rows"),
        (one_input(shape=[-1, 4]), "input 'x' has shape [-1, 4]"),
        (one_input(shape=[2**40, 2**40], data=[]), "input 'x'"),
        (one_input(data=[1, 2, 3]), "input 'x' has 3 values, expected 4"),
        (one_input(data=[1, 2, 3, "4"]), "input 'x' is FP32 and holds '4'"),
        (one_input(data=[[1, 2], 3, 4]), "input 'x'"),
        (one_input(outputs=[{"name": "nope"}]), "output 'nope' does not exist"),
        (one_input(outputs=[{"name": "y"}, {"name": "y"}]), "asked for twice"),
        (one_input(outputs=[{"name": "y", "parameters": {"classification": -1}}]), "classification"),
        (one_input(parameters={"timeout": -5}), "timeout"),
        (one_input(parameters={"timeout": "soon"}), "timeout"),
        (one_input(parameters={"timeout": 10**400}), "timeout"),
        (one_input(shape=[70_000, 4], data=[]), "has 0 values"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4]}]}, "input 'x' has no data"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}]}, "binary_data_size"),
        ({"inputs": [{"name": "x", "datatype": "FP32", "shape": "all"}]}, "inputs[0].shape"),
        ({"outputs": []}, "inputs"),
    ],
)
def test_a_wrong_request_is_refused_with_400_that_names_what_is_wrong(oip: OipServer, body: dict, said: str) -> None:
    assert said in refused(post(oip, "/v2/models/same_fp32/infer", json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[1e999,1,1,1]}]}', "input 'x'"),
        (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":[' + b"1" * 5000 + b",1,1,1]}]}", "input 'x'"),
        (b'{"inputs":[{"name":"x","datatype":"BYTES","shape":[1,4],"data":["\xff","","",""]}]}', ""),
        (b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,4],"data":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}", ""),
        (b'{"parameters":{"a":' + b"[" * 5000 + b"]" * 5000 + b"}}", ""),
    ],
    ids=["beyond every number", "5000 digits", "no UTF-8", "deep data", "deep parameters"],
)
def test_json_that_no_parser_likes_is_the_clients_fault(oip: OipServer, body: bytes, said: str) -> None:
    assert said in refused(post(oip, "/v2/models/same_fp32/infer", body))


@pytest.mark.parametrize("rows", [10**5, 10**10])
def test_rows_without_a_byte_are_bounded(oip: OipServer, rows: int) -> None:
    """A request of 90 bytes for ten thousand million rows held up the whole server."""
    body = json.dumps(one_input(shape=[rows, 0], data=[])).encode()
    assert "rows, at most 65536" in refused(post(oip, "/v2/models/wide/infer", body))
    assert post(oip, "/v2/models/wide/infer", json.dumps(one_input(shape=[3, 0], data=[])).encode()).json()["outputs"][0]["shape"] == [3, 0]


def test_other_models_do_not_wait_for_a_request_of_many_rows(oip: OipServer) -> None:
    """All its rows were due before whatever came later: seconds for whoever sent one row to another model."""
    many, one = np.arange(4 * 65_536, dtype=np.float32).reshape(-1, 4), np.ones((1, 4), np.float32)
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        large = pool.submit(post, oip, "/v2/models/same_fp32/infer", **in_binary(many, binary_data_output=True))
        time.sleep(0.2)
        waits = []
        while not large.done():
            sent = time.monotonic()
            assert post(oip, "/v2/models/wide/infer", **in_binary(one)).status_code == 200
            waits.append(time.monotonic() - sent)
        took = time.monotonic() - began
        answer = large.result()
    length = int(answer.headers["inference-header-content-length"])
    np.testing.assert_array_equal(np.frombuffer(answer.content[length:], np.float32), many.reshape(-1))
    assert len(waits) > 5 and sorted(waits)[-2] < took / 3, (took, waits)  # one may meet a pause of the machine


def test_a_request_of_many_rows_is_told_how_far_it_came(oip: OipServer) -> None:
    many = np.zeros((65_536, 4), np.float32)
    said = refused(post(oip, "/v2/models/same_fp32/infer", **in_binary(many, timeout=400_000)), 504)
    assert "of 65536 rows were answered when the deadline was over" in said


def in_binary(x: np.ndarray, **parameters: object) -> dict:
    head = {"inputs": [{"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}]}
    encoded = json.dumps(head | {"parameters": parameters}).encode()
    return {"content": encoded + x.tobytes(), "headers": {"Inference-Header-Content-Length": str(len(encoded))}}


def test_classes_of_many_rows_are_bounded(client: triton.InferenceServerClient) -> None:
    x = np.random.default_rng(0).standard_normal((50, 3000), np.float32)
    with pytest.raises(InferenceServerException, match="150000 strings, at most 100000"):
        client.infer("wide", [tensor("x", x)], outputs=[output("y", classes=10_000)])
    best = client.infer("wide", [tensor("x", x)], outputs=[output("y", classes=2)]).as_numpy("y")
    assert [int(s.split(b":")[1]) for s in best[:, 0]] == x.argmax(1).tolist()


@pytest.mark.parametrize(
    ("model", "datatype", "data"),
    [
        ("same_int8", "INT8", [1, 2, 3, 128]),
        ("same_uint8", "UINT8", [1, 2, 3, -1]),
        ("same_int32", "INT32", [1, 2, 3, 4.5]),
        ("same_int64", "INT64", [1, 2, 3, 2**63]),
        ("same_bool", "BOOL", [True, False, True, 1]),
        ("same_bytes", "BYTES", ["a", "b", "c", 4]),
        ("same_int32", "INT32", [1, 2, 3, None]),
    ],
)
def test_a_value_that_is_none_of_its_datatype_is_refused(oip: OipServer, model: str, datatype: str, data: list) -> None:
    assert "input 'x'" in refused(post(oip, f"/v2/models/{model}/infer", json.dumps(one_input(datatype, data=data)).encode()))


def binary(header: dict, tail: bytes, length: object = None) -> tuple[bytes, dict[str, str]]:
    encoded = json.dumps(header).encode()
    return encoded + tail, {"Inference-Header-Content-Length": str(len(encoded) if length is None else length)}


def binary_input(nbytes: int, datatype: str = "FP32", shape: tuple[int, ...] = (1, 4)) -> dict:
    return {"inputs": [{"name": "x", "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": nbytes}}]}


@pytest.mark.parametrize(
    ("model", "header", "tail", "said"),
    [
        ("same_fp32", binary_input(16), bytes(15), "15 bytes are left"),
        ("same_fp32", binary_input(16), bytes(17), "1 bytes of the body belong to no input"),
        ("same_fp32", binary_input(12), bytes(12), "input 'x' has 12 bytes, expected 16"),
        ("same_bool", binary_input(4, "BOOL"), b"\0\1\2\1", "must be 0 or 1"),
        ("same_bytes", binary_input(8, "BYTES"), struct.pack("<II", 0, 9), "string 1"),
        ("same_bytes", binary_input(16, "BYTES", (1, 3)), bytes(16), "expected [-1, 4]"),
        ("same_bytes", binary_input(20, "BYTES"), bytes(20), "ends after 16 of 20 bytes"),
        ("words", binary_input(11, "BYTES", (1, 2)), struct.pack("<I", 3) + b"\xff\xfe\xfd" + bytes(4), "not UTF-8"),
    ],
)
def test_wrong_binary_data_are_refused(oip: OipServer, model: str, header: dict, tail: bytes, said: str) -> None:
    body, headers = binary(header, tail)
    assert said in refused(post(oip, f"/v2/models/{model}/infer", body, headers=headers))


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "many", "99999", "1e3", "٣"])
def test_a_wrong_header_length_is_refused(oip: OipServer, length: str) -> None:
    body, headers = binary(binary_input(16), bytes(16), length)
    raw = [(k.encode(), v.encode()) for k, v in headers.items()]
    assert "Inference-Header-Content-Length" in refused(post(oip, "/v2/models/same_fp32/infer", body, headers=raw))


def test_a_model_that_fails_on_an_input_says_so_and_serves_on(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as e:
        client.infer("pairs", [tensor("x", np.ones((1, 3), np.float32))])
    assert e.value.status() == "500"
    assert client.infer("pairs", [tensor("x", np.ones((1, 4), np.float32))]).as_numpy("y").shape == (1, 2, 2)


# ---------------------------------------------------------------- deadlines and clients that leave


def slow_input() -> triton.InferInput:
    return tensor("images", np.zeros((1, 3, 32, 32), np.float32))


def test_a_timeout_is_a_deadline(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as e:
        client.infer("slow", [slow_input()], timeout=1000)
    assert e.value.status() in ("503", "504")


def test_the_work_of_a_client_that_left_is_dropped(oip: OipServer, client: triton.InferenceServerClient) -> None:
    body, size = triton.InferenceServerClient.generate_request_body([slow_input()])
    headers = {"Inference-Header-Content-Length": str(size)}

    def leave() -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{oip.server.url}/v2/models/slow/infer", content=body, headers=headers, timeout=httpx.Timeout(30, read=0.15))

    before = client.get_inference_statistics("slow")["model_stats"][0]["execution_count"]
    with ThreadPoolExecutor(16) as pool:
        for one in [pool.submit(leave) for _ in range(16)]:
            one.result()
    time.sleep(1)
    after = client.get_inference_statistics("slow")["model_stats"][0]
    assert after["execution_count"] - before < 12, "what had not begun was dropped"
    assert client.infer("slow", [slow_input()]).as_numpy("means").shape == (1, 3)


# ---------------------------------------------------------------- statistics and repository


def test_statistics_count_every_row(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("same_fp64")["model_stats"][0]
    for rows in (1, 3, 2500):
        client.infer("same_fp64", [tensor("x", np.zeros((rows, 4)))])
    after = client.get_inference_statistics("same_fp64")["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 2504
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 3
    assert sum(b["batch_size"] * b["compute_infer"]["count"] for b in after["batch_stats"]) == after["inference_count"]
    assert after["last_inference"] / 1e3 == pytest.approx(time.time(), abs=60)
    everything = {m["name"] for m in client.get_inference_statistics()["model_stats"]}
    assert {"same_fp64", "simple", "rgb"} <= everything


def test_models_are_listed_unloaded_and_loaded_again(client: triton.InferenceServerClient) -> None:
    def state() -> str:
        return next(m["state"] for m in client.get_model_repository_index() if m["name"] == "numbered_trees")

    assert state() == "READY"
    client.unload_model("numbered_trees")
    assert state() == "UNAVAILABLE" and not client.is_model_ready("numbered_trees")
    with pytest.raises(InferenceServerException, match="unloaded"):
        client.infer("numbered_trees", [tensor("x", np.zeros((1, 2), np.float32))])
    client.load_model("numbered_trees")
    assert state() == "READY"
    assert client.infer("numbered_trees", [tensor("x", np.zeros((1, 2), np.float32))]).as_numpy("label").tolist() == [7]


def test_a_folder_that_was_copied_a_moment_ago_can_be_loaded(tmp_path: Path) -> None:
    tensors.write(tmp_path / "models", "first", tensors.same("FP32"))
    with oip_serving(tmp_path / "models") as server, triton.InferenceServerClient(server.http) as client:
        for n in range(3):
            shutil.copytree(tmp_path / "models" / "first", tmp_path / "models" / f"copy{n}")
            client.load_model(f"copy{n}")
            assert client.is_model_ready(f"copy{n}")
        stop = threading.Event()
        said: set[str] = set()

        def infer() -> None:
            with triton.InferenceServerClient(server.http) as mine:
                while not stop.is_set():
                    try:
                        mine.infer("first", [tensor("x", np.zeros((1, 4), np.float32))])
                    except InferenceServerException as e:
                        said.add(e.message())

        asking = [threading.Thread(target=infer) for _ in range(2)]
        for thread in asking:
            thread.start()
        for _ in range(30):
            client.unload_model("first")
            client.load_model("first")
        stop.set()
        for thread in asking:
            thread.join()
        assert said and all("unloaded" in text or "being loaded" in text for text in said), said


def test_only_ready_models_are_listed_on_request(oip: OipServer) -> None:
    listed = post(oip, "/v2/repository/index", b'{"ready": true}').json()
    assert listed and all(m["state"] == "READY" for m in listed)


def test_a_model_cannot_be_uploaded_by_loading_it(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match="config"):
        client.load_model("simple", config='{"max_batch_size": 1}')
    with pytest.raises(InferenceServerException, match="'nothing'"):
        client.load_model("nothing")


def test_every_route_is_in_the_openapi_document(oip: OipServer) -> None:
    paths = oip.server.client.get("/openapi.json").json()["paths"]
    assert {"/v2", "/v2/models/{model}/infer", "/v2/repository/index", "/v2/systemsharedmemory/status"} <= set(paths)
