"""Devices by name: what `--device` means on this machine."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from outboard.runtime import DeviceEntry, Runtime

log = logging.getLogger(__name__)

#: Placement order: accelerators in the order of their discovery, the CPU after all of them.
CPU_RANK = 100
PROBE_LIMIT = 5.0


async def nvidia_gpus() -> list[dict[str, Any]]:
    """The driver's GPUs, asked in a disposable process with a time limit; [] where there is no driver or it hangs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "outboard.devices.probe", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), PROBE_LIMIT)
    except TimeoutError:
        log.error("looking for GPUs took more than %.0f s: the driver hangs; going on without it", PROBE_LIMIT)
        process.kill()  # it may be stuck in the kernel: nobody waits for it
        return []
    try:
        return json.loads(out)
    except ValueError:
        return []


async def attach(runtime: Runtime) -> None:
    """Add the devices that the settings ask for, and always the CPU."""
    settings = runtime.settings
    runtime.add_device(DeviceEntry("cpu", "cpu", "cpu", settings.concurrency or runtime.cores, 1), CPU_RANK)
    gpus: list[dict[str, Any]] = []
    if any(d != "cpu" and not d.startswith("sim:") for d in settings.device):
        gpus = await nvidia_gpus()
    ids = {gpu["uuid"]: f"cuda:{i}" for i, gpu in enumerate(gpus)}
    for wanted in settings.device:
        if wanted == "auto":
            for gpu in sorted(gpus, key=lambda g: not g["external"]):
                _add_gpu(runtime, ids[gpu["uuid"]], gpu)
        elif wanted.startswith("sim:"):
            device = f"sim:{sum(d.startswith('sim:') for d in runtime.devices)}"
            # Two batches: the upload of one under the compute of the other.
            runtime.add_device(DeviceEntry(device, "sim", wanted, slots=2, threads=1, external=True), rank=len(runtime.devices))
        elif wanted != "cpu":
            gpu = next((g for g in gpus if wanted in (g["uuid"], ids[g["uuid"]])), None)
            if gpu is not None:
                _add_gpu(runtime, ids[gpu["uuid"]], gpu)
            else:
                _add_gpu(runtime, wanted, {"uuid": wanted, "external": False}, why=f"the NVIDIA driver shows no {wanted}")


def _add_gpu(runtime: Runtime, device: str, gpu: dict[str, Any], why: str = "") -> None:
    if device not in runtime.devices:
        entry = DeviceEntry(device, "gpu", gpu["uuid"], slots=2, threads=1, external=gpu["external"])
        runtime.add_device(entry, rank=len(runtime.devices), present=not why, why=why)
