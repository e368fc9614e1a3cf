"""What a refusal tells a client, whatever it speaks."""

from __future__ import annotations

import pytest

from outboard.problems import Problem


@pytest.mark.parametrize(("seconds", "told"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (2.3, "3"), (2.5, "3"), (None, "")])
def test_nobody_is_asked_to_come_back_too_early(seconds: float | None, told: str) -> None:
    assert Problem("overloaded", "busy", retry_after=seconds).seconds_to_wait == told
