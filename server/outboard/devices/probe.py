"""Which NVIDIA GPUs the driver knows: run as a process of its own, since files of a lost GPU's driver can hang their reader.

`python -m outboard.devices.probe` prints a JSON list. It reads /proc and /sys only: no CUDA context, no NVML, nothing that
would hold the device.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from outboard.devices.figures import Answer
from outboard.devices.thunderbolt import domain_of

log = logging.getLogger(__name__)

DRIVER = Path("/proc/driver/nvidia/gpus")
PCI = Path("/sys/bus/pci/devices")

#: Seconds after which the driver counts as hung.
LIMIT = 5.0

#: The process that asks NVML; it takes UUIDs.
NVML = (sys.executable, "-m", "outboard.worker.nvml")


async def ask() -> list[dict[str, Any]]:
    """`gpus` of a disposable process; [] where there is no driver, or where it hangs."""
    if not DRIVER.is_dir():  # noqa: ASYNC240 (a name in /proc: no driver is asked)
        return []
    try:
        return await _answer([sys.executable, "-m", "outboard.devices.probe"], LIMIT)
    except TimeoutError:
        log.error("looking for GPUs took more than %.0f s: the driver hangs; going on without it", LIMIT)
    except ValueError as e:
        log.error("looking for GPUs failed: %s", e)
    return []


async def nvml(uuids: Iterable[str], command: Sequence[str] = NVML, limit: float = LIMIT) -> Answer:
    """What NVML says of GPUs in use, asked in a disposable process. Raises TimeoutError where NVML hangs."""
    try:
        return msgspec.convert(await _answer([*command, *uuids], limit), Answer)
    except (ValueError, msgspec.ValidationError) as e:
        log.warning("NVML cannot be asked for the GPUs: %s", e)
        return Answer()


async def _answer(command: Sequence[str], limit: float) -> Any:
    """The JSON that a process prints. Raises TimeoutError, and ValueError where it prints none."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
    try:
        out, _ = await asyncio.wait_for(process.communicate(), limit)
    except TimeoutError:
        process.kill()  # it may be stuck in the kernel: nobody waits for it
        raise
    try:
        return json.loads(out)
    except ValueError as e:
        raise ValueError(f"{command[2]} ended with status {process.returncode} and printed no answer") from e


def information(text: str) -> dict[str, str]:
    """What /proc/driver/nvidia/gpus/*/information says: "Model", "GPU UUID" … and their values."""
    lines = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def named(found: list[dict[str, Any]], wanted: str) -> dict[str, Any] | None:
    """The GPU of that UUID, or the Nth of `found` for "cuda:N"; None: there is none."""
    return next((gpu for i, gpu in enumerate(found) if wanted in (gpu["uuid"], f"cuda:{i}")), None)


def gpus(driver: Path = DRIVER, pci: Path = PCI) -> list[dict[str, object]]:
    """One dict for each GPU: uuid, name, pci (address), external and the rule that says so; in order of PCI address."""
    found: list[dict[str, object]] = []
    for folder in sorted(driver.iterdir()) if driver.is_dir() else []:
        facts = information((folder / "information").read_text())
        uuid = facts.get("GPU UUID", "")
        if not uuid.startswith("GPU-") or "?" in uuid:
            continue  # the driver has it, but cannot talk to it
        external, rule = is_external(folder.name, pci)
        found.append({"uuid": uuid, "name": facts.get("Model", "NVIDIA GPU"), "pci": folder.name, "external": external, "rule": rule})
    return found


def is_external(address: str, pci: Path = PCI) -> tuple[bool, str]:
    """Whether a PCI device sits outside the box. The kernel's `removable` is set only below ports that the firmware marks as
    external-facing, so OCuLink reads as internal; a Thunderbolt or USB4 controller whose tunnel leads to it says it otherwise."""
    device = pci / address
    try:
        if (device / "removable").read_text().strip() == "removable":
            return True, "sysfs removable"
    except OSError:
        pass
    if domain_of(address, pci) is not None:
        return True, "behind a Thunderbolt or USB4 controller"
    return False, ""


if __name__ == "__main__":
    json.dump(gpus(), sys.stdout)
