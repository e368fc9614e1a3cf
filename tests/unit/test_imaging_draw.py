"""The answer drawn on its picture."""

from __future__ import annotations

import base64

import cv2
import numpy as np
import pytest
import simplejpeg

from imaging_samples import astronaut
from outboard.imaging.draw import draw

FACE = [181, 62, 268, 172]


def drawn(pixels: np.ndarray, scale: float = 1, **answer: object) -> np.ndarray:
    size = {"width": round(pixels.shape[1] * scale), "height": round(pixels.shape[0] * scale), "orientation": 1}
    return simplejpeg.decode_jpeg(draw(pixels, {"image": size, **answer}))


def changed(before: np.ndarray, after: np.ndarray, by: int = 60) -> tuple[np.ndarray, ...]:
    return (np.abs(before.astype(int) - after).max(axis=2) > by).nonzero()


def detection(label: str, box: list[float], score: float = 0.9, class_id: int = 0) -> dict[str, object]:
    return {"label": label, "class_id": class_id, "score": score, "box": box}


def test_a_box_and_its_label_are_where_the_answer_says():
    ys, xs = changed(astronaut(), drawn(astronaut(), detections=[detection("face", FACE)]))
    assert abs(xs.min() - FACE[0]) <= 4 and abs(xs.max() - FACE[2]) <= 4 and abs(ys.max() - FACE[3]) <= 4
    assert 30 < ys.min() < FACE[1]  # the label is above


def test_the_inside_of_a_box_is_left_alone():
    after = drawn(astronaut(), detections=[detection("face", FACE)])
    inside = np.s_[FACE[1] + 8 : FACE[3] - 8, FACE[0] + 8 : FACE[2] - 8]
    assert np.abs(after[inside].astype(int) - astronaut()[inside]).mean() < 5


def test_boxes_of_the_submitted_image_are_scaled_to_a_smaller_picture():
    box = [v * 7.5 for v in FACE]
    ys, xs = changed(astronaut(), drawn(astronaut(), scale=7.5, detections=[detection("face", box)]))
    assert abs(xs.min() - FACE[0]) <= 4 and abs(xs.max() - FACE[2]) <= 4 and abs(ys.max() - FACE[3]) <= 4


def test_a_label_stays_in_the_picture_and_off_the_others():
    grey = np.full((400, 400, 3), 128, np.uint8)
    one = changed(grey, drawn(grey, detections=[detection("person", [300, 0, 400, 399])]))
    both = changed(grey, drawn(grey, detections=[detection("person", [300, 0, 400, 399]), detection("rocket", [300, 0, 400, 399], 0.5, 1)]))
    assert len(both[0]) > len(one[0]) * 1.2


def test_classes_are_written_in_the_lower_left_corner():
    classes = [{"label": "space shuttle", "class_id": 812, "score": 0.63}, {"label": "jersey", "class_id": 610, "score": 0.05}]
    ys, xs = changed(astronaut(), drawn(astronaut(), classes=classes))
    assert ys.min() > 400 and xs.max() < 256


def test_texts_have_their_polygon_and_what_was_read():
    polygon = [[330, 370], [420, 390], [415, 420], [325, 400]]
    ys, xs = changed(astronaut(), drawn(astronaut(), texts=[{"text": "NASA", "score": 0.9, "polygon": polygon}]))
    assert abs(xs.min() - 325) <= 4 and abs(xs.max() - 420) <= 4 and abs(ys.max() - 420) <= 4


def test_a_mask_tints_what_it_marks_and_nothing_else():
    grey = np.full((128, 128, 3), 128, np.uint8)
    ids = np.zeros((64, 64), np.uint8)
    ids[16:32, 16:32] = 1
    data = base64.b64encode(cv2.imencode(".png", ids)[1]).decode()
    after = drawn(grey, mask={"encoding": "png", "data": data, "labels": []})
    ys, xs = changed(grey, after, by=40)
    assert (xs.min(), ys.min(), xs.max(), ys.max()) == (32, 32, 63, 63)


def test_nothing_found_is_the_picture_itself():
    assert np.abs(drawn(astronaut(), detections=[]).astype(int) - astronaut()).mean() < 3


@pytest.mark.parametrize("shape", [(1, 1), (3, 900), (900, 3), (20, 20)])
def test_tiny_pictures_and_any_alphabet_are_drawn(shape):
    answer = {
        "detections": [detection("人 😀 größe\nzwei", [0, 0, *shape[::-1]]), detection("", [0, 0, 0, 0])],
        "classes": [{"label": "x" * 300, "class_id": 3, "score": 1.0}],
        "texts": [{"text": "", "score": 0.0, "polygon": [[0, 0]] * 4}],
    }
    assert drawn(np.zeros((*shape, 3), np.uint8), **answer).shape == (*shape, 3)
