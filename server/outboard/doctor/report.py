"""What the doctor found, for people (80 columns) and for programs."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator
from typing import Any

from outboard.devices import driver
from outboard.doctor.facts import Facts
from outboard.doctor.findings import SEVERITIES, Finding

WIDTH = 80


def as_json(facts: Facts, findings: list[Finding]) -> dict[str, Any]:
    cards = []
    for card in facts.cards:
        link = facts.links.get(card.uuid)
        cards.append(
            dataclasses.asdict(card)
            | {
                "over": [dataclasses.asdict(router) for router in facts.routers_of(card)],
                "nvml": facts.nvml.gpus.get(card.address),
                "h2d_bytes_per_s": link.h2d_bytes_per_s if link else None,
                "d2h_bytes_per_s": link.d2h_bytes_per_s if link else None,
            }
        )
    return {
        "driver": driver.as_text(facts.driver) or None,
        "cards": cards,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "well": well(findings),
    }


def well(findings: list[Finding]) -> bool:
    """Whether nothing is wrong; notes are not."""
    return all(finding.severity == "note" for finding in findings)


def as_text(facts: Facts, findings: list[Finding]) -> str:
    lines = [line for card in facts.cards for line in (*_card(facts, card), "")]
    for finding in findings:
        lines += [*_finding(finding), ""]
    counts = [(severity, sum(finding.severity == severity for finding in findings)) for severity in SEVERITIES]
    said = ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for severity, n in counts if n)
    lines.append(said[0].upper() + said[1:] + "." if said else "Nothing to say: all that could be checked is well.")
    return "\n".join(lines)


def _card(facts: Facts, card: Any) -> Iterator[str]:
    yield card.subject
    over = "; ".join(f"{router.name}, {router.standard}, {router.gbit:g} Gb/s" for router in facts.routers_of(card))
    where = f"external ({card.external_by})" if card.external else "internal, by all signs"
    yield from _wrapped(f"{where}{': ' if over else ''}{over}")
    if card.now.lanes and not card.gone:
        yield from _wrapped(f"PCIe {card.now} now, {card.possible} possible; an idle link goes down to 2.5 GT/s")
    if link := facts.links.get(card.uuid):
        yield from _wrapped(f"measured: {link.h2d_bytes_per_s / 1e9:.2f} GB/s to it, {link.d2h_bytes_per_s / 1e9:.2f} GB/s back")
    if nvml := facts.nvml.gpus.get(card.address):
        parts = [
            f"{nvml['temperature_c']} °C" if nvml["temperature_c"] is not None else "",
            f"{nvml['power_w']:.0f} of {nvml['limit_w']:.0f} W" if nvml["power_w"] is not None and nvml["limit_w"] else "",
            f"{nvml['used_bytes'] / 2**30:.1f} of {nvml['memory_bytes'] / 2**30:.1f} GiB in use",
        ]
        yield from _wrapped(", ".join(part for part in parts if part))
    if facts.driver:
        yield from _wrapped(f"driver {driver.as_text(facts.driver)}")


def _finding(finding: Finding) -> Iterator[str]:
    yield from textwrap.wrap(f"{finding.severity.upper()} {finding.check}: {finding.subject}", WIDTH, subsequent_indent="  ")
    yield from _wrapped(finding.what)
    yield from _wrapped(f"Why: {finding.why}")
    for step in finding.mend:  # as it is, however long: it is there to be copied
        yield f"  > {step}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_long_words=False)
