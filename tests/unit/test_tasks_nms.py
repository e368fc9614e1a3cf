"""Non-maximum suppression keeps one box a thing, and agrees with torchvision's."""

import numpy as np
import pytest

from outboard.tasks.nms import nms

SQUARE = [0, 0, 10, 10]
SHIFTED = [1, 0, 11, 10]  # IoU 9 / 11 with SQUARE
FAR = [100, 100, 110, 110]


def test_no_boxes_give_no_boxes():
    for class_ids in (None, np.zeros(0, np.int64)):
        kept = nms(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), class_ids, 0.5)
        assert kept.shape == (0,) and kept.dtype.kind == "i"


def test_the_better_of_two_overlapping_boxes_stays_and_the_best_comes_first():
    boxes = np.array([SQUARE, SHIFTED, FAR], np.float32)
    assert nms(boxes, np.array([0.5, 0.9, 0.95], np.float32), None, 0.5).tolist() == [2, 1]
    assert nms(boxes, np.array([0.5, 0.9, 0.95], np.float32), None, 0.9).tolist() == [2, 1, 0]


def test_boxes_of_other_classes_are_left_alone():
    boxes = np.array([SQUARE, SHIFTED, SQUARE], np.float32)
    assert nms(boxes, np.array([0.9, 0.8, 0.7], np.float32), np.array([3, 3, 4]), 0.5).tolist() == [0, 2]


def test_a_suppressed_box_suppresses_nothing():
    """B goes because of A; C overlaps only B and stays."""
    boxes = np.array([[0, 0, 10, 10], [4, 0, 14, 10], [8, 0, 18, 10]], np.float32)
    assert nms(boxes, np.array([0.9, 0.8, 0.7], np.float32), None, 0.4).tolist() == [0, 2]


def test_equal_scores_keep_the_lower_index():
    boxes = np.array([SHIFTED, SQUARE, FAR], np.float32)
    assert nms(boxes, np.full(3, 0.5, np.float32), None, 0.5).tolist() == [0, 2]


def test_nan_and_infinite_boxes_never_stay_and_never_suppress():
    boxes = np.array([[np.nan, 0, 10, 10], SQUARE, [0, 0, np.inf, 10], SHIFTED], np.float32)
    assert nms(boxes, np.array([0.99, 0.5, 0.98, np.nan], np.float32), None, 0.5).tolist() == [1]


def test_boxes_without_area_and_inverted_boxes_do_no_harm():
    boxes = np.array([[5, 5, 5, 5], [5, 5, 5, 5], [9, 9, 1, 1], SQUARE], np.float32)
    with np.errstate(all="raise"):
        assert nms(boxes, np.array([0.9, 0.8, 0.7, 0.6], np.float32), None, 0.5).tolist() == [0, 1, 2, 3]


def test_only_the_best_candidates_are_compared():
    boxes = np.array([[20 * i, 0, 20 * i + 10, 10] for i in range(50)], np.float32)
    scores = np.linspace(0.1, 0.9, 50, dtype=np.float32)
    assert nms(boxes, scores, None, 0.5, candidates=7).tolist() == list(range(49, 42, -1))


@pytest.mark.parametrize(("count", "size"), [(2, 30), (40, 30), (129, 30), (700, 12), (2500, 5)])
@pytest.mark.parametrize("classes", [None, 3])
def test_random_crowds_agree_with_torchvision(count: int, size: int, classes: int | None):
    torch = pytest.importorskip("torch")
    ops = pytest.importorskip("torchvision.ops")
    rng = np.random.default_rng(count + size)
    corner = rng.uniform(0, 100, (count, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(1, size, (count, 2))], 1).astype(np.float32)
    scores = rng.permutation(count).astype(np.float32) / count
    ids = None if classes is None else rng.integers(0, classes, count)
    if ids is None:
        expected = ops.nms(torch.from_numpy(boxes), torch.from_numpy(scores), 0.4)
    else:
        expected = ops.batched_nms(torch.from_numpy(boxes), torch.from_numpy(scores), torch.from_numpy(ids), 0.4)
    assert nms(boxes, scores, ids, 0.4).tolist() == expected.tolist()
