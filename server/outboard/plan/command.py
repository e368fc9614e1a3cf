"""`outboard plan`: from words on the command line to plans. Heavy imports wait until they are needed: every command passes here."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outboard.refusal import refuse

if TYPE_CHECKING:
    from outboard.imaging.tiles import Tiling
    from outboard.plan.arrivals import Recorded
    from outboard.plan.host import DecodeCost
    from outboard.plan.predict import Demand, Plan, Setup
    from outboard.repository import Input

EXAMPLE = 'Example: outboard plan --link thunderbolt4 --gpu "RTX 3060" --model yolov2_tiny --stations 3 --fps 15 --deadline 200ms'


def _refusing(command: Callable[..., bool]) -> Callable[..., None]:
    """Exit with 1 where the answer is no, with 2 and a line of text where there cannot be one."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        from outboard.plan.arrivals import TraceError
        from outboard.plan.usage import Usage
        from outboard.plan.workload import CountError
        from outboard.plots import PlotMissing
        from outboard.repository import ModelProblem
        from outboard.settings import SettingsError

        try:
            holds = command(**options)
        except (Usage, TraceError, CountError, ModelProblem, PlotMissing, SettingsError) as e:
            raise refuse(e) from e
        if not holds:
            raise typer.Exit(1)

    return run


