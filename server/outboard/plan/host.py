"""What a frame costs this machine's processor: measured where it can be in a second, else said where it is from."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outboard import resources
from outboard.plan.machine import Host
from outboard.repository import Input

if TYPE_CHECKING:
    from outboard.core.state import Layout
    from outboard.imaging.header import Header
    from outboard.imaging.tiles import Tiling

#: Seconds of the event loop for each frame before its admission, for each byte of it, and after its answer: the request, its header,
#: the engine, the messages to threads and workers, the answer as JSON. The byte is measured (1,783 requests a second of 1.55 MB, 12,700
#: of 10 kB, on 2 cores); the rest is assumed, and `loadtests/plan_vs_live.py` shows by how much it is off on a machine.
RECEIVE, RECEIVE_BYTE, RESPOND = 0.5e-3, 0.31e-9, 0.7e-3
#: Seconds, on average, chosen so that the age of a frame under light load is what `loadtests/plan_vs_live.py` measured (19 to 21 ms on 2
#: cores of an AMD EPYC, Zen 4; 16 without it). It stands for all that nothing else here has: threads and processes that wake up, caches
#: that others have filled meanwhile, the client's own side.
HANDOVER = 0.8e-3
#: JPEG qualities between which the cost of a byte is measured.
QUALITIES = (60, 93)
#: Seconds of decoding for each of them.
BUDGET = 0.25


def host(cores: int = 0) -> Host:
    """This machine's, or one with so many cores that are as fast."""
    cores = cores or resources.cores()
    return Host(cores, cores + 1, RECEIVE, RECEIVE_BYTE, RESPOND, resources.frame_memory(0), HANDOVER)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of a core from a JPEG of one size in pixels to its rows in frame memory: `base` and `per_byte`."""

    base: float
    per_byte: float
    rows: int = 1

    def seconds(self, nbytes: int) -> float:
        return self.base + self.per_byte * nbytes


def row_bytes(width: int, height: int, given: Input, tiling: Tiling | None, most_tiles: int) -> float:
    """Bytes of frame memory, and over the link, that a JPEG of this size takes for each of its rows: less where they are cut out of one
    picture. Raises Problem where it cannot be cut."""
    from outboard.imaging import tiles
    from outboard.imaging.header import Header

    if tiling is not None:
        cut = tiles.plan(width, height, given, tiling, most_tiles)
        if (layout := tiles.layout(cut, Header("jpeg", width, height), given)) is not None:
            return layout.nbytes / cut.rows
    return 3.0 * given.size[0] * given.size[1]


def measure(width: int, height: int, given: Input, tiling: Tiling | None, most_tiles: int) -> DecodeCost:
    """Decode and fit, or cut, a made-up photograph of this size as the server would, on as many threads as there are cores, in two
    qualities. Raises Problem where it cannot be cut."""
    import simplejpeg

    from outboard.imaging import tiles
    from outboard.imaging.decode import decode
    from outboard.imaging.fit import decode_size, fit
    from outboard.imaging.header import read_header

    cut = tiles.plan(width, height, given, tiling, most_tiles) if tiling is not None else None
    pixels = photograph(width, height)
    points = []
    for quality in QUALITIES:
        body = simplejpeg.encode_jpeg(pixels, quality, "RGB", "420")
        header = read_header(body, max_pixels=width * height)
        least = tiles.decode_size(cut, header, given) if cut is not None else decode_size(header, given)

        layout = tiles.layout(cut, header, given) if cut is not None else None

        def once(
            body: bytes = body, header: Header = header, least: tuple[int, int] | None = least, layout: Layout | None = layout
        ) -> None:
            decoded = decode(body, header, min_size=least, background=given.background)
            if cut is not None and layout is not None:
                tiles.lay(cut, layout, decoded, header, given, np.empty(layout.nbytes, np.uint8))
                return
            rows = np.empty((cut.rows if cut is not None else 1, given.size[1], given.size[0], 3), np.uint8)
            if cut is not None:
                tiles.cut(cut, decoded, header, given, rows)
            else:
                fit(decoded, header, given, rows[0])

        points.append((len(body), _busy_seconds(once, resources.cores())))
    (small, fast), (large, slow) = points
    per_byte = max(0.0, (slow - fast) / (large - small))
    return DecodeCost(max(0.0, fast - per_byte * small), per_byte, cut.rows if cut is not None else 1)


def _busy_seconds(work: Callable[[], None], threads: int) -> float:
    """Seconds of a core that `work` takes while so many threads do it: processor time, so that other programs do not count."""
    times: list[float] = []

    def repeat() -> None:
        work()  # pages and caches
        end, n = time.perf_counter() + BUDGET, 0
        while n < 3 or time.perf_counter() < end:
            began = time.thread_time()
            work()
            times.append(time.thread_time() - began)
            n += 1

    running = [threading.Thread(target=repeat, name="measure") for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return statistics.median(times)


def photograph(width: int, height: int) -> np.ndarray:
    """uint8 [height, width, 3], the same each time: soft shapes, edges and a camera's noise, so that its JPEG costs what a photograph's
    does."""
    import cv2

    rng = np.random.default_rng(0)
    total = np.zeros((height, width, 3), np.float32)
    for cells, weight in ((8, 70.0), (64, 35.0), (512, 18.0)):
        coarse = rng.standard_normal((max(2, cells * height // width), cells, 3)).astype(np.float32)
        total += weight * cv2.resize(coarse, (width, height), interpolation=cv2.INTER_NEAREST if cells == 64 else cv2.INTER_CUBIC)
    total += 128 + 4 * rng.standard_normal((height, width, 1)).astype(np.float32)
    return np.clip(total, 0, 255).astype(np.uint8)
