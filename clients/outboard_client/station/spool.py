"""The disk spool: frames that wait for their outcome, kept over a power cut.

One SQLite file in WAL mode. Two things decided that:
- A frame is on the disk before it is sent (`synchronous=FULL`: each transaction ends with fsync). With less, a power cut could take back
  a frame whose number the server has seen, the number would be given again, and the next frame would get the other one's answer.
- Frames, what of the source was taken, and the numbers change together or not at all. An append-only log writes each frame once, where
  SQLite writes it twice (WAL, then the file), but needs all of this, and the reclaiming of space, written and proved anew.
Several frames go into one transaction when they come faster than the disk syncs.
"""

from __future__ import annotations

import itertools
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from outboard_client.errors import OutboardError
from outboard_client.frames import Frame

_SCHEMA = """
CREATE TABLE IF NOT EXISTS frames (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,  -- AUTOINCREMENT: a number is never given again
    captured INTEGER NOT NULL,
    meta BLOB NOT NULL,
    nbytes INTEGER NOT NULL,
    image BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS taken (source TEXT NOT NULL, key TEXT NOT NULL, PRIMARY KEY (source, key)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
_PAGE = 32 << 10  # a frame is hundreds of small pages, or tens of these
#: What the database and its WAL need beside the frames.
OVERHEAD = 16 << 20


class SpoolError(OutboardError):
    """The spool cannot be used."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A frame to be kept. `key` names it within `source`, so that it is not taken twice; "": it can't be (a camera)."""

    image: bytes
    captured: int
    meta: Any
    source: str
    key: str = ""


class Spool:
    """`limit` bounds the bytes of the file; a spool has one user at a time. Not safe for threads: give it one."""

    def __init__(self, folder: Path, limit: int):
        if limit <= OVERHEAD:
            raise SpoolError(f"the spool's limit is {limit} bytes, expected more than {OVERHEAD}")
        self.path = folder / "spool.sqlite"
        self.limit = limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
            self._db.execute(f"PRAGMA page_size={_PAGE}")
            self._db.execute("PRAGMA locking_mode=EXCLUSIVE")  # one user; and no shared memory file, which network disks lack
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(f"PRAGMA wal_autocheckpoint={(4 << 20) // _PAGE}")
            self._db.execute(f"PRAGMA journal_size_limit={8 << 20}")
            self._db.executescript(f"BEGIN EXCLUSIVE; {_SCHEMA} COMMIT;")
        except sqlite3.OperationalError as e:
            if "locked" in str(e):
                raise SpoolError(f"{self.path} is in use by another station; give this one a --spool of its own") from e
            raise SpoolError(f"{self.path}: {e}") from e
        except (OSError, sqlite3.DatabaseError) as e:
            raise SpoolError(f"{self.path}: {e}") from e
        if self._get("id") is None:
            self.remember("id", secrets.token_hex(6))
        self.id = self._get("id")
        self.frames, self.nbytes = self._db.execute("SELECT count(*), coalesce(sum(nbytes), 0) FROM frames").fetchone()

    def close(self) -> None:
        if not self.frames:
            self._db.execute("VACUUM")  # an empty spool gives its space back
        self._db.close()

    def fitting(self, entries: Sequence[Entry]) -> int:
        """How many of them, from the first on, there is room for."""
        totals = itertools.accumulate(len(e.image) for e in entries)
        return sum(self.nbytes + total <= self.limit - OVERHEAD for total in totals)

    def add(self, entries: Sequence[Entry]) -> bool:
        """Keep the frames; on the disk when this returns. False: the disk is full, and nothing was kept."""
        rows = [(e.captured, msgspec.json.encode(e.meta), len(e.image), e.image) for e in entries]
        try:
            with self._transaction():
                self._db.executemany("INSERT INTO frames (captured, meta, nbytes, image) VALUES (?, ?, ?, ?)", rows)
                self._db.executemany("INSERT OR IGNORE INTO taken VALUES (?, ?)", [(e.source, e.key) for e in entries if e.key])
        except sqlite3.OperationalError as e:
            if e.sqlite_errorcode == sqlite3.SQLITE_FULL:
                return False
            raise SpoolError(f"{self.path}: {e}") from e
        self.frames += len(rows)
        self.nbytes += sum(len(e.image) for e in entries)
        return True

    def next(self, after: int, at_most: int) -> list[Frame]:
        """Frames above `after`, in order."""
        rows = self._db.execute("SELECT seq, captured, meta, image FROM frames WHERE seq > ? ORDER BY seq LIMIT ?", (after, at_most))
        return [Frame(image, captured, msgspec.json.decode(meta), seq) for seq, captured, meta, image in rows]

    def settle(self, up_to: int) -> None:
        """Forget the frames up to that one: their outcomes are held."""
        where = "FROM frames WHERE seq <= ?"
        count, nbytes = self._db.execute(f"SELECT count(*), coalesce(sum(nbytes), 0) {where}", (up_to,)).fetchone()
        with self._transaction():
            self._db.execute(f"DELETE {where}", (up_to,))
            self._put("held", str(max(up_to, self.held)))
        self.frames -= count
        self.nbytes -= nbytes

    @property
    def held(self) -> int:
        """The last frame whose outcome, and all before, are held."""
        return int(self._get("held") or 0)

    @property
    def session(self) -> str | None:
        """The stream's session, to be resumed."""
        return self._get("session")

    def remember(self, name: str, value: str) -> None:
        with self._transaction():
            self._put(name, value)

    def taken(self, source: str) -> set[str]:
        """What of the source was taken before."""
        return {key for (key,) in self._db.execute("SELECT key FROM taken WHERE source = ?", (source,))}

    def _transaction(self) -> sqlite3.Connection:
        self._db.execute("BEGIN")
        return self._db

    def _get(self, name: str) -> str | None:
        row = self._db.execute("SELECT value FROM state WHERE name = ?", (name,)).fetchone()
        return row[0] if row else None

    def _put(self, name: str, value: str) -> None:
        self._db.execute("INSERT INTO state VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value", (name, value))
