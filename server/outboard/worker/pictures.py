"""Rows that are cut out of a picture: where they lie on the host, and which lines of the picture a device has already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from outboard.core.state import Picture
from outboard.devices import slab
from outboard.worker.errors import classify

#: Of a device's memory, the share in which pictures stay until their last tile was cut.
SHARE = 1 / 32

B = TypeVar("B")


def find(pictures: Sequence[Picture], offset: int) -> Picture | None:
    """The picture that a row at `offset` is cut out of; None: it lies whole."""
    return next((p for p in pictures if p.offset <= offset < p.offset + p.nbytes), None)


def cut(memory: np.ndarray, offset: int, shape: tuple[int, ...], pictures: Sequence[Picture]) -> np.ndarray:
    """The row at `offset` bytes of `memory`: uint8 `shape`, a view. Raises ValueError where it leaves the memory, or its picture."""
    picture = find(pictures, offset)
    if picture is None:
        return slab.view(memory, offset, shape, "uint8")
    height, width, channels = shape
    line, at = divmod(offset - picture.offset, picture.pitch)
    if at % channels or at + width * channels > picture.pitch or (line + height) * picture.pitch > picture.nbytes:
        raise ValueError(f"a row of {list(shape)} at byte {at} of line {line} leaves its picture ({picture.pitch} bytes a line)")
    lines = slab.view(memory, picture.offset + line * picture.pitch, (height, picture.pitch // channels, channels), "uint8")
    return lines[:, at // channels : at // channels + width]


def grouped(rows: Sequence[int], pictures: Sequence[Picture]) -> dict[Picture | None, dict[int, int]]:
    """The rows by the picture that they are cut out of: index in the batch -> offset."""
    groups: dict[Picture | None, dict[int, int]] = {}
    for i, offset in enumerate(rows):
        groups.setdefault(find(pictures, offset), {})[i] = offset
    return groups


class Kept(Generic[B]):
    """Pictures on a device: each line crosses the link once, in however many batches the tiles are.

    Used as a context manager around one batch: no other batch changes what is kept meanwhile, and after an exception nothing is, as it is
    not known what has arrived. A picture takes the buffer of the longest unused one, as a stream's are of one size and giving memory back
    holds up a whole device. `allocate` gives a buffer of so many bytes of the device, `free` takes it back; `most`: bytes of all.
    """

    def __init__(self, most: int, allocate: Callable[[int], B], free: Callable[[B], None]):
        self._most, self._allocate, self._free = most, allocate, free
        self._lock = threading.Lock()
        self._copies: dict[int, tuple[Picture, B, np.ndarray]] = {}  # by picture, the longest unused first; with bool [lines]: it is there
        self._in_use: set[int] = set()  # by this batch

    def __enter__(self) -> Kept[B]:
        self._lock.acquire()
        self._in_use.clear()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._in_use.clear()
                while (oldest := self._oldest()) is not None:
                    self._free(oldest[1])
        finally:
            self._lock.release()

    def bring(self, picture: Picture, rows: Sequence[int], height: int, upload: Callable[[B, int, int], None]) -> B | None:
        """Where the picture is on the device, once `upload(buffer, first, count)` was called for those lines of the `rows` (byte offsets)
        that were not there yet. None: there is no room for it beside the pictures of this batch."""
        copy = self._copies.pop(picture.id, None) or self._new(picture)
        if copy is None:
            return None
        self._copies[picture.id] = copy
        self._in_use.add(picture.id)
        _, buffer, there = copy
        wanted = np.zeros_like(there)
        for offset in rows:
            line = (offset - picture.offset) // picture.pitch
            wanted[line : line + height] = True
        edges = np.flatnonzero(np.diff(np.concatenate([[False], wanted & ~there, [False]])))
        for first, end in edges.reshape(-1, 2).tolist():
            upload(buffer, first, end - first)
        there |= wanted
        return buffer

    def _new(self, picture: Picture) -> tuple[Picture, B, np.ndarray] | None:
        nothing = np.zeros(picture.nbytes // picture.pitch, bool)
        while sum(p.nbytes for p, _, _ in self._copies.values()) + picture.nbytes > self._most:
            if (oldest := self._oldest()) is None:
                return None
            if oldest[0].nbytes == picture.nbytes:
                return picture, oldest[1], nothing
            self._free(oldest[1])
        try:
            return picture, self._allocate(picture.nbytes), nothing
        except RuntimeError as e:
            if classify(e) != "oom":
                raise
            return None

    def _oldest(self) -> tuple[Picture, B, np.ndarray] | None:
        """Take out the one that was not used for the longest time; None: this batch uses all."""
        name = next((n for n in self._copies if n not in self._in_use), None)
        return self._copies.pop(name) if name is not None else None
