"""NVIDIA cards on the PCI bus, from sysfs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outboard.devices import presence, probe
from outboard.devices.thunderbolt import domain_of
from outboard.doctor.machine import Machine, read

NVIDIA = "0x10de"
#: Device ids of the GB20x chips (RTX 50, RTX PRO Blackwell), by the PCI id repository.
BLACKWELL = range(0x2B80, 0x3000)


@dataclass(frozen=True, slots=True)
class PcieLink:
    """Speed in GT/s and lanes; 0 where sysfs does not say."""

    speed: float
    lanes: int

    def __str__(self) -> str:
        return f"{self.speed:g} GT/s x{self.lanes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An NVIDIA GPU that the PCI bus shows, or that the driver still believes in."""

    address: str
    device_id: int  #: 0: not known, it is gone
    name: str  #: by the driver, else by its ids
    uuid: str  #: "": the driver does not say
    gone: str  #: why it does not answer; "": it does
    driver: str  #: the kernel module bound to it
    external: bool
    external_by: str  #: the rule that says so
    domain: str  #: the Thunderbolt domain that leads to it: "domain0"; "": none
    now: PcieLink
    possible: PcieLink  #: what both the card and the port that it is plugged into can do
    card: PcieLink  #: what the card alone can do
    port: PcieLink  #: what the port alone can do
    ports: tuple[str, ...]  #: addresses of the ports above it, the nearest first

    @property
    def subject(self) -> str:
        return f"{self.name} ({self.address})"

    @property
    def blackwell(self) -> bool:
        return self.device_id in BLACKWELL

    @property
    def perhaps_oculink(self) -> bool:
        """By all signs built in, but a card of 8 lanes or more on a port of 4: OCuLink, or an M.2 adapter. There is no better sign."""
        return not self.external and self.card.lanes >= 8 and 0 < self.port.lanes <= 4


def cards(machine: Machine) -> list[Card]:
    """All of them, by address."""
    driver = machine.path("/proc/driver/nvidia/gpus")
    known = {folder.name: probe.information(read(folder / "information")) for folder in sorted(driver.glob("*"))}
    found = [
        device.name
        for device in sorted(machine.pci.glob("*"))
        # "Display" (0x0380) and "3D controller" (0x0302) are GPUs as much as "VGA" (0x0300).
        if read(device / "vendor") == NVIDIA and read(device / "class").startswith("0x03")
    ]
    return [_card(machine, address, known.get(address, {})) for address in sorted({*found, *known})]


def _card(machine: Machine, address: str, known: dict[str, str]) -> Card:
    device = machine.pci / address
    ids = read(device / "device")
    ports = ports_above(machine, address)
    external, rule = probe.is_external(address, machine.pci)
    domain = domain_of(address, machine.pci)
    card, port = (_link(folder, "max") for folder in (device, device.resolve().parent))
    uuid = known.get("GPU UUID", "")
    return Card(
        address=address,
        device_id=int(ids, 16) if ids else 0,
        name=known.get("Model") or (f"NVIDIA {ids}" if ids else "NVIDIA GPU"),
        uuid="" if "?" in uuid else uuid,
        gone=presence.gone(address, machine.pci) or ("the driver cannot read its UUID" if "?" in uuid else ""),
        driver=(device / "driver").resolve().name if (device / "driver").exists() else "",
        external=external,
        external_by=rule,
        domain=domain.name if domain else "",
        now=_link(device, "current"),
        possible=PcieLink(min(card.speed, port.speed) or card.speed, min(card.lanes, port.lanes) or card.lanes),
        card=card,
        port=port,
        ports=ports,
    )


def ports_above(machine: Machine, address: str) -> tuple[str, ...]:
    """Addresses of the bridges above a device, the nearest first."""
    above = (machine.pci / address).resolve().parents
    return tuple(folder.name for folder in above if (machine.pci / folder.name).exists())


def _link(device: Path, which: str) -> PcieLink:
    """`which`: current or max. Unknown speeds read as "Unknown", lanes of a link that is down as 0 or 255."""
    speed = re.match(r"([\d.]+) GT/s", read(device / f"{which}_link_speed"))
    lanes = read(device / f"{which}_link_width")
    return PcieLink(float(speed[1]) if speed else 0.0, int(lanes) if lanes.isdecimal() and int(lanes) <= 32 else 0)
