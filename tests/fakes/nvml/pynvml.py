"""Stands for NVIDIA's library where there is no GPU: what its functions return for the cards of $FAKE_NVML, a JSON object by UUID.

Names, units and codes are those of nvidia-ml-py (a test compares the names); a card without a key does not support what asks for it.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0
_CARDS: dict[str, dict[str, Any]] = json.loads(os.environ["FAKE_NVML"])


class NVMLError(Exception):
    def __init__(self, value: int):
        super().__init__(value)
        self.value = value


def nvmlInit() -> None:
    pass


def nvmlDeviceGetHandleByUUID(uuid: bytes) -> dict[str, Any]:
    if uuid.decode() not in _CARDS:
        raise NVMLError(6)
    return {"uuid": uuid.decode(), **_CARDS[uuid.decode()]}


def _told(card: dict[str, Any], key: str) -> Any:
    if "error" in card:
        raise NVMLError(card["error"])
    if key not in card:
        raise NVMLError(3)  # not supported
    return card[key]


def nvmlDeviceGetUUID(card: dict[str, Any]) -> str:
    return _told(card, "uuid")


def nvmlDeviceGetName(card: dict[str, Any]) -> str:
    return _told(card, "name")


def nvmlDeviceGetPciInfo(card: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(busId=_told(card, "busId"))


def nvmlDeviceGetTemperature(card: dict[str, Any], sensor: int) -> int:
    assert sensor == NVML_TEMPERATURE_GPU
    return _told(card, "temperature")


def nvmlDeviceGetPowerUsage(card: dict[str, Any]) -> int:
    return _told(card, "power")


def nvmlDeviceGetEnforcedPowerLimit(card: dict[str, Any]) -> int:
    return _told(card, "limit")


def nvmlDeviceGetUtilizationRates(card: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(gpu=_told(card, "utilization"), memory=0)


def nvmlDeviceGetMemoryInfo(card: dict[str, Any]) -> SimpleNamespace:
    total, used = _told(card, "memory")
    return SimpleNamespace(total=total, used=used, free=total - used)


def nvmlDeviceGetCurrentClocksEventReasons(card: dict[str, Any]) -> int:
    return _told(card, "reasons")


def nvmlDeviceGetCurrPcieLinkGeneration(card: dict[str, Any]) -> int:
    return _told(card, "generation")


def nvmlDeviceGetCurrPcieLinkWidth(card: dict[str, Any]) -> int:
    return _told(card, "width")
