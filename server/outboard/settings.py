"""Every setting in one frozen object: flags over `OUTBOARD_*` over `outboard.toml` over the defaults below."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_origin

import msgspec

MIB = 1 << 20


#: Variables of the same prefix that belong to others: the commands, the load test, docker-compose.yml.
ELSEWHERE = {f"OUTBOARD_{name}" for name in ("URL", "KEY", "MODEL", "IMAGES", "MIN_FPS", "MAX_P99_MS", "UID", "GID")}


class SettingsError(ValueError):
    """A setting that cannot be used: names it, its source and what was expected."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one client may ask for. Sizes take a number of bytes or "64MiB"."""

    body: int = 64 * MIB  #: bytes of a request body
    answer: int = 256 * MIB  #: bytes of the tensors in one answer of the Open Inference Protocol; as JSON each number counts for 20
    body_seconds: float = 60.0  #: for a whole body to arrive; one that takes longer has to come with `body_rate`
    body_rate: int = 10_000  #: bytes a second, on the average; an answer has to be taken at this rate, too
    head: int = 64 << 10  #: bytes of a request's line and headers
    headers: int = 100  #: of a request
    head_seconds: float = 10.0  #: for a request's line and headers to arrive
    pixels: int = 50_000_000  #: of one image
    images: int = 16  #: in one request
    message: int = 32 * MIB  #: bytes of a WebSocket message
    deadline: float = 30.0  #: seconds, unless the request says `deadline_ms`
    frame_memory: int = 0  #: bytes; 0: the lesser of 2 GiB and an eighth of the memory
    requests: int = 1024  #: requests in progress at once
    tiles: int = 128  #: of one picture, the whole one not counted; `tile=auto` looks at larger ones where it would need more


class Failback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a lost device is tried again, and when it is kept away. Seconds."""

    max_losses: int = 3  #: within `window`; one more, and the device is quarantined
    window: float = 600.0  #: in which losses are counted
    quarantine: float = 60.0  #: the first time; it doubles with each next one
    quarantine_max: float = 3600.0  #: and never is longer
    first_retry: float = 0.5  #: from a loss to the first look for the device; it doubles with each look
    max_retry: float = 30.0  #: the longest time between two looks


class Http(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whom the server answers, beside clients that name it by its address (docs/security.md). Several in one variable: a;b"""

    hosts: tuple[str, ...] = ()  #: names by which clients or a proxy call this server, such as "egpu.lab.example"; "*": any
    origins: tuple[str, ...] = ()  #: web pages elsewhere that may use it from a browser, such as "https://lab.example"; "*": any
    keys: Path | None = None  #: the file that `outboard keys` writes: every request needs a key of it; none: nobody is asked for one


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much of a device the server uses (docs/tuning.md). Sizes take a number of bytes or "512MiB"."""

    headroom: int = 512 * MIB  #: of a card's memory, left to the desktop and other programs; never more than an eighth of it
    decode: Literal["auto", "host", "device"] = "auto"  #: auto, host, device: where JPEGs are decoded, if a device can (docs/tuning.md)
    spill_over: Literal["auto", "on", "off"] = "auto"  #: auto, on, off: the CPU takes what it answers before a busy GPU (docs/tuning.md)


class Oip(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The Open Inference Protocol (docs/triton-clients.md)."""

    grpc_port: int | None = None  #: gRPC listens here; none: it does not, 0: any free port
    shared_memory: bool = False  #: clients on this machine may name shared memory objects that the server's user can open


class Streams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Streams of frames (docs/stream-protocol.md). Sizes take a number of bytes or "64MiB", times are seconds."""

    max: int = 64  #: streams open at once
    window: int = 256  #: `lossless`: frames of a stream without an outcome, before the server stops reading
    window_bytes: int = 64 * MIB  #: and their bytes
    kept: int = 10_000  #: outcomes of a stream that its client has not acknowledged
    kept_bytes: int = 8 * MIB  #: and their bytes
    kept_seconds: float = 120.0  #: how long a stream whose link is lost can be resumed
    heartbeat: float = 5.0  #: between two `hb` messages
    offline: float = 3.0  #: a stream without a frame for so long is offline
    ping: float = 20.0  #: between two WebSocket pings
    pong: float = 75.0  #: a link is given up when its pong takes longer


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
    log_format: Literal["text", "json"] = "text"  #: text, json: one object a line (docs/monitoring.md)
    log_requests: bool = False  #: a line for each request
    traces: bool = False  #: OpenTelemetry spans of requests, sent by OTLP as the OTEL_* variables say (docs/monitoring.md)
    limits: Limits = Limits()
    failback: Failback = Failback()
    http: Http = Http()
    streams: Streams = Streams()
    devices: Devices = Devices()
    oip: Oip = Oip()


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
        _check_keys(merged, Settings, str(path))
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


def _fields(struct: type[msgspec.Struct] = Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting's name ("port", "limits.body") and type."""
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _fields(field.type, f"{field.name}.")
        else:
            yield prefix + field.name, field.type


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """OUTBOARD_PORT -> port, OUTBOARD_LIMITS_BODY -> limits.body. Raises SettingsError for one that is no setting's."""
    known = {"OUTBOARD_" + name.replace(".", "_").upper(): (name, kind) for name, kind in _fields()}
    found: dict[str, Any] = {}
    for variable, value in env.items():
        if variable in known:
            name, kind = known[variable]
            found[name] = [x for x in value.split(";") if x] if get_origin(kind) is tuple else value
        elif variable.startswith("OUTBOARD_") and variable not in ELSEWHERE:
            raise SettingsError(f"{variable} is no setting's variable (docs/settings.md lists them){_near(variable, known)}")
    return found


def _check_keys(given: Mapping[str, Any], struct: type[msgspec.Struct], where: str, table: str = "") -> None:
    known = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in given.items():
        if key not in known:
            place = f"[{table}] {key}" if table else key
            raise SettingsError(f"{where}: {place} is no setting (docs/settings.md lists them){_near(key, known)}")
        if isinstance(value, dict) and isinstance(kind := known[key], type) and issubclass(kind, msgspec.Struct):
            _check_keys(value, kind, where, key)


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


def _convert(merged: dict[str, Any], where: str) -> Settings:
    try:
        for table, keys in (
            ("limits", ("body", "answer", "message", "frame_memory", "head")),
            ("streams", ("window_bytes", "kept_bytes")),
            ("devices", ("headroom",)),
        ):
            if isinstance(given := merged.get(table), dict):
                for key in keys:
                    if isinstance(given.get(key), str):
                        given[key] = size(given[key])
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
    if not settings.device:
        raise SettingsError(f"{where}: device is empty, expected auto, cpu, cuda:0, a GPU's UUID or sim:thunderbolt4")
    for name, value in msgspec.structs.asdict(settings.limits).items():
        if not (0 < value < math.inf or name == "frame_memory" and value == 0):
            raise SettingsError(f"{where}: limits.{name} is {value}, expected more than 0")
    return settings
