"""Tables of devices and models for people, in whatever width their terminal has: names stay whole, what matters least is left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

#: Columns between two cells, and the fewest for a column whose text may be folded.
GAP = 2
LEAST = 24


class Loss(msgspec.Struct):
    at: datetime
    why: str


class Device(msgspec.Struct):
    """What the table shows of an entry of `/v1/devices`."""

    id: str
    state: str
    name: str | None = None
    simulated: bool = False
    concurrency: int = 0
    losses: int = 0
    why: str | None = None
    until: datetime | None = None
    last_loss: Loss | None = None


class Size(msgspec.Struct):
    width: int
    height: int


class Refusal(msgspec.Struct):
    file: str
    key: str
    expected: str
    message: str = ""


class Model(msgspec.Struct):
    """What the table shows of an entry of `/v1/models`."""

    name: str
    state: str
    task: str | None = None
    backend: str | None = None
    devices: list[str] = []
    input: Size | None = None
    license: str | None = None
    source: str | None = None
    error: Refusal | None = None


@dataclass
class _Column:
    title: str
    drop: int = 0  #: 0: always there; the others are left out in this order where the width does not do
    fold: bool = False  #: text that may go over several lines
    cells: list[str] = field(default_factory=list)

    @property
    def width(self) -> int:
        longest = max(cell_len(x) for x in (self.title, *self.cells))
        return min(longest, LEAST) if self.fold else longest


def print_devices(out: Console, entries: list[dict[str, Any]]) -> None:
    """`entries` as in `/v1/devices`."""
    now = datetime.now(UTC)
    columns = [
        _Column("Device"),
        _Column("State"),
        _Column("Losses", drop=3),
        _Column("Batches at once", drop=1),
        _Column("Name", drop=2, fold=True),
        _Column("Why", fold=True),
    ]
    devices = msgspec.convert(entries, list[Device])
    for d in devices:
        left = f", {_duration((d.until - now).total_seconds())} left" if d.until else ""
        why = [d.why or ""]
        if (last := d.last_loss) and last.why not in why[0]:
            why.append(f"last lost {_duration((now - last.at).total_seconds())} ago: {last.why}")
        name = (d.name or "") + (" (simulated)" if d.simulated else "")
        _add(columns, d.id, d.state + left, str(d.losses), str(d.concurrency), name, "; ".join(filter(None, why)))
    _print(out, columns)


def print_models(out: Console, entries: list[dict[str, Any]]) -> None:
    """`entries` as in `/v1/models`."""
    columns = [
        _Column("Model"),
        _Column("Task"),
        _Column("Backend", drop=2),
        _Column("State"),
        _Column("On", fold=True),
        _Column("Input", drop=4),
        _Column("Licence", drop=3, fold=True),
        _Column("Source", drop=1, fold=True),
    ]
    models = msgspec.convert(entries, list[Model])
    for m in models:
        given = f"{m.input.width}x{m.input.height}" if m.input else ""
        _add(columns, m.name, m.task or "", m.backend or "", m.state, ", ".join(m.devices), given, m.license or "", m.source or "")
    _print(out, columns, ["red" if m.state == "failed" else None for m in models])
    for m in models:
        if m.error is not None:
            kept = "; the version before it goes on serving" if m.state == "ready" else ""
            message = f"{m.error.message}; " if m.error.message else ""
            line = f"{m.name}: {m.error.file}: {m.error.key}: {message}expected {m.error.expected}{kept}"
            out.print(line, style="italic", markup=False, highlight=False)


def _add(columns: list[_Column], *cells: str) -> None:
    for column, cell in zip(columns, cells, strict=True):
        column.cells.append(cell)


def _print(out: Console, columns: list[_Column], styles: list[str | None] | None = None) -> None:
    shown = list(columns)
    for column in sorted((c for c in columns if c.drop), key=lambda c: c.drop):
        if sum(c.width for c in shown) + GAP * (len(shown) - 1) > out.width:
            shown.remove(column)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in shown:
        table.add_column(column.title, overflow="fold", no_wrap=not column.fold, min_width=column.width)
    for i in range(len(columns[0].cells)):
        table.add_row(*(escape(column.cells[i]) for column in shown), style=styles[i] if styles else None)
    out.print(table)


def _duration(seconds: float) -> str:
    """12 s, 5 min, 3.4 h."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
