"""A runtime with two GPUs that serve, as far as its engine knows: what is beside the workers can be tested without a GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from outboard.runtime import DeviceEntry, Runtime
from outboard.settings import Settings

FIRST, SECOND = "GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002"


@asynccontextmanager
async def two_gpus(folder: Path, *pci: str) -> AsyncIterator[Runtime]:
    """There is no worker behind them. `pci`: their addresses, where they have any."""
    runtime = Runtime(Settings(models=folder, cache=folder))
    runtime.start()
    for i, uuid in enumerate((FIRST, SECOND)):
        device = f"cuda:{i}"
        at = {"pci": pci[i]} if pci else {}
        runtime.devices[device] = DeviceEntry(device, "gpu", uuid, slots=2, threads=1, uuid=uuid, **at)
        runtime.engine.add_device(runtime.now(), device, "gpu", 2, i)
        runtime.engine.hello(runtime.now(), device, 1)
    runtime.engine.take()
    yield runtime
    await runtime.close()
