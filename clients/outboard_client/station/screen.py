"""The station's figures: a live screen for a terminal, plain lines for a log, JSON for programs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outboard_client.station.run import Station

_LOOKS = {"online": "green", "opening": "yellow", "offline": "bold red"}


class Rates:
    """Frames a second since the last look."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

    def of(self, name: str, count: int) -> float:
        now = time.monotonic()
        at, before = self._before.get(name, (now, count))
        self._before[name] = now, count
        return round((count - before) / (now - at), 1) if now > at else 0.0


def figures(station: Station, rates: Rates) -> dict[str, Any]:
    """Everything that is shown, as plain values."""
    source, stream = station.source.figures, station.stream.figures
    shown: dict[str, Any] = {
        "type": "figures",
        "source": {
            "name": station.source.name,
            "state": source.state,
            "fps": rates.of("source", source.frames),
            "size": [source.width, source.height] if source.width else None,
            "frames": source.frames,
            "skipped": source.skipped,
            "corrupted": source.corrupted,
            "unreadable": source.unreadable,
            "restarts": source.restarts,
            "why": source.why or None,
        },
        "link": {
            "state": "up" if stream.connected else "down",
            "links": stream.links,
            "resumed": stream.resumed,
            "closed": stream.closed,
            "bytes_per_s": round(station.stream.uplink.bytes_per_s) or None,
            "quality": station.stream.uplink.quality,
        },
        "frames": {
            "sent": stream.sent,
            "answered": stream.answered,
            "dropped": stream.dropped,
            "unanswered": stream.unanswered,
            "answers_per_s": rates.of("answered", stream.answered),
            "age_ms": stream.age_ms,
        },
        "device": {"id": stream.device, "degraded": stream.degraded, "why": stream.why},
    }
    if station.spool is not None:
        spool = station.spool
        shown["spool"] = {"frames": spool.frames, "bytes": spool.nbytes, "limit": spool.limit, "refused": station.refused}
    return shown


async def show(station: Station, *, every: float, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Until cancelled; and the last state once more, at the end."""
    rates = Rates()
    if as_json:
        await _repeat(lambda: print(msgspec.json.encode(figures(station, rates)).decode(), file=out, flush=True), every)
    elif out.isatty():
        with Live(screen(figures(station, rates)), console=Console(file=out), auto_refresh=False, transient=False) as live:
            await _repeat(lambda: live.update(screen(figures(station, rates)), refresh=True), min(every, 0.5))
    else:
        await _repeat(lambda: print(line(figures(station, rates)), file=out, flush=True), every)


async def _repeat(tell: Callable[[], Any], every: float) -> None:
    try:
        while True:
            tell()
            await asyncio.sleep(every)
    finally:
        tell()


def screen(f: dict[str, Any]) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=8)
    table.add_column()
    source, link, frames, device = f["source"], f["link"], f["frames"], f["device"]
    size = f"  {source['size'][0]}x{source['size'][1]}" if source["size"] else ""
    table.add_row("source", Text.assemble((source["state"], _LOOKS[source["state"]]), f"  {source['fps']:.1f} fps{size}  {source['name']}"))
    troubles = [f"{source[k]} {k}" for k in ("skipped", "corrupted", "unreadable", "restarts") if source[k]]
    if troubles or source["why"]:
        table.add_row("", Text(", ".join(troubles) + (f"  ({source['why']})" if source["why"] else ""), style="dim"))
    rate = f"  {link['bytes_per_s'] / 1e6:.1f} MB/s" if link["bytes_per_s"] else ""
    looks = "green" if link["state"] == "up" else "bold red"
    cut = ", ".join(f"{n} x {why}" for why, n in link["closed"].items())
    table.add_row("link", Text.assemble((link["state"], looks), f"{rate}  quality {link['quality']}" + (f"  lost: {cut}" if cut else "")))
    dropped = ", ".join(f"{n} {why}" for why, n in sorted(frames["dropped"].items())) or "0"
    counts = f"{frames['sent']} sent = {frames['answered']} answered + {dropped} dropped + {frames['unanswered']} on their way"
    table.add_row("frames", counts)
    ages = "  ".join(f"{k} {v:.0f} ms" for k, v in frames["age_ms"].items())
    table.add_row("answers", f"{frames['answers_per_s']:.1f} a second" + (f", age {ages}" if ages else ""))
    if device["id"]:
        why = f"  degraded: {device['why'] or ''}" if device["degraded"] else ""
        table.add_row("device", Text(device["id"] + why, style="yellow" if device["degraded"] else ""))
    if "spool" in f:
        spool = f["spool"]
        refused = f"  {spool['refused']} refused: it is full" if spool["refused"] else ""
        table.add_row("spool", f"{spool['frames']} frames, {spool['bytes'] / 1e6:.1f} of {spool['limit'] / 1e6:.0f} MB{refused}")
    return Group(table)


def line(f: dict[str, Any]) -> str:
    source, frames, device = f["source"], f["frames"], f["device"]
    dropped = sum(frames["dropped"].values())
    parts = [
        f"source {source['state']} {source['fps']:.1f} fps",
        f"link {f['link']['state']}",
        f"sent {frames['sent']} answered {frames['answered']} dropped {dropped} unanswered {frames['unanswered']}",
        f"age p50 {frames['age_ms'].get('p50', 0):.0f} p99 {frames['age_ms'].get('p99', 0):.0f} ms",
        f"device {device['id'] or '-'}{' degraded' if device['degraded'] else ''}",
    ]
    if "spool" in f:
        parts.append(f"spool {f['spool']['frames']} frames {f['spool']['bytes'] / 1e6:.1f} MB")
    return ", ".join(parts)
