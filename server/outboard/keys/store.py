"""The file of keys: names and SHA-256 digests, never a key itself.

A key is 256 random bits, so a digest needs no salt and no slow hash: nothing can be guessed. `outboard keys` writes the file, a running
server reads it again when it has changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

#: Begins every key, so that one that was published by mistake can be searched for.
PREFIX = "outboard_"
NAME = re.compile(r"[\w.-]{1,64}")
#: Seconds after which a server looks at the file again: so long a revoked key still works.
LOOK_EVERY = 1.0


class KeysError(Exception):
    """The file cannot be used, or what is asked of it cannot be done."""


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    sha256: str
    created: datetime


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key] = []


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def read(path: Path) -> list[Key]:
    """Raises KeysError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).keys
    except FileNotFoundError:
        raise KeysError(f"{path}: no such file; `outboard keys add NAME` makes it") from None
    except (OSError, msgspec.MsgspecError) as e:
        raise KeysError(f"{path}: {getattr(e, 'strerror', None) or e}; expected a file that `outboard keys` has written") from e


def add(path: Path, name: str) -> str:
    """Make a key of this name, and the file where there is none; the key, which is told only here. Raises KeysError."""
    if not NAME.fullmatch(name):
        raise KeysError(f"{name!r} is no name for a key, expected at most 64 letters, digits, '.', '-' or '_'")
    keys = read(path) if path.exists() else []
    if any(key.name == name for key in keys):
        raise KeysError(f"there is a key {name!r} already; revoke it first, or choose another name")
    key = PREFIX + secrets.token_urlsafe(32)
    _write(path, [*keys, Key(name, digest(key), datetime.now(UTC).replace(microsecond=0))])
    return key


def revoke(path: Path, name: str) -> None:
    """Raises KeysError."""
    keys = read(path)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        raise KeysError(f"there is no key {name!r}; known: {', '.join(key.name for key in keys) or 'none'}")
    _write(path, left)


def _write(path: Path, keys: list[Key]) -> None:
    """At once: a server that reads meanwhile sees the old file or the new one. Its owner and group stay able to read it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(_File(keys)), indent=1) + b"\n")
            os.fchmod(file.fileno(), mode)
        os.replace(name, path)
    except OSError as e:
        raise KeysError(f"{path}: cannot be written: {e.strerror}") from e


class Keyring:
    """The keys of a file, as they are now."""

    def __init__(self, path: Path):
        """Raises KeysError."""
        self._path = path
        self._stamp = self._seen()
        self._names = {key.sha256: key.name for key in read(path)}
        self._looked = time.monotonic()

    def owner(self, key: str) -> str | None:
        """The key's name; None: there is no such key, or it was revoked."""
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._look()
        return self._names.get(digest(key))

    def _look(self) -> None:
        self._looked = time.monotonic()
        if (stamp := self._seen()) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._names = {key.sha256: key.name for key in read(self._path)}
            log.info("the keys have changed: %d are valid", len(self._names))
        except KeysError as e:
            log.error("%s; the keys known before stay valid", e)

    def _seen(self) -> tuple[int, int, int]:
        try:
            status = self._path.stat()
        except OSError:
            return 0, 0, 0
        return status.st_ino, status.st_mtime_ns, status.st_size
