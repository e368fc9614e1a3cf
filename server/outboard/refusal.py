"""How a command says no: one line on standard error, and an exit code."""

from __future__ import annotations

import typer
from rich.console import Console


def refuse(message: object, code: int = 2) -> typer.Exit:
    """Say why; raise what this returns. A path or a command in it is not broken, so that it can be copied."""
    Console(stderr=True).print(f"outboard: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)
