"""Connections that are slow, wordy, cut short or confused, and what the log says of them. Raw sockets: no library sends such requests."""

from __future__ import annotations

import concurrent.futures
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import graphs
from integration.pictures import encoded
from integration.serverkit import Server, serving

PICTURE = encoded(np.full((32, 32, 3), 200, np.uint8), "PNG")
PREDICT = b"POST /v1/models/m/predict HTTP/1.1\r\nHost: localhost\r\n"
H2C = b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
LAST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    graphs.write_model(models, "m", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    limits = {"OUTBOARD_LIMITS_HEAD_SECONDS": "1", "OUTBOARD_LIMITS_BODY_SECONDS": "1", "OUTBOARD_LIMITS_BODY_RATE": "1000"}
    with serving(models, "--device", "cpu", env=limits) as running:
        yield running


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def rest(s: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    return b"".join(iter(lambda: s.recv(1 << 16), b""))


def answer(server: Server, request: bytes) -> bytes:
    with connect(server) as s:
        s.sendall(request)
        return rest(s)


def refusal(raw: bytes) -> tuple[int, str]:
    """Status and slug."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    problem = json.loads(body)
    assert int(head.split()[1]) == problem["status"]
    return problem["status"], problem["type"]


@pytest.mark.parametrize("split", [False, True])
def test_a_request_that_asks_for_http_2_is_answered_with_its_body_read(server: Server, split: bool) -> None:
    head = PREDICT + H2C + b"Content-Length: %d\r\n\r\n" % len(PICTURE)
    with connect(server) as s:
        for piece in [head, PICTURE, LAST] if split else [head + PICTURE + LAST]:
            s.sendall(piece)
            time.sleep(0.05 if split else 0)
        got = rest(s)
    assert got.startswith(b"HTTP/1.1 200") and b'"means"' in got
    assert got.endswith(b'{"alive": true}'), "and the connection goes on"


def test_a_chunked_body_survives_such_a_request_too(server: Server) -> None:
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PICTURE), PICTURE)
    got = answer(server, PREDICT + H2C + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + LAST)
    assert got.startswith(b"HTTP/1.1 200") and b'"means"' in got


def test_a_post_that_asks_for_a_websocket_is_a_post(server: Server) -> None:
    wish = b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: %d\r\n\r\n" % len(PICTURE)
    got = answer(server, PREDICT + wish + PICTURE + LAST)
    assert got.startswith(b"HTTP/1.1 200") and b'"means"' in got


def test_a_websocket_handshake_that_cannot_be_read_is_refused_and_the_connection_closed(server: Server) -> None:
    wish = b"GET /v1/models/m/stream HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    assert answer(server, wish + b"\r\n").startswith(b"HTTP/1.1 400")
    assert answer(server, wish + b"X: " + b"a" * 20_000 + b"\r\n\r\n").startswith(b"HTTP/1.1 431")


def test_half_a_head_is_given_up(server: Server) -> None:
    assert refusal(answer(server, b"GET /livez HTTP/1.1\r\nHos")) == (408, "request_timeout")


def test_a_head_that_trickles_in_is_given_up_too(server: Server) -> None:
    began = time.monotonic()
    with connect(server) as s:
        s.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        s.setblocking(False)
        got = b""
        while not got and time.monotonic() < began + 20:
            s.send(b"a")
            time.sleep(0.1)
            try:
                got = s.recv(4096)
            except BlockingIOError:
                pass
    assert refusal(got) == (408, "request_timeout")


def test_a_connection_on_which_nothing_comes_is_closed(server: Server) -> None:
    assert answer(server, b"") == b""


def test_line_ends_do_not_keep_an_idle_connection_open(server: Server) -> None:
    """They belong to no request, so nothing else would end it."""
    assert refusal(answer(server, b"\r\n\r\n")) == (408, "request_timeout")


@pytest.mark.parametrize(
    "headers",
    [b"X: " + b"a" * 1_000_000 + b"\r\n", b"X: " + b"a" * 70_000 + b"\r\n", b"X: a\r\n" * 5000, b"X: a\r\n" * 101],
    ids=["a megabyte", "70 kB", "5000", "101"],
)
def test_heads_too_large_are_refused(server: Server, headers: bytes) -> None:
    got = answer(server, b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
    assert refusal(got) == (431, "headers_too_large")


def test_a_large_body_behind_a_small_head_is_not_taken_for_a_large_head(server: Server) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (512, 512, 3), np.uint8)
    picture = encoded(noise, "PNG")
    assert len(picture) > 500_000
    head = PREDICT + b"Content-Length: %d\r\n\r\n" % len(picture)
    got = answer(server, (head + picture) * 2 + LAST)
    assert got.count(b'"means"') == 2 and got.endswith(b'{"alive": true}')


@pytest.mark.parametrize("path", ["/v1/models/m/predict", "/v1/devices/cpu/fault"])
def test_a_body_that_does_not_come_is_given_up_on_every_route(server: Server, path: str) -> None:
    got = answer(server, f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc".encode())
    assert refusal(got) == (408, "body_timeout")


def test_a_body_that_does_not_come_is_given_up_in_the_words_of_the_route(server: Server) -> None:
    got = answer(server, b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
    head, _, body = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ") and "the body is not complete" in json.loads(body)["error"]


def test_a_slow_body_that_keeps_up_the_rate_is_read(server: Server) -> None:
    padding = b"--B\r\nContent-Disposition: form-data; name=x\r\n\r\n" + b" " * 900 + b"\r\n"
    picture = b"--B\r\nContent-Disposition: form-data; name=image; filename=a\r\n\r\n" + PICTURE + b"\r\n--B--\r\n"
    body = padding * 6 + picture
    with connect(server) as s:
        s.sendall(PREDICT + b"Content-Type: multipart/form-data; boundary=B\r\nContent-Length: %d\r\n\r\n" % len(body))
        for at in range(0, len(body), 900):
            s.sendall(body[at : at + 900])
            time.sleep(0.3)
        # The form's field is unknown: the whole body was read and understood.
        assert b" 422 " in s.recv(4096).splitlines()[0]


def test_a_connection_whose_body_is_not_wanted_does_not_stay_open_for_it(server: Server) -> None:
    with connect(server) as s:
        s.sendall(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\nabc")
        assert rest(s).startswith(b"HTTP/1.1 404")


def test_what_is_no_http_is_told_so(server: Server) -> None:
    assert refusal(answer(server, b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")) == (400, "bad_request")
    assert refusal(answer(server, b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")) == (400, "bad_request")


def test_health_is_answered_beside_200_connections_that_trickle(server: Server) -> None:
    sockets = [connect(server) for _ in range(200)]
    try:
        for s in sockets:
            s.sendall(b"GET /livez HT")
        times = []
        for _ in range(20):
            began = time.perf_counter()
            assert server.client.get("/livez").status_code == 200
            times.append(time.perf_counter() - began)
        with concurrent.futures.ThreadPoolExecutor(50) as pool:
            assert all(refusal(got) == (408, "request_timeout") for got in pool.map(rest, sockets))
    finally:
        for s in sockets:
            s.close()
    assert sorted(times)[10] < 0.1


def test_clients_that_leave_or_reset_leave_no_errors_in_the_log(server: Server) -> None:
    before = len(server.log)
    cut_short = b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc"
    for path in (b"/v1/models/m/predict", b"/v1/devices/cpu/fault", b"/v2/models/m/infer", b"/v1/models/m/load", b"/v1/models/m/stream"):
        for reset in (False, True):
            with connect(server) as s:
                s.sendall(b"POST " + path + cut_short)
                time.sleep(0.05)
                if reset:
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    s.shutdown(socket.SHUT_WR)
    with connect(server) as s:
        s.sendall((PREDICT + b"Content-Length: %d\r\n\r\n" % len(PICTURE) + PICTURE) * 20)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.predict("m", PICTURE).status_code == 200
    time.sleep(0.3)
    said = server.log[before:]
    assert not any(word in said for word in ("ERROR", "WARNING", "Traceback", "socket.send()")), said


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
def test_health_answers_head(server: Server, path: str) -> None:
    got, head = server.client.get(path), server.client.head(path)
    assert head.status_code == got.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/livez", "GET, HEAD"),
        ("GET", "/v1/models/m/predict", "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("PUT", "/v1/devices/cpu/eject", "POST"),
    ],
)
def test_a_wrong_method_is_told_the_right_ones(server: Server, method: str, path: str, allow: str) -> None:
    response = server.client.request(method, path)
    assert response.status_code == 405 and response.headers["allow"] == allow
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["type"] == "method_not_allowed" and allow in response.json()["detail"]


@pytest.mark.parametrize(
    "option", ["deadline_ms=nan", "deadline_ms=inf", "deadline_ms=-1", "deadline_ms=1e9", "min_score=nan", "top_k=1_0"]
)
def test_numbers_that_are_none_are_refused_in_plain_words(server: Server, option: str) -> None:
    response = server.client.post(f"/v1/models/m/predict?{option}", content=PICTURE)
    assert response.status_code == 422 and response.json()["type"] == "bad_option"
    assert "e+" not in response.json()["detail"]


def test_readiness_says_which_models_are_not_served_and_why(tmp_path: Path) -> None:
    graphs.write_model(tmp_path, "good", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    graphs.write_model(tmp_path, "away", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "model.toml").write_text('task = "tensor"\nbackend = "onnx"\nfile = "m.onnx"\n')
    with serving(tmp_path, "--device", "cpu") as server:
        server.client.post("/v1/models/away/unload").raise_for_status()
        ready = server.client.get("/readyz").json()
        assert set(ready["not_served"]) == {"bad", "away"}
        assert "model.toml: output" in ready["not_served"]["bad"] and "unloaded" in ready["not_served"]["away"]
