"""What NVML says of every GPU's health. `python -m outboard.worker.health` prints a JSON object.

`{"error": why NVML cannot be used or "", "gpus": [{"uuid", "pci", "temperature_c", "power_w", "limit_w", "default_limit_w", "reasons",
"persistence", "memory_bytes", "used_bytes", "processes": [{"pid", "command", "bytes", "ours"}], "utilisation", "pcie_generation",
"pcie_generation_possible"}]}`. What a card does not tell is null. NVML hangs on a lost GPU, so whoever starts this process gives it up
after a while.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from outboard.worker.nvml import figures, or_none, watts

try:
    import pynvml
except ImportError:  # nvidia-ml-py is not installed
    pynvml = None


def address(bus_id: str) -> str:
    """ "00000000:52:00.0" -> "0000:52:00.0", as sysfs writes it."""
    return bus_id.lower()[-12:]


def _gpu(handle: Any) -> dict[str, Any]:
    known = figures(handle)
    return {
        "uuid": known.uuid,
        "pci": address(known.pci_bus_id),
        "temperature_c": known.temperature_c,
        "power_w": known.power_w,
        "limit_w": known.limit_w,
        "default_limit_w": watts(or_none(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "reasons": known.reasons or [],
        "persistence": bool(or_none(pynvml.nvmlDeviceGetPersistenceMode, handle)),
        "memory_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).total,
        "used_bytes": known.used_bytes,
        "processes": _processes(handle),
        "utilisation": known.utilisation,
        "pcie_generation": known.pcie_generation,
        "pcie_generation_possible": or_none(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
    }


def _processes(handle: Any) -> list[dict[str, Any]]:
    found: dict[int, int] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in or_none(ask, handle) or ():
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
