"""A request's outputs: bounded before they are made, put together from its rows as these are answered, and as bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np

from outboard.devices.rows import pack
from outboard.oip.request import WantedOutput
from outboard.oip.signature import DTYPES, Signature, TensorSpec
from outboard.problems import Problem

#: Bytes of JSON for each element: "-0.12345678901234567, " at most, for a float32 as the double of the same value.
JSON_BYTES = 20
#: Strings that the classification extension gives for one output.
MAX_CLASS_STRINGS = 100_000
#: Elements from which work on each of them, and bytes from which a copy, is for a thread: a millisecond or two.
MANY_ELEMENTS, MANY_BYTES = 20_000, 4 << 20

Row = dict[str, np.ndarray]


class Collector:
    """The outputs of a request of `rows` rows, which come in parts and in order."""

    def __init__(self, wanted: list[WantedOutput], batched: bool, rows: int, limit: int, account: Callable[[int], None]):
        """`limit`: bytes of one answer. `account` may raise Problem memory_full."""
        self._wanted = wanted
        self._batched = batched
        self._rows = rows
        self._limit = limit
        self._account = account
        self._whole: list[np.ndarray] = []
        self._filled = 0

    @property
    def empty(self) -> bool:
        return not self._filled

    def expect(self, first: Row) -> None:
        """Call once, with the first row. Raises Problem answer_too_large, memory_full."""
        size = sum(_nbytes(w, first[w.name]) for w in self._wanted) * self._rows
        refuse_larger(size, self._rows, self._limit)
        self._account(size)

    def add(self, part: list[Row]) -> None:
        """The next rows; in any thread. Raises Problem inference_failed."""
        self._filled += len(part)
        if not self._batched:
            self._whole = [part[0][w.name] for w in self._wanted]
        elif len(part) == self._rows:
            self._whole = [stacked(w.name, part) for w in self._wanted]
        else:
            if not self._whole:
                firsts = [part[0][w.name] for w in self._wanted]
                self._whole = [np.empty((self._rows, *first.shape), first.dtype) for first in firsts]
            for w, whole in zip(self._wanted, self._whole, strict=True):
                place = whole[self._filled - len(part) : self._filled]
                shapes = {row[w.name].shape for row in part}
                if shapes != {place.shape[1:]}:
                    raise _differ(w.name, shapes | {place.shape[1:]})
                np.stack([row[w.name] for row in part], out=place)

    def outputs(self) -> list[tuple[WantedOutput, np.ndarray]]:
        assert self._filled == self._rows
        return list(zip(self._wanted, self._whole, strict=True))


def least_bytes(known: Signature, wanted: list[WantedOutput]) -> int:
    """Of a row's outputs, as far as their shapes are known before they are computed."""
    return sum(_least_elements(known.outputs[w.name]) * _element(w, known.outputs[w.name].datatype) for w in wanted)


def refuse_larger(nbytes: int, rows: int, limit: int) -> None:
    """Raises Problem answer_too_large for an answer of more than `limit` bytes."""
    if nbytes > limit:
        raise Problem(
            "answer_too_large",
            f"the answer to {rows} rows takes {nbytes} bytes, at most {limit} are given; send fewer rows, ask for fewer outputs, take them "
            "as binary data rather than JSON, or set [limits] answer to get more",
        )


def refuse_many_strings(known: Signature, wanted: list[WantedOutput], rows: int, elements: int | None = None) -> None:
    """Raises Problem bad_option where the classification extension is asked for too much. `elements` of a row: None before they are
    known."""
    for w in wanted:
        strings = rows * min(w.classes, _least_elements(known.outputs[w.name]) if elements is None else elements)
        if strings > MAX_CLASS_STRINGS:
            raise Problem(
                "bad_option",
                f"output {w.name!r}: {w.classes} classes of {rows} rows are {strings} strings, at most {MAX_CLASS_STRINGS} are given; ask "
                "for fewer classes, or send fewer rows at once",
            )


def _least_elements(spec: TensorSpec) -> int:
    return prod(axis for axis in spec.axes if axis)


def _element(wanted: WantedOutput, datatype: str) -> int:
    """Bytes, at least."""
    if datatype == "BYTES":
        return 4
    return DTYPE_BYTES[datatype] if wanted.binary or wanted.target or wanted.classes else JSON_BYTES


DTYPE_BYTES = {datatype: 2 if datatype == "BF16" else np.dtype(dtype).itemsize for datatype, dtype in DTYPES.items()}


def _nbytes(wanted: WantedOutput, array: np.ndarray) -> int:
    if array.dtype.kind == "O":
        return sum(4 + len(string) for string in array.reshape(-1))
    return array.nbytes if wanted.binary or wanted.target or wanted.classes else array.size * JSON_BYTES


def stacked(name: str, rows: list[Row]) -> np.ndarray:
    """Raises Problem inference_failed where the rows' shapes differ."""
    if len(rows) == 1:
        return rows[0][name][None]
    try:
        return np.stack([row[name] for row in rows])
    except ValueError:
        raise _differ(name, {row[name].shape for row in rows}) from None


def _differ(name: str, shapes: set[tuple[int, ...]]) -> Problem:
    shown = ", ".join(sorted(str(list(shape)) for shape in shapes)[:4])
    return Problem("inference_failed", f"output {name!r} has rows of different shapes ({shown}): send them one by one")


def with_classes(known: Signature, wanted: WantedOutput, array: np.ndarray) -> tuple[WantedOutput, np.ndarray]:
    """The classification extension: the best `classes` values of each row as "value:index" or "value:index:label"."""
    labels = known.outputs[wanted.name].labels
    rows = array.reshape(len(array), -1) if known.batched else array.reshape(1, -1)
    best = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, : wanted.classes]
    strings = np.empty(best.shape, object)
    for (i, j), index in np.ndenumerate(best):
        label = f":{labels[index]}" if index < len(labels) else ""
        strings[i, j] = f"{float(rows[i, index]):f}:{index}{label}".encode()
    return wanted, strings if known.batched else strings[0]


def packed_output(array: np.ndarray) -> bytes | memoryview:
    """An output's bytes on the wire."""
    if array.dtype.kind == "O":
        return pack(array.reshape(-1))
    array = np.ascontiguousarray(array)
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else b""


def costly(wanted: WantedOutput, array: np.ndarray) -> bool:
    """Whether to put it on the wire is for a thread."""
    if array.dtype.kind == "O" or not (wanted.binary or wanted.target):
        return array.size > MANY_ELEMENTS
    return array.nbytes > MANY_BYTES
