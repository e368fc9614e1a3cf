"""All checks, in the order in which one would look: cable, card, link, power, log, libraries, limits."""

from __future__ import annotations

from outboard.doctor import card, enclosure, libraries, limits, link, power, xid
from outboard.doctor.facts import Facts, gather
from outboard.doctor.findings import SEVERITIES, Check, Finding
from outboard.doctor.machine import Machine

#: Title of an area -> the module with its checks.
AREAS = {
    "Enclosure and cable": enclosure,
    "Card": card,
    "Link": link,
    "Power, heat and memory": power,
    "Kernel log": xid,
    "Libraries": libraries,
    "Limits": limits,
}
CHECKS: dict[str, tuple[Check, ...]] = {title: area.CHECKS for title, area in AREAS.items()}


def examine(machine: Machine) -> tuple[Facts, list[Finding]]:
    """What is there, and what is to be said of it: the worst first, else in the order of the areas."""
    facts = gather(machine)
    found = [finding for area in AREAS.values() for finding in area.look(facts)]
    return facts, sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
