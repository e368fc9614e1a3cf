"""Decoders for detectors that people bring: a graph finds coloured blocks and answers in each layout; they are where they were."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest

import graphs
from outboard import repository, tasks
from outboard.imaging.fit import fit
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header
from outboard.problems import Problem
from outboard.tasks import Options, detection
from outboard.tasks.answer import answer_body

SIZE = (320, 320)
WIDTH, HEIGHT = 480, 270  # letterboxed: pads above and below

LEFT_RED = (30, 40, 120, 150)
RIGHT_GREEN = (300, 100, 430, 220)

NO_OPTIONS = Options()
RED, GREEN = (0, "red"), (1, "green")
A = [(*RED, 0.9, LEFT_RED)]  # what is in image A
B = [(*GREEN, 0.8, RIGHT_GREEN)]
BOTH = [*A, *B]

#: Keys of [output], and the labels, that each layout needs.
OUTPUT = {"ssd": 'boxes = "unit"\nbackground_class = true\nfirst_class = 1'}
#: The class ids of red and green: SSD has a class 0 for the background.
FIRST_CLASS = {"ssd": 1}


def picture(*boxes: tuple[int, int, int, int]) -> np.ndarray:
    """uint8 [HEIGHT, WIDTH, 3]: grey with LEFT_RED, RIGHT_GREEN or both."""
    pixels = np.full((HEIGHT, WIDTH, 3), 110, np.uint8)
    for x1, y1, x2, y2 in boxes:
        pixels[y1:y2, x1:x2] = graphs.COLORS[0 if (x1, y1, x2, y2) == LEFT_RED else 1]
    return pixels


IMAGES = {"A": picture(LEFT_RED), "B": picture(RIGHT_GREEN), "both": picture(LEFT_RED, RIGHT_GREEN), "none": picture()}
EXPECTED = {"A": A, "B": B, "both": BOTH, "none": []}


@cache
def session(layout: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(graphs.block_finder(layout, SIZE), options, providers=["CPUExecutionProvider"])


@pytest.fixture
def read_spec(tmp_path: Path):
    """layout -> the ModelSpec, read from files as the server does."""

    def read(layout: str, labels: bool = True, output: str = "") -> repository.ModelSpec:
        text = graphs.toml("detection", graphs.FORMATS[layout], SIZE, output=OUTPUT.get(layout, "") + "\n" + output)
        if labels:
            text = 'labels = "labels.txt"\n' + text
        folder = graphs.write_model(tmp_path, layout, b"not read here", text)
        (folder / "labels.txt").write_text("red\ngreen\n")
        return repository.read(folder)

    return read


def run(layout: str, names: list[str]) -> tuple[dict[str, np.ndarray], list[Geometry]]:
    """The raw outputs for a batch of IMAGES, and where each picture lies in the network's input."""
    batch, geometries = [], []
    for name in names:
        canvas = np.empty((SIZE[1], SIZE[0], 3), np.uint8)
        geometries.append(fit(IMAGES[name], Header("png", WIDTH, HEIGHT), repository.Input(size=SIZE), canvas))
        batch.append(canvas.transpose(2, 0, 1).astype(np.float32) / 255)
    network = session(layout)
    outputs = network.run(None, {"images": np.stack(batch)})
    return dict(zip((o.name for o in network.get_outputs()), outputs, strict=True)), geometries


def answers(layout: str, spec: repository.ModelSpec, names: list[str], options: Options = NO_OPTIONS) -> list[dict]:
    """What each image of a batch is answered, through JSON as a client gets it."""
    outputs, geometries = run(layout, names)
    split = tasks.rows(spec.toml.output.decoder, outputs, len(names))
    bodies = [answer_body(tasks.decode(row, spec, options), spec, g) for row, g in zip(split, geometries, strict=True)]
    return [msgspec.json.decode(msgspec.json.encode(body)) for body in bodies]


def assert_found(layout: str, answer: dict, expected: list) -> None:
    assert set(answer) == {"detections"}
    assert len(answer["detections"]) == len(expected), f"{len(expected)} blocks are in the picture: {answer}"
    for got, (class_id, label, score, box) in zip(answer["detections"], expected, strict=True):
        assert (got["label"], got["class_id"]) == (label, class_id + FIRST_CLASS.get(layout, 0))
        assert got["score"] == pytest.approx(score, abs=2e-4)
        assert np.abs(np.subtract(got["box"], box)).max() <= 1.0, f"{got['box']} is more than a pixel off {box}"


@pytest.mark.parametrize("layout", graphs.FORMATS)
def test_each_layout_finds_the_blocks_within_a_pixel_of_the_submitted_image(layout, read_spec):
    for name, expected in EXPECTED.items():
        assert_found(layout, answers(layout, read_spec(layout), [name])[0], expected)


