"""Requests without a valid key are refused with 401, where the server asks for keys (`[http] keys`).

A key comes as `Authorization: Bearer KEY`. A browser cannot be told to send that, but it asks its user for the password of `Basic`: there a
key is the password, of any user, and the dashboard works. (A page elsewhere gains nothing by what the browser then sends: http/origin.py.)
"""

from __future__ import annotations

import base64
import binascii
from importlib import resources

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from outboard.http.counted import REFUSED
from outboard.http.problems import respond_at
from outboard.keys.store import Keyring
from outboard.problems import Problem
from outboard.telemetry import metrics

#: What tells nothing but that the server is there, for those who watch it.
OPEN = ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready")
#: A header each: Chromium reads only the first challenge of a header, and asks nobody for a Bearer.
CHALLENGES = ('Bearer realm="outboard"', 'Basic realm="outboard: a key as password", charset="UTF-8"')

#: The page has its style in itself: nothing else is given to who has no key.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


class Keyed:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, keyring: Keyring):
        self._app = app
        self._keyring = keyring
        self._page = resources.files("outboard.dashboard").joinpath("key.html").read_bytes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = None if scope["type"] == "lifespan" or scope["path"] in OPEN else self._problem(scope)
        if problem is None:
            await self._app(scope, receive, send)
            return
        metrics.request(REFUSED, problem.status, 0.0)
        response = self._respond(scope, problem)
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)

    def _respond(self, scope: Scope, problem: Problem) -> Response:
        """What a browser shows to somebody who opens a page here and does not know the password is for people."""
        accepts = next((value for name, value in scope["headers"] if name == b"accept"), b"")
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD") and b"text/html" in accepts:
            response = Response(self._page, problem.status, _PAGE_HEADERS, "text/html; charset=utf-8")
        else:
            response = respond_at(scope["path"], problem)
        for challenge in CHALLENGES:
            response.headers.append("WWW-Authenticate", challenge)
        return response

    def _problem(self, scope: Scope) -> Problem | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        key = presented(given[0].decode("latin-1")) if len(given) == 1 else None
        return refusal(self._keyring, key)


def refusal(keyring: Keyring, key: str | None) -> Problem | None:
    """None: the key is valid."""
    if key is None:
        return Problem("key_required", "no key was sent; expected the header Authorization: Bearer KEY (clients: OUTBOARD_KEY)")
    if keyring.owner(key) is None:
        return Problem("key_required", "the key is not valid, or not any more; `outboard keys add NAME` on the server makes one")
    return None


def presented(authorization: str) -> str | None:
    """The key in an Authorization header; None where there is none."""
    scheme, _, value = authorization.strip().partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value or None
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
        except (binascii.Error, UnicodeDecodeError, ValueError):
            return None
    return None
