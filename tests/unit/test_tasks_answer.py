"""The task's part of an answer is plain JSON whose numbers are right, whatever the network put out."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import onnxruntime
import pytest

import graphs
from outboard import repository, tasks
from outboard.imaging.geometry import Geometry
from outboard.problems import Problem
from outboard.tasks import Classes, Detections, Options, Tensors, Texts
from outboard.tasks.answer import answer_body
from outboard.tasks.tensor import DATATYPES

AS_IT_IS = Geometry(640, 480, 1.0, 1.0, 0, 0)
TENSOR = graphs.toml("tensor", "tensor", (32, 32))


@pytest.fixture
def spec(tmp_path: Path) -> repository.ModelSpec:
    folder = graphs.write_model(tmp_path, "m", b"not read here", 'labels = "labels.txt"\n' + TENSOR)
    (folder / "labels.txt").write_text("cat\ndog\n")
    return repository.read(folder)


def through_json(body: dict) -> dict:
    return msgspec.json.decode(msgspec.json.encode(body))


def run(model: bytes, images: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return dict(zip((o.name for o in session.get_outputs()), session.run(None, {"images": images}), strict=True))


def test_every_kind_of_answer_is_plain_json_however_its_arrays_were_typed(spec):
    """numpy scalars inside an answer would be a 500 (H23)."""
    for real, whole in ((np.float32, np.int64), (np.float64, np.int32), (np.float16, np.uint8)):
        ids, scores = np.array([1, 0], whole), np.array([0.75, 0.5], real)
        boxes = np.array([[1, 2, 3, 4], [5, 6, 7, 8]], real)
        detections = through_json(answer_body(Detections(boxes=boxes, scores=scores, class_ids=ids), spec, AS_IT_IS))
        assert detections["detections"][0] == {"label": "dog", "class_id": 1, "score": 0.75, "box": [1.0, 2.0, 3.0, 4.0]}
        classes = through_json(answer_body(Classes(class_ids=ids, scores=scores), spec, AS_IT_IS))
        assert classes == {"classes": [{"label": "dog", "class_id": 1, "score": 0.75}, {"label": "cat", "class_id": 0, "score": 0.5}]}
        polygons = np.arange(16, dtype=real).reshape(2, 4, 2)
        texts = through_json(answer_body(Texts(texts=["Ä", '"'], scores=scores, polygons=polygons), spec, AS_IT_IS))
        assert texts["texts"][1] == {"text": '"', "score": 0.5, "polygon": [[8, 9], [10, 11], [12, 13], [14, 15]]}
        tensors = through_json(answer_body(Tensors(outputs={"y": ids, "z": scores}), spec, AS_IT_IS))
        assert [t["data"] for t in tensors["outputs"]] == [[1, 0], [0.75, 0.5]]


def test_boxes_come_back_in_the_submitted_images_pixels_and_stay_inside_it(spec):
    letterboxed = Geometry(3775, 1571, 320 / 3775, 133 / 1571, 0, 93)
    network = np.array([[160, 159.5, 400, 320], [-5, 0, 10, 93]], np.float32)
    result = Detections(boxes=network, scores=np.array([0.9, 0.8], np.float32), class_ids=np.array([0, 1]))
    first, second = answer_body(result, spec, letterboxed)["detections"]
    assert first["box"] == [1887.5, 785.5, 3775.0, 1571.0]
    assert second["box"] == [0.0, 0.0, 117.97, 0.0]
    assert b"-0" not in msgspec.json.encode(second["box"])


def test_numbers_are_short_and_near(spec):
    result = Detections(boxes=np.full((1, 4), 1 / 3, np.float32), scores=np.array([2 / 3], np.float32), class_ids=np.array([0]))
    (detection,) = answer_body(result, spec, AS_IT_IS)["detections"]
    assert msgspec.json.encode([detection["score"], detection["box"]]) == b"[0.66667,[0.33,0.33,0.33,0.33]]"


def test_nothing_found_is_an_empty_list(spec):
    none, no_ids = np.zeros(0, np.float32), np.zeros(0, np.int64)
    assert answer_body(Detections(boxes=np.zeros((0, 4), np.float32), scores=none, class_ids=no_ids), spec, AS_IT_IS) == {"detections": []}
    assert answer_body(Classes(class_ids=no_ids, scores=none), spec, AS_IT_IS) == {"classes": []}
    assert answer_body(Texts(texts=[], scores=none, polygons=np.zeros((0, 4, 2), np.float32)), spec, AS_IT_IS) == {"texts": []}


def test_what_was_left_out_as_not_finite_is_counted(spec):
    broken = Classes(class_ids=np.array([0]), scores=np.array([0.9], np.float32), non_finite=3)
    assert answer_body(broken, spec, AS_IT_IS)["non_finite"] == 3


# ---- tensors


def tensors_of(model: bytes, images: np.ndarray, spec: repository.ModelSpec) -> list[dict]:
    rows = tasks.rows("tensor", run(model, images), len(images))
    return [answer_body(tasks.decode(row, spec, Options()), spec, AS_IT_IS) for row in rows]


def test_nan_and_infinity_are_null_and_counted_and_the_rest_is_exact(spec):
    """H24: JSON has no NaN. -0.0 and denormals are numbers like others."""
    for body in tensors_of(graphs.nan_model(), np.zeros((2, 3, 32, 32), np.float32), spec):
        encoded = msgspec.json.encode(body)
        (output,) = msgspec.json.decode(encoded)["outputs"]
        assert body["non_finite"] == 3
        assert output["data"][:3] == [None, None, None]
        rest = np.array(output["data"][3:], np.float32)
        assert rest.tobytes() == graphs.STRANGE_NUMBERS[3:].tobytes()


def test_an_identity_gives_back_every_bit_that_json_can_hold(spec):
    images = np.random.default_rng(3).integers(0, 2**32, 2 * 3 * 32 * 32, dtype=np.uint32).view(np.float32).reshape(2, 3, 32, 32)
    images[0, 0, 0, :5] = [np.nan, np.inf, -np.inf, -0.0, 1e-45]
    for image, body in zip(images, tensors_of(graphs.identity(), images, spec), strict=True):
        (output,) = through_json(body)["outputs"]
        assert (output["name"], output["datatype"], output["shape"]) == ("output", "FP32", [3, 32, 32])
        back = np.array([np.nan if v is None else v for v in output["data"]], np.float32).reshape(3, 32, 32)
        finite = np.isfinite(image)
        assert back[finite].tobytes() == image[finite].tobytes()
        assert np.isnan(back[~finite]).all() and body["non_finite"] == (~finite).sum() > 0


def test_channel_means_come_in_the_order_of_the_channels(spec):
    red = np.zeros((1, 3, 32, 32), np.float32)
    red[:, 0] = 1
    (body,) = tensors_of(graphs.channel_means(), red, spec)
    assert body == {"outputs": [{"name": "means", "datatype": "FP32", "shape": [3], "data": [1.0, 0.0, 0.0]}]}


def test_an_empty_output_keeps_its_shape(spec):
    body = answer_body(tasks.decode({"boxes": np.zeros((0, 6), np.float32)}, spec, Options()), spec, AS_IT_IS)
    assert body == {"outputs": [{"name": "boxes", "datatype": "FP32", "shape": [0, 6], "data": []}]}


@pytest.mark.parametrize("dtype", [dtype for dtype in DATATYPES if dtype != "object"])
def test_each_datatype_has_its_protocol_name_and_its_extremes_survive(dtype, spec):
    kind = np.dtype(dtype)
    limits = ml_dtypes.finfo(kind) if "float" in dtype else np.iinfo(kind) if kind.kind in "iu" else None
    values = np.array([False, True] if limits is None else [limits.min, 0, limits.max], kind)
    (output,) = through_json(answer_body(tasks.decode({"y": values}, spec, Options()), spec, AS_IT_IS))["outputs"]
    assert output["datatype"] == DATATYPES[dtype]
    assert np.array(output["data"], kind).tobytes() == values.tobytes()


def test_strings_are_bytes_of_utf8(spec):
    words = np.array([b"cat", "Füchse".encode()], object)
    (output,) = through_json(answer_body(tasks.decode({"y": words}, spec, Options()), spec, AS_IT_IS))["outputs"]
    assert (output["datatype"], output["data"]) == ("BYTES", ["cat", "Füchse"])
    with pytest.raises(Problem, match="not UTF-8"):
        answer_body(tasks.decode({"y": np.array([b"\xff"], object)}, spec, Options()), spec, AS_IT_IS)


def test_a_dtype_that_the_protocol_lacks_is_refused(spec):
    with pytest.raises(Problem, match="output 'y' is complex64; expected one of bool"):
        tasks.decode({"y": np.zeros(3, np.complex64)}, spec, Options())