@pytest.mark.parametrize("layout", [x for x in graphs.FORMATS if x != "boxes_single"])
@pytest.mark.parametrize("names", [["A", "B"], ["B", "A"], ["none", "both", "A"]])
def test_in_a_batch_each_image_gets_its_own_boxes_and_the_same_as_alone(layout, names, read_spec):
    spec = read_spec(layout)
    batched = answers(layout, spec, names)
    for name, answer in zip(names, batched, strict=True):
        assert_found(layout, answer, EXPECTED[name])
        assert answer == answers(layout, spec, [name])[0]


def test_a_detector_exported_without_a_batch_axis_cannot_be_split_in_two(read_spec):
    outputs, _ = run("boxes_single", ["A", "B", "both"])
    with pytest.raises(Problem, match=r"shape \[4, 4\]; expected 3 rows on the first axis"):
        tasks.rows("boxes", outputs, 3)


def test_a_higher_threshold_answers_less_and_top_k_cuts_the_rest(read_spec):
    spec = read_spec("yolov8")
    for options in (Options(min_score=0.85), Options(top_k=1)):
        assert [d["label"] for d in answers("yolov8", spec, ["both"], options)[0]["detections"]] == ["red"]
    assert answers("yolov8", spec, ["both"], Options(min_score=0.95))[0] == {"detections": []}


def test_the_models_own_threshold_holds_where_the_request_has_none(read_spec):
    spec = read_spec("yolov8", output="min_score = 0.85")
    assert [d["label"] for d in answers("yolov8", spec, ["both"])[0]["detections"]] == ["red"]
    assert len(answers("yolov8", spec, ["both"], Options(min_score=0.5))[0]["detections"]) == 2


def test_a_threshold_of_zero_does_not_answer_the_zeros_that_exports_pad_with(read_spec):
    for layout in ("end2end", "efficient_nms", "boxes"):
        assert_found(layout, answers(layout, read_spec(layout), ["A"], Options(min_score=0.0))[0], A)


def test_the_shorter_axis_holds_the_classes_where_no_labels_tell(read_spec):
    for layout in ("yolov8", "yolov8_rows"):
        answer = answers(layout, read_spec(layout, labels=False), ["both"])[0]
        assert [d["label"] for d in answer["detections"]] == ["0", "1"]


# ---- outputs written by hand


def spec_of(decoder: str, labels: int = 2, size: tuple[int, int] = SIZE, **output) -> repository.ModelSpec:
    given = repository.Input(size=size)
    toml = repository.ModelFile(
        task="detection", backend="onnx", file="m.onnx", input=given, output=repository.Output(decoder=decoder, **output)
    )
    network = repository.Network(key="m", file=Path("m.onnx"), input=given, batching=toml.batching, sha256="")
    names = tuple(f"class {i}" for i in range(labels))
    return repository.ModelSpec(name="m", directory=Path("."), toml=toml, version="", labels=names, networks={"": network})


EMPTY = {
    "end2end [0, 6]": ("end2end", {"output0": np.zeros((0, 6), np.float32)}),
    "end2end [0, 7]": ("end2end", {"output": np.zeros((0, 7), np.float32)}),
    "num_dets 0": (
        "end2end",
        {
            "num_dets": np.zeros(1, np.int32),
            "det_boxes": np.full((100, 4), np.nan, np.float32),  # what lies behind num_dets is nobody's
            "det_scores": np.full(100, 0.9, np.float32),
            "det_classes": np.zeros(100, np.int32),
        },
    ),
    "boxes [0, 4]": ("boxes", {"boxes": np.zeros((0, 4), np.float32), "labels": np.zeros(0, np.int64), "scores": np.zeros(0, np.float32)}),
    "ssd [0, 4]": ("boxes", {"boxes": np.zeros((0, 4), np.float32), "scores": np.zeros((0, 3), np.float32)}),
    "yolov5 [0, 7]": ("yolov5", {"output0": np.zeros((0, 7), np.float32)}),
    "yolov8 [6, 0]": ("yolov8", {"output0": np.zeros((6, 0), np.float32)}),
    "detr [0, 3]": ("detr", {"logits": np.zeros((0, 3), np.float32), "pred_boxes": np.zeros((0, 4), np.float32)}),
}


@pytest.mark.parametrize("case", EMPTY)
def test_nothing_found_is_an_empty_list(case):
    decoder, outputs = EMPTY[case]
    spec = spec_of(decoder)
    result = tasks.decode(outputs, spec, Options())
    assert result.boxes.shape == (0, 4) and result.class_ids.dtype == np.int64
    assert msgspec.json.encode(answer_body(result, spec, Geometry(WIDTH, HEIGHT, 1.0, 1.0, 0, 0))) == b'{"detections":[]}'


