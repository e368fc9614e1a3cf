"""Tensor data as JSON values: nested or flat lists in, flat lists out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from math import prod
from typing import Any

import msgspec
import numpy as np

from outboard.devices.rows import pack
from outboard.oip.signature import DTYPES
from outboard.problems import Problem

#: Bytes of JSON that are read at once: some 5 ms, in which no other thread runs. As Python's objects, numbers take more than their text.
AT_ONCE = 256 << 10


def decode(name: str, datatype: str, shape: tuple[int, ...], raw: msgspec.Raw) -> memoryview:
    """The `data` member of an input as the bytes that the binary extension would have. Raises Problem bad_input.

    null stands for NaN in floating-point tensors, as in the answers: JSON has no other word for it.
    """
    dtype = np.dtype(DTYPES[datatype]) if datatype in DTYPES else None
    if dtype is None and datatype != "BYTES":
        raise Problem("bad_input", f"input {name!r} has datatype {datatype[:20]!r}, expected one of {', '.join([*DTYPES, 'BYTES'])}")
    count, found = prod(shape), 0
    arrays = []
    for values in _values(name, datatype, shape, bytes(raw)):
        found += len(values)
        if dtype is not None and values and found <= count:
            arrays.append(_array(name, datatype, dtype, values))
    if found != count:
        raise Problem("bad_input", f"input {name!r} has {found} values, expected {count} for shape {list(shape)}")
    if dtype is None:
        if not all(isinstance(v, str) for v in values):
            raise _wrong(name, datatype, next(v for v in values if not isinstance(v, str)))
        return memoryview(pack(v.encode() for v in values))
    if not arrays:
        return memoryview(b"")
    return memoryview(arrays[0] if len(arrays) == 1 else np.concatenate(arrays)).cast("B")


def _values(name: str, datatype: str, shape: tuple[int, ...], raw: bytes) -> Iterator[list[Any]]:
    """The values, flat: many numbers some at a time, everything else at once. Raises Problem."""
    try:
        if len(raw) <= AT_ONCE or not _plain(raw, shape):
            yield _flat(name, datatype, msgspec.json.decode(raw))
            return
        text = raw.translate(None, b"[] \t\r\n")
        at = 0
        while at < len(text):
            end = text.find(b",", at + AT_ONCE)
            end = len(text) if end < 0 else end
            yield msgspec.json.decode(b"[" + text[at:end] + b"]")
            at = end + 1
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise Problem("bad_input", f"input {name!r}: its data cannot be read: {e}") from e


def _plain(raw: bytes, shape: tuple[int, ...]) -> bool:
    """Whether it is a list of numbers, flat or nested as the shape is. (The request was read before, so it is JSON.)"""
    nested, lists = 1, 1
    for axis in shape[:-1]:
        lists *= axis
        nested += lists
    return raw.count(b"[") in (1, nested) and not any(mark in raw for mark in (b'"', b"{"))


def _flat(name: str, datatype: str, values: Any) -> list[Any]:
    if not isinstance(values, list):
        values = [values]
    while values and isinstance(values[0], list):
        if not all(isinstance(v, list) for v in values):
            raise _wrong(name, datatype, "a list where another element is none")
        values = list(chain.from_iterable(values))
    return values


def _array(name: str, datatype: str, dtype: np.dtype, values: list[Any]) -> np.ndarray:
    if datatype == "BOOL":
        allowed: tuple[type, ...] = (bool,)
    elif datatype.startswith(("FP", "BF")):
        allowed = (int, float, type(None))
    else:
        allowed = (int,)
    kinds = set(map(type, values))
    if not kinds <= set(allowed):
        raise _wrong(name, datatype, next(v for v in values if type(v) not in allowed))
    try:
        if datatype.startswith(("FP", "BF")):
            with np.errstate(over="ignore"):  # beyond the largest number is infinity, as everywhere
                array = np.array(values, np.float64).astype(dtype)
        else:
            array = np.array(values, dtype)
    except OverflowError:
        raise Problem("bad_input", f"input {name!r} holds a number that does not fit {datatype}") from None
    return array.view(np.uint8)


def _wrong(name: str, datatype: str, value: Any) -> Problem:
    shown = repr(value)
    return Problem("bad_input", f"input {name!r} is {datatype} and holds {shown[:40]}, which is none")
