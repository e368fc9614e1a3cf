"""/v2: the Open Inference Protocol over HTTP, an ASGI application of its own as `http/predict.py` is, and for the same reason."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from outboard.http import body as bodies
from outboard.http.watch import unless_left
from outboard.oip import binary, compression
from outboard.oip.outputs import costly
from outboard.oip.service import Service
from outboard.oip.shared_memory import CUDA_REFUSED
from outboard.problems import Problem, mistake
from outboard.telemetry import metrics

log = logging.getLogger(__name__)

PREFIX = "/v2"
INFER = "/v2/models/{model}/infer"
OTHER = "/v2/…"
_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
_encode = msgspec.json.Encoder().encode

#: Bytes of an answer that are given to the transport at once; the next ones wait until the client has taken them.
AT_ONCE = 1 << 20

#: Status, headers, pieces of the body.
Answer = tuple[int, list[tuple[bytes, bytes]], list[binary.Piece]]


class _Region(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, Any] = {}


def matches(path: str) -> bool:
    return path.startswith("/v2/") or path == PREFIX


class Rest:
    """Serves the paths that `matches`."""

    def __init__(self, service: Service):
        self._service = service
        self._runtime = service.runtime
        self._in_progress = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        limit = self._runtime.settings.limits.requests
        parts = scope["path"].strip("/").split("/")[1:]
        infer = parts[-1:] == ["infer"] and scope["method"] == "POST"
        self._in_progress += 1
        try:
            with bodies.Held(self._runtime) as held:
                try:
                    if self._in_progress > limit:
                        raise Problem("overloaded", f"{limit} requests are in progress, no more are taken", retry_after=1.0)
                    answer = await (self._infer(scope, receive, parts, held) if infer else self._other(scope, receive, parts))
                except Problem as e:
                    answer = _refusal(e)
                except Exception as e:
                    log.error("%s %s failed", scope["method"], scope["path"][:200], exc_info=e)
                    answer = _refusal(mistake(e))
                metrics.request(INFER if infer else OTHER, answer[0], time.perf_counter() - began)
                await _send(send, *answer)
        finally:
            self._in_progress -= 1

    # ---------------------------------------------------------------- inference

    async def _infer(self, scope: Scope, receive: Receive, parts: list[str], held: bodies.Held) -> Answer:
        """`held`: the answer's bytes are accounted for there."""
        runtime, service = self._runtime, self._service
        arrived = runtime.now()
        model, version = _model(parts[:-1])
        serving = service.inferer.serving(model, version)  # refused before a byte of the body is read
        headers = Headers(scope=scope)
        peer = _peer(scope)
        with bodies.Held(runtime) as sent:
            body = await self._body(headers, receive, sent)
            length = headers.get(binary.HEADER_LENGTH)
            if length == "0":
                request = binary.raw(body, service.inferer.signature(serving))
            elif len(body) > 1 << 20 and length is None:  # a megabyte of JSON numbers takes ten milliseconds
                request = await runtime.in_thread(binary.parse, body, length, service.regions, peer)
            else:
                request = binary.parse(body, length, service.regions, peer)
            known, result = await unless_left(receive, service.inferer.infer(model, version, request, arrived, held.take))
        in_thread = any(costly(wanted, array) for wanted, array in result.outputs)
        respond = partial(binary.respond, known, request, result)
        length_of_header, pieces = await runtime.in_thread(respond) if in_thread else respond()
        answer = [_JSON]
        if length_of_header is not None:
            answer = [_BINARY, (binary.HEADER_LENGTH.encode(), str(length_of_header).encode())]
        if encoding := compression.asked_for(headers.get("accept-encoding")):
            pieces = [await runtime.in_thread(compression.compress, pieces, encoding)]
            answer.append((b"content-encoding", encoding.encode()))
        return 200, answer, pieces

    async def _body(self, headers: Headers, receive: Receive, held: bodies.Held) -> bytes:
        """The plain body. Raises Problem."""
        limit = self._runtime.settings.limits.body
        body = await bodies.read(headers, receive, limit, held)
        encoding = headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return body
        if encoding not in compression.ENCODINGS:
            raise Problem("unsupported_media_type", f"Content-Encoding {encoding[:20]!r} is not read; expected gzip or deflate")
        plain = await self._runtime.in_thread(compression.decompress, body, encoding, limit)
        held.take(len(plain))
        return plain

    # ---------------------------------------------------------------- everything else

    async def _other(self, scope: Scope, receive: Receive, parts: list[str]) -> Answer:
        method = scope["method"]
        if method in ("GET", "HEAD"):
            status, value = self._get(scope, parts)
        elif method == "POST":
            headers = Headers(scope=scope)
            with bodies.Held(self._runtime) as held:
                status, value = await self._post(scope, parts, await self._body(headers, receive, held))
        else:
            raise Problem("method_not_allowed", f"{scope['path'][:200]} takes GET or POST, not {method}")
        return status, [_JSON], [] if value is None else [_encode(value)]

    def _get(self, scope: Scope, parts: list[str]) -> tuple[int, Any]:
        service = self._service
        match parts:
            case []:
                return 200, service.metadata()
            case ["health", "live"]:
                return 200, {"live": True}
            case ["health", "ready"]:
                ready = service.ready()
                return 200 if ready else 503, {"ready": ready}
            case ["models", "stats"]:
                return 200, service.statistics()
            case ["models", *named, "ready"]:
                ready = service.model_ready(*_model(["models", *named]))
                return 200 if ready else 503, {"name": named[0], "ready": ready}
            case ["models", *named, "config"]:
                return 200, service.model_config(*_model(["models", *named]))
            case ["models", *named, "stats"]:
                return 200, service.statistics(*_model(["models", *named]))
            case ["models", *named, "infer"]:
                raise Problem("method_not_allowed", f"{scope['path'][:200]} takes POST")
            case ["models", *named] if named:
                return 200, service.model_metadata(*_model(parts))
            case ["systemsharedmemory", "status"]:
                service.regions.check(_peer(scope))
                return 200, service.regions.status()
            case ["systemsharedmemory", "region", name, "status"]:
                service.regions.check(_peer(scope))
                return 200, service.regions.status(name)
            case ["cudasharedmemory", "status"]:
                return 200, []
        raise _nothing(scope)

    async def _post(self, scope: Scope, parts: list[str], body: bytes) -> tuple[int, Any]:
        service = self._service
        match parts:
            case ["repository", "index"]:
                return 200, service.index(_json(body, _Index).ready)
            case ["repository", "models", model, "load"]:
                await service.load(model, _json(body, _Load).parameters)
                return 200, None
            case ["repository", "models", model, "unload"]:
                service.unload(model)
                return 200, None
            case ["systemsharedmemory", "region", name, "register"]:
                service.regions.check(_peer(scope))
                asked = _json(body, _Region)
                service.regions.register(name, asked.key, asked.offset, asked.byte_size)
                return 200, None
            case ["systemsharedmemory", "region", name, "unregister"]:
                service.regions.check(_peer(scope))
                service.regions.unregister(name)
                return 200, None
            case ["systemsharedmemory", "unregister"]:
                service.regions.check(_peer(scope))
                service.regions.unregister()
                return 200, None
            case ["cudasharedmemory", "region", _, "register"]:
                raise Problem("not_supported", CUDA_REFUSED)
            case ["cudasharedmemory", "unregister"] | ["cudasharedmemory", "region", _, "unregister"]:
                return 200, None  # there is none: what clients do before they begin
        raise _nothing(scope)


