"""What NVML says of GPUs. `python -m outboard.worker.nvml UUID …` prints, as JSON, which of them are gone and the figures of the others
(devices/figures.py).

NVML hangs on a lost GPU, so it is asked in processes that may be given up: a worker, or one for this question alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from outboard.devices.figures import REASONS, Answer, Figures

try:
    import pynvml
except ImportError:  # nvidia-ml-py is not installed
    pynvml = None

#: NVML's return codes for a GPU that the driver has given up, although sysfs may still show it.
_GONE = {6: "NVML does not find it", 15: "NVML says that it is lost", 16: "NVML says that it must be reset"}


def gone(uuid: str) -> str:
    """Why the GPU cannot be used any more; "" where it answers, or where there is no NVML to ask."""
    try:
        pynvml.nvmlDeviceGetTemperature(_handle(uuid), pynvml.NVML_TEMPERATURE_GPU)  # a call that reaches the card
    except pynvml.NVMLError as e:
        return _GONE.get(e.value, "")
    return ""


def power_limit_w(uuid: str) -> float:
    """Watts that the card may draw; 0 where that is not known."""
    if pynvml is None:
        return 0.0
    try:
        pynvml.nvmlInit()
        try:
            return pynvml.nvmlDeviceGetEnforcedPowerLimit(_handle(uuid)) / 1e3
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0.0


def figures(handle: Any) -> Figures:
    """Raises NVMLError where not even memory and name are told."""
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    utilisation = or_none(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return Figures(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        pci_bus_id=pynvml.nvmlDeviceGetPciInfo(handle).busId,
        name=pynvml.nvmlDeviceGetName(handle),
        temperature_c=or_none(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        power_w=watts(or_none(pynvml.nvmlDeviceGetPowerUsage, handle)),
        limit_w=watts(or_none(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        utilisation=utilisation.gpu if utilisation else None,
        used_bytes=memory.used,
        free_bytes=memory.free,
        reasons=throttle_reasons(handle),
        pcie_generation=or_none(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        pcie_width=or_none(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
    )


def throttle_reasons(handle: Any) -> list[str] | None:
    bits = or_none(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    return None if bits is None else [name for bit, name in REASONS.items() if bits & bit]


def or_none(call: Callable[..., Any], *args: Any) -> Any:
    """Cards differ in what they tell."""
    try:
        return call(*args)
    except pynvml.NVMLError:
        return None


def watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def _handle(uuid: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())


def main(uuids: list[str]) -> None:
    found: dict[str, str] = {}
    told: list[Figures] = []
    if pynvml is not None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver, or one of another version than the library: it tells nothing of the card
            uuids = []
        found = {uuid: why for uuid in uuids if (why := gone(uuid))}
        told = [known for uuid in uuids if uuid not in found and (known := or_none(lambda of: figures(_handle(of)), uuid))]
    sys.stdout.buffer.write(msgspec.json.encode(Answer(found, told)))


if __name__ == "__main__":
    main(sys.argv[1:])
