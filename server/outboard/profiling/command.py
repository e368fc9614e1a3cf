"""`outboard profile`: from words on the command line to a table. Heavy imports wait until they are needed: every command passes here."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from outboard.refusal import refuse

if TYPE_CHECKING:
    from outboard.profiling.findings import Findings
    from outboard.profiling.run import Measured

EXAMPLE = "Example: outboard profile yolov2_tiny --device sim:thunderbolt4,compute=8+4 --deadline 100ms --plot profile.png"


def profile(
    model: Annotated[str, typer.Argument(help="A model of the repository.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda:0, a GPU's UUID, or a simulated one such as sim:thunderbolt4.")] = "auto",
    deadline: Annotated[str, typer.Option(help="When an answer is worthless, such as 200ms: how large may a batch be then?")] = "",
    plot: Annotated[Path | None, typer.Option(help="Draw batch size against throughput and latency as a PNG.")] = None,
    models: Annotated[Path | None, typer.Option(help="The model repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure what a model costs on a device, without a server, and keep it: servers and plans begin with it.

    Exit code 1: the model does not run there, 2: wrong usage.
    """
    from outboard import plots, repository
    from outboard.devices.simulated import parse
    from outboard.plan.usage import seconds
    from outboard.profiling import findings, run
    from outboard.profiling import plot as picture
    from outboard.settings import load as load_settings

    err = Console(stderr=True)

    try:
        settings = load_settings({"models": models} if models else {})
        if device.startswith("sim:"):
            parse(device)
        limit = seconds("--deadline", deadline) if deadline else None
        if plot is not None:
            plots.check()
    except (ValueError, plots.PlotMissing) as e:  # a setting, a time, a simulated device
        raise refuse(e, 2) from e
    folder = settings.models / model
    if not (folder / "model.toml").is_file():
        known = ", ".join(repository.names(settings.models)) or "none"
        raise refuse(f"there is no model {model!r} in {settings.models}; there are: {known}", 2)

    async def measured() -> list[Measured]:
        return await run.measure(spec, await run.find(device), settings.cache.expanduser(), settings.devices.headroom)

    try:
        spec = repository.read(folder)
        results = asyncio.run(measured())
    except (repository.ModelProblem, run.CannotMeasure) as e:
        raise refuse(e, 1) from e
    found = [(m, findings.find(m, spec.networks[part].batching.max, limit)) for part, m in zip(spec.networks, results, strict=True)]
    if as_json:
        print(json.dumps({"profiles": [findings.as_dict(m, f) for m, f in found]}))
    else:
        out = Console(width=None if sys.stdout.isatty() else 120)
        for m, f in found:
            _print(out, m, f)
    if plot is not None:
        picture.draw(plot, found)
        err.print(f"{plot} is drawn", highlight=False)


def _print(out: Console, measured: Measured, found: Findings) -> None:
    hello, loaded, memory = measured.hello, measured.loaded, measured.memory
    out.print(f"\n{loaded.model} on {hello.name} ({loaded.provider})", style="bold", highlight=False, markup=False)
    if (link := hello.link) is not None:
        rates = f"{link.h2d_bytes_per_s / 1e9:.2f} GB/s to the device, {link.d2h_bytes_per_s / 1e9:.2f} back"
        both = f"both at once {link.both_h2d_bytes_per_s / 1e9:.2f} and {link.both_d2h_bytes_per_s / 1e9:.2f}"
        out.print(f"link: {rates} ({both}), latency {link.h2d_latency * 1e6:.0f} us", highlight=False, soft_wrap=True)
    if memory.total:
        holds = f"the loaded network holds {loaded.memory_bytes >> 20} MiB"
        out.print(f"memory: {memory.describe()}; {holds}", highlight=False, markup=False, soft_wrap=True)
    if (decoder := loaded.decoder) is not None:
        costs = f"{decoder.per_picture * 1e3:.2f} ms a picture and {decoder.per_pixel * 1e9:.2f} ms a megapixel"
        beside = f"a second of it costs {decoder.slows:.2f} s of computing"
        out.print(f"JPEG decoder: {costs}, the making of rows included; {beside}", highlight=False, soft_wrap=True)
    columns = ("Rows", "ms a batch", "of it upload", "ms when busy", "Rows a second", "Memory", "")
    table = Table(*columns, box=None, header_style="bold", pad_edge=False)
    for column in table.columns[:-1]:
        column.justify = "right"
    for cost in loaded.costs:
        marks = ["used" if cost.rows == found.batch else ""]
        table.add_row(
            str(cost.rows),
            f"{cost.alone * 1e3:.2f}",
            f"{cost.upload * 1e3:.2f}" if cost.upload else "",
            f"{cost.seconds * 1e3:.2f}",
            f"{cost.rows / cost.seconds:.1f}",
            f"{cost.memory / (1 << 20):.1f} MiB" if cost.memory else "",
            *marks,
        )
    out.print(table)
    caps = [("fit the memory", found.vram_cap), ("meet the deadline", found.deadline_cap)]
    said = [f"at most {cap} rows {what}" if cap else f"not one row can {what}" for what, cap in caps if cap is not None]
    out.print("; ".join([f"batches of {found.batch} are used, {found.at_once} at once", *said]), highlight=False)
