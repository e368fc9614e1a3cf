"""4K detection behind Thunderbolt 4 beside the same card without a link's limit: three cards by their estimates, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

import link_share
from outboard.plan.host import host

MODELS = Path(__file__).parents[2] / "models"
DECODE = 18.4e-3


@pytest.mark.parametrize("gpu", ["RTX 3060", "RTX 3080", "RTX 4090"])
def test_a_thunderbolt_cable_costs_little_where_only_pixels_that_the_model_needs_cross_it(gpu: str) -> None:
    rows = link_share.compare(MODELS, "yolov2_tiny", gpu, ["thunderbolt4"], [link_share.INPUT], "16 cores", host(16), DECODE)
    assert len(rows) == 2  # the worst and the best of the estimate
    for row in rows:
        assert not row.misses(min_share=0.97, max_more_ms=8), row


def test_whole_frames_as_float32_would_cost_most_of_the_card() -> None:
    (row, _) = link_share.compare(
        MODELS, "yolov2_tiny", "RTX 3060", ["thunderbolt4"], [link_share.FLOAT_FRAME], "16 cores", host(16), DECODE
    )
    assert row.share < 0.1 and row.more_ms > 30 and row.misses(min_share=0.97, max_more_ms=8), row
