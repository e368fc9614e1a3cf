"""What is asked over HTTP and how its answer is read, without any I/O: `Client` and `AsyncClient` share all of it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from outboard_client.answers import Answer, Device, Model, Readiness, answer_or_problem
from outboard_client.backoff import Backoff
from outboard_client.errors import Problem, Unreachable, problem_of

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"
#: Answers that a moment changes: too many requests, not ready, overloaded, stopping; and what a proxy says while the server restarts.
_PASSING = frozenset({429, 502, 503})


class _Models(msgspec.Struct, frozen=True):
    models: list[Model]


class _Devices(msgspec.Struct, frozen=True):
    devices: list[Device]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a prediction, as `predict` takes them; None leaves the model's own."""

    min_score: float | None = None
    top_k: int | None = None
    tile: str | int | None = None
    overlap: float | None = None
    merge: str | None = None
    whole: bool | None = None
    deadline_ms: float | None = None
    strict_device: bool | None = None

    def query(self) -> dict[str, str]:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: _text(value) for name, value in given if value is not None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def server_url(url: str | None) -> str:
    """The given URL, else OUTBOARD_URL, else the default; without a slash at the end. Raises ValueError."""
    found = (url or os.environ.get("OUTBOARD_URL") or DEFAULT_URL).rstrip("/")
    if not found.startswith(("http://", "https://")):
        raise ValueError(f"the server's URL is {found!r}, expected http://host:port or https://…")
    return found


def key_headers(key: str | None) -> dict[str, str]:
    """The header that carries an API key: the given one, else OUTBOARD_KEY, else none."""
    key = key or os.environ.get("OUTBOARD_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. `repeatable`: asking twice does no harm, so it may be asked again when the link broke."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    params: Mapping[str, str] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)  #: further arguments of httpx: content, headers, files, json
    repeatable: bool = True
    answers: frozenset[int] = frozenset()  #: error statuses that are answers to this question

    def result(self, response: httpx.Response) -> T:
        """What was asked for. Raises Problem."""
        if response.is_success or response.status_code in self.answers:
            return self.read(response)
        raise problem_of(response.status_code, response.headers, response.content)


class Attempts:
    """When a call is asked again. A refusal that may pass is asked again no sooner than the server's Retry-After, up to a quarter later (so
    that the refused don't come back together); a broken link with growing pauses. Never beyond `patience` seconds in all."""

    def __init__(self, patience: float, rng: random.Random | None = None):
        self._rng = rng or random.Random()
        self._backoff = Backoff(first=0.25, most=10.0, rng=self._rng)
        self._left = patience

    def pause(self, call: Call[Any], error: Problem | httpx.TransportError, spent: float) -> float:
        """Seconds to wait before asking again, `spent` seconds after the first attempt. Raises what the caller gets instead."""
        if isinstance(error, Problem):
            if error.status not in _PASSING:
                raise error
            pause = self._backoff.next()
            if error.retry_after is not None:
                pause = error.retry_after * self._rng.uniform(1.0, 1.25)
            if spent + pause > self._left:
                raise error
            return pause
        pause = self._backoff.next()
        # A server that does not listen has not begun the work; after that, only what may be done twice.
        again = call.repeatable or isinstance(error, httpx.ConnectError)
        if not again or isinstance(error, httpx.TimeoutException) or spent + pause > self._left:
            raise Unreachable(f"{type(error).__name__}: {error or 'no answer'}") from error
        return pause


def predict(model: str, image: tuple[bytes, str], options: Options) -> Call[Answer]:
    data, kind = image
    request = {"content": data, "headers": {"Content-Type": kind}}
    return Call("POST", f"{_model(model)}/predict", _reader(Answer), options.query(), request)


def predict_several(model: str, images: list[tuple[bytes, str]], options: Options) -> Call[list[Answer | Problem]]:
    if not images:
        raise ValueError("there are no images, expected one or more")
    files = [("image", (f"{i}", data, kind)) for i, (data, kind) in enumerate(images)]

    def read(response: httpx.Response) -> list[Answer | Problem]:
        if len(images) == 1:
            return [msgspec.json.decode(response.content, type=Answer)]
        results = msgspec.json.decode(response.content)["results"]
        return [answer_or_problem(r) for r in results]

    return Call("POST", f"{_model(model)}/predict", read, options.query(), {"files": files})


def picture(model: str, image: tuple[bytes, str], options: Options) -> Call[bytes]:
    data, kind = image
    request = {"content": data, "headers": {"Content-Type": kind, "Accept": "image/jpeg"}}
    return Call("POST", f"{_model(model)}/predict", lambda response: response.content, options.query(), request)


def models() -> Call[list[Model]]:
    return Call("GET", "/v1/models", lambda response: msgspec.json.decode(response.content, type=_Models).models)


def model(name: str) -> Call[Model]:
    return Call("GET", _model(name), _reader(Model))


def load(name: str) -> Call[Model]:
    return Call("POST", f"{_model(name)}/load", _reader(Model), repeatable=False)


def unload(name: str) -> Call[Model]:
    return Call("POST", f"{_model(name)}/unload", _reader(Model), repeatable=False)


def devices() -> Call[list[Device]]:
    return Call("GET", "/v1/devices", lambda response: msgspec.json.decode(response.content, type=_Devices).devices)


def device(device_id: str) -> Call[Device]:
    return Call("GET", f"/v1/devices/{quote(device_id, safe=':')}", _reader(Device))


def ready(strict: bool) -> Call[Readiness]:
    def read(response: httpx.Response) -> Readiness:
        try:
            members = msgspec.json.decode(response.content)
        except msgspec.DecodeError:
            members = {}
        why = members.get("why", members.get("detail"))
        why = why if isinstance(why, str) or why is None else msgspec.json.encode(why).decode()
        return Readiness(ready=response.is_success, degraded=bool(members.get("degraded", False)), why=why)

    return Call("GET", "/readyz", read, {"strict": "1"} if strict else {}, answers=frozenset({503}))


def _model(name: str) -> str:
    return f"/v1/models/{quote(name, safe='')}"


def _reader(kind: type[T]) -> Callable[[httpx.Response], T]:
    return lambda response: msgspec.json.decode(response.content, type=kind)
