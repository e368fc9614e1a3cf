"""The card: on the bus, alive, with a driver, and reachable for this process."""

from __future__ import annotations

from collections.abc import Iterator

from outboard.doctor.facts import Facts
from outboard.doctor.findings import Check, Finding
from outboard.doctor.pci import Card

NO_CARD = Check(
    "no-card",
    "note",
    "The PCI bus shows no NVIDIA GPU.",
    "Everything is answered by the CPU. A card looks the same whose enclosure is switched off, or plugged in with a plain USB-C cable.",
    (
        "Switch the enclosure on, plug the cable in, and see what comes: boltctl list",
        "sudo sh -c 'echo 1 > /sys/bus/pci/rescan'",
        "No card? outboard serve --device sim:thunderbolt4 shows how one would serve",
    ),
)
GONE = Check(
    "card-lost",
    "problem",
    "A card that the driver had is gone, or does not answer on the bus.",
    "The driver cannot use it any more, and every process that had it open must end before it can come back. The server answers with the "
    "CPU and takes the card back by itself once it works.",
    (
        "End what still has it open: sudo fuser -v /dev/nvidia*",
        "sudo sh -c 'echo 1 > /sys/bus/pci/devices/{address}/remove'",
        "Switch the enclosure off and on, plug the cable in again.",
        "sudo sh -c 'echo 1 > /sys/bus/pci/rescan'   # where it does not come back; at last: restart the machine",
    ),
)
NO_DRIVER = Check(
    "no-driver",
    "problem",
    "A card is on the bus, and NVIDIA's driver does not have it.",
    "CUDA needs NVIDIA's driver. Nouveau, vfio-pci (a virtual machine's) or none at all leaves the card unused.",
    (
        "sudo modprobe nvidia   # not found: install the driver (Debian: sudo apt install nvidia-driver)",
        "If {driver} has taken it: blacklist that module and restart the machine.",
    ),
)
NO_FILES = Check(
    "no-device-files",
    "problem",
    "The driver has the card, and /dev has no file for it.",
    "CUDA opens /dev/nvidia0 and its like; without them it finds no device.",
    ("sudo nvidia-modprobe -u -c=0",),
)
CONTAINER = Check(
    "container-without-card",
    "problem",
    "This is a container that was started without the card, or before it was plugged in (again).",
    "A container gets its device files when it starts: a card that is plugged in later does not appear in it, and systemctl "
    "daemon-reload on the host takes it away.",
    (
        "On the host: sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        "Make the container anew: docker compose up --force-recreate",
    ),
)
CHECKS = (NO_CARD, GONE, NO_DRIVER, NO_FILES, CONTAINER)


def look(facts: Facts) -> Iterator[Finding]:
    if not facts.cards and all(router.authorised for router in facts.routers):
        attached = ", ".join(router.subject for router in facts.routers)
        yield NO_CARD.found("PCI bus", f"No NVIDIA GPU is there{f'; on the cable: {attached}' if attached else ''}.")
    for card in facts.cards:
        if card.gone:
            yield GONE.found(card.subject, f"{card.gone[0].upper()}{card.gone[1:]}.", address=card.address)
        elif card.driver != "nvidia":
            had = f"The kernel module {card.driver} has it." if card.driver else "No kernel module has it."
            yield NO_DRIVER.found(card.subject, had, driver=card.driver or "another module")
        elif not (facts.machine.path("/dev/nvidiactl").exists() and any(facts.machine.path("/dev").glob("nvidia[0-9]*"))):
            yield _without_files(facts, card)


def _without_files(facts: Facts, card: Card) -> Finding:
    inside = any(facts.machine.path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))
    return (CONTAINER if inside else NO_FILES).found(card.subject, "There is no /dev/nvidiactl or no /dev/nvidia0.")
