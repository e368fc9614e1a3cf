"""The Thunderbolt or USB4 controller behind whose PCIe tunnel a device sits, from sysfs alone."""

from __future__ import annotations

import re
from pathlib import Path

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")


def domain_of(address: str, pci: Path) -> Path | None:
    """The folder (`…/domain0`) of the controller that the PCI device at `address` is tunnelled through; None: through none.

    A controller in the processor lies beside its PCIe ports; the firmware names it as their supplier (Linux, drivers/thunderbolt/acpi.c,
    `usb4-host-interface`). A controller of its own chip is one leg of a PCIe switch whose other legs are its ports.
    """
    device = (pci / address).resolve()
    for port in (device, *device.parents):
        if not _ADDRESS.match(port.name):
            break
        for link in sorted(port.glob("supplier:pci:*")):
            found = sorted((pci / link.name.removeprefix("supplier:pci:")).glob("domain[0-9]*"))
            if found:
                return found[0].resolve()
        for below in ("domain[0-9]*", "*/domain[0-9]*", "*/*/domain[0-9]*"):
            if found := sorted(port.glob(below)):
                return found[0].resolve()
    return None
