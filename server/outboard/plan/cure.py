"""What would make a plan hold that does not: each change is tried by the same simulation, at the worst end of the range."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from outboard.devices.simulated import LINKS
from outboard.plan.cards import CARDS
from outboard.plan.machine import link
from outboard.plan.predict import Demand, Estimate, Plan, Setup, predict

#: Seconds of arrivals that a change is tried with.
TRIED = 10.0
#: Batches are not tried beyond this.
MOST_ROWS = 128


def cures(plan: Plan, smaller: Callable[[], tuple[str, Demand] | None], slower: Callable[[int], Demand] | None) -> list[str]:
    """Sentences, the cheapest change first; of each kind the smallest that suffices. `smaller`: the same frames at fewer pixels, and their
    name; `slower`: the same stations at fewer frames a second."""
    setup, limit = plan.setup, plan.worst.bottleneck
    found = []
    kinds: dict[str, Iterator[tuple[str, Setup]]] = {
        "batch": _batches(setup),
        "precision": _precision(setup),
        "source": _source(setup, smaller),
        "link": _links(setup),
        "cores": _cores(setup),
        "card": _cards(setup),
    }
    concerned = {
        "link": ("link",),
        "compute": ("batch", "precision", "card"),
        "memory": ("precision", "card"),
        "decode": ("source", "cores"),
        "deadline": tuple(kinds),
        "waiting": tuple(kinds),
    }[limit]
    for kind in concerned:
        found += next(([text] for text, changed in kinds[kind] if _holds(changed)), [])
    if slower is not None and (fps := _fastest(setup, slower, round(plan.worst.fps_asked))) > 0:
        found.append(f"or ask for less: {fps} frames a second of each station hold here")
    return found


def _holds(setup: Setup) -> bool:
    return predict(dataclasses.replace(setup, demand=setup.demand.until(TRIED))).holds


def _batches(setup: Setup) -> Iterator[tuple[str, Setup]]:
    rows = setup.max_rows
    while (rows := 2 * rows) <= MOST_ROWS and not setup.fixed_rows:
        yield f"batches of up to {rows} rows (max = {rows} in [batching] of model.toml)", dataclasses.replace(setup, max_rows=rows)


def _precision(setup: Setup) -> Iterator[tuple[str, Setup]]:
    if isinstance(setup.card, Estimate) and setup.card.precision == "fp32":
        card = dataclasses.replace(setup.card, precision="fp16")
        yield 'half precision (precision = "fp16" in [run] of model.toml)', dataclasses.replace(setup, card=card)


def _source(setup: Setup, smaller: Callable[[], tuple[str, Demand] | None]) -> Iterator[tuple[str, Setup]]:
    if (found := smaller()) is not None:
        name, demand = found
        yield f"frames of {name}", dataclasses.replace(setup, demand=demand)


def _links(setup: Setup) -> Iterator[tuple[str, Setup]]:
    now = link(setup.link).h2d_bytes_per_s
    for name, (h2d, _) in sorted(LINKS.items(), key=lambda item: item[1]):
        if h2d > now:
            yield f"{name} as the cable", dataclasses.replace(setup, link=name)


def _cores(setup: Setup) -> Iterator[tuple[str, Setup]]:
    for cores in (2 * setup.host.cores, 4 * setup.host.cores, 8 * setup.host.cores):
        host = dataclasses.replace(setup.host, cores=cores, decode_threads=cores + 1)
        yield f"a host of {cores} such cores", dataclasses.replace(setup, host=host)


def _cards(setup: Setup) -> Iterator[tuple[str, Setup]]:
    if not isinstance(setup.card, Estimate):
        return
    for card in sorted(CARDS, key=lambda c: c.fp32):
        if card.fp32 > setup.card.card.fp32 or card.vram > setup.card.card.vram:
            yield f"{card.name} as the card", dataclasses.replace(setup, card=dataclasses.replace(setup.card, card=card))


def _fastest(setup: Setup, slower: Callable[[int], Demand], asked: int) -> int:
    """The most frames a second, below what was asked, that hold; 0: none."""
    low, high = 0, asked
    while high - low > 1:
        middle = (low + high) // 2
        holds = _holds(dataclasses.replace(setup, demand=slower(middle)))
        low, high = (middle, high) if holds else (low, middle)
    return low
