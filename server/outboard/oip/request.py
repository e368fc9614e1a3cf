"""An inference request, whatever form it came in: names, datatypes, shapes, and where the bytes are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outboard.problems import Problem

MAX_RANK = 32
LONGEST = 10 * 365 * 86_400.0  #: seconds of a deadline


class Source(Protocol):
    """Bytes of a tensor that lie elsewhere: in a region of shared memory."""

    nbytes: int

    def read_into(self, target: memoryview, at: int = 0) -> None:
        """Copy those from byte `at` on. Raises Problem."""


class Target(Protocol):
    """A place elsewhere for an output."""

    def write(self, data: bytes | memoryview) -> None:
        """Raises Problem where it does not fit."""

    def parameters(self, nbytes: int) -> dict[str, Any]:
        """What the response says in place of the data."""


@dataclass(slots=True)
class InputTensor:
    """`data`: little-endian elements in row-major order, strings each behind their length (devices/rows.py); or where they are."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | Source


@dataclass(slots=True)
class WantedOutput:
    name: str
    binary: bool = False
    classes: int = 0  #: the classification extension: so many of the best, as strings
    target: Target | None = None


@dataclass(slots=True)
class InferRequest:
    inputs: list[InputTensor]
    outputs: list[WantedOutput] | None  #: None: the usual ones
    id: str = ""
    binary: bool = False  #: of outputs that are not named
    seconds: float | None = None  #: the client's own deadline, from arrival
    body: memoryview | bytes | None = None  #: what was sent, by which an input that kills workers is known again


@dataclass(slots=True)
class InferResult:
    """Outputs in the order asked for. The first axis is the batch where the model has one; strings are arrays of objects (bytes)."""

    outputs: list[tuple[WantedOutput, np.ndarray]]
    device: str
    degraded: bool
    parameters: dict[str, Any] = field(default_factory=dict)


def checked_shape(name: str, shape: Any) -> tuple[int, ...]:
    """Raises Problem bad_input."""
    if len(shape) > MAX_RANK or any(axis < 0 for axis in shape):
        raise Problem("bad_input", f"input {name!r} has shape {list(shape)[:40]}, expected at most {MAX_RANK} axes of 0 or more")
    return tuple(shape)


def seconds(parameters: dict[str, Any]) -> float | None:
    """The deadline of a request's parameters: `timeout` (µs, Triton's) or `deadline_ms`. Raises Problem bad_option."""
    for key, unit in (("timeout", 1e6), ("deadline_ms", 1e3)):
        value = parameters.get(key)
        if value in (None, 0):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < LONGEST * unit:  # NaN fails, too
            raise Problem(
                "bad_option",
                f"parameter {key!r} is {str(value)[:40]}, expected a number above 0 ({'µs' if unit == 1e6 else 'ms'}), at most ten years",
            )
        return max(value / unit, 1e-9)
    return None


def refuse_sequences(parameters: dict[str, Any]) -> None:
    """Raises Problem bad_option: to answer as if nothing had been asked would look like a sequence that works."""
    if parameters.get("sequence_id") not in (None, 0, ""):
        raise Problem("bad_option", "parameter 'sequence_id': no model here keeps state between requests; leave it out")
