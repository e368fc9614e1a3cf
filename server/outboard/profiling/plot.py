"""Batch size against throughput and latency, as a picture."""

from __future__ import annotations

from pathlib import Path

from outboard.plots import pyplot, save
from outboard.profiling.findings import Findings
from outboard.profiling.run import Measured


def draw(file: Path, results: list[tuple[Measured, Findings]]) -> None:
    """One row of two charts for each network."""
    plt = pyplot()
    figure, grid = plt.subplots(len(results), 2, figsize=(9, 3.4 * len(results)), layout="constrained", squeeze=False)
    for (measured, found), (left, right) in zip(results, grid, strict=True):
        costs = measured.loaded.costs
        rows = [c.rows for c in costs]
        left.plot(rows, [c.rows / c.seconds for c in costs], marker="o", markersize=4)
        right.plot(rows, [c.alone * 1e3 for c in costs], marker="o", markersize=4, label="alone")
        right.plot(rows, [c.seconds * 1e3 for c in costs], marker="o", markersize=4, label="when busy")
        marks = (("used", found.batch, "-"), ("VRAM cap", found.vram_cap, "--"), ("deadline cap", found.deadline_cap, ":"))
        for axes in (left, right):
            for i, (name, at, style) in enumerate(marks, 2):
                if at:
                    axes.axvline(at, color=f"C{i}", linestyle=style, linewidth=1.2, label=f"{name}: {at}")
            axes.set_xscale("log", base=2)
            axes.set_xticks(rows, [str(n) for n in rows])
            axes.minorticks_off()
            axes.set(xlabel="rows of a batch", ylim=(0, None))
            for side in ("top", "right"):
                axes.spines[side].set_visible(False)
            axes.legend(frameon=False, fontsize="small")
        left.set(ylabel="rows a second")
        left.set_title(f"{measured.loaded.model} on {measured.hello.name}", loc="left", fontsize="medium")
        right.set(ylabel="ms a batch")
    save(figure, file)
