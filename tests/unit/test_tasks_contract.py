"""What the golden answers tell of a decoder and of labels, on arrays written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import graphs
from outboard import repository
from outboard.repository import ModelProblem, ModelSpec
from outboard.tasks.contract import check


def spec(root: Path, decoder: str, labels: int, size: tuple[int, int] = (640, 640)) -> ModelSpec:
    text = 'labels = "labels.txt"\n' + graphs.toml("detection", decoder, size)
    folder = graphs.write_model(root, "m", b"not read here", text)
    (folder / "labels.txt").write_text("".join(f"class {i}\n" for i in range(labels)))
    return repository.read(folder)


def yolov8(classes: int, more: np.ndarray) -> dict[str, np.ndarray]:
    """A batch of one: boxes in pixels, class scores, and `more` rows after them."""
    rng = np.random.default_rng(0)
    table = np.concatenate([rng.uniform(0, 640, (4, 300)), rng.uniform(0, 1, (classes, 300)), more]).astype(np.float32)
    return {"output0": table[None]}


def test_mask_coefficients_and_key_points_after_the_labelled_classes_are_taken(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    check(yolov8(80, rng.normal(size=(32, 300))), spec(tmp_path, "yolov8", 80), "")
    check(yolov8(1, rng.uniform(0, 640, (51, 300))), spec(tmp_path, "yolov8", 1), "")


def test_scores_of_more_classes_than_there_are_labels_are_no_key_points(tmp_path: Path) -> None:
    with pytest.raises(ModelProblem, match="expected 80 lines") as caught:
        check(yolov8(80, np.zeros((0, 300))), spec(tmp_path, "yolov8", 20), "")
    assert caught.value.key == "labels"


def test_a_yolov8_head_read_as_yolov5_is_found_by_its_values(tmp_path: Path) -> None:
    with pytest.raises(ModelProblem, match="reads probabilities from 0 to 1"):
        check(yolov8(80, np.zeros((0, 300))), spec(tmp_path, "yolov5", 80), "")
