"""The Open Inference Protocol over gRPC, with tritonclient, the health checker's and the reflection's own stubs, and bare messages."""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import Callable, Iterator
from functools import partial

import grpc
import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from failing_link import linked
from integration import pictures
from integration.oipkit import SAMPLES, OipServer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def client(oip: OipServer) -> Iterator[triton.InferenceServerClient]:
    made = triton.InferenceServerClient(oip.grpc)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stub(oip: OipServer) -> Iterator[service_pb2_grpc.GRPCInferenceServiceStub]:
    with grpc.insecure_channel(oip.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def tensor(name: str, array: np.ndarray, datatype: str = "") -> triton.InferInput:
    return triton.InferInput(name, array.shape, datatype or np_to_triton_dtype(array.dtype)).set_data_from_numpy(array)


def numbers(first: float = 0) -> triton.InferInput:
    return tensor("x", np.arange(first, first + 4, dtype=np.float32)[None])


def refused(code: grpc.StatusCode, message: service_pb2.ModelInferRequest, stub: service_pb2_grpc.GRPCInferenceServiceStub) -> str:
    with pytest.raises(grpc.RpcError) as e:
        stub.ModelInfer(message)
    assert e.value.code() is code, e.value.details()
    return e.value.details()


# ---------------------------------------------------------------- health, metadata, reflection


def test_the_server_says_that_it_lives_and_is_ready(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("simple")
    assert client.get_server_metadata().name == "outboard"


def test_model_metadata_and_config(client: triton.InferenceServerClient) -> None:
    found = client.get_model_metadata("mixed")
    assert [(t.name, t.datatype, list(t.shape)) for t in found.inputs] == [
        ("x", "FP32", [-1, -1]),
        ("k", "INT64", [-1]),
        ("z", "FP64", [-1, 3, 1]),
    ]
    config = client.get_model_config("mixed", as_json=True)["config"]
    assert config["max_batch_size"] == 16 and config["input"][2]["data_type"] == "TYPE_FP64"
    assert client.get_model_config("mixed").config.backend == "onnxruntime"


def test_what_does_not_exist_is_not_found(client: triton.InferenceServerClient) -> None:
    for call in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics, client.is_model_ready):
        with pytest.raises(InferenceServerException, match="'nothing'") as e:
            call("nothing")
        assert e.value.status() == "StatusCode.NOT_FOUND"


def test_health_checks_of_the_service(oip: OipServer) -> None:
    with grpc.insecure_channel(oip.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as e:
            health.Check(health_pb2.HealthCheckRequest(service="other"))
        assert e.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_published_service(oip: OipServer) -> None:
    with grpc.insecure_channel(oip.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "inference.GRPCInferenceService" in database.get_services()
        pool = DescriptorPool(database)
        service = pool.FindServiceByName("inference.GRPCInferenceService")
        theirs = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        for method in service.methods:
            published = theirs.methods_by_name[method.name]
            assert _fields(method.input_type) <= _fields(published.input_type), method.name
            assert _fields(method.output_type) <= _fields(published.output_type), method.name
        missing = {m.name for m in theirs.methods} - {m.name for m in service.methods}
        assert missing == {"TraceSetting", "LogSettings"}


def _fields(message: object, seen: frozenset[str] = frozenset()) -> set[tuple[str, str, int, int, bool]]:
    """Every field of a message and of the messages in it: name, number, type, repeated."""
    if message.full_name in seen:
        return set()
    seen |= {message.full_name}
    found = {(message.full_name, f.name, f.number, f.type, f.is_repeated) for f in message.fields}
    for f in message.fields:
        if f.message_type is not None:
            found |= _fields(f.message_type, seen)
        if f.enum_type is not None:
            found |= {(f.enum_type.full_name, v.name, v.number, 0, False) for v in f.enum_type.values}
    return found


# ---------------------------------------------------------------- inference


@pytest.mark.parametrize("datatype", SAMPLES)
def test_every_datatype_comes_back_bit_for_bit(client: triton.InferenceServerClient, datatype: str) -> None:
    sample = SAMPLES[datatype]
    got = client.infer(f"same_{datatype.lower()}", [tensor("x", sample, datatype)]).as_numpy("y")
    if datatype == "BYTES":
        assert got.tolist() == sample.tolist()
    else:
        assert got.astype(sample.dtype).tobytes() == sample.tobytes()


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False, True, True]),
        ("INT8", "int_contents", [-128, 127, 0, 1]),
        ("INT64", "int64_contents", [-(2**63), 2**63 - 1, 0, 1]),
        ("UINT16", "uint_contents", [0, 65535, 1, 2]),
        ("UINT64", "uint64_contents", [0, 2**64 - 1, 1, 2]),
        ("FP32", "fp32_contents", [0.5, -1.0, 3.0, 2.0**100]),
        ("FP64", "fp64_contents", [0.1, -1.0, 3.0, 1e300]),
        ("BYTES", "bytes_contents", [b"a", b"", "ü".encode(), b"long" * 50]),
    ],
)
def test_typed_contents(stub: service_pb2_grpc.GRPCInferenceServiceStub, datatype: str, field: str, values: list) -> None:
    message = service_pb2.ModelInferRequest(model_name=f"same_{datatype.lower()}")
    given = message.inputs.add(name="x", datatype=datatype, shape=[1, 4])
    getattr(given.contents, field).extend(values)
    got = triton.InferResult(stub.ModelInfer(message)).as_numpy("y")
    assert got.reshape(-1).tolist() == values