@_refusing
def plan(
    model: Annotated[str, typer.Option(help="A model of the repository, or MODEL/PART of a pipeline.")],
    link: Annotated[str, typer.Option(help="thunderbolt3, thunderbolt4, usb4, thunderbolt5, oculink, pcie4x16, or GB/s.")] = "",
    gpu: Annotated[
        str, typer.Option(help='"RTX 3060" …, a device measured here, or MS_PER_BATCH+MS_PER_ROW. Default: what was measured here.')
    ] = "",
    stations: Annotated[int, typer.Option(min=1, max=1000)] = 1,
    fps: Annotated[float, typer.Option(min=0.1, max=1000.0, help="Frames a second that each station sends.")] = 15.0,
    deadline: Annotated[str, typer.Option(help="When an answer is worthless: 200ms or 0.2s after its frame has come.")] = "",
    source: Annotated[str, typer.Option(help="Size of the frames: 4k, 1080p, 720p or WxH.")] = "4k",
    jpeg_bytes: Annotated[int, typer.Option(min=0, max=100_000_000, help="Bytes of a frame; 0: a photograph of quality 88.")] = 0,
    tile: Annotated[str, typer.Option(help="Look at tiles of each frame: auto, or their width in pixels.")] = "",
    policy: Annotated[str, typer.Option(help="live: of each station the newest frame wins; lossless: each is answered.")] = "live",
    duration: Annotated[str, typer.Option(help="Time that is played through.")] = "60s",
    seed: Annotated[int, typer.Option(help="Of the stations' phases and jitter.")] = 0,
    cores: Annotated[int, typer.Option(min=0, help="Of the host; 0: as many as here.")] = 0,
    decode_ms: Annotated[
        float, typer.Option(min=0.0, max=60_000.0, help="Of a core, to decode a frame and fit it; 0: measured here.")
    ] = 0.0,
    device_decode_ms: Annotated[
        float,
        typer.Option(
            min=0.0, max=60_000.0, help="Of the card's JPEG decoder, a megapixel, as `outboard profile` shows it; 0: the host decodes."
        ),
    ] = 0.0,
    batch: Annotated[int, typer.Option(min=0, help="Rows of a batch at most; 0: [batching] max of model.toml.")] = 0,
    replay: Annotated[Path | None, typer.Option(help="Recorded arrivals, NDJSON or CSV, in place of --stations and --fps.")] = None,
    compare: Annotated[str, typer.Option(help="Links, with commas between.")] = "",
    plot: Annotated[Path | None, typer.Option(help="With --compare: draw the links as a PNG.")] = None,
    models: Annotated[Path | None, typer.Option(help="The model repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> bool:
    """Will this card over this cable hold so many stations? The server's engine in virtual time, on costs that were measured or estimated.

    Exit code 0: it holds, 1: it does not, or only at the good end of the estimate, 2: wrong usage. With --compare and without --link: 0
    when one of the links holds.
    """
    from outboard.core.decoding import Decoder
    from outboard.plan import arrivals, report, usage
    from outboard.plan.basis import basis
    from outboard.plan.cure import TRIED, cures
    from outboard.plan.host import host
    from outboard.plan.predict import Demand, Setup
    from outboard.plan.predict import plan as planned
    from outboard.plots import check
    from outboard.settings import load as load_settings

    links = _links(link, compare)
    if policy not in ("live", "lossless"):
        raise usage.Usage(f"--policy is {policy!r}, expected live or lossless")
    if replay is not None and (stations, fps, duration, source, jpeg_bytes) != (1, 15.0, "60s", "4k", 0):
        raise usage.Usage("--replay brings its own frames; leave out --stations, --fps, --duration, --source and --jpeg-bytes")
    if plot is not None and not compare:
        raise usage.Usage("--plot draws what --compare compares; give it links, such as --compare thunderbolt4,oculink")
    if plot is not None:
        check()
    length = usage.seconds("--duration", duration)
    allowed = usage.seconds("--deadline", deadline) if deadline else inf
    width, height = usage.size(source)
    settings = load_settings({"models": models} if models is not None else {})
    spec, network = usage.model(settings.models, model)
    given = network.input
    assert given is not None
    card = basis(gpu, spec, network, settings.cache.expanduser())
    per_megapixel = device_decode_ms / 1e3 or card.decode
    decoder = Decoder(0.0, per_megapixel / 1e6, slows=0.0) if per_megapixel else None  # as it is played: beside the computing
    decode = _Decode(given, decode_ms / 1e3, usage.tiling(tile), settings.limits.tiles)

    if replay is not None:
        frames = arrivals.read(replay)
        asked = f"{len(frames)} frames of {replay.name}"
    else:
        frames = arrivals.steady(stations, fps, length, jpeg_bytes or usage.usual_bytes(width, height), width, height, seed)
        if not frames:
            raise usage.Usage(f"in {length:g} s a station of {fps:g} frames a second sends none; give more --duration")
        each = f"{width}x{height}, {frames[0].bytes / 1e6:.2g} MB each" + (f", {decode(width, height).rows} tiles" if tile else "")
        asked = f"{stations} station{'s' if stations > 1 else ''} of {fps:g} frames a second, {each}"

    def demand(frames: Sequence[Recorded]) -> Demand:
        return Demand(frames, {(f.width, f.height): decode(f.width, f.height) for f in frames}, allowed, policy == "live", seed)

    def others(stations: int, fps: float) -> Demand:
        """Stations that send such frames as the first one is, for a moment."""
        first = frames[0]
        return demand(arrivals.steady(stations, fps, TRIED, first.bytes, first.width, first.height, seed))

    def smaller() -> tuple[str, Demand] | None:
        name = next((name for name, (w, h) in usage.SOURCES.items() if w * h < width * height), "")
        if replay is not None or not name or decode_ms:
            return None
        size = usage.SOURCES[name]
        return name, demand(arrivals.steady(stations, fps, TRIED, usage.usual_bytes(*size), *size, seed))

    setup = Setup(
        link=links[0],
        card=card.card,
        host=host(cores),
        shape=(given.size[1], given.size[0], 3),
        row_bytes=decode.row_bytes(frames),
        answer_bytes=card.answer_bytes,
        max_rows=batch or network.batching.max,
        demand=demand(frames),
        fixed_rows=card.fixed_rows,
        max_delay=network.batching.max_delay_ms / 1e3,
        decoder=decoder,
    )
    plans = [planned(dataclasses.replace(setup, link=name)) for name in links]
    found = [[] if p.worst.holds else cures(p, smaller, None if replay else lambda fps: others(stations, fps)) for p in plans]
    if plot is not None:
        _draw(plot, f"{model} on {gpu or card.text}, {plans[0].worst.fps_asked:.3g} frames a second each", plans[0], links, others)
    host_text = decode.text(setup.host.cores)
    if per_megapixel:
        host_text += f"; or on the card, {per_megapixel * 1e3:g} ms for a megapixel, as given, wherever a frame is ready first"
    if as_json:
        common = {"model": model, "gpu": gpu, "policy": policy, "deadline_ms": allowed * 1e3 if allowed < inf else None}
        common["basis"] = {"card": card.text, "host": host_text}
        print(json.dumps({"plans": [report.entry(p, c) | common for p, c in zip(plans, found, strict=True)]}))
    else:
        late = f", answers within {allowed * 1e3:g} ms" if allowed < inf else ""
        _print(plans, found, f"{model}: {asked}, {policy}{late}", card.text, host_text)
    judged = [p for p in plans if p.setup.link == link] or plans
    return any(p.worst.holds for p in judged)


def _links(link: str, compare: str) -> list[str]:
    """The links to plan for, `link` first where it is given. Raises Usage."""
    from outboard.devices.simulated import LINKS
    from outboard.plan.machine import link as link_of
    from outboard.plan.usage import Usage, checked

    compared = [name.strip() for name in compare.split(",") if name.strip()]
    for option, names in (("--link", [link] if link else []), ("--compare", compared)):
        for name in names:
            checked(option, link_of, name)
    links = list(dict.fromkeys(([link] if link else []) + compared))
    if not links:
        raise Usage(f"--link is missing: expected one of {', '.join(LINKS)}, or a measured rate in GB/s such as 2.1")
    return links


def _print(plans: Sequence[Plan], found: Sequence[list[str]], asked: str, card: str, host: str) -> None:
    from outboard.plan import report
    from outboard.plan.machine import LINK_SOURCES
    from outboard.plan.machine import link as link_of

    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)
    out.print(asked)
    for p in plans:
        rate = link_of(p.setup.link).h2d_bytes_per_s / 1e9
        out.print(f"link: {p.setup.link}, {rate:g} GB/s to the device; {LINK_SOURCES.get(p.setup.link, 'as given')}")
    out.print(f"card: {card}")
    out.print(f"host: {host}")
    out.print()
    out.print(report.one(plans[0]) if len(plans) == 1 else report.comparison(plans))
    out.print()
    said: dict[tuple[str, ...], list[str]] = {}
    for p, cures in zip(plans, found, strict=True):
        lines = [report.sentence(p)]
        if cures:
            lines += [f"What would hold{' (estimate)' if p.estimate else ''}:", *(f"  - {cure}" for cure in cures)]
        elif not p.worst.holds:
            lines.append("No single change that was tried would cure it.")
        said.setdefault(tuple(lines), []).append(p.setup.link)
    for lines, links in said.items():
        out.print(("" if len(plans) == 1 else f"{', '.join(links)}: ") + "\n".join(lines))


def _draw(file: Path, title: str, first: Plan, links: Sequence[str], others: Callable[[int, float], Demand]) -> None:
    """Each link with fewer and more stations than were asked for."""
    from outboard.plan.plot import draw
    from outboard.plan.predict import plan as planned

    setup: Setup = first.setup
    stations = len({f.station for f in setup.demand.frames})
    by_link: dict[str, list[tuple[int, Plan]]] = {name: [] for name in links}
    for n in sorted({max(1, round(stations * i / 4)) for i in range(1, 9)}):
        demand = others(n, first.worst.fps_asked)
        for name in links:
            by_link[name].append((n, planned(dataclasses.replace(setup, link=name, demand=demand))))
    draw(file, title, by_link)


class _Decode:
    """Seconds to decode a frame of some size and fit or cut it, measured once for each size, or given."""

    def __init__(self, network: Input, given: float, tiling: Tiling | None, most_tiles: int):
        self._input, self._given, self._tiling, self._most_tiles = network, given, tiling, most_tiles
        self._known: dict[tuple[int, int], DecodeCost] = {}

    def __call__(self, width: int, height: int) -> DecodeCost:
        from outboard.plan.usage import Usage
        from outboard.problems import Problem

        if (width, height) not in self._known:
            try:
                self._known[width, height] = self._cost(width, height)
            except Problem as e:
                raise Usage(f"--tile: {e.detail}") from e
            except ModuleNotFoundError as e:
                missing = f"{e.name} is missing, so decoding cannot be measured here: pip install 'outboard[server]', or give --decode-ms"
                raise Usage(missing) from e
        return self._known[width, height]

    def row_bytes(self, frames: Sequence[Recorded]) -> int:
        """Of all frames on the average."""
        from outboard.plan import host

        costs = [(self(f.width, f.height).rows, f.width, f.height) for f in frames]
        each = {size: host.row_bytes(*size, self._input, self._tiling, self._most_tiles) for size in {(w, h) for _, w, h in costs}}
        return round(sum(rows * each[w, h] for rows, w, h in costs) / sum(rows for rows, _, _ in costs))

    def _cost(self, width: int, height: int) -> DecodeCost:
        from outboard.plan import host

        if not self._given:
            return host.measure(width, height, self._input, self._tiling, self._most_tiles)
        if self._tiling is None:
            return host.DecodeCost(self._given, 0.0)
        from outboard.imaging import tiles

        return host.DecodeCost(self._given, 0.0, tiles.plan(width, height, self._input, self._tiling, self._most_tiles).rows)

    def text(self, cores: int) -> str:
        from outboard.plan.usage import usual_bytes

        what = "to decode a frame and cut its tiles" if self._tiling is not None else "to decode a frame and fit it"
        if self._given:
            return f"{cores} cores, {self._given * 1e3:.1f} ms {what}, as given"
        shown = [
            f"{w}x{h} {cost.seconds(usual_bytes(w, h)) * 1e3:.1f} ms for {usual_bytes(w, h) / 1e6:.2g} MB"
            for (w, h), cost in self._known.items()
        ]
        return f"{cores} cores; {what}, measured here: {', '.join(shown[:3])}{' …' if len(shown) > 3 else ''}"
