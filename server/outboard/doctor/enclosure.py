"""The enclosure and its cable: authorised, allowed to carry PCIe, as fast as it should be."""

from __future__ import annotations

from collections.abc import Iterator

from outboard.doctor.facts import Facts
from outboard.doctor.findings import Check, Finding
from outboard.doctor.machine import read

UNAUTHORISED = Check(
    "thunderbolt-unauthorised",
    "problem",
    "A Thunderbolt or USB4 device is plugged in, and nobody has authorised it.",
    "Until it is authorised the kernel makes no PCIe tunnel to it, so the card in it does not exist for this machine.",
    ("boltctl enroll {uuid}   # now and for ever", "echo 1 | sudo tee /sys/bus/thunderbolt/devices/{id}/authorized   # this time"),
)
NO_TUNNELS = Check(
    "thunderbolt-without-pcie",
    "problem",
    "The firmware allows this Thunderbolt controller no PCIe.",
    "At this security level only displays and USB pass through the cable; a card in the enclosure cannot be seen.",
    ('In the firmware\'s setup set Thunderbolt security to "user authorization" (user) or "none", and allow PCIe tunnelling.',),
)
SLOW_CABLE = Check(
    "thunderbolt-slow-cable",
    "warning",
    "The cable runs at less than the 40 Gb/s that Thunderbolt 3 and later can do.",
    "Every picture crosses this cable. A passive Thunderbolt 3 cable of more than half a metre, a USB-C cable or a damaged one runs with "
    "one lane or half the speed.",
    ("Use a cable that is marked Thunderbolt with 40 Gb/s or more, as short as possible, plugged directly into the computer.",),
)
BEFORE_BOLT = Check(
    "starts-before-bolt",
    "warning",
    "A systemd unit starts Outboard without waiting for bolt.",
    "At boot the server then looks for the card before bolt has authorised its enclosure. It goes on looking and adopts the card later, "
    "but a named --device begins as lost, and the first frames are answered by the CPU.",
    ("sudo systemctl edit {unit}   # [Unit] with the lines Wants=bolt.service and After=bolt.service",),
)
CHECKS = (UNAUTHORISED, NO_TUNNELS, SLOW_CABLE, BEFORE_BOLT)

#: Security levels at which there is no PCIe (Linux, Documentation/admin-guide/thunderbolt.rst).
_NO_PCIE = ("dponly", "usbonly", "nopcie")
_UNITS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def look(facts: Facts) -> Iterator[Finding]:
    closed = {domain.name: domain.security for domain in facts.domains if domain.security in _NO_PCIE}
    for router in facts.routers:
        if router.domain in closed:
            yield NO_TUNNELS.found(router.subject, f"Security of {router.domain} is {closed[router.domain]!r}.")
        elif not router.authorised:
            yield UNAUTHORISED.found(router.subject, "It waits to be authorised.", uuid=router.uuid or "UUID", id=router.id)
        elif router.generation >= 3 and 0 < router.gbit < 40:
            lanes = "1 lane" if router.lanes == 1 else f"{router.lanes} lanes"
            speed = f"{router.gbit:g} Gb/s ({lanes} of {router.lane_gbit:g} Gb/s)"
            yield SLOW_CABLE.found(router.subject, f"{router.standard}, and its cable runs at {speed}.")
    if any(domain.security in ("user", "secure") for domain in facts.domains):
        yield from _units(facts)


def _units(facts: Facts) -> Iterator[Finding]:
    seen = set()
    for folder in _UNITS:
        for unit in sorted(facts.machine.path(folder).glob("*.service")):
            texts = [read(file) for file in (unit, *sorted(unit.parent.glob(f"{unit.name}.d/*.conf")))]
            lines = [line.strip() for text in texts for line in text.splitlines()]
            starts = any(line.startswith("ExecStart") and "outboard" in line and " serve" in line for line in lines)
            if starts and unit.name not in seen:
                seen.add(unit.name)
                if not any(line.startswith("After=") and "bolt.service" in line for line in lines):
                    yield BEFORE_BOLT.found(unit.name, f"{folder}/{unit.name} has no After=bolt.service.", unit=unit.name)