def test_several_inputs_ids_and_chosen_outputs(client: triton.InferenceServerClient) -> None:
    a, b = np.arange(32, dtype=np.int32).reshape(2, 16), np.full((2, 16), 3, np.int32)
    outputs = [triton.InferRequestedOutput("OUTPUT1")]
    found = client.infer("simple", [tensor("INPUT0", a), tensor("INPUT1", b)], outputs=outputs, request_id="seven")
    assert np.array_equal(found.as_numpy("OUTPUT1"), a - b) and found.as_numpy("OUTPUT0") is None
    answer = found.get_response()
    assert answer.id == "seven" and answer.parameters["device"].string_param == "cpu"


def test_classification_names_the_best(client: triton.InferenceServerClient) -> None:
    outputs = [triton.InferRequestedOutput("probabilities", class_count=1)]
    found = client.infer("trees", [tensor("x", np.array([[1, 1]], np.float32))], outputs=outputs)
    assert found.as_numpy("probabilities").tolist() == [[b"1.000000:2:fox"]]


def test_a_picture_as_bytes(client: triton.InferenceServerClient) -> None:
    picture = pictures.encoded(pictures.scene(32, 32, 0, 0, 32))
    assert np.allclose(client.infer("rgb", [tensor("image", np.array([picture], object))]).as_numpy("means"), [[1, 0, 0]], atol=0.02)


def test_large_messages_both_ways_and_a_limit(client: triton.InferenceServerClient) -> None:
    x = np.random.default_rng(0).standard_normal((2, 800_000), np.float32)  # 6.4 MB: above gRPC's usual 4
    assert np.array_equal(client.infer("wide", [tensor("x", x)]).as_numpy("y"), x)
    with pytest.raises(InferenceServerException, match="larger than max") as e:
        client.infer("wide", [tensor("x", np.zeros((1, 17_600_000), np.float32))])
    assert e.value.status() == "StatusCode.RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_messages_may_be_compressed(client: triton.InferenceServerClient, algorithm: str) -> None:
    assert client.infer("same_fp32", [numbers()], compression_algorithm=algorithm).as_numpy("y").tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "z"}, "input 'z' does not exist"),
        ({"datatype": "INT32"}, "input 'x' is INT32, expected FP32"),
        ({"shape": [1, 5]}, "input 'x' has shape [1, 5]"),
        ({"shape": [2, 4]}, "input 'x' has 16 bytes, expected 32"),
        ({"shape": [-1, 4]}, "input 'x' has shape [-1, 4]"),
    ],
)
def test_what_is_wrong_is_an_invalid_argument(stub: service_pb2_grpc.GRPCInferenceServiceStub, change: dict, said: str) -> None:
    message = service_pb2.ModelInferRequest(model_name="same_fp32", raw_input_contents=[bytes(16)])
    message.inputs.add(**{"name": "x", "datatype": "FP32", "shape": [1, 4]} | change)
    assert said in refused(grpc.StatusCode.INVALID_ARGUMENT, message, stub)


