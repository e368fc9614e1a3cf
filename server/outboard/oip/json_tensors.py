"""Tensor data as JSON values: nested or flat lists in, flat lists out."""

from __future__ import annotations

from itertools import chain
from math import prod
from typing import Any

import msgspec
import numpy as np

from outboard.devices.rows import pack
from outboard.oip.signature import DTYPES
from outboard.problems import Problem


def decode(name: str, datatype: str, shape: tuple[int, ...], raw: msgspec.Raw) -> memoryview:
    """The `data` member of an input as the bytes that the binary extension would have. Raises Problem bad_input.

    null stands for NaN in floating-point tensors, as in the answers: JSON has no other word for it.
    """
    try:
        values = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise Problem("bad_input", f"input {name!r}: its data cannot be read: {e}") from e
    count = prod(shape)
    if not isinstance(values, list):
        values = [values]
    while values and isinstance(values[0], list):
        if not all(isinstance(v, list) for v in values):
            raise _wrong(name, datatype, "a list where another element is none")
        values = list(chain.from_iterable(values))
    if len(values) != count:
        raise Problem("bad_input", f"input {name!r} has {len(values)} values, expected {count} for shape {list(shape)}")
    if datatype == "BYTES":
        if not all(isinstance(v, str) for v in values):
            raise _wrong(name, datatype, next(v for v in values if not isinstance(v, str)))
        return memoryview(pack(v.encode() for v in values))
    dtype = np.dtype(DTYPES[datatype]) if datatype in DTYPES else None
    if dtype is None:
        raise Problem("bad_input", f"input {name!r} has datatype {datatype[:20]!r}, expected one of {', '.join([*DTYPES, 'BYTES'])}")
    return memoryview(_array(name, datatype, dtype, values)).cast("B") if values else memoryview(b"")


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
