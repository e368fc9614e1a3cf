"""Outboard, the servers people use otherwise, and the bare loop that none of them can beat: side by side, in one go.

    make venv && loadtests/peers/setup.sh
    .venv/bin/python loadtests/peers/compare.py --target 4k=0.90 --target small=0.90 --target small:best-peer=1.10

A closed loop of wrk posts 4K and small JPEGs to one server after another, in interleaved rounds: machines drift, and what counts
is the ratio to the loop of the same round. Each server is started anew in each round. Before anything is measured all sides must
agree about every picture.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

import prepare
from figures import missed, show, summarise
from measure import LOOP, measure_loop, measure_server, reference
from sides import CACHE, PROCESSES, SERVERS


def main(
    sides: Annotated[
        str, typer.Option(help="which to run, comma-separated: " + ", ".join([LOOP, *SERVERS]))
    ] = "loop,outboard,mosec,triton,naive",
    workloads: Annotated[str, typer.Option(help="comma-separated: " + ", ".join(prepare.WORKLOADS))] = "4k,small",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    seconds: Annotated[float, typer.Option(min=1, help="of each measurement")] = 8,
    connections: Annotated[int, typer.Option(min=1)] = 16,
    loop_batches: Annotated[str, typer.Option(help="batch sizes of the bare loop")] = "1,4,8",
    target: Annotated[
        list[str] | None, typer.Option(help="WORKLOAD[:loop|best-loop|best-peer|SIDE]=RATIO that outboard must reach")
    ] = None,
    max_p99: Annotated[float, typer.Option(help="outboard's p99 may be this many times its p50 (0: not checked)")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write every figure here")] = None,
) -> None:
    """Compare Outboard with its peers and with the bare loop. Exit status 1: a target was missed."""
    console = Console() if sys.stdout.isatty() else Console(width=150)
    chosen, targets = sides.split(","), [parse_target(text) for text in target or []]
    if unknown := set(chosen) - {LOOP, *SERVERS}:
        raise typer.BadParameter(f"unknown sides {sorted(unknown)}; there are {[LOOP, *SERVERS]}")
    if unknown := set(workloads.split(",")) - set(prepare.WORKLOADS):
        raise typer.BadParameter(f"unknown workloads {sorted(unknown)}; there are {list(prepare.WORKLOADS)}")
    if not shutil.which("wrk"):
        sys.exit("wrk is not installed (Debian: apt-get install wrk)")
    every = prepare.images(CACHE / "data")
    model = prepare.repository(CACHE / "data" / "models", every["small"])
    files = {name: every[name] for name in workloads.split(",")}
    expected = reference(files, model)

    rows: list[dict] = []
    for turn in range(rounds):
        order = chosen if turn % 2 == 0 else chosen[::-1]
        for name in order:
            console.print(f"round {turn + 1} of {rounds}: {name}", highlight=False)
            batches = [int(batch) for batch in loop_batches.split(",")]
            measured = (
                measure_loop(files, model, batches, seconds)
                if name == LOOP
                else measure_server(SERVERS[name], files, expected, model, connections, seconds)
            )
            rows += [{"round": turn, **row} for row in measured]
    summaries = summarise(rows, list(files))
    for workload in files:
        show(console, summaries, workload)
    failures = missed(targets, max_p99, rows, summaries)
    if json_file:
        about = {"when": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "cores": PROCESSES, "kernel": platform.release(), "cpu": cpu_name()}
        about |= {"connections": connections, "seconds": seconds, "rounds": rounds, "sides": {s.name: s.about for s in SERVERS.values()}}
        json_file.write_text(json.dumps({"about": about, "summary": summaries, "rows": rows, "missed": failures}, indent=1))
    for failure in failures:
        console.print(f"[red]missed:[/] {failure}", highlight=False)
    raise typer.Exit(1 if failures else 0)


def parse_target(text: str) -> tuple[str, str, float]:
    """WORKLOAD[:OTHER]=RATIO."""
    what, _, wanted = text.partition("=")
    workload, _, other = what.partition(":")
    other = other or LOOP
    if workload not in prepare.WORKLOADS or (other not in {LOOP, "best-loop", "best-peer", *SERVERS}):
        raise typer.BadParameter(
            f"{text!r} is not WORKLOAD[:OTHER]=RATIO with a workload of {list(prepare.WORKLOADS)}, such as 4k=0.90 or 4k:mosec=1.05"
        )
    try:
        return workload, other, float(wanted)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: {wanted!r} is not a number") from None


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    typer.run(main)