def test_contents_that_do_not_fit_are_refused(stub: service_pb2_grpc.GRPCInferenceServiceStub) -> None:
    message = service_pb2.ModelInferRequest(model_name="same_int8")
    message.inputs.add(name="x", datatype="INT8", shape=[1, 4]).contents.int_contents.extend([1, 2, 3, 200])
    assert "does not fit INT8" in refused(grpc.StatusCode.INVALID_ARGUMENT, message, stub)
    del message.inputs[0].contents.int_contents[3]
    assert "3 values" in refused(grpc.StatusCode.INVALID_ARGUMENT, message, stub)
    message = service_pb2.ModelInferRequest(model_name="same_fp32")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    assert "neither contents nor" in refused(grpc.StatusCode.INVALID_ARGUMENT, message, stub)
    message.raw_input_contents.extend([bytes(16), bytes(16)])
    assert "2 raw_input_contents" in refused(grpc.StatusCode.INVALID_ARGUMENT, message, stub)


# ---------------------------------------------------------------- deadlines, cancellation


def slow() -> triton.InferInput:
    return tensor("images", np.zeros((1, 3, 32, 32), np.float32))


def executions(client: triton.InferenceServerClient) -> int:
    return client.get_inference_statistics("slow").model_stats[0].execution_count


def test_the_calls_deadline_is_the_works(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as e:
        client.infer("slow", [slow()], client_timeout=0.05)
    assert e.value.status() in ("StatusCode.DEADLINE_EXCEEDED", "StatusCode.UNAVAILABLE")


def test_the_work_of_cancelled_calls_is_dropped(client: triton.InferenceServerClient) -> None:
    before = executions(client)
    calls = [client.async_infer("slow", [slow()], lambda result, error: None) for _ in range(16)]
    time.sleep(0.15)
    for call in calls:
        call.cancel()
    time.sleep(1)
    assert executions(client) - before < 12, "what had not begun was dropped"
    assert client.infer("slow", [slow()]).as_numpy("means").shape == (1, 3)


# ---------------------------------------------------------------- streams


def test_a_stream_answers_in_order_errors_included(oip: OipServer) -> None:
    answers: queue.Queue[tuple[object, object]] = queue.Queue()
    with triton.InferenceServerClient(oip.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        for i in range(60):
            if i % 10 == 7:
                client.async_stream_infer("same_fp32", [tensor("x", np.zeros((1, 3), np.float32))], request_id=str(i))
            elif i % 10 == 3:  # larger than its successors, and still before them
                client.async_stream_infer("same_fp32", [tensor("x", np.full((2000, 4), i, np.float32))], request_id=str(i))
            else:
                client.async_stream_infer("same_fp32", [numbers(i)], request_id=str(i))
        got = [answers.get(timeout=30) for _ in range(60)]
        client.stop_stream()
    for i, (result, error) in enumerate(got):
        if i % 10 == 7:
            assert "shape [1, 3]" in str(error)
        else:
            assert error is None and result.get_response().id == str(i)
            assert result.as_numpy("y")[0, 0] == i
            assert result.get_response().parameters["triton_final_response"].bool_param


def test_a_cancelled_stream_drops_its_work(oip: OipServer, client: triton.InferenceServerClient) -> None:
    before = executions(client)
    with triton.InferenceServerClient(oip.grpc) as streaming:
        streaming.start_stream(lambda result, error: None)
        for _ in range(16):
            streaming.async_stream_infer("slow", [slow()])
        time.sleep(0.15)
        streaming.stop_stream(cancel_requests=True)
    time.sleep(1)
    assert executions(client) - before < 12


@pytest.mark.long
async def test_a_stream_whose_way_has_silently_gone_is_ended(oip: OipServer) -> None:
    """S22: a NAT forgets the connection, and nobody is told. The server asks after 30 s of silence and waits 10 for the answer."""
    port = int(oip.grpc.rpartition(":")[2])

    def connected() -> int:
        sockets = psutil.Process(oip.server.process.pid).net_connections("tcp")
        return sum(s.laddr.port == port and s.status == psutil.CONN_ESTABLISHED for s in sockets)

    def talk(near: str, set_up: Callable[[], None], set_down: Callable[[], None]) -> None:
        answers: queue.Queue[tuple[object, object]] = queue.Queue()
        before = connected()
        with triton.InferenceServerClient(near) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            client.async_stream_infer("same_fp32", [numbers(1)])
            assert answers.get(timeout=30)[1] is None and connected() == before + 1
            set_down()
            oip.server.until(lambda: connected() == before, 60, "the server to end the connection")
            set_up()
            assert answers.get(timeout=30)[1] is not None, "the client was not told"

    loop = asyncio.get_running_loop()
    async with linked(f"http://{oip.grpc}") as (line, url):
        up, down = (partial(loop.call_soon_threadsafe, change) for change in (line.up.set, line.up.clear))
        await asyncio.to_thread(talk, url.removeprefix("http://"), up, down)


# ---------------------------------------------------------------- repository and statistics


def test_statistics(client: triton.InferenceServerClient) -> None:
    before = client.get_inference_statistics("same_int16").model_stats[0]
    client.infer("same_int16", [tensor("x", np.zeros((5, 4), np.int16))])
    after = client.get_inference_statistics("same_int16").model_stats[0]
    assert after.inference_count - before.inference_count == 5
    assert after.inference_stats.success.count - before.inference_stats.success.count == 1
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert len(client.get_inference_statistics().model_stats) > 10


def test_the_repository(client: triton.InferenceServerClient) -> None:
    def state() -> str:
        return next(m.state for m in client.get_model_repository_index().models if m.name == "sparse")

    assert state() == "READY"
    client.unload_model("sparse")
    assert state() == "UNAVAILABLE" and not client.is_model_ready("sparse")
    with pytest.raises(InferenceServerException, match="unloaded") as e:
        client.infer("sparse", [tensor("indices", np.zeros((1, 1), np.int64)), tensor("values", np.zeros((1, 1), np.float32))])
    assert e.value.status() == "StatusCode.UNAVAILABLE"
    client.load_model("sparse")
    assert state() == "READY"
    with pytest.raises(InferenceServerException, match="config"):
        client.load_model("sparse", config="{}")


# ---------------------------------------------------------------- the asyncio clients


async def test_the_asyncio_client_over_grpc(oip: OipServer) -> None:
    import tritonclient.grpc.aio as aio

    async with aio.InferenceServerClient(oip.grpc) as client:
        assert await client.is_server_ready() and (await client.get_model_metadata("simple")).name == "simple"
        found = await asyncio.gather(*[client.infer("same_fp32", [numbers(i)]) for i in range(20)])
        assert [r.as_numpy("y")[0, 0] for r in found] == list(range(20))

        async def requests() -> object:
            for i in range(10):
                yield {"model_name": "same_fp32", "inputs": [numbers(i)], "request_id": str(i)}

        ids = [(result.get_response().id, error) async for result, error in client.stream_infer(requests())]
        assert ids == [(str(i), None) for i in range(10)]


async def test_the_asyncio_client_over_http(oip: OipServer) -> None:
    import tritonclient.http.aio as aio

    async with aio.InferenceServerClient(oip.http) as client:
        assert await client.is_server_ready() and (await client.get_model_metadata("simple"))["name"] == "simple"

        def given(i: int) -> aio.InferInput:
            return aio.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.full((1, 4), i, np.float32))

        found = await asyncio.gather(*[client.infer("same_fp32", [given(i)]) for i in range(20)])
        assert [r.as_numpy("y")[0, 0] for r in found] == list(range(20))
        with pytest.raises(InferenceServerException, match="'nothing'"):
            await client.infer("nothing", [given(0)])
