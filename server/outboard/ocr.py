"""Reading text: a pipeline of three networks (find lines, turn them upright, read them) with as many rows as there are lines.

Each step is a frame of the engine, so lines of several images batch together, whatever device serves them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import outboard.tasks.text as text
from outboard import tasks
from outboard.core.state import Sender
from outboard.imaging.decode import decode
from outboard.imaging.fit import fit
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header
from outboard.registry import Version
from outboard.runtime import Outcome, Runtime, all_of
from outboard.tasks.answer import answer_body
from outboard.tasks.results import Texts


async def read_text(
    runtime: Runtime, version: Version, body: bytes, header: Header, options: tasks.Options, deadline: float, sender: Sender
) -> tuple[dict[str, Any], Outcome]:
    """The answer's content, and an outcome that sums the steps up. Raises Problem."""
    networks = version.spec.networks
    kept: dict[str, np.ndarray] = {}

    def fill_page(rows: np.ndarray) -> Geometry:
        given = networks["det"].input
        kept["pixels"] = pixels = decode(body, header, background=given.background)
        return fit(pixels, header, given, rows[0])

    width, height = networks["det"].input.size
    page = await runtime.submit(
        version.ids["det"], (height, width, 3), fill_page, deadline=deadline, kind=header.format, body=body, sender=sender
    )
    lines_of = Sender(sender.station, strict=sender.strict)  # what has begun is finished: a newer page takes the place of a page only
    polygons, _ = await runtime.in_thread(text.text_boxes, page.rows[0], page.filled)
    crops = await runtime.in_thread(lambda: [text.crop(kept["pixels"], polygon) for polygon in polygons])
    turns = await _each(runtime, version, "cls", crops, deadline, lines_of)
    upright = [text.upright(crop, turn.rows[0]) for crop, turn in zip(crops, turns, strict=True)]
    lines = await _each(runtime, version, "rec", upright, deadline, lines_of)
    read = [text.ctc(line.rows[0], version.spec.labels) for line in lines]
    least = version.spec.toml.output.min_score if options.min_score is None else options.min_score
    good = [i for i, (line, score) in enumerate(read) if line and score >= least][: options.top_k]
    result = Texts(
        texts=[read[i][0] for i in good],
        scores=np.array([read[i][1] for i in good], np.float32),
        polygons=np.array([polygons[i] for i in good], np.float32).reshape(-1, 4, 2),
    )
    steps = [page, *turns, *lines]
    # The lines of a step run side by side: the slowest one is what the client waits for.
    waited_for = [page, *(max(step, key=lambda s: s.decode + s.queue + s.infer) for step in (turns, lines) if step)]
    total = Outcome(
        rows=[],
        device=page.device,
        degraded=any(s.degraded for s in steps),
        filled=page.filled,
        decode=page.decode,
        queue=sum(s.queue for s in waited_for),
        infer=sum(s.infer for s in waited_for),
    )
    return answer_body(result, version.spec, page.filled), total


async def _each(
    runtime: Runtime, version: Version, part: str, crops: list[np.ndarray], deadline: float, sender: Sender
) -> list[Outcome]:
    """Run every crop through a part of the pipeline, as a frame of its own whose width is one of the part's buckets."""
    given = version.spec.networks[part].input

    def submit(crop: np.ndarray) -> asyncio.Future[Outcome]:
        row = text.row(crop, given)

        def fill(rows: np.ndarray) -> None:
            rows[0] = row

        return runtime.submit(version.ids[part], row.shape, fill, deadline=deadline, sender=sender)

    return await all_of([submit(crop) for crop in crops])  # one line's refusal, or the client's leaving, ends the others too
