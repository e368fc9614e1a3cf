"""A worker that is started only to measure: it loads the networks, says what they cost, and ends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from outboard import resources
from outboard.core.device_memory import DeviceMemory
from outboard.core.state import PIPELINE
from outboard.devices import probe, protocol
from outboard.devices.slab import Slab
from outboard.devices.supervisor import Supervisor, Worker
from outboard.repository import ModelProblem, ModelSpec

M = TypeVar("M", protocol.Hello, protocol.Loaded, protocol.Pong)

#: Frame memory of a worker that is given no frames.
SLAB_BYTES = 1 << 20
#: Seconds within which a network must be loaded and measured.
PATIENCE = 600.0


class CannotMeasure(RuntimeError):
    """The device or the model cannot be used; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    hello: protocol.Hello
    loaded: protocol.Loaded
    memory: DeviceMemory  #: with the network loaded


async def find(device: str) -> str:
    """The worker's name of `device`: "auto" (the first GPU, external ones before others, else the CPU), "cpu", "cuda:0", a GPU's UUID or
    "sim:…". Raises CannotMeasure."""
    if device == "cpu" or device.startswith("sim:"):
        return device
    gpus = await probe.ask()
    if device == "auto":
        external = sorted(gpus, key=lambda gpu: not gpu["external"])
        return external[0]["uuid"] if external else "cpu"
    if (gpu := probe.named(gpus, device)) is not None:
        return gpu["uuid"]
    shown = ", ".join(gpu["uuid"] for gpu in gpus) or "none"
    raise CannotMeasure(f"--device {device}: the NVIDIA driver shows no such GPU (it shows {shown})")


async def measure(spec: ModelSpec, device: str, cache: Path, headroom: int) -> list[Measured]:
    """Each network of the model on the device (as `find` names it), measured anew and kept as its profile. Raises CannotMeasure."""
    messages: asyncio.Queue[protocol.ToFront | int] = asyncio.Queue()
    slab = Slab(SLAB_BYTES, "outboard-profile")
    supervisor = Supervisor(slab, cache, lambda _, message: messages.put_nowait(message), lambda _, status: messages.put_nowait(status))
    # As many batches at once as the server would run there.
    worker = supervisor.start("profile", 1, device, resources.cores() if device == "cpu" else PIPELINE, 1)
    try:
        hello = await _next(messages, protocol.Hello)
        found = []
        for part, network in spec.networks.items():
            folder = str(spec.directory.absolute())
            supervisor.send(worker, protocol.Load(network.key, spec.version, folder, part, spec.toml.backend, anew=True))
            loaded = await _next(messages, protocol.Loaded)
            found.append(Measured(hello, loaded, await _memory(supervisor, worker, messages, hello, headroom)))
            supervisor.send(worker, protocol.Unload(network.key, spec.version))
        return found
    finally:
        await supervisor.close()
        slab.close()


async def _memory(
    supervisor: Supervisor, worker: Worker, messages: asyncio.Queue[protocol.ToFront | int], hello: protocol.Hello, headroom: int
) -> DeviceMemory:
    supervisor.send(worker, protocol.Ping(1))
    pong = await _next(messages, protocol.Pong)
    return DeviceMemory.reported(hello.memory_total, pong.memory_free, pong.memory_held, headroom)


async def _next(messages: asyncio.Queue[protocol.ToFront | int], kind: type[M]) -> M:
    """The next message of this kind. Raises CannotMeasure where the worker refuses the model or ends."""
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                message = await messages.get()
                if isinstance(message, kind):
                    return message
                if isinstance(message, protocol.LoadFailed):
                    raise CannotMeasure(str(ModelProblem(message.file, message.key, message.expected, message.message)))
                if isinstance(message, int):
                    raise CannotMeasure(f"the worker ended with status {message}; what it printed says why")
    except TimeoutError:
        raise CannotMeasure(f"nothing was measured within {PATIENCE:.0f} s") from None