def test_no_detections_in_a_whole_batch_are_none_for_each_image():
    assert [r["output"].shape for r in tasks.rows("end2end", {"output": np.zeros((0, 7), np.float32)}, 3)] == [(0, 7)] * 3


def test_rows_that_only_pad_the_batch_are_nobodys():
    table = np.array([[0, 1, 2, 3, 4, 0, 0.9], [3, 9, 9, 9, 9, 0, 0.9]], np.float32)
    (row,) = tasks.rows("end2end", {"output": table}, 1)
    assert row["output"].tolist() == table[:1].tolist()


@pytest.mark.parametrize("image", [np.nan, -1.0, 0.5])
def test_an_image_number_that_is_none_is_refused(image):
    with pytest.raises(Problem, match="whole image numbers from 0 on"):
        tasks.rows("end2end", {"output": np.array([[image, 1, 2, 3, 4, 0, 0.9]], np.float32)}, 2)


def test_rotated_boxes_are_refused_and_not_misread():
    with pytest.raises(Problem, match="rotated boxes are not supported"):
        tasks.rows("end2end", {"output0": np.zeros((1, 300, 7), np.float32)}, 1)


@pytest.mark.parametrize("decoder", ["yolov8", "tensor", "logits"])
def test_outputs_that_are_not_a_batch_are_refused_with_their_shape(decoder):
    with pytest.raises(Problem, match=r"'y' of a batch of 2 has shape \[3, 5\]; expected 2 rows") as caught:
        tasks.rows(decoder, {"y": np.zeros((3, 5), np.float32)}, 2)
    assert caught.value.slug == "inference_failed"


MISFITS = {
    "yolov5": {"output0": np.zeros((8, 5), np.float32)},
    "yolov8": {"output0": np.zeros((4, 8400), np.float32)},
    "end2end": {"output0": np.zeros((300, 5), np.float32)},
    "boxes": {"boxes": np.zeros((3, 4), np.float32), "scores": np.zeros(2, np.float32)},
    "detr": {"logits": np.zeros((100, 92), np.float32)},
}


@pytest.mark.parametrize("decoder", MISFITS)
def test_a_layout_that_does_not_fit_says_what_came_and_what_was_expected(decoder):
    with pytest.raises(Problem) as caught:
        tasks.decode(MISFITS[decoder], spec_of(decoder), Options())
    assert caught.value.slug == "inference_failed"
    for name, array in MISFITS[decoder].items():
        assert f"{name} {list(array.shape)}" in caught.value.detail
    assert f"decoder '{decoder}'" in caught.value.detail and "expected" in caught.value.detail


#: For one image two boxes, of which the second is good. The first has broken[…] in a score.
def rows_with(decoder: str, broken: float) -> dict[str, np.ndarray]:
    good = [60.0, 60, 40, 40]
    return {
        "yolov5": {"o": np.array([[50, 50, 20, 20, broken, 0.5, 0.5], [*good, 0.9, 1, 0], [*good, 0.9, broken, 0]], np.float32)},
        "yolov8": {"o": np.array([[50, 50, 20, 20, broken, 0.5], [*good, 0.9, 0], [*good, 0.1, broken]], np.float32).T},
        "end2end": {"o": np.array([[40, 40, 60, 60, broken, 0], [40, 40, 80, 80, 0.9, 0], [broken, 0, 9, 9, 0.9, 0]], np.float32)},
        "boxes": {
            "boxes": np.array([[40, 40, 60, 60], [40, 40, 80, 80], [broken, 0, 9, 9]], np.float32),
            "scores": np.array([broken, 0.9, 0.9], np.float32),
            "labels": np.array([0, 0, 1]),
        },
        "detr": {
            "logits": np.array([[broken, 0, 0], [3, 0, 0], [5, 0, 0]], np.float32),
            "pred_boxes": np.array([[0.5] * 4, np.divide(good, 100), [broken, 0.5, 0.1, 0.1]], np.float32),
        },
    }[decoder]


@pytest.mark.parametrize("broken", [np.nan, np.inf])
@pytest.mark.parametrize("decoder", ["yolov5", "yolov8", "end2end", "boxes", "detr"])
def test_a_box_with_nan_or_infinity_is_left_out_and_counted(decoder, broken):
    spec = spec_of(decoder, labels=0 if decoder == "detr" else 2, size=(100, 100))
    result = tasks.decode(rows_with(decoder, broken), spec, Options())
    np.testing.assert_allclose(result.boxes, [[40, 40, 80, 80]], rtol=1e-5)
    assert result.non_finite == 2
    body = answer_body(result, spec, Geometry(100, 100, 1.0, 1.0, 0, 0))
    assert body["non_finite"] == 2 and len(body["detections"]) == 1


