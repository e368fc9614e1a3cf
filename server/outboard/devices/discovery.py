"""Devices by name: what `--device` means on this machine, and cards that are plugged in later."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import pyudev

from outboard.core.state import LIVE, PIPELINE
from outboard.devices import presence, probe, simulated
from outboard.devices.figures import Figures
from outboard.runtime import DeviceEntry, Runtime
from outboard.telemetry import gpus

log = logging.getLogger(__name__)

#: Placement order: accelerators in the order of their discovery, the CPU after all of them.
CPU_RANK = 100
#: Seconds between two looks for cards that are new or back, and between two looks whether those in use are there.
LOOK_EVERY = 5
CHECK_EVERY = 1
#: Seconds after which reading a few bytes of sysfs counts as hung.
PRESENCE_LIMIT = 2.0


#: What names a GPU: its number, or its UUID, or that of a part of it.
_GPU = re.compile(r"cuda:\d{1,3}|GPU-[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}|MIG-[\w/-]+")


def check(wanted: str) -> None:
    """Whether `--device` can mean something. Raises ValueError with what was expected."""
    if wanted.startswith("sim:"):
        simulated.parse(wanted)
    elif wanted not in ("auto", "cpu") and not _GPU.fullmatch(wanted):
        raise ValueError(f"{wanted!r} names no device, expected auto, cpu, cuda:0, a GPU's UUID (GPU-…) or sim:thunderbolt4,vram=8GiB")


async def attach(runtime: Runtime) -> None:
    """Add the devices that the settings ask for, and always the CPU."""
    settings = runtime.settings
    runtime.add_device(DeviceEntry("cpu", "cpu", "cpu", settings.concurrency or runtime.cores, 1), CPU_RANK)
    for wanted in settings.device:
        if wanted.startswith("sim:"):
            device = f"sim:{sum(d.startswith('sim:') for d in runtime.devices)}"
            _add(runtime, DeviceEntry(device, "sim", wanted, slots=PIPELINE, threads=1, external=True))
        elif wanted not in ("auto", "cpu"):
            # Its start looks for it, and goes on looking where it is absent.
            _add(runtime, DeviceEntry(wanted, "gpu", wanted, slots=PIPELINE, threads=1))
    if "auto" in settings.device:
        adopt(runtime, await probe.ask())


def adopt(runtime: Runtime, found: list[dict[str, Any]]) -> None:
    """Add GPUs that are not known yet, external ones first. A built-in one serves only while no external one was seen."""
    external = any(gpu["external"] for gpu in found) or any(d.external for d in runtime.devices.values() if d.kind == "gpu")
    for gpu in sorted(found, key=lambda g: not g["external"]):
        known = any(d.kind == "gpu" and gpu["uuid"] in (d.spec, d.uuid) for d in runtime.devices.values())
        if not known and (gpu["external"] or not external):
            _add(runtime, _entry(runtime, gpu))


async def follow(runtime: Runtime) -> None:
    """For ever: adopt what is plugged in later, wake what has come back, and notice what is gone before its worker does.

    A PCI event of udev brings the next look forward; where there are none (containers), looks come every few seconds.
    """
    if not any(d != "cpu" and not d.startswith("sim:") for d in runtime.settings.device):
        return
    event = asyncio.Event()
    monitor = _listen(event)  # kept: it ends with its last reference
    present: set[str] = set()
    looked = runtime.now()
    while True:
        try:
            async with asyncio.timeout(CHECK_EVERY):
                await event.wait()
        except TimeoutError:
            pass
        await _check_presence(runtime)
        if event.is_set() or runtime.now() - looked >= LOOK_EVERY:
            event.clear()
            looked = runtime.now()
            await check_driver(runtime)
            found = await probe.ask()
            if "auto" in runtime.settings.device:
                adopt(runtime, found)
            now_present = {gpu["uuid"] for gpu in found}
            for entry in runtime.devices.values():
                if entry.uuid in now_present - present:
                    runtime.seen(entry.id)
            present = now_present
            log.debug("looked for GPUs%s: %d", "" if monitor else " (no udev)", len(found))


def _listen(event: asyncio.Event) -> pyudev.Monitor | None:
    """Set `event` at every PCI device that comes, goes, or changes its driver."""
    try:
        monitor = pyudev.Monitor.from_netlink(pyudev.Context())
        monitor.filter_by("pci")
        monitor.start()
    except (ImportError, OSError) as e:  # no libudev, no netlink
        log.info("no udev events (%s): cards are looked for every %d s", e, LOOK_EVERY)
        return None

    def readable() -> None:
        while (device := monitor.poll(timeout=0)) is not None:
            log.info("udev: %s %s", device.action, device.sys_name)
            event.set()

    asyncio.get_running_loop().add_reader(monitor.fileno(), readable)
    return monitor


async def _check_presence(runtime: Runtime) -> None:
    for entry in list(runtime.devices.values()):
        if entry.kind != "gpu" or not entry.pci or not _in_use(runtime, entry.id):
            continue
        try:
            why = await asyncio.wait_for(asyncio.to_thread(presence.gone, entry.pci), PRESENCE_LIMIT)
        except TimeoutError:
            why = f"reading the state of {entry.pci} hangs"
        if why:
            runtime.lose(entry.id, why)


async def check_driver(runtime: Runtime, command: Sequence[str] = probe.NVML, limit: float = probe.LIMIT) -> None:
    """GPUs in use that NVML has given up are lost, although sysfs may still show them. Where NVML hangs one of them is lost: which, only a
    second sign tells, so those are that owe an answer. The figures of the others are kept, and shown as metrics."""
    used = {e.uuid: e.id for e in runtime.devices.values() if e.kind == "gpu" and e.uuid and _in_use(runtime, e.id)}
    if not used:
        _keep(runtime, {})
        return
    generations = {device: runtime.engine.devices[device].generation for device in used.values()}
    try:
        answer = await probe.nvml(used, command, limit)
        why = answer.gone
        _keep(runtime, {used[f.uuid]: f for f in answer.figures if f.uuid in used})
    except TimeoutError:
        log.error("NVML has not answered for %.0f s: the driver hangs", limit)
        why = {
            uuid: "its batch is overdue, and NVML hangs"
            for uuid, device in used.items()
            if runtime.engine.devices[device].state == "suspect"
        }
        _keep(runtime, {})
    for uuid, device in used.items():
        if uuid in why and runtime.engine.devices[device].generation == generations[device]:
            runtime.lose(device, why[uuid])


def _keep(runtime: Runtime, figures: dict[str, Figures]) -> None:
    for entry in runtime.devices.values():
        entry.figures = figures.get(entry.id)
    gpus.show(figures)


def _in_use(runtime: Runtime, device: str) -> bool:
    return runtime.engine.devices[device].state in ("starting", *LIVE, "suspect")


def _entry(runtime: Runtime, gpu: dict[str, Any]) -> DeviceEntry:
    number = sum(d.kind == "gpu" for d in runtime.devices.values())
    entry = DeviceEntry(
        f"cuda:{number}", "gpu", gpu["uuid"], slots=PIPELINE, threads=1, external=gpu["external"], uuid=gpu["uuid"], pci=gpu["pci"]
    )
    log.info("%s is %s (%s)%s", entry.id, gpu["name"], gpu["uuid"], f", external: {gpu['rule']}" if gpu["external"] else "")
    return entry


def _add(runtime: Runtime, entry: DeviceEntry) -> None:
    if entry.id not in runtime.devices:
        runtime.add_device(entry, rank=len(runtime.devices))
