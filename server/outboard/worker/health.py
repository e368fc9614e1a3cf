"""What NVML says of every GPU's health. `python -m outboard.worker.health` prints a JSON object.

`{"error": why NVML cannot be used or "", "gpus": [{"uuid", "pci", "temperature_c", "power_w", "limit_w", "default_limit_w", "reasons",
"persistence", "memory_bytes", "used_bytes", "processes": [{"pid", "command", "bytes", "ours"}], "utilisation", "pcie_generation",
"pcie_generation_possible"}]}`. What a card does not tell is null. NVML hangs on a lost GPU, so whoever starts this process gives it up
after a while.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import pynvml
except ImportError:  # nvidia-ml-py is not installed
    pynvml = None

#: Bits of the clocks' event reasons (nvml.h), by dcgm-exporter's names.
REASONS = {
    0x01: "gpu_idle",
    0x02: "clocks_setting",
    0x04: "power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}


def address(bus_id: str) -> str:
    """ "00000000:52:00.0" -> "0000:52:00.0", as sysfs writes it."""
    return bus_id.lower()[-12:]


def _or_none(call: Callable[..., Any], *args: Any) -> Any:
    """Cards differ in what they tell."""
    try:
        return call(*args)
    except pynvml.NVMLError:
        return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def _gpu(handle: Any) -> dict[str, Any]:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    reasons = _or_none(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle) or 0
    utilisation = _or_none(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return {
        "uuid": pynvml.nvmlDeviceGetUUID(handle),
        "pci": address(pynvml.nvmlDeviceGetPciInfo(handle).busId),
        "temperature_c": _or_none(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": _watts(_or_none(pynvml.nvmlDeviceGetPowerUsage, handle)),
        "limit_w": _watts(_or_none(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "default_limit_w": _watts(_or_none(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "reasons": [name for bit, name in REASONS.items() if reasons & bit],
        "persistence": bool(_or_none(pynvml.nvmlDeviceGetPersistenceMode, handle)),
        "memory_bytes": memory.total,
        "used_bytes": memory.used,
        "processes": _processes(handle),
        "utilisation": utilisation.gpu if utilisation else None,
        "pcie_generation": _or_none(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_generation_possible": _or_none(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
    }


def _processes(handle: Any) -> list[dict[str, Any]]:
    found: dict[int, int] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _or_none(ask, handle) or ():
            found[process.pid] = max(found.get(process.pid, 0), process.usedGpuMemory or 0)
    return [{"pid": pid, "command": (who := _command(pid))[0], "bytes": used, "ours": who[1]} for pid, used in sorted(found.items())]


def _command(pid: int) -> tuple[str, bool]:
    """Its name, and whether it is one of Outboard's workers. Other users' processes, and those of other containers, have none to see."""
    folder = Path(f"/proc/{pid}")
    try:
        return (folder / "comm").read_text().strip(), b"outboard.worker" in (folder / "cmdline").read_bytes()
    except OSError:
        return "a process that cannot be seen from here", False


def main() -> None:
    answer: dict[str, Any] = {"error": "", "gpus": []}
    if pynvml is None:
        answer["error"] = "nvidia-ml-py is not installed (pip install 'outboard[server]')"
    else:
        try:
            pynvml.nvmlInit()
            for i in range(pynvml.nvmlDeviceGetCount()):
                answer["gpus"].append(_gpu(pynvml.nvmlDeviceGetHandleByIndex(i)))
        except pynvml.NVMLError as e:
            answer["error"] = str(e)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