def test_a_model_gone_all_wrong_answers_nothing_and_says_how_much():
    for decoder, shape in (("yolov5", (25, 7)), ("yolov8", (6, 25)), ("end2end", (25, 6))):
        result = tasks.decode({"o": np.full(shape, np.nan, np.float32)}, spec_of(decoder), Options())
        assert (len(result.boxes), result.non_finite) == (0, 25), decoder


def test_mask_coefficients_behind_the_classes_are_not_classes():
    """A segmentation export, [4 + 2 + 32, N] and prototypes: coefficients above every class score change nothing."""
    table = np.zeros((38, 50), np.float32)
    table[:4] = np.array([60, 60, 40, 40])[:, None]
    table[5, 7] = 0.9
    table[6:] = 5.0
    outputs = {"output0": table, "output1": np.zeros((32, 8, 8), np.float32)}
    for decoder, given in (("yolov8", outputs), ("yolov8", {"output0": table.T})):
        result = tasks.decode(given, spec_of(decoder), Options())
        assert (result.class_ids.tolist(), result.boxes.tolist()) == ([1], [[40, 40, 80, 80]])


def test_yolov5_multiplies_objectness_and_class():
    table = np.array([[60, 60, 40, 40, 0.5, 0.2, 0.8], [160, 160, 40, 40, 0.4, 0.3, 0.6]], np.float32)
    result = detection.yolov5({"output0": table}, spec_of("yolov5"), Options())
    assert result.scores.tolist() == [pytest.approx(0.4)]  # 0.4 x 0.6 is below 0.25
    assert result.class_ids.tolist() == [1]


def test_a_negative_or_large_class_number_is_its_own_label():
    spec = spec_of("end2end")
    result = tasks.decode({"o": np.array([[1, 2, 3, 4, 0.9, 77]], np.float32)}, spec, Options())
    assert answer_body(result, spec, Geometry(9, 9, 1.0, 1.0, 0, 0))["detections"][0]["label"] == "77"


def test_half_precision_outputs_decode_like_single():
    table = np.array([[10, 20, 110, 120, 0.75, 1], [0, 0, 0, 0, 0, 0]], np.float16)
    result = tasks.decode({"output0": table}, spec_of("end2end"), Options())
    assert (result.boxes.dtype, result.boxes.tolist(), result.scores.tolist()) == (np.float32, [[10, 20, 110, 120]], [0.75])


def test_torchvisions_background_label_is_not_answered():
    outputs = {"boxes": np.ones((2, 4), np.float32), "labels": np.array([0, 2]), "scores": np.array([0.9, 0.8], np.float32)}
    result = tasks.decode(outputs, spec_of("boxes", background_class=True), Options())
    assert result.class_ids.tolist() == [2]


def test_outputs_without_telling_names_are_found_by_shape():
    boxes, scores, labels = np.array([[1, 2, 3, 4]], np.float32), np.array([0.9], np.float32), np.array([1])
    for order in ([boxes, labels, scores], [scores, boxes, labels]):
        result = tasks.decode({str(i): array for i, array in enumerate(order)}, spec_of("boxes"), Options())
        assert (result.boxes.tolist(), result.class_ids.tolist()) == ([[1, 2, 3, 4]], [1])
    per_class = tasks.decode({"449": np.array([[0.1, 0.9]], np.float32), "448": boxes}, spec_of("boxes"), Options())
    assert (per_class.class_ids.tolist(), per_class.boxes.tolist()) == ([1], [[1, 2, 3, 4]])


def test_rt_detrs_query_may_be_two_things_and_detrs_only_one():
    boxes = np.array([[0.5, 0.5, 0.5, 0.5]], np.float32)
    two = tasks.decode({"logits": np.array([[2.0, 1.0]], np.float32), "pred_boxes": boxes}, spec_of("detr", labels=2), Options())
    assert two.class_ids.tolist() == [0, 1]
    one = tasks.decode({"logits": np.array([[2.0, 1.0, -9]], np.float32), "pred_boxes": boxes}, spec_of("detr", labels=2), Options())
    assert one.class_ids.tolist() == [0] and one.scores[0] == pytest.approx(np.e / (np.e + 1), abs=1e-3)


def test_every_decoder_of_the_repository_exists_with_its_task():
    """`ocr` is a pipeline of three networks and is decoded step by step (tasks/text.py)."""
    assert {name: d.task for name, d in tasks.DECODERS.items()} == {n: t for n, t in repository.DECODERS.items() if n != "ocr"}
