"""The way between computer and card: lanes, errors, what was measured of it, and combinations that are known to be unstable."""

from __future__ import annotations

from collections.abc import Iterator

from outboard.devices.simulated import LINKS
from outboard.doctor.facts import Facts
from outboard.doctor.findings import Check, Finding
from outboard.doctor.machine import Machine, read
from outboard.doctor.pci import Card

NARROW = Check(
    "link-narrow",
    "warning",
    "The card's PCIe link has fewer lanes than card and slot can do.",
    "Each lane that is missing takes its share of the bandwidth. Lanes do not go to sleep: a link that is narrow when idle is narrow.",
    ("Switch off, clean and reseat the card (and riser or cable); try another slot.",),
)
SLOW = Check(
    "link-slow",
    "warning",
    "The card's PCIe link is slower than card and slot can do, while the card works.",
    "An idle link goes down to 2.5 GT/s and that is well; one that stays there under load has been trained down, by a bad cable or riser.",
    ("Reseat the card or the cable; set the slot's PCIe speed in the firmware's setup.", "sudo dmesg | grep -i -e aer -e pcieport"),
)
BANDWIDTH = Check(
    "bandwidth-low",
    "warning",
    "The bandwidth that Outboard measured is far below what this kind of link gives elsewhere.",
    "Pictures take so much longer to the card. Speed and lanes that sysfs shows can lie, a measurement does not. What others got in "
    "GB/s: Thunderbolt 3 2.4 and Thunderbolt 4 or USB4 2.75 (secondary sources), Thunderbolt 5 5.6, OCuLink 6.6, PCIe 4.0 x16 25.",
    (
        "Use another cable and another port; plug the enclosure directly into the computer, without a dock.",
        "outboard profile   # measure again, with nothing else running",
    ),
)
ERRORS = Check(
    "pcie-errors",
    "warning",
    "The PCIe links to the card have counted transmission errors.",
    "A few corrected errors are harmless; many, or one that was not corrected, come from a bad cable, riser or connector.",
    ("Replace the cable, reseat its plugs.", "cat /sys/bus/pci/devices/{address}/aer_dev_correctable"),
)
BLACKWELL = Check(
    "blackwell-over-cable",
    "warning",
    "A card of the RTX 50 series (Blackwell) is at the end of a Thunderbolt, USB4 or OCuLink cable.",
    "This combination is known to be unstable on Linux: the machine may freeze at the first CUDA operation although nvidia-smi works "
    "(NVIDIA/open-gpu-kernel-modules issues 979, 974, 900 and 1247). Some were cured by the settings below, others were not.",
    (
        "Kernel parameters: pcie_port_pm=off pcie_aspm.policy=performance thunderbolt.clx=0 pci=assign-busses,hpbussize=0x10,realloc",
        "Cap the link at 8 GT/s with setpci before the driver is loaded; OCuLink: pcie_ports=native",
    ),
)
OCULINK = Check(
    "oculink-not-hot-pluggable",
    "note",
    "The card seems to be attached by OCuLink, or by an adapter in an M.2 slot.",
    "OCuLink is not hot-pluggable in practice: pulling or plugging the cable while the computer runs can freeze it. Nothing in sysfs "
    "tells such a card from a built-in one but its few lanes.",
    ("Switch the computer off before you plug or pull this cable.",),
)
INTERNAL = Check(
    "driver-takes-it-for-internal",
    "note",
    "The card is external, and NVIDIA's driver takes it for a built-in one.",
    "The driver knows only Thunderbolt 3 enclosures behind Intel bridges as external. When another one is unplugged, removal waits until "
    "every program has closed the card, desktop and monitors included, and hot-plugging may need a restart.",
    ("Before you pull the cable: outboard eject DEVICE",),
)
CHECKS = (NARROW, SLOW, BANDWIDTH, ERRORS, BLACKWELL, OCULINK, INTERNAL)

