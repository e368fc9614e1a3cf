"""API keys: made, asked for on every route and protocol, and revoked while the server runs."""

from __future__ import annotations

import base64
import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import tritonclient.grpc as triton
from click.testing import Result
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import graphs
from integration.oipkit import OipServer
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving
from outboard.cli import app
from outboard_client import Client


@dataclass
class Guarded:
    """A server that asks for keys."""

    server: Server
    file: Path
    key: str


def keys(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments, "--file", str(file)])


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    models = tmp_path_factory.mktemp("models")
    graphs.write_model(models, "means", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32)))
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    key = keys(file, "add", "station1").stdout.strip()
    with serving(models, "--device", "cpu", "--grpc-port", "0", env={"OUTBOARD_HTTP_KEYS": str(file)}) as server:
        yield Guarded(server, file, key)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/docs"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("GET", "/v1/devices"),
        ("GET", "/v1/nothing"),
        ("POST", "/v1/models/means/predict"),
        ("POST", "/v1/models/means/unload"),
        ("POST", "/v1/models/means/stream"),
        ("GET", "/v2/models/means"),
        ("POST", "/v2/models/means/infer"),
    ],
)
def test_nothing_is_answered_without_a_key(guarded: Guarded, method: str, path: str) -> None:
    for headers in ({}, bearer("wrong"), {"authorization": "Bearer"}, {"authorization": guarded.key}, {"authorization": "Basic %%%"}):
        refused = guarded.server.client.request(method, path, headers=headers)
        assert refused.status_code == 401, headers
        if path.startswith("/v2"):
            assert list(refused.json()) == ["error"], "what clients of that protocol read"
        else:
            assert refused.json()["type"] == "key_required", headers
        # A header each: of two challenges in one, Chromium sees the first only, and asks nobody for a password.
        assert [challenge.split()[0] for challenge in refused.headers.get_list("www-authenticate")] == ["Bearer", "Basic"]
    twice = guarded.server.client.request(method, path, headers=[("authorization", f"Bearer {guarded.key}"), ("authorization", "Bearer x")])
    assert twice.status_code == 401


def test_a_key_opens_everything(guarded: Guarded) -> None:
    client = guarded.server.client
    assert client.get("/v1/models", headers=bearer(guarded.key)).status_code == 200
    picture = encoded(scene(64, 48, 5, 5, 20))
    assert client.post("/v1/models/means/predict", content=picture, headers=bearer(guarded.key)).status_code == 200
    assert client.get("/v2/models/means", headers=bearer(guarded.key)).status_code == 200


def test_a_browser_may_send_it_as_a_password(guarded: Guarded) -> None:
    basic = base64.b64encode(f"anybody:{guarded.key}".encode()).decode()
    assert guarded.server.client.get("/", headers={"authorization": f"Basic {basic}"}).status_code == 200


def test_whoever_watches_the_server_needs_none(guarded: Guarded) -> None:
    for path in ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert guarded.server.client.get(path).status_code == 200


def test_streams_ask_before_the_upgrade(guarded: Guarded) -> None:
    url = f"ws{guarded.server.url.removeprefix('http')}/v1/models/means/stream"
    with pytest.raises(InvalidStatus) as refused:
        connect(url)
    assert refused.value.response.status_code == 401
    with connect(url, additional_headers=bearer(guarded.key)) as link:
        assert json.loads(link.recv(10))["type"] == "hello"


def test_grpc_asks_too_but_not_for_its_health(guarded: Guarded) -> None:
    address = OipServer(guarded.server).grpc
    with triton.InferenceServerClient(address) as client:
        for ask in (client.get_model_metadata, client.get_model_config):
            with pytest.raises(InferenceServerException) as refused:
                ask("means")
            assert "UNAUTHENTICATED" in str(refused.value.status())
        assert client.is_server_live() and client.is_server_ready()
        assert client.get_model_metadata("means", headers=bearer(guarded.key)).name == "means"
    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(iter([b""]))
        with pytest.raises(grpc.RpcError) as ended:
            next(stream)
        assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        assert health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest()).status == 1


def test_the_client_and_the_commands_take_it_from_the_environment(guarded: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOARD_URL", guarded.server.url)
    refused = CliRunner().invoke(app, ["models"])
    assert refused.exit_code == 1 and "OUTBOARD_KEY" in refused.stderr
    assert CliRunner().invoke(app, ["models", "--key", guarded.key]).exit_code == 0
    monkeypatch.setenv("OUTBOARD_KEY", guarded.key)
    assert CliRunner().invoke(app, ["devices"]).exit_code == 0
    short = ["--size", "64x48", "--seconds", "0.3s", "--warm-up", "0"]
    assert CliRunner().invoke(app, ["bench", "means", *short]).exit_code == 0
    with Client() as client:
        assert client.predict("means", encoded(scene(64, 48, 5, 5, 20))).model == "means"


def test_a_key_that_is_revoked_ends_and_a_new_one_begins_while_the_server_runs(guarded: Guarded) -> None:
    server, new = guarded.server, keys(guarded.file, "add", "visitor").stdout.strip()
    server.until(lambda: server.client.get("/v1/models", headers=bearer(new)).status_code == 200, what="the new key is known")
    assert keys(guarded.file, "revoke", "visitor").exit_code == 0
    server.until(lambda: server.client.get("/v1/models", headers=bearer(new)).status_code == 401, what="the revoked key is refused")
    assert server.client.get("/v1/models", headers=bearer(guarded.key)).status_code == 200
    good = guarded.file.read_bytes()
    guarded.file.write_bytes(b"{")


    def told() -> bool:
        server.client.get("/v1/models", headers=bearer("wrong"))  # the file is looked at when somebody asks with a key
        return "the keys known before stay valid" in server.log

    server.until(told, what="the complaint about a file that is no such")
    assert server.client.get("/v1/models", headers=bearer(guarded.key)).status_code == 200
    guarded.file.write_bytes(good)


def test_the_file_holds_no_key_and_only_its_owner_reads_it(guarded: Guarded) -> None:
    assert guarded.key.startswith("outboard_") and len(guarded.key) > 50
    assert guarded.key not in guarded.file.read_text() and guarded.key.removeprefix("outboard_") not in guarded.file.read_text()
    assert stat.S_IMODE(guarded.file.stat().st_mode) == 0o600
    assert guarded.key not in guarded.server.log


def test_keys_are_listed_by_name_and_mistakes_are_told(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert keys(file, "list").exit_code == 1 and "outboard keys add" in keys(file, "list").stderr
    first, second = keys(file, "add", "a").stdout.strip(), keys(file, "add", "b").stdout.strip()
    assert first != second
    assert [k["name"] for k in json.loads(keys(file, "list", "--json").stdout)["keys"]] == ["a", "b"]
    assert "already" in keys(file, "add", "a").stderr and keys(file, "add", "a").exit_code == 1
    assert keys(file, "add", "no good").exit_code == 1
    assert keys(file, "revoke", "a").exit_code == 0
    assert keys(file, "revoke", "a").exit_code == 1 and "known: b" in keys(file, "revoke", "a").stderr
    assert "b" in keys(file, "list").stdout


def test_a_server_whose_file_of_keys_is_not_there_does_not_start(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "--models", str(tmp_path)], env={"OUTBOARD_HTTP_KEYS": str(tmp_path / "none.json")})
    assert done.exit_code == 2 and "outboard keys add" in done.stderr
