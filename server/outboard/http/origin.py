"""Whom the server answers: a web page elsewhere must not reach it through the browser of somebody at this machine.

Two ways lead there, and no password is asked on loopback. A page may send requests and open WebSockets to any address: then the browser
names the page in `Origin`, or, where it sends none (a picture, a script), in `Sec-Fetch-Site`. Or the page's own name may be made to
point at this machine (DNS rebinding): then `Host` is that name. An address as `Host` cannot come from there, since rebinding needs a name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import lru_cache

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from outboard.http.counted import REFUSED
from outboard.http.problems import respond_at
from outboard.problems import Problem
from outboard.settings import Settings
from outboard.telemetry import metrics

_HOST = re.compile(r"(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^\[\]:@/\s]+))(:\d*)?")


class OwnPagesOnly:
    """ASGI middleware in front of everything. Pages of `[http] origins` may come in, and their browsers are told so (CORS)."""

    def __init__(self, app: ASGIApp, settings: Settings):
        self._hosts = {name.lower() for name in settings.http.hosts} | own_names(settings.host)
        self._origins = {origin.lower().rstrip("/") for origin in settings.http.origins}
        if self._origins:
            app = CORSMiddleware(app, allow_origins=sorted(self._origins), allow_methods=["*"], allow_headers=["*"])
        self._app = app
        self._known = lru_cache(1024)(self._is_known)  # asked for each request, and nearly always the same

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None if scope["type"] == "lifespan" else self._problem(dict(scope["headers"]))
        if problem is None:
            await self._app(scope, receive, send)
            return
        metrics.request(REFUSED, problem.status, 0.0)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(respond_at(scope["path"], problem))
        else:
            await respond_at(scope["path"], problem)(scope, receive, send)

    def _problem(self, headers: dict[bytes, bytes]) -> Problem | None:
        host = headers.get(b"host", b"")
        if host and not self._known(host):  # HTTP/1.0 may leave it out; no browser does
            return Problem(
                "unknown_host",
                f"Host is {_shown(host)}, and this server does not go by that name; use its address, or add the name to [http] hosts",
            )
        origin = headers.get(b"origin")
        if origin is not None:
            if not self._is_welcome(origin, host):
                return _foreign(f"a page of {_shown(origin)}")
        elif b"sec-fetch-site" in headers and not self._origins:
            embedded = headers[b"sec-fetch-site"] in (b"cross-site", b"same-site") and headers.get(b"sec-fetch-mode") != b"navigate"
            if embedded:
                return _foreign("a page elsewhere")
        return None

    def _is_known(self, host: bytes) -> bool:
        name = _name(host.decode("latin-1"))
        return "*" in self._hosts or name in self._hosts or _is_address(name)

    def _is_welcome(self, origin: bytes, host: bytes) -> bool:
        text = origin.decode("latin-1").lower()
        scheme, _, authority = text.partition("://")
        own = scheme in ("http", "https") and authority == host.decode("latin-1").lower()
        return own or "*" in self._origins or text in self._origins


def own_names(bound: str) -> set[str]:
    """The names, lower case, by which a server bound to this address may be called."""
    names = {"localhost", bound.lower()}
    if bound != "localhost" and not (_is_address(bound) and ipaddress.ip_address(bound).is_loopback):
        machine = socket.gethostname().lower()
        short = machine.partition(".")[0]
        names |= {machine, short, f"{short}.local"}  # .local: mDNS
    return names


def _name(host: str) -> str:
    """ "Name:8000", "name.", "[::1]:8000" -> "name", "name", "::1"; "" for what is none of them."""
    found = _HOST.fullmatch(host)
    return (found["address"] or found["name"]).lower().removesuffix(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _shown(value: bytes) -> str:
    return repr(value[:100].decode("latin-1"))


def _foreign(who: str) -> Problem:
    return Problem("foreign_origin", f"{who} may not use this server from a browser; add its origin to [http] origins if it should")
