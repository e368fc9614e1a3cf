"""Commands about a running server, asked of things that are none: one line, exit code 1."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from outboard import remote
from outboard.cli import app

COMMANDS = [
    ["devices"],
    ["devices", "--json"],
    ["models"],
    ["eject", "cuda:0"],
    ["unplug", "a/b"],
    ["replug", "sim:0"],
    ["devices", "reset", "sim:0"],
]
BODIES = {
    "a list": (200, "application/json", b"[1, 2]"),
    "other names": (200, "application/json", b'{"items": []}'),
    "other entries": (200, "application/json", b'{"devices": [{"x": 1}], "models": [{"name": 5}]}'),
    "a page": (200, "text/html", b"<!doctype html><title>Hello</title>"),
    "a refusal of another kind": (404, "application/json", b'{"detail": ["Not Found"]}'),
    "nothing": (200, "application/json", b""),
    "no text": (200, "application/json", b"\xff\xfe\x00"),
    "deep": (200, "application/json", b"[" * 100_000),
    "elsewhere": (302, "text/html", b""),
}


class _Foreign(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, kind, body = self.server.says  # type: ignore[attr-defined]
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def foreign() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Foreign)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def refused(command: list[str], url: str) -> str:
    """The one line that the command says."""
    done = CliRunner().invoke(app, [*command, "--url", url])
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit), (command, done.exception)
    assert done.stdout == "" and done.stderr.count("\n") == 1, done.output
    return done.stderr


@pytest.mark.parametrize("what", BODIES)
def test_another_server_is_recognised(foreign: http.server.ThreadingHTTPServer, what: str) -> None:
    foreign.says = BODIES[what]  # type: ignore[attr-defined]
    for command in COMMANDS if what == "other entries" else (["devices"], ["models"]):
        assert "no Outboard server" in refused(command, f"http://127.0.0.1:{foreign.server_port}")


def test_a_closed_port_and_an_address_that_is_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as s:
        closed = s.getsockname()[1]
    for command in COMMANDS:
        assert "no server answers" in refused(command, f"http://127.0.0.1:{closed}")
    for url in ("localhost:8000", "http://127.0.0.1:99999", "http://☃:1", "http://[::1"):
        assert "no server answers" in refused(["devices"], url)


def test_a_port_that_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            connection.recv(4096)
            connection.close()

        threading.Thread(target=greet, daemon=True).start()
        assert "no server answers" in refused(["devices"], f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_a_server_that_says_nothing_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ANSWER_LIMIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert "timed out" in refused(["devices"], f"http://127.0.0.1:{listener.getsockname()[1]}")


def test_names_of_devices_are_quoted(foreign: http.server.ThreadingHTTPServer) -> None:
    foreign.says = BODIES["nothing"]  # type: ignore[attr-defined]
    for device, path in (("cuda:0", "cuda:0"), ("a/b", "a%2Fb"), ("a?b#c d", "a%3Fb%23c%20d")):
        refused(["eject", device], f"http://127.0.0.1:{foreign.server_port}")
        assert foreign.asked[-1] == f"/v1/devices/{path}/eject"  # type: ignore[attr-defined]
