"""A running server, as the commands ask it: an answer of the shape that was asked for, or one line about why there is none."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from outboard.tables import Device, Model

CONNECT_LIMIT = 5.0
ANSWER_LIMIT = 30.0


class NoAnswer(Exception):
    """The server is not there, is another one, or says no. The text is for people."""


class Devices(msgspec.Struct):
    devices: list[Device]


class Models(msgspec.Struct):
    models: list[Model]


class Holder(msgspec.Struct):
    pid: int
    command: str


class Ejected(msgspec.Struct):
    holders: list[Holder]
    commands: list[str]
    say: str
    safe: bool


class _Problem(msgspec.Struct):
    type: str
    title: str
    detail: str


def device_path(device: str, action: str) -> str:
    return f"/v1/devices/{quote(device, safe=':')}/{action}"


def ask(method: str, url: str, path: str, kind: Any, body: Any = None, key: str = "") -> Any:
    """The answer's JSON values, which `kind` (a msgspec type) has checked. Raises NoAnswer."""
    import httpx

    try:
        limits = httpx.Timeout(ANSWER_LIMIT, connect=CONNECT_LIMIT)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        response = httpx.request(method, url.rstrip("/") + path, json=body, headers=headers, timeout=limits)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OverflowError) as e:  # the latter: a port or a name that cannot be
        why = " ".join(str(e).split()) or type(e).__name__
        raise NoAnswer(f"no server answers at {url} ({why}); start one with `outboard serve`, or name it with --url") from e
    try:
        if response.is_error:
            raise NoAnswer(msgspec.json.decode(response.content, type=_Problem).detail)
        answer = msgspec.json.decode(response.content)
        msgspec.convert(answer, kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        said = response.headers.get("content-type", "no content type")
        raise NoAnswer(f"what answers at {url} is no Outboard server: {response.status_code} with {said} to {method} {path}") from e
    return answer
