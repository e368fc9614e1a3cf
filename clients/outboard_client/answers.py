"""Typed answers. Members that a newer server adds are ignored, so that an older client keeps working."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from outboard_client.errors import Problem, problem_in

#: The Open Inference Protocol's names of element types -> numpy's.
DTYPES = {
    "BOOL": "bool",
    **{f"UINT{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"INT{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"FP{n}": f"float{n}" for n in (16, 32, 64)},
}


class Picture(msgspec.Struct, frozen=True):
    """The submitted image, upright. `orientation` is the EXIF value that was applied (1: none)."""

    width: int
    height: int
    orientation: int = 1


class Detection(msgspec.Struct, frozen=True):
    """`box` is x1, y1, x2, y2 in pixels of the upright submitted image."""

    label: str
    class_id: int
    score: float
    box: tuple[float, float, float, float]


class ClassScore(msgspec.Struct, frozen=True):
    label: str
    class_id: int
    score: float


class Text(msgspec.Struct, frozen=True):
    """`polygon` is four points in pixels of the upright submitted image."""

    text: str
    score: float
    polygon: tuple[tuple[float, float], ...]


class Mask(msgspec.Struct, frozen=True):
    """Segmentation: a PNG whose values are indices of `labels`."""

    encoding: str
    data: bytes
    labels: list[str] = []

    def array(self) -> np.ndarray:
        """uint8 [height, width]."""
        with Image.open(io.BytesIO(self.data)) as picture:
            return np.asarray(picture)


class Tensor(msgspec.Struct, frozen=True):
    """A network's output. `data` is flat in row-major order; None where JSON has no number for NaN or infinity."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any]

    def array(self) -> np.ndarray:
        """The output with its own dtype and shape; None becomes NaN."""
        dtype = np.dtype(DTYPES[self.datatype])
        flat = [np.nan if x is None else x for x in self.data] if dtype.kind == "f" else self.data
        return np.array(flat, dtype).reshape(self.shape)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says about one image. Of `detections`, `classes`, `texts`, `mask` and `outputs` the task's one is there.

    `degraded`: another device than the one asked for answered. `meta`: what the sender attached to the frame.
    """

    id: str = ""
    model: str = ""
    version: str = ""
    task: str = ""
    device: str = ""
    degraded: bool = False
    simulated: bool = False
    image: Picture | None = None
    detections: list[Detection] | None = None
    classes: list[ClassScore] | None = None
    texts: list[Text] | None = None
    mask: Mask | None = None
    outputs: list[Tensor] | None = None
    timing_ms: dict[str, float] = {}
    source_bit_depth: int = 8
    non_finite: int = 0
    meta: Any = None


def answer_or_problem(members: Mapping[str, Any]) -> Answer | Problem:
    """What stands in the place of one answer among several."""
    return problem_in(members) if "type" in members and "detail" in members else msgspec.convert(members, Answer)


class Size(msgspec.Struct, frozen=True):
    width: int
    height: int


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """One model of the repository. `state` is loading, ready, failed or unloaded; `error` {file, key, expected} says why it failed."""

    name: str
    state: str
    task: str | None = None
    backend: str | None = None
    version: str | None = None
    input: Size | None = None
    devices: list[str] = []
    license: str | None = None
    error: dict[str, Any] | str | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True):
    type: str | None = None
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    total_bytes: int | None = None
    free_bytes: int | None = None
    headroom_bytes: int | None = None


class Loss(msgspec.Struct, frozen=True):
    at: str
    why: str


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device. `state` is starting, warming, serving, standby, suspect, lost, quarantined, ejected or off."""

    id: str
    kind: str
    state: str
    name: str | None = None
    uuid: str | None = None
    why: str | None = None
    until: str | None = None
    simulated: bool = False
    external: bool = False
    concurrency: int = 1
    link: Link = Link()
    memory: Memory = Memory()
    losses: int = 0
    last_loss: Loss | None = None


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """`degraded`: every model is served, but not by the device that was asked for."""

    ready: bool
    degraded: bool = False
    why: str | None = None
