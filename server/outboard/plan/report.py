"""A plan for people and for programs. Beside every number that rests on an estimate stands the word."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

from rich.table import Table

from outboard.plan.predict import Plan, Prediction

_NAMES = {
    "link": "the link",
    "compute": "the card's compute",
    "decode": "decoding on the host",
    "decoder": "the card's JPEG decoder",
    "deadline": "the deadline: frames come too late though nothing is full",
    "waiting": "no single resource, nothing is full: frames come in bursts, or wait for one another's steps",
    "memory": "the card's memory",
}


def entry(plan: Plan, cures: Sequence[str]) -> dict[str, Any]:
    """One of `{"plans": […]}`. Single figures are those of the worst case; `range` holds [worst, best]."""
    worst, best = plan.worst, plan.best

    def both(value: Any) -> list[Any]:
        return [value(worst), value(best)]

    return {
        "link": plan.setup.link,
        "stations": len({f.station for f in plan.setup.demand.frames}),
        "fps": round(worst.fps, 2),
        "fps_asked": round(worst.fps_asked, 2),
        "age_p50_ms": _ms(worst.age_p50),
        "age_p99_ms": _ms(worst.age_p99),
        "sent": worst.sent,
        "answered": worst.answered,
        "dropped": worst.dropped,
        "refused": worst.refused,
        "batch_rows": round(worst.rows, 2),
        "use": {name: round(share, 4) for name, share in worst.use.items()},
        "bottleneck": worst.bottleneck,
        "holds": worst.holds,
        "estimate": plan.estimate,
        "range": {
            "fps": both(lambda p: round(p.fps, 2)),
            "age_p50_ms": both(lambda p: _ms(p.age_p50)),
            "age_p99_ms": both(lambda p: _ms(p.age_p99)),
            "dropped": both(lambda p: p.dropped),
            "holds": both(lambda p: p.holds),
        },
        "cures": list(cures),
    }


def _ms(seconds: float) -> float | None:
    return round(seconds * 1e3, 2) if seconds < inf else None


def _figure(plan: Plan, shown: Any) -> str:
    """ "12.3", or "12.3 to 15.0 (estimate)"."""
    worst, best = shown(plan.worst), shown(plan.best)
    if not plan.estimate:
        return worst
    return f"{worst} (estimate)" if worst == best else f"{worst} to {best} (estimate)"


def _age(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < inf else "none"


def _share(name: str) -> Any:
    return lambda p: f"{p.use.get(name, 0.0):.0%}"


_COLUMNS: tuple[tuple[str, Any], ...] = (
    ("fps a station", lambda p: f"{p.fps:.1f}"),
    ("age p50, ms", lambda p: _age(p.age_p50)),
    ("age p99, ms", lambda p: _age(p.age_p99)),
    ("dropped", lambda p: f"{(p.dropped + p.refused) / max(1, p.sent):.1%}"),
    ("rows in a batch", lambda p: f"{p.rows:.1f}"),
    ("link used", _share("link")),
    ("compute used", _share("compute")),
    ("host used", _share("decode")),
)
_DECODER = ("decoder used", _share("decoder"))


def _columns(plans: Sequence[Plan]) -> tuple[tuple[str, Any], ...]:
    return (*_COLUMNS, _DECODER) if any(plan.setup.decoder for plan in plans) else _COLUMNS


def one(plan: Plan) -> Table:
    """Rows of figures for a single link."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, shown in _columns([plan]):
        table.add_row(name, _figure(plan, shown))
    return table


def comparison(plans: Sequence[Plan]) -> Table:
    """A row for each link."""
    table = Table("link", box=None, header_style="bold", pad_edge=False)
    for name, _ in _columns(plans):
        table.add_column(f"{name} (estimate)" if plans[0].estimate else name, justify="right")
    table.add_column("limit")
    table.add_column("holds")
    for plan in plans:
        figures = [_figure(plan, shown).removesuffix(" (estimate)") for _, shown in _columns(plans)]
        table.add_row(plan.setup.link, *figures, plan.worst.bottleneck, verdict(plan))
    return table


def verdict(plan: Plan) -> str:
    """yes, no, or perhaps: only at the good end of the range."""
    return "yes" if plan.worst.holds else "perhaps" if plan.best.holds else "no"


def sentence(plan: Plan) -> str:
    """What holds or not, and why."""
    p: Prediction = plan.worst
    limit = _NAMES[p.bottleneck]
    if p.holds:
        return f"It holds. What would be full first: {limit}, {p.use[p.bottleneck]:.0%} used{' (estimate)' if plan.estimate else ''}."
    start = "It may hold (estimate): only at the good end of the range." if plan.best.holds else "It does not hold."
    return f"{start} What limits is {limit}."