#: GB/s of a lane at GT/s, after line coding (8b/10b up to 5, 128b/130b from 8 on).
_LANE = {2.5: 0.25, 5.0: 0.5, 8.0: 0.985, 16.0: 1.969, 32.0: 3.938}
#: Share of it that pinned copies get: 12.1 of 15.8 at PCIe 3.0 x16, 25 of 31.5 at 4.0 x16.
_PINNED = 0.77
#: Measured bandwidth below this share of what the link gives elsewhere is worth a word.
_LOW = 0.7
#: Corrected errors since boot.
_MANY = 100


def look(facts: Facts) -> Iterator[Finding]:
    for card in facts.cards:
        if card.gone or not card.driver:
            continue
        if 0 < card.now.lanes < card.possible.lanes:
            yield NARROW.found(card.subject, f"It runs with {card.now.lanes} lanes; card and slot can do {card.possible.lanes}.")
        nvml = facts.nvml.gpus.get(card.address, {})
        works, now, best = nvml.get("utilisation") or 0, nvml.get("pcie_generation"), nvml.get("pcie_generation_possible")
        if works >= 20 and now and best and now < best and not card.domain:
            yield SLOW.found(card.subject, f"The card is {works} % busy and its link is at generation {now} of {best}.")
        if finding := _bandwidth(facts, card):
            yield finding
        yield from _errors(facts.machine, card)
        over_cable = card.external or card.perhaps_oculink
        if card.blackwell and over_cable and "pcie_port_pm=off" not in read(facts.machine.path("/proc/cmdline")).split():
            yield BLACKWELL.found(card.subject, "The kernel was started without pcie_port_pm=off.")
        if card.perhaps_oculink:
            yield OCULINK.found(card.subject, f"A card of {card.card.lanes} lanes is on a port of {card.port.lanes}.")
        if card.external and any(router.generation != 3 for router in facts.routers_of(card)):
            yield INTERNAL.found(card.subject, f"It is external ({card.external_by}), over {facts.routers_of(card)[0].standard}.")


def expected_gb_per_s(facts: Facts, card: Card) -> tuple[str, float]:
    """What others got over such a link: (its name, GB/s to the card); 0: not known."""
    if routers := facts.routers_of(card):
        slowest = min(routers, key=lambda router: router.gbit or 1e9)
        if slowest.generation < 3:
            return slowest.standard, 0.0
        preset = "thunderbolt3" if slowest.generation == 3 else "thunderbolt5" if slowest.lane_gbit >= 40 else "thunderbolt4"
        return slowest.standard, LINKS[preset][0] / 1e9
    return f"PCIe at {card.possible}", _LANE.get(card.possible.speed, 0.0) * card.possible.lanes * _PINNED


def _bandwidth(facts: Facts, card: Card) -> Finding | None:
    measured = facts.links.get(card.uuid)
    name, expected = expected_gb_per_s(facts, card)
    if measured is None or measured.h2d_bytes_per_s / 1e9 >= _LOW * expected:
        return None
    return BANDWIDTH.found(card.subject, f"{measured.h2d_bytes_per_s / 1e9:.2f} GB/s to the card; {name} gives about {expected:.1f}.")


def _errors(machine: Machine, card: Card) -> Iterator[Finding]:
    """Counters of the card and of every port above it (Linux, Documentation/ABI/testing/sysfs-bus-pci-devices-aer)."""
    for address in (card.address, *card.ports):
        corrected = _total(machine, address, "aer_dev_correctable", "TOTAL_ERR_COR")
        other = sum(_total(machine, address, f"aer_dev_{kind}fatal", f"TOTAL_ERR_{kind.upper()}FATAL") for kind in ("", "non"))
        if corrected >= _MANY or other:
            yield ERRORS.found(f"{address}, the way to {card.subject}" if address != card.address else card.subject,
                               f"{corrected} corrected errors and {other} others since the machine started.", address=address)  # fmt: skip


def _total(machine: Machine, address: str, file: str, name: str) -> int:
    for line in read(machine.pci / address / file).splitlines():
        key, _, value = line.rpartition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0
