"""From measurements to figures: ratios within a round, medians over the rounds, the table, and the targets that were missed."""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

import prepare
from measure import LOOP

#: Above this share of one core, somebody else's work spoils the figures.
NOISE = 0.15


def summarise(rows: list[dict], workloads: list[str]) -> list[dict]:
    """One line for each workload and side."""
    loops = {row["side"] for row in rows if row["side"].startswith(LOOP)}
    peers = {row["side"] for row in rows} - loops - {"outboard"}
    out = []
    for workload in workloads:
        for side in dict.fromkeys(row["side"] for row in rows if row["workload"] == workload):
            mine = [row for row in rows if row["workload"] == workload and row["side"] == side]
            rates = [row["fps"] for row in mine]
            summary = {"workload": workload, "side": side, "fps": median(rates), "fps_low": min(rates), "fps_high": max(rates)}
            summary["of_loop"] = ratio(rows, workload, side, {LOOP})
            summary["of_best_loop"] = ratio(rows, workload, side, loops)
            summary |= {key: median(row[key] for row in mine) for key in ("server_cpu", "children_cpu", "other_cpu")}
            if side not in loops:
                summary["of_best_peer"] = ratio(rows, workload, side, peers - {side})
                summary |= {key: median(row[key] for row in mine) for key in ("p50_ms", "p99_ms")}
                summary |= {key: sum(row[key] for row in mine) for key in ("answers", "bad")}
            out.append(summary)
    return out


def ratio(rows: list[dict], workload: str, side: str, other: set[str]) -> float:
    """The median over the rounds of fps of `side` / best fps among `other`, each within one round; 0 if one is missing."""
    by_round: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["workload"] == workload:
            by_round.setdefault(row["round"], {})[row["side"]] = row["fps"]
    ratios = [fps[side] / max(fps[o] for o in other if o in fps) for fps in by_round.values() if side in fps and other & fps.keys()]
    return median(ratios) if ratios else 0.0


def show(console: Console, summaries: list[dict], workload: str) -> None:
    table = Table("side", title=f"{workload}: {prepare.DESCRIPTION[workload]}", title_justify="left")
    headings = "fps|low-high|/ loop|/ best loop|/ best peer|p50 ms|p99 ms|bad|answers|server CPU|wrk CPU|other CPU"
    for heading in headings.split("|"):
        table.add_column(heading, justify="right")
    mine = [summary for summary in summaries if summary["workload"] == workload]
    for s in mine:
        cells = [f"{s['fps']:.1f}", f"{s['fps_low']:.0f}-{s['fps_high']:.0f}", _share(s["of_loop"]), _share(s["of_best_loop"])]
        if "p50_ms" in s:
            cells += [_share(s["of_best_peer"]), f"{s['p50_ms']:.1f}", f"{s['p99_ms']:.1f}", str(s["bad"]), str(s["answers"])]
            cells += [f"{s['server_cpu']:.0%}", f"{s['children_cpu']:.0%}"]
        else:
            cells += [""] * 7
        table.add_row(s["side"], *cells, f"{max(0, s['other_cpu']):.0%}", style="bold" if s["side"] == "outboard" else "")
    console.print(table)
    noisy = [s["side"] for s in mine if s["other_cpu"] > NOISE]
    if noisy:
        console.print(f"[yellow]Something else used more than {NOISE:.0%} of a core beside {'; '.join(noisy)}: repeat on a quiet machine.")


def _share(value: float) -> str:
    return f"{value:.2f}" if value else "-"


def missed(targets: list[tuple[str, str, float]], limit: float, rows: list[dict], summaries: list[dict]) -> list[str]:
    """What did not reach its target, in words."""
    out = []
    sides = {row["side"] for row in rows}
    loops = {side for side in sides if side.startswith(LOOP)}
    groups = {"best-loop": loops, "best-peer": sides - loops - {"outboard"}}
    for workload, other, wanted in targets:
        got = ratio(rows, workload, "outboard", groups.get(other, {other}))
        if not got:
            out.append(f"{workload}: outboard against {other} was not measured")
        elif got < wanted:
            out.append(f"{workload}: outboard is {got:.3f} of {other}, wanted at least {wanted}")
    for s in summaries:
        if s["side"] != "outboard":
            continue
        if s["bad"]:
            out.append(f"{s['workload']}: {s['bad']} of outboard's {s['answers']} answers were bad")
        if limit and s["p99_ms"] > limit * s["p50_ms"]:
            out.append(f"{s['workload']}: p99 is {s['p99_ms'] / s['p50_ms']:.2f} x p50, wanted at most {limit}")
    return out
