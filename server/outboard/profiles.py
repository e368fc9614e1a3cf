"""Profiles: what was measured of a network on a device, kept on disk so that the next start begins with it.

One JSON file for each device and network in the cache directory, `profiles/DEVICE/MODEL@VERSION.PROVIDER.json`. A profile speaks for the
same device, model version, libraries and number of batches at once, and for nothing else; where any of them differs, or where the file
is damaged, one measures anew.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from outboard.core.costs import BatchCost
from outboard.core.link import Link

log = logging.getLogger(__name__)

SCHEMA = 2
#: Profiles of one network that are kept for a device: each change of a model.toml makes another.
KEPT = 16


class Key(msgspec.Struct, frozen=True):
    """What a profile speaks for."""

    uuid: str  #: the device's; of the CPU: its name and cores
    model: str  #: the network: the model's name, or "name/part"
    version: str  #: "sha256:…" of the model's files
    provider: str  #: what runs it: "CUDAExecutionProvider", "torch eager" …
    libraries: str  #: names and versions of what the figures depend on
    concurrency: int  #: batches at once
    threads: int  #: threads inside one batch


class Profile(msgspec.Struct, frozen=True):
    """What was measured. Bytes and seconds."""

    key: Key
    device: str  #: its name, for people
    measured_at: float  #: seconds since the epoch
    costs: list[BatchCost]
    fixed_rows: int  #: as `Loaded.fixed_rows`; 1 also where rows turned out to depend on their neighbours
    memory_bytes: int  #: of the loaded network
    link: Link | None  #: None: there is none
    schema: int = SCHEMA


class Store:
    """The profiles of a cache directory."""

    def __init__(self, cache: Path):
        self._root = cache / "profiles"

    def get(self, key: Key) -> Profile | None:
        """The profile that speaks for exactly this; None where there is none."""
        profile = _read(self._path(key))
        return profile if profile is not None and profile.key == key else None

    def put(self, profile: Profile) -> None:
        """Keep it: whole or not at all. Not to be able to is no failure: the next start measures again."""
        path = self._path(profile.key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".new", delete=False) as file:
                file.write(msgspec.json.format(msgspec.json.encode(profile)))
            os.replace(file.name, path)
            versions = sorted(path.parent.glob(f"{_slug(profile.key.model)}@*.json"), key=lambda p: p.stat().st_mtime, reverse=True)
            for old in versions[KEPT:]:
                old.unlink(missing_ok=True)
        except OSError as e:
            log.warning("what was measured of %s cannot be kept: %s", profile.key.model, e)

    def all(self) -> Iterator[Profile]:
        """Every profile that can be read."""
        for path in sorted(self._root.glob("*/*.json")):
            if (profile := _read(path)) is not None:
                yield profile

    def _path(self, key: Key) -> Path:
        version = key.version.removeprefix("sha256:")[:12]
        return self._root / _slug(key.uuid) / f"{_slug(key.model)}@{_slug(version)}.{_slug(key.provider)}.json"


def _read(path: Path) -> Profile | None:
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as e:
        log.warning("%s cannot be read (%s): it is measured anew", path, e)
        return None
    if profile.schema != SCHEMA or not profile.costs:
        log.info("%s is of another version of Outboard: it is measured anew", path)
        return None
    return profile


def _slug(text: str) -> str:
    """`text` as a file name. Different texts may share one: the key inside the file decides."""
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text)[:100]