def _model(parts: list[str]) -> tuple[str, str]:
    """(model, version) of ["models", NAME] or ["models", NAME, "versions", VERSION]. Raises Problem not_found."""
    match parts:
        case ["models", model]:
            return model, ""
        case ["models", model, "versions", version]:
            return model, version
    raise Problem("not_found", "expected /v2/models/NAME or /v2/models/NAME/versions/VERSION")


def _peer(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _json(body: bytes, kind: Callable[..., Any]) -> Any:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise Problem("bad_input", f"the body is not what the protocol describes: {e}") from e


def _nothing(scope: Scope) -> Problem:
    return Problem("not_found", f"nothing takes {scope['method']} at {scope['path'][:200]}; docs/triton-clients.md lists what there is")


def status_of(problem: Problem) -> int:
    """The protocol's clients know 400 for all that is wrong with a request."""
    return 400 if problem.status in (406, 415, 422) else problem.status


def _refusal(problem: Problem) -> Answer:
    headers = [_JSON]
    if problem.seconds_to_wait:
        headers.append((b"retry-after", problem.seconds_to_wait.encode()))
    return status_of(problem), headers, [_encode({"error": problem.detail})]


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], pieces: list[binary.Piece]) -> None:
    """Until the client has taken all but the last of it. (For HEAD, uvicorn sends the head alone.)"""
    total = sum(map(len, pieces))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, (b"content-length", str(total).encode())]})
    if total <= AT_ONCE:
        await send({"type": "http.response.body", "body": b"".join(pieces)})
        return
    for view in map(memoryview, pieces):
        for at in range(0, len(view), AT_ONCE):
            await send({"type": "http.response.body", "body": view[at : at + AT_ONCE], "more_body": True})
            await asyncio.sleep(0)  # a fast client never makes `send` wait
    await send({"type": "http.response.body", "body": b""})
