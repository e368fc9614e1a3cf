"""Gather what the checks look at, once."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

from outboard.core.link import Link
from outboard.doctor import kernel_log, pci, thunderbolt
from outboard.doctor.machine import Machine, read
from outboard.profiles import Store


@dataclass(frozen=True, slots=True)
class Nvml:
    """What NVML said. `gpus` by PCI address, each as `worker/health.py` describes it."""

    gpus: dict[str, dict[str, Any]] = field(default_factory=dict)
    error: str = ""  #: why it could not be asked
    hangs: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    machine: Machine
    cards: list[pci.Card]
    domains: list[thunderbolt.Domain]
    routers: list[thunderbolt.Router]
    driver: tuple[int, ...]  #: version of the NVIDIA driver that is loaded; (): none is
    nvml: Nvml
    log: str | None  #: None: it cannot be read
    links: dict[str, Link]  #: what was measured last, by the card's UUID

    def routers_of(self, card: pci.Card) -> list[thunderbolt.Router]:
        """The devices on the cable that leads to a card, as far as sysfs tells."""
        return [router for router in self.routers if card.domain and router.domain == card.domain and router.authorised]


def gather(machine: Machine) -> Facts:
    found = pci.cards(machine)
    version = driver_version(machine)
    return Facts(
        machine=machine,
        cards=found,
        domains=thunderbolt.domains(machine),
        routers=thunderbolt.routers(machine),
        driver=version,
        nvml=_ask_nvml(machine) if version else Nvml(),
        log=kernel_log.read_log(machine),
        links=_links(machine),
    )


def driver_version(machine: Machine) -> tuple[int, ...]:
    """ "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.45.04  Release Build" -> (595, 45, 4)."""
    for word in read(machine.path("/proc/driver/nvidia/version")).split():
        parts = word.split(".")
        if len(parts) in (2, 3) and all(part.isdecimal() for part in parts):
            return tuple(map(int, parts))
    return ()


def version_text(version: tuple[int, ...]) -> str:
    """As NVIDIA writes it: 595.45.04."""
    return ".".join(str(part) if i == 0 else f"{part:02d}" for i, part in enumerate(version))


def _ask_nvml(machine: Machine) -> Nvml:
    """In a process of its own: NVML hangs on a lost GPU, and nobody waits for a process that is stuck in the kernel."""
    process = subprocess.Popen(machine.nvml, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        out, _ = process.communicate(timeout=machine.nvml_limit)
    except subprocess.TimeoutExpired:
        process.kill()
        return Nvml(hangs=True)
    try:
        answer = json.loads(out)
    except ValueError:
        return Nvml(error=f"the process that asks it ended with status {process.returncode} and no answer")
    return Nvml({gpu["pci"]: gpu for gpu in answer["gpus"]}, answer["error"])


def _links(machine: Machine) -> dict[str, Link]:
    newest = sorted(Store(machine.cache).all(), key=lambda profile: profile.measured_at)
    return {profile.key.uuid: profile.link for profile in newest if profile.link is not None}
