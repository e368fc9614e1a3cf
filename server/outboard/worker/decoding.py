"""JPEGs that a device decodes itself: brought once, kept for the batches that follow, measured and proved before the front is told.

A frame is decoded into a buffer of the device that looks like the frame's memory would, had the host decoded it: so a row is where it would
be, and the rest of the way is the same.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import simplejpeg

from outboard.core.decoding import Decoder
from outboard.core.state import Coded, Picture
from outboard.devices import slab
from outboard.imaging import coded as jobs
from outboard.imaging.header import read_header
from outboard.worker import pictures
from outboard.worker.errors import NotDecoded, classify
from outboard.worker.measure import mixed_rows, seeded_image

if TYPE_CHECKING:
    from outboard.worker.networks import LoadedNetwork

log = logging.getLogger(__name__)

#: (width, height) of the pictures by which a decoder is measured.
SIZES = ((640, 480), (2560, 1440))
REPEATS = 3
#: Seconds of batches beside the decoder, and their rows at most, that show whether it slows them.
BESIDE_S, MOST_ROWS = 0.1, 8
#: Levels by which a decoder's rows may differ from the host's, on the average: JPEG decoders round differently, and no more.
TOLERANCE = 2.0

B = TypeVar("B")
_ids = itertools.count(-1, -1)  # of what is measured: frames have positive ones


class Spent(threading.local):
    """What decoding took of the calling thread's batch. Seconds."""

    seconds = 0.0  #: of the decoder
    until = 0.0  #: when the last picture was decoded, by `time.perf_counter`; 0: none was

    def begin(self) -> None:
        self.seconds = self.until = 0.0


class Decoded(Generic[B]):
    """Frames decoded on a device. Used as a context manager around one batch, as `pictures.Kept` is: what it holds stays that long."""

    def __init__(self, most: int, allocate: Callable[[int], B], free: Callable[[B], None]):
        self._kept = pictures.Kept(most, allocate, free)
        self.spent = Spent()

    def __enter__(self) -> Decoded[B]:
        self._kept.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        # What one picture lacks does not make the others worse.
        kind = raised[0]
        self._kept.__exit__(None if kind is NotDecoded else kind, *raised[1:])  # type: ignore[arg-type]

    def bring(
        self, coded: Sequence[Coded], rows: Sequence[int], send: Callable[[int], None], decode: Callable[[Coded, B], None]
    ) -> list[tuple[Coded, B] | None]:
        """For each of the `rows` (offsets) its frame and the buffer with that; None: its pixels are in the slab. For frames that are
        not there, `send(bytes)` and then `decode(frame, buffer)` are called. Raises NotDecoded with the rows whose frames these fail for,
        or for which there is no room."""
        found: dict[int, B] = {}
        why: dict[int, str] = {}
        for c in coded:

            def upload(buffer: B, _first: int, _count: int, c: Coded = c) -> None:
                send(c.length)
                began = time.perf_counter()
                decode(c, buffer)
                self.spent.until = time.perf_counter()
                self.spent.seconds += self.spent.until - began

            try:
                buffer = self._kept.bring(Picture(c.id, c.offset, c.nbytes, c.nbytes), [c.offset], 1, upload)
            except Exception as e:
                if classify(e) == "sticky":
                    raise
                why[c.id] = f"{type(e).__name__}: {e}"
                continue
            if buffer is None:
                why[c.id] = f"there is no room for {c.nbytes} bytes of pixels beside the others of this batch"
            else:
                found[c.id] = buffer
        owners = [next((c for c in coded if c.offset <= offset < c.offset + c.nbytes), None) for offset in rows]
        if why:
            raise NotDecoded(next(iter(why.values())), [i for i, c in enumerate(owners) if c is not None and c.id in why])
        return [(c, found[c.id]) if c is not None else None for c in owners]


def source(memory: np.ndarray, c: Coded) -> tuple[jobs.Job, np.ndarray]:
    """What is to be made of a frame, and its JPEG's bytes where they lie."""
    return jobs.read(slab.view(memory, c.source, (c.length,), "uint8"))


