"""The results file: one JSON object a line, in the frames' order, each frame once, also over crashes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import msgspec

from outboard_client.answers import Answer
from outboard_client.errors import Problem
from outboard_client.frames import BundleResult, Drop, Outcome

_BLOCK = 64 << 10


class Journal:
    """Appends to a file. What a crash left of a last line is cut off; `last` is the seq of the last whole one.

    A frame's outcome is held when its line is on the disk (`sync`). So after a crash the file itself says where to go on, and no second
    record can disagree with it. `spool` names the spool whose frames they are ("": none); its numbers mean nothing for another one.
    Raises ValueError for a file that is not this spool's.
    """

    def __init__(self, path: Path, spool: str = ""):
        self._spool = spool
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "ab+")  # noqa: SIM115
        self.last = self._recover()

    def _recover(self) -> int:
        size = self._file.seek(0, os.SEEK_END)
        whole = self._line_end(size)
        if whole < size:
            self._file.truncate(whole)
        if whole == 0:
            return 0
        begin = self._line_end(whole - 1)
        self._file.seek(begin)
        line = self._file.read(whole - begin)
        self._file.seek(0, os.SEEK_END)
        try:
            members = msgspec.json.decode(line)
            seq, spool = int(members["seq"]), members.get("spool", "")
        except (msgspec.DecodeError, AttributeError, KeyError, TypeError, ValueError) as e:
            raise ValueError(f"{self.path}: its last line is not one of a station's results; give another file") from e
        if spool != self._spool:
            raise ValueError(f"{self.path} has results of {spool or 'no spool'}, expected {self._spool or 'none'}; give another file")
        return seq

    def _line_end(self, before: int) -> int:
        """The offset behind the last newline in front of `before`; 0 where there is none. Lines may be of any length (masks)."""
        end = before
        while end > 0:
            begin = max(0, end - _BLOCK)
            self._file.seek(begin)
            if (found := self._file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
            end = begin
        return 0

    def append(self, outcome: Outcome) -> None:
        line = record(outcome) | ({"spool": self._spool} if self._spool else {})
        self._file.write(msgspec.json.encode(line) + b"\n")

    def flush(self) -> None:
        """Visible to other processes, and safe from the end of this one."""
        self._file.flush()

    def sync(self) -> None:
        """On the disk when this returns."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.flush()
        self._file.close()


def record(outcome: Outcome) -> dict[str, Any]:
    """An outcome as one line says it."""
    if isinstance(outcome, Drop):
        return {"type": "drop", "seq": outcome.seq, "reason": outcome.reason, "detail": outcome.detail}
    age_ms = round(outcome.age * 1e3, 1) if math.isfinite(outcome.age) else None
    line: dict[str, Any] = {"type": "result", "seq": outcome.seq, "age_ms": age_ms}
    if isinstance(outcome, BundleResult):
        parts = {name: part.members() if isinstance(part, Problem) else _members(part) for name, part in outcome.parts.items()}
        return line | {"parts": parts, "missing": outcome.missing, "meta": outcome.meta}
    return _members(outcome.answer) | line


def _members(answer: Answer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in Answer.__struct_fields__ if getattr(answer, name) is not None}
