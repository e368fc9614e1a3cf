"""Which frames arrive when: stations at a steady rate, or a recorded trace."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

#: A camera's clock and a network move each frame by up to this share of its interval.
JITTER = 0.1
#: Seconds of a trace at most: one wrong time among many makes a trace of years, which nobody waits for.
LONGEST = 86_400.0


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace: a frame that reached the server whole."""

    t: float  #: seconds, on any clock
    station: str
    bytes: int
    width: int
    height: int


class TraceError(ValueError):
    """A trace that cannot be read: names file, line and what was expected."""


def steady(stations: int, fps: float, duration: float, nbytes: int, width: int, height: int, seed: int) -> list[Recorded]:
    """`stations` cameras of `fps` frames a second for `duration` seconds, each with its own phase."""
    rng = random.Random(seed)
    found = []
    for station in range(stations):
        phase = rng.random()
        for i in range(int(duration * fps)):
            at = (i + phase + rng.uniform(-JITTER, JITTER) / 2) / fps
            found.append(Recorded(t=max(0.0, at), station=f"station-{station + 1}", bytes=nbytes, width=width, height=height))
    return sorted(found, key=lambda r: (r.t, r.station))


def read(path: Path) -> list[Recorded]:
    """A trace in order of time, beginning at 0. NDJSON, or CSV with a heading of the same names. Raises TraceError."""
    try:
        text = path.read_text("utf-8-sig")  # spreadsheets write a byte order mark
    except (OSError, UnicodeDecodeError) as e:
        raise TraceError(f"--replay {path}: cannot be read: {e}") from e
    found: list[Recorded] = []
    for number, values in _json_lines(path, text) if text.lstrip().startswith("{") else _csv_lines(path, text):
        try:
            frame = msgspec.convert(values, Recorded, strict=False)
        except msgspec.ValidationError as e:
            raise TraceError(f"--replay {path}: line {number}: {e}; expected t (seconds), station, bytes, width and height") from e
        if frame.bytes < 1 or frame.width < 1 or frame.height < 1:
            raise TraceError(f"--replay {path}: line {number}: bytes, width and height must be at least 1")
        if not math.isfinite(frame.t):
            raise TraceError(f"--replay {path}: line {number}: t is {frame.t}, expected seconds on any clock")
        found.append(frame)
    if not found:
        raise TraceError(f"--replay {path}: it holds no frames")
    first, last = min(frame.t for frame in found), max(frame.t for frame in found)
    if last - first > LONGEST:
        raise TraceError(
            f"--replay {path}: its times go from {first:.15g} to {last:.15g} s, at most a day is played; is one wrong?"
        )
    return sorted((msgspec.structs.replace(f, t=f.t - first) for f in found), key=lambda f: f.t)


def _json_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line)
            except msgspec.DecodeError as e:
                raise TraceError(f"--replay {path}: line {number} is no JSON: {e}") from e


def _csv_lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    if not text.strip():
        return
    lines = csv.DictReader(text.splitlines())
    missing = set(Recorded.__struct_fields__) - set(lines.fieldnames or ())
    if missing:
        raise TraceError(f"--replay {path}: column {sorted(missing)[0]!r} is missing; expected t,station,bytes,width,height")
    for values in lines:
        yield lines.line_num, values
