"""Binary messages of the subprotocol `outboard.frames`: a header of 20 bytes, a JSON header, an image or the parts of a bundle."""

from __future__ import annotations

from math import prod
from struct import Struct
from typing import Any

import msgspec
import numpy as np

from outboard.frames import Frame, Part
from outboard.problems import Problem

SUBPROTOCOL = "outboard.frames"
#: Bytes of the JSON header.
MAX_HEADER = 64 << 10
_HEAD = Struct(">QQI")


class _Part(msgspec.Struct):
    name: str
    type: str
    length: int
    dtype: str = ""
    shape: tuple[int, ...] = ()
    model: str = ""
    input: str = ""


class _Header(msgspec.Struct):
    meta: msgspec.Raw = msgspec.Raw()
    parts: list[_Part] | None = None


_decode = msgspec.json.Decoder(_Header).decode


class ProtocolError(ValueError):
    """A message by which the client breaks the protocol so that no frame can be named: the link ends."""


def read(message: bytes, most_parts: int) -> Frame:
    """The frame; where its header cannot be read, `problem` says why. Raises ProtocolError."""
    if len(message) < _HEAD.size:
        raise ProtocolError(f"a frame of {SUBPROTOCOL} has {_HEAD.size} bytes or more, got {len(message)}")
    seq, captured, length = _HEAD.unpack_from(message)
    if seq < 1:
        raise ProtocolError("seq is 0, expected 1 or more")
    frame = Frame(seq, len(message), captured=captured / 1e6 if captured else None)
    rest = memoryview(message)[_HEAD.size :]
    try:
        if length > min(MAX_HEADER, len(rest)):
            raise _bad(f"its JSON header is said to have {length} bytes; at most {MAX_HEADER} are taken, {len(rest)} follow")
        header = _header(rest[:length]) if length else _Header()
        frame.meta = header.meta if bytes(header.meta) else None
        if header.parts is None:
            frame.image = rest[length:]
        else:
            frame.parts = _parts(header.parts, rest[length:], most_parts)
    except Problem as e:
        frame.problem = e.with_traceback(None)  # which may hold this frame: a cycle
    return frame


def _bad(detail: str) -> Problem:
    return Problem("bad_frame", detail)


def _header(data: memoryview) -> _Header:
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise _bad(f"its JSON header cannot be read: {str(e)[:160]}") from e


def _parts(listed: list[_Part], data: memoryview, most: int) -> list[Part]:
    if not 0 < len(listed) <= most:
        raise _bad(f"a bundle has {len(listed)} parts, expected 1 to {most}")
    if len({p.name for p in listed}) < len(listed):
        raise _bad("two parts of a bundle have the same name")
    total = sum(p.length for p in listed)
    if total != len(data) or any(p.length < 0 for p in listed):
        raise _bad(f"the lengths of the parts add up to {total} bytes, {len(data)} follow the header")
    parts, at = [], 0
    for p in listed:
        parts.append(_part(p, data[at : at + p.length]))
        at += p.length
    return parts


def _part(p: _Part, data: memoryview) -> Part:
    part = Part(p.name, data, model=p.model, input=p.input)
    if p.type == "array":
        part.dtype, part.shape = _array(p)
    elif p.type != "image":
        raise _bad(f"part {p.name[:60]!r} has type {p.type[:40]!r}, expected image or array")
    return part


def _array(p: _Part) -> tuple[str, tuple[int, ...]]:
    try:
        dtype: Any = np.dtype(p.dtype)
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "biuf" or dtype.name != p.dtype:
        raise _bad(f"part {p.name[:60]!r} has dtype {p.dtype[:40]!r}, expected a number type such as uint8 or float32, or bool")
    if len(p.shape) > 32 or any(axis < 0 for axis in p.shape) or prod(p.shape) * dtype.itemsize != p.length:
        raise _bad(f"part {p.name[:60]!r} has {p.length} bytes; {p.dtype} {list(p.shape)[:32]} would have {prod(p.shape) * dtype.itemsize}")
    return dtype.name, p.shape
