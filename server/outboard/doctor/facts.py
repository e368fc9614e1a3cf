"""Gather what the checks look at, once."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from typing import Any

from outboard.core.link import Link
from outboard.devices import driver
from outboard.doctor import kernel_log, pci, thunderbolt
from outboard.doctor.machine import Machine
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
    version = driver.version(machine.path("/proc/driver/nvidia/version"))
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
