"""A JPEG on its way to rows: what is to be made of it, and the bytes, as they lie in frame memory for a device that decodes.

The host makes the same rows of it with `Job.fill`; a device must come as close as its decoder does.
"""

from __future__ import annotations

from struct import pack_into, unpack_from

import msgspec
import numpy as np

from outboard.core.state import Layout
from outboard.imaging import fit, tiles
from outboard.imaging.decode import decode, decoded_size
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Data, Header
from outboard.repository import Input

_END = b"\xff\xd9"  # of a JPEG
_LENGTH = 4  # bytes of the head's


class Job(msgspec.Struct, frozen=True):
    """What rows an image becomes: one of all of it, or those of a plan, cut on the device where they have a layout."""

    header: Header
    plan: tiles.Plan | None = None
    layout: Layout | None = None

    def min_size(self, input: Input) -> tuple[int, int] | None:
        """The (width, height) of the upright picture that suffices; None: all of it."""
        return tiles.decode_size(self.plan, self.header, input) if self.plan else fit.decode_size(self.header, input)

    def decoded_size(self, input: Input) -> tuple[int, int]:
        """(width, height) of the upright picture that the rows are made of."""
        return decoded_size(self.header, self.min_size(input))

    def shows(self, input: Input) -> Geometry | list[tiles.View]:
        """Where the image lies in the row, or what each of the plan's rows shows of it."""
        size = self.decoded_size(input)
        return tiles.views(self.plan, self.header, input, size) if self.plan else fit.placing(self.header, input, size).geometry

    def fill(self, data: Data, input: Input, memory: np.ndarray) -> Geometry | list[tiles.View]:
        """Decode `data` and write the rows into `memory` (uint8 [rows, height, width, 3] of `input.size`, or [layout.nbytes]); what they
        show. Raises Problem."""
        pixels = decode(data, self.header, min_size=self.min_size(input), background=input.background)
        if self.plan is None:
            return fit.fit(pixels, self.header, input, memory[0])
        if self.layout is not None:
            return tiles.lay(self.plan, self.layout, pixels, self.header, input, memory)
        return tiles.cut(self.plan, pixels, self.header, input, memory)

    def shape(self, input: Input) -> tuple[int, ...]:
        """Of the memory that `fill` takes."""
        if self.layout is not None:
            return (self.layout.nbytes,)
        return (self.plan.rows if self.plan else 1, input.size[1], input.size[0], 3)


def for_devices(header: Header, data: Data) -> bool:
    """Whether a device may try: what every decoder knows, and a file that is whole. Decoders of devices fill in what is missing without a
    word, so an end that is cut off must be seen before."""
    return header.plain and bytes(data[-2:]) == _END


def packed(job: Job) -> bytes:
    """What lies before the JPEG's bytes in frame memory."""
    job_bytes = msgspec.msgpack.encode(job)
    head = bytearray(_LENGTH)
    pack_into("<I", head, 0, len(job_bytes))
    return bytes(head) + job_bytes


def write(head: bytes, data: Data, memory: np.ndarray) -> None:
    """Put both into `memory`, uint8 [len(head) + len(data)]."""
    memory[: len(head)] = np.frombuffer(head, np.uint8)
    memory[len(head) :] = np.frombuffer(data, np.uint8)


def read(memory: np.ndarray) -> tuple[Job, np.ndarray]:
    """What `write` has put there: the job, and the JPEG's bytes where they lie. Raises ValueError."""
    (length,) = unpack_from("<I", memory, 0)
    job = msgspec.msgpack.decode(memory[_LENGTH : _LENGTH + length].data, type=Job)
    return job, memory[_LENGTH + length :]
