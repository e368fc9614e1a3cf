"""What a thin cable costs: 4K detection behind each link as a share of the same card without a limit, in virtual time.

    python loadtests/link_share.py --model yolov2_tiny --gpus "RTX 3060,RTX 3080,RTX 4090" --links thunderbolt4

The engine is the server's own, the cards' costs are estimates from their vendor's rates (`outboard plan`), the frames are 4K JPEGs that the
host decodes. Beside it: what crossing the link as float32 would give, the model's input and whole frames; and how far link and card alone
would come, with a host whose work takes no time. Exit status 1: with uint8 input and this host, some card keeps less than `--min-share`
behind one of the links, or answers more than `--max-more-ms` later.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from outboard.plan import arrivals, usage
from outboard.plan.basis import basis
from outboard.plan.drive import Log, play
from outboard.plan.host import DecodeCost, host
from outboard.plan.machine import Host, Machine
from outboard.plan.predict import Demand, Setup, quantile
from outboard.plan.roofline import BEST, WORST

#: GB/s of a link that limits nothing.
FREE = "1000"
WIDTH, HEIGHT = 3840, 2160
BYTES = usage.usual_bytes(WIDTH, HEIGHT)
ESTIMATES = {"worst": WORST, "best": BEST}
#: What crosses the link for each frame: the model's input as the server sends it, as float32, and a whole frame as float32.
INPUT, FLOAT_INPUT, FLOAT_FRAME = UPLOADS = ("uint8 input", "float32 input", "float32 frame")
#: Frames arrive this many times as fast as the card behind the free link could answer them, or as fast as the host can take them in; from
#: so many stations, so many in all.
OVERLOAD, HOST_LOAD, STATIONS, FRAMES = 1.3, 0.97, 48, 1500
#: Under light load: one station, frames a second and seconds.
CALM_FPS, CALM_SECONDS = 15.0, 4.0
#: A host whose work takes no time: the link and the card are all there is.
NO_HOST = Host(cores=1000, decode_threads=64, receive=0.0, receive_byte=0.0, respond=0.0)


@dataclass(frozen=True)
class Row:
    """Behind a link, beside the same card behind one that limits nothing. Ages in milliseconds."""

    gpu: str
    estimate: str
    host: str
    link: str
    upload: str
    fps: float
    share: float
    more_ms: float  #: median age under light load, more than behind the free link
    more_full_ms: float  #: under full load
    link_used: float
    compute_used: float

    def misses(self, min_share: float, max_more_ms: float) -> bool:
        return self.share < min_share or max(self.more_ms, self.more_full_ms) > max_more_ms


@dataclass(frozen=True)
class _Played:
    fps: float
    age: float
    calm_age: float
    link_used: float
    compute_used: float


def compare(
    models: Path, model: str, gpu: str, links: Sequence[str], uploads: Sequence[str], name: str, there: Host, decode: float
) -> list[Row]:
    """Both ends of the card's estimate behind each of `links`, with what `uploads` names crossing it. The host is `there`, called `name`;
    `decode` are seconds of a core for a frame."""
    spec, network = usage.model(models, model)
    card = basis(gpu, spec, network, Path(os.devnull))  # an estimate, also where such a card was measured
    assert network.input is not None
    width, height = network.input.size
    row_bytes = {INPUT: width * height * 3, FLOAT_INPUT: width * height * 3 * 4, FLOAT_FRAME: WIDTH * HEIGHT * 3 * 4}
    calm = arrivals.steady(1, CALM_FPS, CALM_SECONDS, BYTES, WIDTH, HEIGHT, 0)
    setup = Setup(
        link=FREE,
        card=card.card,
        host=there,
        shape=(height, width, 3),
        row_bytes=row_bytes[INPUT],
        answer_bytes=card.answer_bytes,
        max_rows=network.batching.max,
        demand=Demand(calm, {(WIDTH, HEIGHT): DecodeCost(decode, 0.0)}),
    )
    rows = []
    for end, efficiency in ESTIMATES.items():
        free = setup.machine(efficiency)
        offered = _offered(free, decode)
        full = arrivals.steady(STATIONS, offered / STATIONS, FRAMES / offered, BYTES, WIDTH, HEIGHT, 0)
        demands = setup.demand, dataclasses.replace(setup.demand, frames=full)
        reference = _play(free, *demands)
        for link in links:
            for upload in uploads:
                machine = dataclasses.replace(setup, link=link, row_bytes=row_bytes[upload]).machine(efficiency)
                found = _play(machine, *demands)
                more, more_full = (found.calm_age - reference.calm_age) * 1e3, (found.age - reference.age) * 1e3
                share = found.fps / reference.fps
                rows.append(Row(gpu, end, name, link, upload, found.fps, share, more, more_full, found.link_used, found.compute_used))
    return rows


def _offered(free: Machine, decode: float) -> float:
    """Frames a second that keep the card busy, as far as the host can take them in and decode them."""
    card = max(rows / max(free.batch(rows)) for rows in range(1, free.model.max_rows + 1))
    there = free.host
    host_seconds = max(there.receive + there.receive_byte * BYTES + there.respond, decode / there.cores)
    return min(OVERLOAD * card, HOST_LOAD / host_seconds) if host_seconds else OVERLOAD * card


def _play(machine: Machine, calm: Demand, full: Demand) -> _Played:
    log, quiet = (play(machine, demand.arrivals(), live=True) for demand in (full, calm))
    begin, end = full.frames[len(full.frames) // 4].t, full.frames[-1].t  # without the start and what waits at the end
    answered = sum(e.end == "answered" and begin <= e.at < end for e in log.endings)
    return _Played(answered / (end - begin), _age(log), _age(quiet), log.link / log.duration, log.compute / log.duration)


def _age(log: Log) -> float:
    """The median of those that were answered, in seconds."""
    return quantile(sorted(e.at - e.arrival.at for e in log.endings if e.end == "answered"), 0.5)


def table(rows: Sequence[Row]) -> Table:
    columns = ("GPU (estimate)", "Link", "Over the link", "fps", "Share", "ms more", "under load", "Link used", "Compute")
    made = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for column in made.columns[3:]:
        column.justify = "right"
    for r in rows:
        ages, used = (f"{r.more_ms:+.1f}", f"{r.more_full_ms:+.1f}"), (f"{r.link_used:.0%}", f"{r.compute_used:.0%}")
        made.add_row(f"{r.gpu} ({r.estimate})", r.link, r.upload, f"{r.fps:.0f}", f"{r.share:.3f}", *ages, *used)
    return made


def main(
    model: Annotated[str, typer.Option()] = "yolov2_tiny",
    models: Annotated[Path, typer.Option()] = Path("models"),
    gpus: Annotated[str, typer.Option(help="comma-separated")] = "RTX 3060,RTX 3080,RTX 4090",
    links: Annotated[str, typer.Option(help="comma-separated")] = "thunderbolt4",
    cores: Annotated[int, typer.Option(min=1, help="of the host")] = 16,
    decode_ms: Annotated[float, typer.Option(help="of a core, to decode a 4K JPEG and fit it")] = 18.4,
    min_share: Annotated[float, typer.Option(help="of the frames a second behind a link that limits nothing")] = 0.97,
    max_more_ms: Annotated[float, typer.Option(help="of the median age")] = 8.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    hosts = (f"{cores} cores", host(cores), decode_ms / 1e3), ("none", NO_HOST, 0.0)
    rows = [
        row
        for name, *there in hosts
        for gpu in gpus.split(",")
        for row in compare(models, model, gpu, links.split(","), UPLOADS, name, *there)
    ]
    judged = [row for row in rows if row.host == hosts[0][0] and row.upload == INPUT]
    missed = [row for row in judged if row.misses(min_share, max_more_ms)]
    if as_json:
        print(json.dumps({"rows": [dataclasses.asdict(row) for row in rows], "missed": [dataclasses.asdict(row) for row in missed]}))
    else:
        out = Console(width=120)
        for (name, *_), title in zip(hosts, (f"A host of {cores} cores", "A host whose work takes no time"), strict=True):
            out.print(title)
            out.print(table([row for row in rows if row.host == name]))
            out.print()
        for row in missed:
            ages = f"{row.more_ms:+.1f} ms, {row.more_full_ms:+.1f} under load"
            out.print(f"missed: {row.gpu} ({row.estimate}) behind {row.link}: {row.share:.3f} of its frames a second, {ages}", style="red")
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
