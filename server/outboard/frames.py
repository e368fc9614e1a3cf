"""A frame of a stream as it came, from any route, before it is decoded."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from outboard.problems import Problem
from outboard.telemetry.tracing import Trace


@dataclass(slots=True)
class Part:
    """One image or array of a bundle."""

    name: str
    data: memoryview
    dtype: str = ""  #: numpy's name; "": an image file
    shape: tuple[int, ...] = ()
    model: str = ""  #: "": the stream's
    input: str = ""  #: of a model that takes tensors; "": its only one


@dataclass(slots=True)
class Frame:
    """An image, or with `parts` a bundle. `problem`: what is wrong with it is known already."""

    seq: int
    nbytes: int  #: of the whole message
    captured: float | None = None  #: seconds since the epoch on the sender's clock
    image: bytes | memoryview = b""
    meta: msgspec.Raw | None = None
    parts: list[Part] | None = None
    problem: Problem | None = None
    arrived: float = 0.0  #: seconds since the epoch
    trace: Trace | None = None
