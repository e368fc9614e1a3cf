"""Detection in a large picture cut into tiles: one frame of the engine with a row for each, merged into one answer.

Rows of several pictures batch together, whatever their sizes: a tile is as large as any other row of the network. Where a tile is a part of
the decoded picture as it is, the picture is written once and the device cuts; where tiles are resized, the host writes each of them.
"""

from __future__ import annotations

from typing import Any

from outboard import tasks
from outboard.core.state import Sender
from outboard.imaging import tiles
from outboard.imaging.coded import Job
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header
from outboard.problems import Problem
from outboard.registry import Version
from outboard.runtime import Outcome, Runtime
from outboard.tasks.answer import answer_body
from outboard.tasks.merge import merge


async def detect(
    runtime: Runtime,
    version: Version,
    body: bytes | memoryview,
    header: Header,
    tiling: tiles.Tiling,
    options: tasks.Options,
    deadline: float,
    sender: Sender,
) -> tuple[dict[str, Any], Outcome]:
    """The answer's content, with what was cut as `tiles`, and the frame's outcome. Raises Problem."""
    spec = version.spec
    if spec.toml.task != "detection":
        raise Problem("bad_option", f"tile is for detection, and {spec.name}'s task is {spec.toml.task}; ask without tile")
    given = spec.networks[""].input
    plan = tiles.plan(header.width, header.height, given, tiling, runtime.settings.limits.tiles)

    job = Job(header, plan, tiles.layout(plan, header, given))
    outcome = await runtime.submit_image(version.ids[""], job, body, deadline=deadline, sender=sender)

    def content() -> dict[str, Any]:
        each = tasks.Options(min_score=options.min_score)  # the best of a tile need not be the best of the picture
        found = [tasks.decode(row, spec, each) for row in outcome.rows]
        merged = merge(found, outcome.filled, (header.width, header.height), tiling.merge, options.top_k)
        return answer_body(merged, spec, Geometry(header.width, header.height, 1.0, 1.0, 0, 0))

    cut = {"width": plan.width, "height": plan.height, "count": len(plan.origins), "whole": plan.whole}
    return {**await runtime.in_thread(content), "tiles": cut}, outcome
