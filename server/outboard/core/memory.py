"""Accounting of frame memory: which bytes of the slab are whose."""

from __future__ import annotations

from bisect import bisect_left, insort

PAGE = 4096


class OutOfSlab(MemoryError):
    """No free stretch of this size."""


class Allocator:
    """First-fit allocation of byte ranges in [0, size), aligned to `align`; adjacent free ranges are merged.

    It always gives the lowest free place, so the pages really touched follow the peak of what was in flight. `used` is the
    sum of the allocated (rounded) lengths: it returns to 0 when everything was freed.
    """

    def __init__(self, size: int, align: int = PAGE):
        self.size = size // align * align
        self.align = align
        self.used = 0
        self._free: list[tuple[int, int]] = [(0, self.size)]  # (offset, length), sorted
        self._held: dict[int, int] = {}

    def alloc(self, nbytes: int) -> int:
        """The offset of a free stretch of `nbytes`. Raises OutOfSlab."""
        assert nbytes > 0, nbytes
        need = -(-nbytes // self.align) * self.align
        for i, (offset, length) in enumerate(self._free):
            if length >= need:
                if length == need:
                    del self._free[i]
                else:
                    self._free[i] = (offset + need, length - need)
                self._held[offset] = need
                self.used += need
                return offset
        raise OutOfSlab(f"{nbytes} bytes wanted, {self.size - self.used} free of {self.size}")

    def free(self, offset: int) -> None:
        length = self._held.pop(offset)
        self.used -= length
        i = bisect_left(self._free, (offset, 0))
        if i < len(self._free) and self._free[i][0] == offset + length:
            length += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == offset:
            before = self._free.pop(i - 1)
            offset, length = before[0], before[1] + length
        insort(self._free, (offset, length))
