"""Power, heat and memory of the card: what NVML says, and what the kernel may put to sleep."""

from __future__ import annotations

from collections.abc import Iterator

from outboard.doctor.facts import Facts
from outboard.doctor.findings import Check, Finding
from outboard.doctor.machine import Machine, read
from outboard.doctor.pci import Card

HANGS = Check(
    "driver-hangs",
    "problem",
    "NVML does not answer: the driver hangs.",
    "A lost card can block every program that asks the driver, nvidia-smi too. The server does not: it ends its worker and goes on.",
    ("End what has the card open: sudo fuser -v /dev/nvidia*; then restart the machine if nvidia-smi still hangs.",),
)
REFUSES = Check(
    "driver-refuses",
    "problem",
    "NVML cannot be used.",
    "The driver's kernel module and its libraries are of different versions after an update, or the module does not work.",
    (
        "nvidia-smi   # says the same, with its own words",
        "Restart the machine, or: sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia",
    ),
)
HOT = Check(
    "throttled-by-heat",
    "warning",
    "The card runs slower because it is hot.",
    "Batches take longer and their times vary. Enclosures are small: dust, a wall behind the fan or a summer field is enough.",
    ("Give the enclosure air, clean it, raise its fan's speed.", "sudo nvidia-smi -pl {watts}   # less power: nearly as fast, much cooler"),
)
BRAKE = Check(
    "power-brake",
    "problem",
    "The card is being slowed down by its power supply.",
    "The power brake is pulled from outside: the enclosure's supply cannot give what the card takes. The next step is that it falls off "
    "the bus.",
    ("sudo nvidia-smi -pl {watts}", "Use a stronger supply, and a cable of its own for each power plug of the card."),
)
POWER_LIMIT = Check(
    "power-limit-low",
    "warning",
    "The card's power limit is less than half of its default.",
    "It will be slow. Some enclosures and laptops leave a limit behind.",
    ("sudo nvidia-smi -pl {watts}",),
)
TAKEN = Check(
    "memory-taken",
    "warning",
    "Others have taken more than a fifth of the card's memory.",
    "Batches will be smaller, and models may not fit. A desktop on the card takes more as windows open.",
    ("Close what is named above, or give the desktop another card.",),
)
PERSISTENCE = Check(
    "persistence-on-external",
    "warning",
    "Persistence mode is on for an external card.",
    "nvidia-persistenced then has the card open, and the kernel's removal waits for it: unplugging can hang.",
    ("sudo nvidia-smi -pm 0", "sudo systemctl disable --now nvidia-persistenced"),
)
GPU_SLEEPS = Check(
    "card-may-sleep",
    "warning",
    "The kernel may put the external card to sleep (runtime power management).",
    "A card that cannot wake up over its cable is lost: it falls off the bus.",
    (
        "echo on | sudo tee /sys/bus/pci/devices/{address}/power/control",
        "For ever: options nvidia NVreg_DynamicPowerManagement=0x00   # in /etc/modprobe.d/nvidia.conf",
    ),
)
CONTROLLER_SLEEPS = Check(
    "controller-may-sleep",
    "note",
    "The kernel may put the Thunderbolt controller or a port above the card to sleep (runtime power management).",
    "That is the kernel's default and mostly goes well while a card is in use. If the card is lost when it has been idle, try this first.",
    ("echo on | sudo tee {files}", "For ever: the kernel parameter pcie_port_pm=off"),
)
CHECKS = (HANGS, REFUSES, HOT, BRAKE, POWER_LIMIT, TAKEN, PERSISTENCE, GPU_SLEEPS, CONTROLLER_SLEEPS)

_TAKEN = 0.2


def look(facts: Facts) -> Iterator[Finding]:
    if facts.nvml.hangs:
        yield HANGS.found("NVIDIA driver", "NVML was asked in a process of its own and did not answer.")
    elif facts.nvml.error:
        yield REFUSES.found("NVIDIA driver", f"NVML: {facts.nvml.error}.")
    for card in facts.cards:
        if nvml := facts.nvml.gpus.get(card.address):
            yield from _health(card, nvml)
        if card.external and not card.gone:
            yield from _sleep(facts, card)


def _health(card: Card, nvml: dict) -> Iterator[Finding]:
    reasons, limit, default = nvml["reasons"], nvml["limit_w"], nvml["default_limit_w"]
    draw = f"it draws {nvml['power_w']:.0f} W of {limit:.0f} W" if limit and nvml["power_w"] is not None else "its draw is not known"
    less = round(0.8 * (limit or default or 200))
    if {"sw_thermal", "hw_thermal"} & set(reasons):
        yield HOT.found(card.subject, f"It is at {nvml['temperature_c']} °C and throttles; {draw}.", watts=less)
    if "hw_power_brake" in reasons:
        yield BRAKE.found(card.subject, f"The hardware power brake is on; {draw}.", watts=less)
    if limit and default and limit < default / 2:
        yield POWER_LIMIT.found(card.subject, f"It is limited to {limit:.0f} W, its default is {default:.0f} W.", watts=round(default))
    others = [process for process in nvml["processes"] if not process["ours"]]
    taken = sum(process["bytes"] for process in others)
    if taken > _TAKEN * nvml["memory_bytes"]:
        largest = sorted(others, key=lambda process: -process["bytes"])[:3]
        names = ", ".join(f"{p['command']} (process {p['pid']}, {p['bytes'] / 2**30:.1f} GiB)" for p in largest)
        total = nvml["memory_bytes"] / 2**30
        yield TAKEN.found(card.subject, f"{taken / 2**30:.1f} of {total:.1f} GiB are taken by others: {names}.")
    if card.external and nvml["persistence"]:
        yield PERSISTENCE.found(card.subject, "nvidia-smi -q says Persistence Mode: Enabled.")


def _sleep(facts: Facts, card: Card) -> Iterator[Finding]:
    if _may_sleep(facts.machine, card.address):
        yield GPU_SLEEPS.found(card.subject, "power/control is auto.", address=card.address)
    controllers = [domain.controller for domain in facts.domains if domain.name == card.domain]
    if asleep := [address for address in (*card.ports, *controllers) if _may_sleep(facts.machine, address)]:
        files = " ".join(f"/sys/bus/pci/devices/{address}/power/control" for address in asleep)
        yield CONTROLLER_SLEEPS.found(card.subject, f"power/control is auto for {', '.join(asleep)}.", files=files)


def _may_sleep(machine: Machine, address: str) -> bool:
    return read(machine.pci / address / "power" / "control") == "auto"
