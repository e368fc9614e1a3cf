"""Whether a PCI device is still there, without asking its driver."""

from __future__ import annotations

from pathlib import Path

from outboard.devices.probe import PCI


def gone(address: str, pci: Path = PCI) -> str:
    """Empty while the device is on the bus, else how it is known to be gone.

    A surprise removal does not always take the sysfs entry away, nor raise an Xid: the device's configuration space then reads as ones.
    """
    device = pci / address
    if not device.exists():
        return f"{address} is no longer on the PCI bus"
    try:
        with (device / "config").open("rb") as config:
            identity = config.read(4)
    except OSError as e:
        return f"the configuration space of {address} cannot be read ({e.strerror})"
    return f"{address} does not answer on the PCI bus" if identity == b"\xff\xff\xff\xff" else ""
