"""What NVML says of GPUs. `python -m outboard.worker.nvml UUID …` prints a JSON object: for each GPU that is gone, why.

NVML hangs on a lost GPU, so it is asked in processes that may be given up: a worker, or one for this question alone.
"""

from __future__ import annotations

import json
import sys
from typing import Any

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


def _handle(uuid: str) -> Any:
    return pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())


def main(uuids: list[str]) -> None:
    found: dict[str, str] = {}
    if pynvml is not None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:  # no driver, or one of another version than the library: it tells nothing of the card
            uuids = []
        found = {uuid: why for uuid in uuids if (why := gone(uuid))}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
