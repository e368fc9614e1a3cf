"""Pictures on a device: rows are cut out of them, and each line crosses the link once."""

from __future__ import annotations

import numpy as np
import pytest

from outboard.core.state import Picture
from outboard.worker.pictures import Kept, cut

#: 10 lines of 20 pixels.
PITCH, LINES = 60, 10
SHAPE = (4, 5, 3)


def picture(n: int = 1, lines: int = LINES) -> Picture:
    return Picture(n, 100, PITCH * lines, PITCH)


class Device:
    """Buffers by number, and what crossed the link for them."""

    def __init__(self, most: int, memory: int = 1 << 20):
        self.memory, self.buffers, self.crossed = memory, 0, []
        self.sizes: dict[int, int] = {}
        self.kept: Kept[int] = Kept(most, self.allocate, self.free)

    def allocate(self, nbytes: int) -> int:
        if nbytes > self.memory:
            raise RuntimeError("CUDA out of memory")
        self.memory -= nbytes
        self.buffers += 1
        self.sizes[self.buffers] = nbytes
        return self.buffers

    def free(self, buffer: int) -> None:
        self.memory += self.sizes.pop(buffer)

    def batch(self, *pictures: Picture, lines: tuple[int, ...] = (0,)) -> list[int | None]:
        """One batch with a row at each of `lines` of each picture; the lines that crossed the link are in `crossed`."""
        self.crossed = []
        with self.kept as kept:
            return [
                kept.bring(p, [p.offset + line * PITCH for line in lines], SHAPE[0], lambda _, *new: self.crossed.append(new))
                for p in pictures
            ]


def test_each_line_crosses_once_in_however_many_batches_its_tiles_are() -> None:
    device = Device(1 << 20)
    device.batch(picture(), lines=(0, 1))
    assert device.crossed == [(0, 5)]
    device.batch(picture(), lines=(1, 3))
    assert device.crossed == [(5, 2)]
    device.batch(picture(), lines=(6,))
    assert device.crossed == [(7, 3)]
    device.batch(picture(), lines=(0, 3, 6))
    assert device.crossed == [] and device.buffers == 1


def test_two_stretches_that_are_apart_cross_apart() -> None:
    device = Device(1 << 20)
    device.batch(picture(lines=20), lines=(0, 10))
    assert device.crossed == [(0, 4), (10, 4)]


def test_the_picture_that_was_not_used_for_the_longest_time_makes_room() -> None:
    device = Device(2 * LINES * PITCH)
    device.batch(picture(1))
    device.batch(picture(2))
    device.batch(picture(1))
    assert device.batch(picture(3)) == [2], "it has the buffer of the second one, of the same size"
    assert device.crossed == [(0, 4)], "what lay there before is not taken for it"
    device.batch(picture(1))
    assert device.crossed == []
    device.batch(picture(2))
    assert device.crossed == [(0, 4)]


def test_a_picture_of_another_size_gets_memory_of_its_own() -> None:
    device = Device(LINES * PITCH)
    device.batch(picture(1))
    assert device.batch(picture(2, lines=6)) == [2] and device.sizes == {2: 6 * PITCH}


def test_there_is_no_room_beside_the_pictures_of_the_same_batch() -> None:
    device = Device(2 * LINES * PITCH)
    assert device.batch(picture(1), picture(2), picture(3)) == [1, 2, None]
    assert device.batch(picture(3)) == [1]


def test_a_device_that_is_full_keeps_no_picture() -> None:
    device = Device(1 << 20, memory=10)
    assert device.batch(picture()) == [None] and device.memory == 10


def test_after_a_failure_nothing_is_taken_for_granted() -> None:
    device = Device(1 << 20)
    device.batch(picture())
    with pytest.raises(OSError, match="the cable"), device.kept as kept:
        kept.bring(picture(2), [100], 4, lambda *_: (_ for _ in ()).throw(OSError("the cable")))
    assert device.sizes == {}
    device.batch(picture())
    assert device.crossed == [(0, 4)]


def test_a_row_is_cut_out_of_its_picture_or_lies_whole() -> None:
    memory = np.random.default_rng(0).integers(0, 256, 100 + LINES * PITCH + 60, np.uint8)
    pixels = memory[100 : 100 + LINES * PITCH].reshape(LINES, 20, 3)
    row = cut(memory, 100 + 6 * PITCH + 3 * 15, SHAPE, [picture()])
    np.testing.assert_array_equal(row, pixels[6:10, 15:20])
    assert np.may_share_memory(row, memory)
    np.testing.assert_array_equal(cut(memory, 100 + LINES * PITCH, SHAPE, [picture()]).reshape(-1), memory[-60:])


@pytest.mark.parametrize(
    "at", [7 * PITCH, 3 * 16, 3 * 15 + 1], ids=["below the last line", "beyond the end of a line", "between two pixels"]
)
def test_a_row_that_leaves_its_picture_is_refused(at: int) -> None:
    memory = np.zeros(1000, np.uint8)
    with pytest.raises(ValueError, match="leaves its picture"):
        cut(memory, 100 + at, SHAPE, [picture()])


def test_a_picture_that_leaves_the_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves a memory"):
        cut(np.zeros(400, np.uint8), 100 + 6 * PITCH, SHAPE, [picture()])
