"""One submitted image to one answer: the path of a frame, read straight down.

header -> (engine: admit) -> decode and fit into shared memory -> (engine: batch, place) -> worker -> task decoder -> answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from outboard import tasks
from outboard.core.state import ANYBODY, Sender
from outboard.imaging.coded import Job
from outboard.imaging.decode import decode
from outboard.imaging.draw import draw
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header, read_header
from outboard.imaging.tiles import Tiling
from outboard.ocr import read_text
from outboard.problems import Problem
from outboard.registry import Version
from outboard.runtime import Outcome, Runtime
from outboard.tasks.answer import answer_body
from outboard.telemetry import tracing
from outboard.tiled import detect

#: Bytes of a tensor answer that is written by the event loop: about 0.1 ms.
SMALL = 8192


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks for, checked. Times are the event loop's seconds."""

    options: tasks.Options
    deadline: float
    tiling: Tiling | None = None  #: None: the whole picture is one row
    strict_device: bool = False
    received: float = 0.0  #: seconds from the first byte to the whole body
    sender: Sender = ANYBODY


class Predictor:
    """Answers images with the models of a runtime."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    async def predict(self, version: Version, body: bytes, request: Request, header: Header | None = None) -> dict[str, Any]:
        """The answer's JSON values (design.md, section 1). `header` is given for raw pixels, which have none. Raises Problem."""
        return (await self.predict_rows(version, body, request, header))[0]

    async def predict_rows(
        self, version: Version, body: bytes, request: Request, header: Header | None = None
    ) -> tuple[dict[str, Any], Outcome]:
        """As `predict`, and what the rows of the network gave."""
        began = time.perf_counter()
        spec = version.spec
        if request.strict_device and self.runtime.engine.degraded():
            raise Problem(
                "device_unavailable", "strict_device was asked for, and the device does not serve now; see GET /v1/devices", retry_after=5.0
            )
        if spec.takes_tensors:
            raise Problem("bad_input", f"{spec.name} takes tensors, not images; send them to POST /v2/models/{spec.name}/infer")
        header = header or read_header(body, max_pixels=self.runtime.settings.limits.pixels)
        sender = replace(request.sender, strict=True) if request.strict_device else request.sender
        if request.tiling is not None:
            content, outcome = await detect(
                self.runtime, version, body, header, request.tiling, request.options, request.deadline, sender
            )
        elif spec.toml.parts:
            content, outcome = await read_text(self.runtime, version, body, header, request.options, request.deadline, sender)
        else:
            job = Job(header)
            outcome = await self.runtime.submit_image(version.ids[""], job, body, deadline=request.deadline, sender=sender)
            # Cheaper than handing it to a thread, which decodes the next picture just now.
            if spec.toml.task == "classification" or (spec.toml.task == "tensor" and _bytes(outcome.rows[0]) <= SMALL):
                content = self._content(version, outcome.rows[0], outcome.filled, request.options)
            else:
                content = await self.runtime.in_thread(self._content, version, outcome.rows[0], outcome.filled, request.options)
        if request.strict_device and outcome.degraded:
            raise Problem("device_unavailable", f"strict_device was asked for, and {outcome.device} had to answer", retry_after=5.0)
        total = time.perf_counter() - began
        post = max(0.0, total - outcome.decode - outcome.queue - outcome.infer)
        answer = {
            "id": secrets.token_hex(8),
            "model": spec.name,
            "version": spec.version,
            "task": spec.toml.task,
            "device": outcome.device,
            "degraded": outcome.degraded,
            "image": {"width": header.width, "height": header.height, "orientation": header.orientation},
            **content,
            "timing_ms": {
                "receive": _ms(request.received),
                "decode": _ms(outcome.decode),
                "queue": _ms(outcome.queue),
                "infer": _ms(outcome.infer),
                "post": _ms(post),
                "total": _ms(request.received + total),
            },
        }
        if header.bit_depth != 8:
            answer["source_bit_depth"] = header.bit_depth
        if outcome.device in self.runtime.devices and self.runtime.devices[outcome.device].kind == "sim":
            answer["simulated"] = True
        if (trace := tracing.CURRENT.get()) is not None:
            trace.request_ids.append(answer["id"])
        return answer, outcome

    @staticmethod
    def _content(version: Version, outputs: dict[str, np.ndarray], geometry: Geometry, options: tasks.Options) -> dict[str, Any]:
        return answer_body(tasks.decode(outputs, version.spec, options), version.spec, geometry)

    async def picture(self, body: bytes, answer: dict[str, Any], width: int = 0) -> bytes:
        """The submitted picture, upright, with the answer drawn on, as JPEG; at most about `width` wide, 0: as large as it is."""
        return await self.runtime.in_thread(self._picture, body, answer, width)

    def _picture(self, body: bytes, answer: dict[str, Any], width: int) -> bytes:
        header = read_header(body, max_pixels=self.runtime.settings.limits.pixels)
        small = (width, max(1, round(width * header.height / header.width))) if 0 < width < header.width else None
        return draw(decode(body, header, min_size=small), answer, quality=80 if width else 90)

    async def several(self, version: Version, bodies: list[bytes], request: Request) -> list[dict[str, Any]]:
        """One answer for each image, in their order; a bad one has its problem in its place (M04)."""

        async def one(body: bytes) -> dict[str, Any]:
            try:
                return await self.predict(version, body, request)
            except Problem as e:
                return e.body()

        return await asyncio.gather(*map(one, bodies))


def _bytes(outputs: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in outputs.values())


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
