"""Log lines for programs, `traceparent`, and spans that reach a real OTLP receiver: a server run for each."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tritonclient.grpc import service_pb2, service_pb2_grpc
from typer.testing import CliRunner
from websockets.sync.client import connect

import graphs
from integration.oipkit import OipServer
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving
from integration.streamkit import hear
from outboard.cli import app

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"


class Collector:
    """An OTLP receiver: what has been sent to it."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.end_headers()
                self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def spans(self) -> list[Span]:
        return [span for r in self.received for group in r.resource_spans for scope in group.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    graphs.write_model(folder, "means", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32)))
    return folder


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="module")
def server(models: Path, collector: Collector) -> Iterator[Server]:
    """Logs as JSON, a line for each request, spans to the collector."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_SERVICE_NAME": "egpu-lab"}
    flags = ("--device", "sim:thunderbolt4,compute=4+1", "--grpc-port", "0", "--log-format", "json", "--log-requests", "--traces")
    with serving(models, *flags, env=environment) as running:
        running.until(lambda: "sim:0" in running.model("means")["devices"], what="the device serves")
        yield running


@pytest.fixture(scope="module")
def plain(models: Path) -> Iterator[Server]:
    """As it is served when nothing is asked for."""
    with serving(models, "--device", "cpu", "--grpc-port", "0") as running:
        yield running


def picture() -> bytes:
    return encoded(scene(64, 48, 5, 5, 20))


def lines(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines()]


def attributes(span: Span) -> dict[str, Any]:
    return {a.key: getattr(a.value, str(a.value.WhichOneof("value"))) for a in span.attributes}


def send(server: Server, body: bytes, traceparent: str = TRACEPARENT, model: str = "means", **headers: str):
    headers |= {"traceparent": traceparent} if traceparent else {}
    return server.client.post(f"/v1/models/{model}/predict", content=body, headers={"content-type": "image/jpeg", **headers})


def link(server: Server, traceparent: str, policy: str = "live"):
    headers = {"traceparent": traceparent} if traceparent else {}
    url = f"ws{server.url.removeprefix('http')}/v1/models/means/stream?policy={policy}"
    return connect(url, additional_headers=headers, compression=None)


def test_a_request_has_a_span_whose_children_say_where_its_time_went(server: Server, collector: Collector) -> None:
    answer = send(server, picture(), tracestate="vendor=1")
    assert answer.status_code == 200
    passed_on = re.fullmatch(rf"00-{TRACE}-([0-9a-f]{{16}})-01", answer.headers["traceparent"])
    assert passed_on and passed_on[1] != CALLER
    request = server.until(lambda: next((s for s in collector.spans() if s.span_id.hex() == passed_on[1]), None), what="its span")
    assert isinstance(request, Span)
    assert (request.trace_id.hex(), request.parent_span_id.hex(), request.trace_state) == (TRACE, CALLER, "vendor=1")
    assert (request.name, request.kind) == ("POST /v1/models/{model}/predict", Span.SPAN_KIND_SERVER)
    said = attributes(request)
    assert said["outboard.request_id"] == answer.json()["id"] and said["outboard.device"] == answer.json()["device"]
    assert (said["http.response.status_code"], said["http.route"], said["outboard.frames"]) == (200, "/v1/models/{model}/predict", 1)

    children = [s for s in collector.spans() if s.parent_span_id == request.span_id]
    assert [s.name for s in sorted(children, key=lambda s: s.start_time_unix_nano)] == ["queue", "decode", "queue", "infer"]
    assert all(request.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in children)
    assert all(s.end_time_unix_nano <= request.end_time_unix_nano for s in children)
    infer = next(s for s in children if s.name == "infer")
    took = (infer.end_time_unix_nano - infer.start_time_unix_nano) / 1e6
    assert took == pytest.approx(answer.json()["timing_ms"]["infer"], abs=0.02) and took >= 5  # the modelled time of a batch of one
    assert attributes(infer)["outboard.device"] == "sim:0" and attributes(infer)["outboard.outcome"] == "answered"


def test_spans_carry_the_name_that_the_environment_gives_the_service(server: Server, collector: Collector) -> None:
    send(server, picture())
    server.until(lambda: collector.received, what="spans")
    resource = {a.key: a.value.string_value for a in collector.received[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "egpu-lab" and resource["service.version"]


def test_a_picture_that_cannot_be_decoded_has_a_span_that_says_so(server: Server, collector: Collector) -> None:
    answer = send(server, picture()[:-300])
    assert answer.status_code == 422
    span_id = answer.headers["traceparent"].split("-")[2]
    request = server.until(lambda: next((s for s in collector.spans() if s.span_id.hex() == span_id), None), what="its span")
    assert isinstance(request, Span) and attributes(request)["http.response.status_code"] == 422
    children = [s for s in collector.spans() if s.parent_span_id == request.span_id]
    assert [s.name for s in children] == ["queue", "decode"] and attributes(children[0])["outboard.outcome"] == "image_truncated"


def test_what_a_caller_does_not_sample_is_not_sent(server: Server, collector: Collector) -> None:
    answer = send(server, picture(), TRACEPARENT[:-2] + "00")
    sampled = send(server, picture())
    assert answer.headers["traceparent"].endswith("-00")
    ids = {answer: answer.headers["traceparent"].split("-")[2] for answer in (answer, sampled)}
    server.until(lambda: any(s.span_id.hex() == ids[sampled] for s in collector.spans()), what="the span sent after it")
    assert all(s.span_id.hex() != ids[answer] for s in collector.spans())


def test_tensors_have_spans_too_and_scrapes_have_none(server: Server, collector: Collector) -> None:
    for path in ("/metrics", "/livez", "/v1/devices"):
        assert server.client.get(path).status_code == 200
    body = {"id": "mine", "inputs": [{"name": "nothing", "datatype": "FP32", "shape": [1], "data": [0]}]}
    answer = server.client.post("/v2/models/means/infer", json=body)
    span_id = answer.headers["traceparent"].split("-")[2]
    request = server.until(lambda: next((s for s in collector.spans() if s.span_id.hex() == span_id), None), what="its span")
    assert isinstance(request, Span) and request.name == "POST /v2/models/{model}/infer" and not request.parent_span_id
    assert {s.name.partition(" ")[0] for s in collector.spans() if s.kind == Span.SPAN_KIND_SERVER} == {"POST"}


def inference(model: str = "means") -> service_pb2.ModelInferRequest:
    body = picture()
    image = service_pb2.ModelInferRequest.InferInputTensor(name="image", datatype="BYTES", shape=[1])
    return service_pb2.ModelInferRequest(model_name=model, inputs=[image], raw_input_contents=[len(body).to_bytes(4, "little") + body])


def stub(server: Server) -> service_pb2_grpc.GRPCInferenceServiceStub:
    return service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(OipServer(server).grpc))


def test_a_call_over_grpc_has_a_span_and_its_trace_is_passed_on(server: Server, collector: Collector) -> None:
    metadata = (("traceparent", TRACEPARENT), ("tracestate", "vendor=1"))
    _, call = stub(server).ModelInfer.with_call(inference(), metadata=metadata)
    passed_on = re.fullmatch(rf"00-{TRACE}-([0-9a-f]{{16}})-01", dict(call.trailing_metadata())["traceparent"])
    assert passed_on and passed_on[1] != CALLER
    span = server.until(lambda: next((s for s in collector.spans() if s.span_id.hex() == passed_on[1]), None), what="its span")
    assert isinstance(span, Span) and span.name == "inference.GRPCInferenceService/ModelInfer" and span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, CALLER, "vendor=1")
    said = attributes(span)
    assert (said["rpc.system"], said["rpc.method"], said["rpc.grpc.status_code"]) == ("grpc", "ModelInfer", 0)
    assert said["outboard.model"] == "means" and said["outboard.device"] in ("cpu", "sim:0")
    children = sorted((s for s in collector.spans() if s.parent_span_id == span.span_id), key=lambda s: s.start_time_unix_nano)
    assert [s.name for s in children] == ["queue", "decode", "queue", "infer"]
    line = server.until(lambda: next((x for x in lines(server) if x.get("span_id") == passed_on[1]), None), what="its line")
    assert isinstance(line, dict) and (line["method"], line["status"], line["model"]) == ("ModelInfer", "OK", "means")


def test_a_refusal_over_grpc_is_the_callers_error(server: Server, collector: Collector) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        stub(server).ModelInfer(inference("none"), metadata=(("traceparent", TRACEPARENT),))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
    span_id = dict(refused.value.trailing_metadata())["traceparent"].split("-")[2]  # type: ignore[attr-defined]
    span = server.until(lambda: next((s for s in collector.spans() if s.span_id.hex() == span_id), None), what="its span")
    assert isinstance(span, Span) and attributes(span)["rpc.grpc.status_code"] == 5 and span.status.code == Status.STATUS_CODE_UNSET


def test_each_inference_of_a_grpc_stream_has_a_span(server: Server, collector: Collector) -> None:
    trace = TRACE.replace("4", "5")
    answers = stub(server).ModelStreamInfer(iter([inference(), inference("none")]), metadata=(("traceparent", f"00-{trace}-{CALLER}-01"),))
    assert [bool(a.error_message) for a in answers] == [False, True]

    def found() -> list[int]:
        spans = [s for s in collector.spans() if s.trace_id.hex() == trace and s.name.endswith("/ModelStreamInfer")]
        return sorted(attributes(s)["rpc.grpc.status_code"] for s in spans)

    server.until(lambda: found() == [0, 5], what="a span for each")


def test_without_spans_grpc_passes_a_trace_on_as_it_came(plain: Server) -> None:
    for given, passed_on in ((TRACEPARENT, TRACEPARENT), (TRACEPARENT.upper(), None)):
        _, call = stub(plain).ModelInfer.with_call(inference(), metadata=(("traceparent", given),))
        assert dict(call.trailing_metadata()).get("traceparent") == passed_on


def test_each_frame_of_a_stream_has_a_span_under_what_opened_it(server: Server, collector: Collector) -> None:
    trace = TRACE.replace("4", "6")
    with link(server, f"00-{trace}-{CALLER}-01", policy="lossless") as frames:
        for body in (picture(), b"no picture", picture()):
            frames.send(body)
        outcomes = [hear(frames) for _ in range(3)]

    def found() -> list[Span]:
        spans = [s for s in collector.spans() if s.trace_id.hex() == trace and s.name == "frame"]
        return sorted(spans, key=lambda s: s.start_time_unix_nano) if len(spans) == 3 else []

    spans = server.until(found, what="a span for each frame")
    assert isinstance(spans, list)
    assert {(s.parent_span_id.hex(), s.kind) for s in spans} == {(CALLER, Span.SPAN_KIND_CONSUMER)}
    said = [attributes(s) for s in spans]
    assert [(a["outboard.seq"], a["outboard.outcome"]) for a in said] == [(1, "answered"), (2, "undecodable"), (3, "answered")]
    assert said[0]["outboard.device"] == outcomes[0]["device"] and said[0]["outboard.model"] == "means"
    assert (said[0]["outboard.frames"], said[2]["outboard.frames"]) == (1, 1), "each has its own"
    children = sorted((s for s in collector.spans() if s.parent_span_id == spans[0].span_id), key=lambda s: s.start_time_unix_nano)
    assert [s.name for s in children] == ["queue", "decode", "queue", "infer"]
    assert all(spans[0].start_time_unix_nano <= s.start_time_unix_nano <= spans[0].end_time_unix_nano for s in children)


def test_frames_have_no_spans_where_their_sender_does_not_ask_for_them(server: Server, collector: Collector) -> None:
    trace = TRACE.replace("4", "7")
    with link(server, f"00-{trace}-{CALLER}-00") as unsampled, link(server, "") as silent:
        for frames in (unsampled, silent):
            frames.send(picture())
            assert hear(frames)["type"] == "result"
    with link(server, TRACEPARENT) as sampled:
        sampled.send(picture())
        hear(sampled)
    server.until(lambda: any(s.name == "frame" and s.trace_id.hex() == TRACE for s in collector.spans()), what="the span sent after them")
    assert all(s.trace_id.hex() != trace for s in collector.spans())
    assert all(s.parent_span_id for s in collector.spans() if s.name == "frame")
    # The request that opened a link may last for days: what its frames were is not kept for its line.
    ended = server.until(lambda: [x for x in lines(server) if x.get("trace_id") == trace and "seconds" in x], what="the link's line")
    assert isinstance(ended, list)
    assert ended[0]["method"] == "WebSocket" and "request_id" not in ended[0]


def test_every_line_is_one_json_object_of_the_front_or_a_worker(server: Server) -> None:
    server.client.post("/v1/devices/sim:0/fault", json={"fault": "unplug"})
    server.until(lambda: any(x.get("state") == "lost" for x in lines(server)), what="a line about the loss")
    server.client.post("/v1/devices/sim:0/fault", json={"fault": "replug"})
    server.until(lambda: "sim:0" in server.model("means")["devices"], 60)
    said = lines(server)
    assert {x["process"] for x in said} == {"front", "worker"}
    assert all({"time", "level", "logger", "pid", "message"} <= x.keys() for x in said)
    lost = next(x for x in said if x.get("state") == "lost")
    assert (lost["level"], lost["device"], lost["why"]) == ("warning", "sim:0", "unplugged (simulated)")
    loaded = next(x for x in said if x["process"] == "worker" and "model" in x)
    assert loaded["device"] in ("cpu", "sim:0") and loaded["model"] == "means"
    assert any(x.get("models") == {"means": "ready"} for x in said)


def test_the_line_of_a_request_names_its_trace_its_answer_and_its_device(server: Server) -> None:
    answer = send(server, picture())

    def found() -> dict[str, Any] | None:
        return next((x for x in lines(server) if x.get("request_id") == answer.json()["id"]), None)

    line = server.until(found, what="its line")
    assert isinstance(line, dict)
    assert (line["trace_id"], line["span_id"]) == (TRACE, answer.headers["traceparent"].split("-")[2])
    assert (line["model"], line["device"], line["status"], line["method"]) == ("means", answer.json()["device"], 200, "POST")
    refused = send(server, b"no picture", model="none")
    assert refused.status_code == 404
    server.until(lambda: any((x.get("model"), x.get("status")) == ("none", 404) for x in lines(server)), what="the line of a refusal")


def test_lines_of_the_http_server_itself_are_json_too_with_their_traceback(server: Server) -> None:
    with connect(f"ws{server.url.removeprefix('http')}/v1/models/means/stream", additional_headers={"traceparent": TRACEPARENT}) as link:
        assert link.response and link.response.headers["traceparent"] == TRACEPARENT
        link.send(b"\xff", text=True)  # no UTF-8
        line = server.until(lambda: next((x for x in lines(server) if x["logger"].startswith("uvicorn")), None), what="uvicorn's line")
    assert isinstance(line, dict) and "UTF-8" in line["message"] and line["exception"].startswith("Traceback")


def test_without_spans_a_trace_is_passed_on_as_it_came(plain: Server) -> None:
    answer = send(plain, picture())
    assert answer.headers["traceparent"] == TRACEPARENT
    refused = send(plain, b"no picture")
    assert refused.status_code == 415 and refused.headers["traceparent"] == TRACEPARENT
    assert "traceparent" not in send(plain, picture(), "").headers
    assert plain.client.get("/livez", headers={"traceparent": TRACEPARENT}).headers["traceparent"] == TRACEPARENT


@pytest.mark.parametrize(
    "malformed",
    [
        "",
        "nonsense",
        TRACEPARENT.upper(),
        f"ff-{TRACE}-{CALLER}-01",
        f"00-{'0' * 32}-{CALLER}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{CALLER}-01-more",
        f"00-{TRACE}-{CALLER}",
        f"00-{TRACE}-{CALLER}-1",
    ],
)
def test_a_malformed_trace_is_ignored(plain: Server, malformed: str) -> None:
    answer = plain.client.get("/livez", headers={"traceparent": malformed})
    assert answer.status_code == 200 and "traceparent" not in answer.headers


def test_two_traces_in_one_request_are_none(plain: Server) -> None:
    answer = plain.client.get("/livez", headers=[("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)])
    assert "traceparent" not in answer.headers


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known(plain: Server) -> None:
    answer = plain.client.get("/livez", headers={"traceparent": f"cc-{TRACE}-{CALLER}-01-what-comes-later"})
    assert answer.headers["traceparent"] == TRACEPARENT


def test_the_server_ends_in_time_although_the_collector_does_not_answer(models: Path) -> None:
    """Whose address leads nowhere; also no answer waits for it."""
    flags = ("--device", "cpu", "--traces")
    with serving(models, *flags, env={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://192.0.2.1:4318", "OTEL_BSP_SCHEDULE_DELAY": "50"}) as server:
        assert send(server, picture()).status_code == 200
        began = time.monotonic()
        server.process.terminate()
        server.process.wait(60)
        assert time.monotonic() - began < 30


def test_a_protocol_that_is_not_spoken_is_refused_before_the_start(models: Path) -> None:
    done = CliRunner().invoke(
        app, ["serve", "--models", str(models), "--traces"], env={"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OUTBOARD_DEVICE": "cpu"}
    )
    assert done.exit_code == 2 and "http/protobuf" in done.stderr
