"""Every setting in one frozen object: flags over `OUTBOARD_*` over `outboard.toml` over the defaults below."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

MIB = 1 << 20


class SettingsError(ValueError):
    """A setting that cannot be used: names it, its source and what was expected."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may ask for. Sizes take a number of bytes or "64MiB"."""

    body: int = 64 * MIB  #: bytes of a request body
    body_seconds: float = 60.0  #: for a whole body to arrive
    pixels: int = 50_000_000  #: of one image
    images: int = 16  #: in one request
    message: int = 32 * MIB  #: bytes of a WebSocket message
    deadline: float = 30.0  #: seconds, unless the request says `deadline_ms`
    frame_memory: int = 0  #: bytes; 0: the lesser of 2 GiB and an eighth of the memory
    requests: int = 1024  #: requests in progress at once


class Failback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a lost device is tried again, and when it is kept away. Seconds."""

    max_losses: int = 3  #: within `window`; one more, and the device is quarantined
    window: float = 600.0  #: in which losses are counted
    quarantine: float = 60.0  #: the first time; it doubles with each next one
    quarantine_max: float = 3600.0  #: and never is longer
    first_retry: float = 0.5  #: from a loss to the first look for the device; it doubles with each look
    max_retry: float = 30.0  #: the longest time between two looks


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server's settings; `docs/settings.md` is made from this class."""

    models: Path = Path("models")  #: the model repository: folders with a model.toml each
    host: str = "127.0.0.1"  #: address to listen on
    port: int = 8000  #: 0: any free one
    device: tuple[str, ...] = ("auto",)  #: auto, cpu, cuda:0, a GPU's UUID, sim:thunderbolt4,vram=8GiB; several in one variable: a;b
    workers: int = 1  #: must be 1: several front processes would each hold every model
    decode_threads: int = 0  #: 0: one more than cores
    concurrency: int = 0  #: batches at once on the CPU; 0: one for each core
    cache: Path = Path("~/.cache/outboard")  #: compiled models
    log_level: str = "info"  #: debug, info, warning, error
    limits: Limits = Limits()
    failback: Failback = Failback()


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*\Z")


def size(text: str) -> int:
    """ "64MiB" -> bytes. Raises ValueError."""
    match = _SIZE.match(text)
    if not match or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 64MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def load(flags: Mapping[str, Any], env: Mapping[str, str] = os.environ, file: Path | None = None) -> Settings:
    """Merge the sources and check them. `flags` holds only what was given. Raises SettingsError."""
    merged: dict[str, Any] = {}
    path = file or Path("outboard.toml")
    if path.is_file():
        try:
            merged = msgspec.toml.decode(path.read_bytes())
        except (msgspec.DecodeError, ValueError) as e:
            raise SettingsError(f"{path}: not valid TOML: {e}") from e
        _convert(merged, str(path))
    elif file is not None:
        raise SettingsError(f"{file}: no such file")
    for key, value in _from_env(env).items():
        _put(merged, key, value)
    for key, given in flags.items():
        _put(merged, key, given)
    return _convert(merged, "settings")


def _put(merged: dict[str, Any], key: str, value: Any) -> None:
    table, _, name = key.rpartition(".")
    (merged.setdefault(table, {}) if table else merged)[name] = value


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """OUTBOARD_PORT -> port, OUTBOARD_LIMITS_BODY -> limits.body. Others (OUTBOARD_URL, OUTBOARD_KEY) belong to the clients."""
    found: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        nested = field.type if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct) else None
        for name in [f"{field.name}.{f.name}" for f in msgspec.structs.fields(nested)] if nested else [field.name]:
            value = env.get("OUTBOARD_" + name.replace(".", "_").upper())
            if value is not None:
                found[name] = value.split(";") if name == "device" else value
    return found


def _convert(merged: dict[str, Any], where: str) -> Settings:
    limits = merged.get("limits", {})
    try:
        if isinstance(limits, dict):
            for key in ("body", "message", "frame_memory"):
                if isinstance(limits.get(key), str):
                    limits[key] = size(limits[key])
        settings = msgspec.convert(merged, Settings, strict=False, dec_hook=lambda kind, value: kind(value))
    except (msgspec.ValidationError, ValueError, TypeError) as e:
        raise SettingsError(f"{where}: {e}") from e
    if settings.workers != 1:
        raise SettingsError(
            f"{where}: workers is {settings.workers}, expected 1: one front process feeds one worker process for each device; "
            "more fronts would each load every model. Start servers on several ports instead"
        )
    if not 0 <= settings.port <= 65535:
        raise SettingsError(f"{where}: port is {settings.port}, expected 0 to 65535")
    if settings.limits.images < 1 or settings.limits.pixels < 1 or settings.limits.deadline <= 0:
        raise SettingsError(f"{where}: limits.images, limits.pixels and limits.deadline must be above 0")
    return settings
