"""A web page elsewhere must not reach a server on loopback: what a browser would send for it, with a plain client."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import graphs
from integration.serverkit import Server, serving

FOREIGN = "https://evil.example"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    graphs.write_model(models, "m", graphs.channel_means(), graphs.toml("tensor", "tensor", (32, 32)))
    env = {"OUTBOARD_HTTP_HOSTS": "egpu.lab.example;other", "OUTBOARD_HTTP_ORIGINS": "https://lab.example"}
    with serving(models, "--device", "cpu", env=env) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As it comes, without settings."""
    with serving(tmp_path_factory.mktemp("models"), "--device", "cpu") as running:
        yield running


def port(server: Server) -> str:
    return server.url.rpartition(":")[2]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/devices"), ("POST", "/v1/models/m/predict"), ("POST", "/v2/models/m/infer"), ("GET", "/nowhere")]
)
def test_a_request_from_a_page_elsewhere_is_refused(server: Server, method: str, path: str) -> None:
    response = server.client.request(method, path, headers={"Origin": FOREIGN})
    assert response.status_code == 403
    if path.startswith("/v2"):
        assert list(response.json()) == ["error"], "what clients of that protocol read"
    else:
        assert response.json()["type"] == "foreign_origin" and response.headers["content-type"] == "application/problem+json"


def test_requests_that_were_not_let_in_are_counted(server: Server) -> None:
    def refused() -> float:
        found = re.search(r'outboard_http_requests_total\{route="refused",status="403"\} (\S+)', server.client.get("/metrics").text)
        return float(found[1]) if found else 0.0

    before = refused()
    for path in ("/v1/devices", "/v2"):
        server.client.get(path, headers={"Origin": FOREIGN})
    assert refused() == before + 2


@pytest.mark.parametrize("origin", ["null", "http://127.0.0.1:1", "http://localhost", "file://", "", "https://lab.example.evil.example"])
def test_other_ports_and_origins_that_say_nothing_are_elsewhere(server: Server, origin: str) -> None:
    assert server.client.get("/v1/devices", headers={"Origin": origin}).status_code == 403


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_name_that_was_made_to_point_here_is_not_answered(server: Server, method: str) -> None:
    for path in ("/v1/devices", "/v1/models/m/predict", "/"):
        response = server.client.request(
            method, path, headers={"Host": f"evil.example:{port(server)}", "Origin": f"http://evil.example:{port(server)}"}
        )
        assert response.status_code == 421 and response.json()["type"] == "unknown_host"


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:1", "localhost.", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "192.168.1.7", "egpu.lab.example:443", "other"],
)
def test_its_own_names_and_any_address_are_answered(server: Server, host: str) -> None:
    assert server.client.get("/v1/devices", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1.evil.example", "localhost.evil.example", "evil", "[::1].evil", "127.0.0.1@evil", "lab.example"]
)
def test_names_that_only_look_like_its_own_are_not(server: Server, host: str) -> None:
    response = server.client.get("/v1/devices", headers={"Host": host})
    assert response.status_code == 421, host


def test_its_own_page_may_ask(server: Server) -> None:
    host = f"localhost:{port(server)}"
    for scheme in ("http", "https"):  # https: a proxy with TLS in front
        response = server.client.get("/v1/devices", headers={"Host": host, "Origin": f"{scheme}://{host}"})
        assert response.status_code == 200


def test_pictures_and_scripts_that_a_page_elsewhere_embeds_are_refused_and_links_are_not(plain: Server) -> None:
    """A browser sends no Origin for them."""
    embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert plain.client.get("/v1/devices", headers=embedded).status_code == 403
    assert plain.client.get("/", headers=embedded | {"Sec-Fetch-Mode": "navigate"}).status_code == 200
    assert plain.client.get("/v1/devices", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200
    assert plain.client.get("/v1/devices", headers={"Sec-Fetch-Site": "none"}).status_code == 200


def test_a_page_that_was_let_in_can_read_the_answers(server: Server) -> None:
    asked = {"Origin": "https://lab.example", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    before = server.client.options("/v1/models/m/predict", headers=asked)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == "https://lab.example"
    response = server.client.get("/v1/devices", headers={"Origin": "https://lab.example"})
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "https://lab.example"


def shake_hands(server: Server, path: str, **headers: str) -> int:
    """Status of a WebSocket handshake."""
    given = {name: value for name, value in headers.items() if name != "origin"}
    try:
        with connect(f"ws://127.0.0.1:{port(server)}{path}", origin=headers.get("origin"), additional_headers=given):  # type: ignore[arg-type]
            return 101
    except InvalidStatus as e:
        if e.response.body:
            assert e.response.headers["content-type"] == "application/problem+json"
        return e.response.status_code


@pytest.mark.parametrize("path", ["/v1/models/m/stream", "/nowhere", "/"])
def test_a_websocket_from_a_page_elsewhere_is_refused_before_it_opens(server: Server, path: str) -> None:
    assert shake_hands(server, path, origin=FOREIGN) == 403
    assert shake_hands(server, path, origin=f"http://127.0.0.1:1{port(server)}") == 403


def test_a_websocket_of_its_own_page_or_of_none_opens(server: Server) -> None:
    assert shake_hands(server, "/v1/models/m/stream") == 101
    assert shake_hands(server, "/v1/models/m/stream", origin=f"http://127.0.0.1:{port(server)}") == 101


@pytest.mark.parametrize("path", ["/v1/models/m/stream", "/nowhere"])
def test_a_websocket_to_an_unknown_name_is_refused(server: Server, path: str) -> None:
    name = f"evil.example:{port(server)}"
    with socket.create_connection(("127.0.0.1", int(port(server)))) as s, pytest.raises(InvalidStatus) as refused:
        connect(f"ws://{name}{path}", origin=f"http://{name}", sock=s)  # type: ignore[arg-type]
    assert refused.value.response.status_code == 421
    assert "ERROR" not in server.log
