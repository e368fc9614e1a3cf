"""The answer region: whole answers, aligned, freed when the front says so."""

from __future__ import annotations

import numpy as np
import pytest

from outboard.devices.slab import view
from outboard.worker.answers import ALIGN, Answers, RegionFull
from outboard.worker.errors import classify


def test_what_is_put_can_be_read_at_the_offsets_given() -> None:
    memory = np.zeros(4096, np.uint8)
    outputs = {"boxes": np.arange(12, dtype=np.float32).reshape(1, 3, 4), "labels": np.array([[1, 2, 3]], np.int64)}
    tensors = Answers(memory).put(7, outputs)
    for tensor in tensors:
        assert tensor.offset % ALIGN == 0
        assert np.array_equal(view(memory, tensor.offset, tensor.shape, tensor.dtype), outputs[tensor.name])


def test_an_answer_with_no_rows_has_its_shape() -> None:
    (tensor,) = Answers(np.zeros(256, np.uint8)).put(1, {"detections": np.empty((0, 6), np.float32)})
    assert tensor.shape == (0, 6)


def test_a_full_region_refuses_with_numbers_and_recovers_when_batches_are_freed() -> None:
    answers = Answers(np.zeros(1024, np.uint8))
    answers.put(1, {"x": np.zeros(800, np.uint8)})
    with pytest.raises(RegionFull, match=r"832 bytes wanted, 192 free of 1024.*1 batches") as caught:
        answers.put(2, {"x": np.zeros(800, np.uint8)})
    assert classify(caught.value) == "unknown"
    answers.free([1, 2, 99])
    assert answers.used == 0
    answers.put(3, {"x": np.zeros(800, np.uint8)})


def test_columns_of_a_larger_array_are_written_in_c_order() -> None:
    memory = np.zeros(1024, np.uint8)
    array = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2]
    (tensor,) = Answers(memory).put(1, {"x": array})
    assert np.array_equal(view(memory, tensor.offset, tensor.shape, tensor.dtype), array)
