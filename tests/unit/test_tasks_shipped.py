"""The decoders of the shipped models, on arrays whose answer is known by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from outboard.imaging.geometry import Geometry
from outboard.problems import Problem
from outboard.repository import Input, ModelFile, ModelSpec, Network, Output
from outboard.tasks import Options, centerface, classification, text, yolov2

EVERYTHING = Options(min_score=0.0)
NO_CHANGE = Geometry(640, 640, 1.0, 1.0, 0, 0)


def spec(task: str, labels: int = 0, **output) -> ModelSpec:
    given = Input(size=(64, 64))
    toml = ModelFile(task=task, backend="onnx", file="m.onnx", input=given, output=Output(**output))
    network = Network(key="m", file=Path("m.onnx"), input=given, batching=toml.batching, sha256="")
    return ModelSpec(
        name="m", directory=Path("."), toml=toml, version="", labels=tuple(f"class {i}" for i in range(labels)), networks={"": network}
    )


# ---- classification

CLASSIFIER = spec("classification", decoder="logits")


def test_logits_become_probabilities_best_first():
    result = classification.logits({"y": np.log(np.array([[0.1, 0.6, 0.3]], np.float32))}, CLASSIFIER, Options(top_k=2))
    assert result.class_ids.tolist() == [1, 2]
    np.testing.assert_allclose(result.scores, [0.6, 0.3], rtol=1e-5)


def test_large_logits_do_not_overflow():
    result = classification.logits({"y": np.array([3e38, 0, -3e38], np.float32)}, CLASSIFIER, Options())
    assert result.class_ids[0] == 0
    assert result.scores.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_logit_is_left_out_and_counted(broken):
    result = classification.logits({"y": np.array([1.0, broken, 2.0], np.float32)}, CLASSIFIER, Options())
    assert result.class_ids.tolist() == [2, 0]
    assert result.scores.sum() == pytest.approx(1.0)
    assert result.non_finite == 1


def test_a_classifier_gone_all_wrong_answers_nothing():
    result = classification.logits({"y": np.full(1000, np.nan, np.float32)}, CLASSIFIER, Options())
    assert (result.class_ids.size, result.scores.size, result.non_finite) == (0, 0, 1000)


def test_the_best_of_many_classes_are_those_that_a_full_sort_finds():
    values = np.random.default_rng(0).integers(0, 20, 1000).astype(np.float32) / 20  # many equal ones
    for k in (1, 5, 999, 1000, 5000):
        result = classification.probabilities({"y": values}, CLASSIFIER, Options(top_k=k))
        assert result.class_ids.tolist() == np.argsort(-values, kind="stable")[:k].tolist()


def test_min_score_of_the_request_leaves_classes_out():
    result = classification.probabilities({"y": np.array([0.5, 0.3, 0.2], np.float32)}, CLASSIFIER, Options(min_score=0.3))
    assert result.class_ids.tolist() == [0, 1]


# ---- YOLOv2

YOLO = spec("detection", decoder="yolov2", anchors=((1.0, 2.0), (3.0, 3.0)))


def yolo_head(classes: int = 3, rows: int = 2, columns: int = 4) -> np.ndarray:
    head = np.zeros((2, 5 + classes, rows, columns), np.float32)
    head[:, 4] = -100
    return head


def test_a_cell_of_the_grid_becomes_a_box_in_pixels():
    head = yolo_head()
    head[1, :, 1, 2] = [0.0, 0.0, 0.0, np.log(2), 100, 0, 100, 0]  # centre of cell (1, 2), 3 x 6 cells, class 1
    result = yolov2.yolov2({"head": head.reshape(-1, 2, 4)}, YOLO, Options())
    np.testing.assert_allclose(result.boxes, [[(2.5 - 1.5) * 32, (1.5 - 3) * 32, (2.5 + 1.5) * 32, (1.5 + 3) * 32]], atol=1e-3)
    assert result.class_ids.tolist() == [1]
    assert result.scores.tolist() == [1.0]


def test_the_score_is_objectness_times_the_share_of_the_class():
    head = yolo_head()
    head[0, 4:, 0, 0] = [0.0, 1.0, 1.0, -100.0]
    result = yolov2.yolov2({"head": head.reshape(-1, 2, 4)}, YOLO, Options(min_score=0.2))
    assert result.scores[0] == pytest.approx(0.25)


def test_the_same_thing_seen_by_two_anchors_is_one_box():
    head = yolo_head()
    head[0, :, 0, 1] = [0, 0, np.log(3), np.log(1.5), 2, 9, 0, 0]
    head[1, :, 0, 1] = [0, 0, 0, 0, 3, 9, 0, 0]
    result = yolov2.yolov2({"head": head.reshape(-1, 2, 4)}, YOLO, Options())
    assert len(result.scores) == 1


def test_a_yolo_head_of_nothing_but_broken_numbers_has_no_boxes():
    head = np.full((16, 2, 4), np.nan, np.float32)
    result = yolov2.yolov2({"head": head}, YOLO, EVERYTHING)
    assert (result.boxes.shape, result.non_finite) == ((0, 4), 16)


def test_an_infinite_box_is_left_out_and_counted():
    head = yolo_head()
    head[1, 2, 1, 2], head[1, 4, 1, 2] = 1e9, 100
    result = yolov2.yolov2({"head": head.reshape(-1, 2, 4)}, YOLO, Options(min_score=0.1))
    assert (len(result.scores), result.non_finite) == (0, 1)


def test_a_head_that_does_not_fit_the_anchors_is_refused_with_both_shapes():
    with pytest.raises(Problem, match=r"got, for one image, \[15, 2, 4\]; expected \[2 anchors x"):
        yolov2.yolov2({"head": np.zeros((15, 2, 4), np.float32)}, YOLO, Options())


# ---- CenterFace

FACES = spec("detection", decoder="centerface")


def face_maps() -> dict[str, np.ndarray]:
    return {"heat": np.zeros((1, 8, 16), np.float32), "scale": np.zeros((2, 8, 16), np.float32), "offset": np.zeros((2, 8, 16), np.float32)}


def test_a_peak_of_the_heat_map_becomes_a_face():
    maps = face_maps()
    maps["heat"][0, 3, 5] = 0.9
    maps["scale"][:, 3, 5] = np.log([6, 4])  # height, width
    maps["offset"][:, 3, 5] = [0.25, -0.25]  # y, x
    result = centerface.centerface(maps, FACES, Options())
    np.testing.assert_allclose(result.boxes, [[21 - 8, 15 - 12, 21 + 8, 15 + 12]], atol=1e-4)
    assert result.scores.tolist() == [pytest.approx(0.9)]
    assert result.class_ids.tolist() == [0]


def test_no_peak_is_no_face():
    assert centerface.centerface(face_maps(), FACES, Options()).boxes.shape == (0, 4)


def test_other_maps_are_refused_with_their_shapes():
    with pytest.raises(Problem, match=r"heat \[2, 8, 16\]"):
        centerface.centerface({**face_maps(), "heat": np.zeros((2, 8, 16), np.float32)}, FACES, Options())


# ---- text


def text_map(*boxes: tuple[int, int, int, int]) -> dict[str, np.ndarray]:
    """A map of 640 x 640 with text at x1, y1, x2, y2."""
    chances = np.zeros((1, 640, 640), np.float32)
    for x1, y1, x2, y2 in boxes:
        chances[0, y1:y2, x1:x2] = 0.95
    return {"map": chances}


def test_text_is_found_grown_by_what_the_network_was_trained_to_leave_out():
    polygons, scores = text.text_boxes(text_map((100, 200, 300, 220)), NO_CHANGE)
    grow = 200 * 20 * text.UNCLIP / (2 * 220)
    np.testing.assert_allclose(polygons[0, 0], [100 - grow, 200 - grow], atol=2)
    np.testing.assert_allclose(polygons[0, 2], [300 + grow, 220 + grow], atol=2)
    assert scores[0] == pytest.approx(0.95, abs=0.05)


def test_lines_come_from_top_to_bottom_and_left_to_right_though_their_tops_jitter():
    boxes = (300, 100, 400, 120), (100, 104, 200, 124), (100, 160, 400, 180), (450, 97, 500, 117)
    polygons, _ = text.text_boxes(text_map(*boxes), NO_CHANGE)
    assert [round(float(p[:, 0].mean()), -1) for p in polygons] == [150, 350, 480, 250]


def test_specks_and_empty_maps_are_no_text():
    for chances in (text_map(), text_map((10, 10, 12, 40)), {"map": np.full((1, 64, 64), np.nan, np.float32)}):
        polygons, scores = text.text_boxes(chances, NO_CHANGE)
        assert (polygons.shape, scores.shape) == ((0, 4, 2), (0,))


def test_a_crop_straightens_and_a_line_written_downwards_is_laid_flat():
    pixels = np.zeros((200, 200, 3), np.uint8)
    pixels[50:150, 90:110] = 255
    pixels[50:70, 90:110] = (255, 0, 0)  # its upper end
    line = text.crop(pixels, np.array([[90, 50], [110, 50], [110, 150], [90, 150]], np.float32))
    assert line.shape == (20, 100, 3)
    assert line[10, 5].tolist() == [255, 0, 0]


def test_a_polygon_without_area_is_still_a_crop():
    assert text.crop(np.zeros((10, 10, 3), np.uint8), np.zeros((4, 2), np.float32)).shape == (1, 1, 3)


READER = Input(size=(320, 48), dynamic=True, color="BGR", background=(127, 127, 127))


@pytest.mark.parametrize(("line", "width"), [(1, 320), (320, 320), (321, 480), (481, 640), (700, 960), (2560, 2560), (9000, 2560)])
def test_the_width_of_a_row_is_the_first_step_that_suffices(line, width):
    assert text.row(np.zeros((48, line, 3), np.uint8), READER).shape == (48, width, 3)


def test_a_row_is_padded_on_the_right_and_in_the_networks_channel_order():
    row = text.row(np.full((24, 50, 3), (250, 10, 20), np.uint8), READER)
    assert row[20, 50].tolist() == [20, 10, 250]
    assert (row[:, 100:] == 127).all()


def test_a_network_of_fixed_width_sees_the_beginning_of_a_long_line():
    line = np.zeros((48, 1000, 3), np.uint8)
    line[:, :192] = 200
    assert (text.row(line, Input(size=(192, 48))) == 200).all()


@pytest.mark.parametrize(("ids", "read"), [([0, 1, 1, 0, 1, 2, 3, 2], "aab b"), ([0, 0], ""), ([], ""), ([2], "b")])
def test_repeated_steps_are_one_character_unless_a_blank_is_between(ids, read):
    charset = ("a", "b", text.SPACE)
    line, score = text.ctc({"ids": np.array(ids, np.int64), "scores": np.full(len(ids), 0.5, np.float32)}, charset)
    assert line == read
    assert score == (0.5 if read else 0.0)


def test_a_class_without_a_character_is_refused():
    with pytest.raises(Problem, match="ids from 0 to 2"):
        text.ctc({"ids": np.array([3]), "scores": np.ones(1, np.float32)}, ("a", "b"))
