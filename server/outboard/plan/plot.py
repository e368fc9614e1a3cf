"""A picture of links compared: what a station gets as more stations come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from outboard.plan.predict import Plan
from outboard.plots import pyplot, save


def draw(file: Path, title: str, by_link: Mapping[str, Sequence[tuple[int, Plan]]]) -> None:
    """`by_link`: for each link (stations, plan). Lines are the worst case, dotted ones the best."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    estimate = False
    for i, (name, points) in enumerate(by_link.items()):
        stations = [n for n, _ in points]
        estimate = estimate or points[0][1].estimate
        # Links that make no difference lie on each other: the later ones are thinner, so that all are seen.
        style = {"color": f"C{i}", "linewidth": 6.0 - 4.5 * i / max(1, len(by_link) - 1)}
        for axes, value in ((left, lambda p: p.fps), (right, lambda p: p.age_p50 * 1e3)):
            axes.plot(stations, [value(plan.worst) for _, plan in points], label=name, **style)
            if estimate:
                axes.plot(stations, [value(plan.best) for _, plan in points], linestyle=":", **(style | {"linewidth": 1.5}))
    suffix = " (estimate)" if estimate else ""
    left.set(xlabel="stations", ylabel=f"answers a second, each station{suffix}", ylim=(0, None))
    right.set(xlabel="stations", ylabel=f"age p50, ms{suffix}", ylim=(0, None))
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, file)
