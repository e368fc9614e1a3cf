"""What the pictures of `--plot` share. matplotlib is an extra, so it is imported when something is drawn."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any


class PlotMissing(RuntimeError):
    """matplotlib is not installed."""


def check() -> None:
    """Raise PlotMissing before minutes are spent on what could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as e:
        raise PlotMissing("--plot needs matplotlib: pip install 'outboard[plot]'") from e


def pyplot() -> ModuleType:
    """For files, without a display. Raises PlotMissing."""
    check()
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, file: Path) -> None:
    """Write the figure as a PNG, and close it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
    pyplot().close(figure)
