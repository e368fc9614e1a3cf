"""Bundles: several images and arrays of one tick, answered together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from outboard.frames import Part
from outboard.imaging.header import Header
from outboard.oip.infer import Inferer
from outboard.oip.request import InferRequest, InputTensor
from outboard.predictor import Predictor, Request
from outboard.problems import Problem
from outboard.registry import Registry, Version
from outboard.runtime import Runtime, all_of
from outboard.tasks.tensor import DATATYPES, tensor_body

#: Problems that end the whole bundle: the server could not do it now, whatever its parts are.
_OF_THE_SERVER = frozenset(
    {"deadline_missed", "device_unavailable", "memory_full", "model_not_ready", "overloaded", "shutting_down", "superseded"}
)


class Bundler:
    """Answers bundles with the models of a registry."""

    def __init__(self, runtime: Runtime, registry: Registry, predictor: Predictor):
        self._runtime = runtime
        self._registry = registry
        self._predictor = predictor
        self._inferer = Inferer(runtime, registry)

    async def answer(self, model: str, parts: list[Part], request: Request, expect: Sequence[str]) -> dict[str, Any]:
        """`{"parts": {name: answer or problem}, "missing": [names]}`. Raises Problem where the bundle as a whole cannot be answered."""
        # One part's refusal, or the stream's end, ends the others too.
        answers = await all_of([asyncio.ensure_future(self._answer_or_problem(part.model or model, part, request)) for part in parts])
        content: dict[str, Any] = {"parts": {part.name: given for part, given in zip(parts, answers, strict=True)}}
        if expect:
            content["missing"] = [name for name in expect if name not in content["parts"]]
        return content

    async def _answer_or_problem(self, model: str, part: Part, request: Request) -> dict[str, Any]:
        try:
            with self._registry.use(model) as version:
                if version.spec.takes_tensors:
                    return await self._tensor(version, part, request)
                header = _pixels(part, self._runtime.settings.limits.pixels) if part.dtype else None
                return await self._predictor.predict(version, part.data, request, header)
        except Problem as e:
            if e.slug in _OF_THE_SERVER:
                raise
            return e.body()

    async def _tensor(self, version: Version, part: Part, request: Request) -> dict[str, Any]:
        """One row for a model that takes tensors."""
        spec = version.spec
        if not part.dtype:
            raise Problem("bad_input", f"{spec.name} takes tensors; send part {part.name[:60]!r} as an array")
        known = self._inferer.signature(version)
        shape = (1, *part.shape) if known.batched else part.shape
        tensor = InputTensor(part.input or next(iter(known.inputs)), DATATYPES[part.dtype], shape, part.data)
        now = self._runtime.now()
        asked = InferRequest([tensor], None, seconds=request.deadline - now, body=part.data)
        _, result = await self._inferer.infer(spec.name, "", asked, now, _not_counted)
        outputs = {w.name: array[0] if known.batched else array for w, array in result.outputs}
        about = {"model": spec.name, "version": spec.version, "task": spec.toml.task, "device": result.device, "degraded": result.degraded}
        return about | tensor_body(outputs)


def _not_counted(nbytes: int) -> None:
    """One row's outputs are JSON in a moment, for which the stream accounts."""


def _pixels(part: Part, most: int) -> Header:
    """The header of raw pixels. Raises Problem."""
    if part.dtype != "uint8" or len(part.shape) != 3 or part.shape[2] != 3 or 0 in part.shape:
        raise Problem("bad_input", f"an array for a model of pictures is uint8 [height, width, 3], got {part.dtype} {list(part.shape)}")
    height, width, _ = part.shape
    if width * height > most:
        raise Problem("image_too_large", f"{width} x {height} pixels, at most {most} are taken; set [limits] pixels to take more")
    return Header("raw", width, height)
