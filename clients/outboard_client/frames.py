"""What crosses the stream's WebSocket: frames as binary messages, what the server says as text (docs/stream-protocol.md)."""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from outboard_client.answers import Answer, answer_or_problem
from outboard_client.errors import Problem
from outboard_client.images import ImageLike

SUBPROTOCOL = "outboard.frames"
MAX_HEADER = 64 << 10
_HEADER = struct.Struct(">QQI")  # seq, capture time in µs since the epoch, length of the JSON header


def now_us() -> int:
    """Microseconds since the epoch."""
    return time.time_ns() // 1000


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a bundle, for the model and the input that it names ("": the stream's model, its only input).

    `data` is an encoded image, or an array: uint8 [height, width, 3] in RGB for a model of pictures, else one row of a tensor.
    """

    data: bytes | np.ndarray
    model: str = ""
    input: str = ""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Images and arrays of one tick, answered together: name -> part. A simulator's cameras and sensors."""

    parts: Mapping[str, Part | bytes | np.ndarray]


@dataclass(frozen=True, slots=True)
class Frame:
    """One image, or one bundle, of a stream. `captured` is in µs since the epoch; `meta`, any JSON, comes back with the result.

    `seq` is for senders that number their frames themselves, upwards (a spool); 0: the stream does. `parts` describes the bytes of a
    bundle that has been encoded.
    """

    image: ImageLike | Bundle
    captured: int = field(default_factory=now_us)
    meta: Any = None
    seq: int = 0
    parts: list[dict[str, Any]] | None = None


def encoded_bundle(bundle: Bundle) -> tuple[bytes, list[dict[str, Any]]]:
    """(the parts' bytes one after the other, their descriptions). Raises ValueError for an array that the protocol has no name for."""
    described: list[dict[str, Any]] = []
    chunks: list[bytes | memoryview] = []
    for name, given in bundle.parts.items():
        part = given if isinstance(given, Part) else Part(given)
        entry: dict[str, Any] = {"name": name}
        if isinstance(part.data, np.ndarray):
            array = np.ascontiguousarray(part.data, part.data.dtype.newbyteorder("<"))
            if array.dtype.kind not in "biuf":
                raise ValueError(f"part {name!r} is an array of {array.dtype}, expected numbers or bools")
            data: bytes | memoryview = array.reshape(-1).view(np.uint8).data  # no copy: cameras' pixels are megabytes
            entry |= {"type": "array", "dtype": array.dtype.name, "shape": list(array.shape)}
        else:
            data = bytes(part.data)
            entry["type"] = "image"
        entry |= {"length": len(data)} | {k: v for k in ("model", "input") if (v := getattr(part, k))}
        described.append(entry)
        chunks.append(data)
    return b"".join(chunks), described


def head(seq: int, captured: int, meta: Any = None, parts: list[dict[str, Any]] | None = None) -> bytes:
    """What the binary message of one frame begins with. Raises ValueError where `meta` is larger than a header may be."""
    members = {k: v for k, v in (("parts", parts), ("meta", meta)) if v is not None}
    header = msgspec.json.encode(members) if members else b""
    if len(header) > MAX_HEADER:
        raise ValueError(f"the frame's header has {len(header)} bytes (meta, parts), at most {MAX_HEADER} are taken")
    return _HEADER.pack(seq, captured, len(header)) + header


def pack(seq: int, captured: int, image: bytes, meta: Any = None, parts: list[dict[str, Any]] | None = None) -> bytes:
    """The binary message of one frame. Raises ValueError as `head`."""
    return head(seq, captured, meta, parts) + image


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the server takes: bytes of a message, and frames and bytes without an outcome; 0: it did not say."""

    message: int = 0
    window: int = 0
    window_bytes: int = 0


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The first message on a link. `last` is the seq of the last frame that the server has received in this session."""

    session: str
    stream: str = ""
    resumed: bool = False
    last: int = 0
    limits: Limits = Limits()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Where the stream's frames run."""

    device: str | None = None
    degraded: bool = False
    why: str | None = None


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """`at` is the server's clock in µs, `queue` the stream's frames without an outcome."""

    at: int = 0
    queue: int = 0


class ResultMessage(Answer, frozen=True, kw_only=True):
    """An answer with the frame's seq; a bundle's is in `parts`, an answer or a problem for each."""

    seq: int
    age_ms: float | None = None
    parts: dict[str, dict[str, Any]] | None = None
    missing: list[str] = []


class DropMessage(msgspec.Struct, frozen=True, kw_only=True):
    seq: int
    reason: str
    problem: dict[str, Any] = {}


class _Any(msgspec.Struct, frozen=True):
    type: str


_KINDS = {"hello": Hello, "result": ResultMessage, "drop": DropMessage, "state": State, "hb": Heartbeat}


def decode(text: str | bytes) -> Hello | ResultMessage | DropMessage | State | Heartbeat | None:
    """What the server said; None for a kind that this client does not know. Raises msgspec.MsgspecError."""
    kind = _KINDS.get(msgspec.json.decode(text, type=_Any).type)
    return None if kind is None else msgspec.json.decode(text, type=kind)


def ack(seq: int) -> str:
    """The outcomes up to `seq` are held: the server may forget them."""
    return msgspec.json.encode({"type": "ack", "seq": seq}).decode()


def heartbeat(at: int) -> str:
    """The answer to a heartbeat, by which the server corrects the frames' ages."""
    return msgspec.json.encode({"type": "hb", "at": at, "clock": now_us()}).decode()


STOP = '{"type": "stop"}'


@dataclass(frozen=True, slots=True)
class Result:
    """A frame's answer. `age` is the seconds from capture to the moment that it was here, by this machine's clock."""

    seq: int
    answer: Answer
    age: float


@dataclass(frozen=True, slots=True)
class BundleResult:
    """A bundle's answers: one, or a problem, for each part; `missing` names the expected ones that it lacked."""

    seq: int
    parts: dict[str, Answer | Problem]
    missing: list[str]
    age: float
    meta: Any = None


@dataclass(frozen=True, slots=True)
class Drop:
    """A frame without an answer, and why. `here`: it was dropped before it reached the server."""

    seq: int
    reason: str
    detail: str = ""
    here: bool = False


Outcome = Result | BundleResult | Drop


def outcome(said: ResultMessage | DropMessage, age: float) -> Outcome:
    """What the server said of a frame, as the caller gets it."""
    if isinstance(said, DropMessage):
        return Drop(said.seq, said.reason, str(said.problem.get("detail", "")))
    if said.parts is not None:
        parts = {name: answer_or_problem(p) for name, p in said.parts.items()}
        return BundleResult(said.seq, parts, said.missing, age, said.meta)
    return Result(said.seq, said, age)
