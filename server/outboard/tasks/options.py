"""What a request may ask of a decoder."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """None means model.toml's `[output]` value. The HTTP layer has checked the ranges: `min_score` 0..1, `top_k` at least 1."""

    min_score: float | None = None  #: answer nothing that scores less
    top_k: int | None = None  #: answer at most so many, the best
