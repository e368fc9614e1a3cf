"""Thunderbolt and USB4: domains (controllers) and routers (what is plugged into them), from sysfs.

Attributes: Linux, Documentation/ABI/testing/sysfs-bus-thunderbolt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outboard.doctor.machine import Machine, read

_ROUTER = re.compile(r"(\d+)-([0-9a-f]+)\Z")


@dataclass(frozen=True, slots=True)
class Domain:
    name: str  #: domain0
    security: str  #: none, user, secure, dponly, usbonly or nopcie
    controller: str  #: PCI address of its controller


@dataclass(frozen=True, slots=True)
class Router:
    """A device on the cable: an enclosure, or a dock between it and the computer."""

    id: str  #: 0-1, 0-301 …
    domain: str
    name: str
    uuid: str
    authorised: bool
    generation: int  #: 1 to 3: Thunderbolt; 4: USB4 and Thunderbolt 4 (and 5)
    lane_gbit: float  #: Gb/s of a lane, the slower direction; 0: not known
    lanes: int

    @property
    def gbit(self) -> float:
        return self.lane_gbit * self.lanes

    @property
    def subject(self) -> str:
        return f"{self.name} ({self.id})"

    @property
    def standard(self) -> str:
        if self.generation < 4:
            return f"Thunderbolt {self.generation}"
        return "Thunderbolt 5 or USB4 v2" if self.lane_gbit >= 40 else "Thunderbolt 4 or USB4"


def domains(machine: Machine) -> list[Domain]:
    found = sorted(machine.path("/sys/bus/thunderbolt/devices").glob("domain*"))
    return [Domain(folder.name, read(folder / "security"), folder.resolve().parent.name) for folder in found]


def routers(machine: Machine) -> list[Router]:
    """Devices, not the computers' own routers (0-0) and not other computers (which have no `authorized`)."""
    found = []
    for folder in sorted(machine.path("/sys/bus/thunderbolt/devices").glob("*")):
        match = _ROUTER.match(folder.name)
        if not match or match[2] == "0" or not (folder / "authorized").exists():
            continue
        generation = read(folder / "generation")
        directions = [(_gbit(read(folder / f"{way}_speed")), read(folder / f"{way}_lanes")) for way in ("rx", "tx")]
        lane_gbit, lanes = min((speed, int(count)) for speed, count in ((s, c if c.isdecimal() else "0") for s, c in directions))
        name = " ".join(text for text in (read(folder / "vendor_name"), read(folder / "device_name")) if text)
        found.append(
            Router(
                folder.name,
                f"domain{match[1]}",
                name or "a Thunderbolt device",
                read(folder / "unique_id"),
                read(folder / "authorized") not in ("", "0"),
                int(generation) if generation.isdecimal() else 0,
                lane_gbit,
                lanes,
            )
        )
    return found


def _gbit(text: str) -> float:
    """ "20.0 Gb/s" -> 20.0; 0 where it is not known."""
    match = re.match(r"([\d.]+) Gb/s", text)
    return float(match[1]) if match else 0.0