def within(c: Coded, cut_from: Sequence[Picture]) -> list[Picture]:
    """The pictures of the frame, by their place in its buffer."""
    return [Picture(p.id, p.offset - c.offset, p.nbytes, p.pitch) for p in cut_from if p.id == c.id]


def others(coded: Sequence[Coded], rows: Sequence[int]) -> dict[int, int]:
    """The rows whose pixels are in the slab: index in the batch -> offset."""
    return {i: o for i, o in enumerate(rows) if not any(c.offset <= o < c.offset + c.nbytes for c in coded)}


def measure(network: LoadedNetwork) -> Decoder | None:
    """What decoding for this network costs its device; None where that takes pixels only, or makes other rows than the host does."""
    if network.spec.takes_tensors or network.spec.toml.parts or not network.device.decodes(network.backend.provider):
        return None
    try:
        small, large = (_Picture(network, size) for size in SIZES)
        costs = Decoder.fit((small.pixels, small.proved()), (large.pixels, large.proved()))
        return dataclasses.replace(costs, slows=_slows(network, large))
    except Exception as e:
        if classify(e) == "sticky":
            raise
        log.warning("%s: the device is to decode no JPEGs: %s", network.network.key, e)
        return None


@functools.cache
def _jpeg(width: int, height: int) -> bytes:
    """Of soft colours with noise; kept for the next network."""
    return simplejpeg.encode_jpeg(np.ascontiguousarray(seeded_image(width, height)), quality=85)


class _Picture:
    """A JPEG to measure by, in memory as the front lays it."""

    def __init__(self, network: LoadedNetwork, size: tuple[int, int]):
        self._device, self._given = network.device, network.network.input
        self.pixels = size[0] * size[1]
        self._body = _jpeg(*size)
        self._job = jobs.Job(read_header(self._body, max_pixels=self.pixels))
        head = jobs.packed(self._job)
        self._row = 3 * self._given.size[0] * self._given.size[1]
        self._memory = np.zeros(self._row + len(head) + len(self._body), np.uint8)
        jobs.write(head, self._body, self._memory[self._row :])

    def decode(self) -> tuple[Any, float]:
        """The row of it, as a batch, and the decoder's seconds."""
        spent = self._device.decoded.spent
        spent.begin()
        width, height = self._given.size
        c = Coded(next(_ids), 0, self._row, self._row, self._memory.nbytes - self._row)
        batch = self._device.gather_coded(self._memory, [0], (height, width, 3), 1, (), (c,), self._given)
        return batch, spent.seconds

    def proved(self) -> float:
        """Seconds of the quickest of some. Raises RuntimeError where the row differs from the host's."""
        host = np.zeros(self._job.shape(self._given), np.uint8)
        self._job.fill(self._body, self._given, host)
        took = []
        for _ in range(REPEATS):
            batch, seconds = self.decode()
            took.append(seconds)
        difference = np.abs(self._device.to_host(batch).astype(np.int16) - host).mean()
        if difference > TOLERANCE:
            raise RuntimeError(f"its rows differ from the host's by {difference:.1f} levels on the average")
        return min(took)


def _slows(network: LoadedNetwork, picture: _Picture) -> float:
    """Seconds of computing that a second of decoding costs: batches alone, then while another thread decodes all the time."""
    width, height = network.network.input.size
    memory, offsets = mixed_rows(seeded_image(width, height), min(network.max_rows, MOST_ROWS))

    def run(least: float) -> tuple[int, float]:
        began, n = time.perf_counter(), 0
        while n < 2 or time.perf_counter() - began < least:
            network.run(memory, offsets, (height, width, 3))
            n += 1
        return n, time.perf_counter() - began

    run(0.0)
    alone, elapsed = run(BESIDE_S / 2)
    each = elapsed / alone
    stop, decoding = threading.Event(), [0.0]

    def decode() -> None:
        while not stop.is_set():
            decoding[0] += picture.decode()[1]

    thread = threading.Thread(target=decode, name="measure")
    thread.start()
    try:
        n, elapsed = run(BESIDE_S)
    finally:
        stop.set()
        thread.join()
    return min(max(elapsed - n * each, 0.0) / max(min(decoding[0], elapsed), 1e-6), 1.0)
