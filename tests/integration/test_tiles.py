"""`tile=`: what is small in a large picture is found, over HTTP, where it is."""

from __future__ import annotations

import concurrent.futures
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import graphs
from integration.pictures import RED, encoded, iou, turned
from integration.serverkit import Server, serving
from outboard.imaging.tiles import Tiling, plan
from outboard.repository import Input

ROOT = Path(__file__).resolve().parents[2]
FRAME = (3850, 2170)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    graphs.write_model(folder, "blocks", graphs.every_block((640, 640)), graphs.toml("detection", "end2end", (640, 640)))
    graphs.write_model(folder, "small", graphs.every_block((320, 320)), graphs.toml("detection", "end2end", (320, 320)))
    graphs.write_model(folder, "rgb", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32), input='fit = "stretch"'))
    shipped = ROOT / "models" / "yolov2_tiny"
    if (shipped / "yolov2_tiny.onnx").is_file():
        shutil.copytree(shipped, folder / "yolov2_tiny")
    with serving(folder, env={"OUTBOARD_LIMITS_TILES": "100"}) as running:
        yield running


def png(pixels: np.ndarray) -> bytes:
    return cv2.imencode(".png", pixels[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])[1].tobytes()


def blocks(size: tuple[int, int], *boxes: tuple[int, int, int, int]) -> np.ndarray:
    pixels = np.full((size[1], size[0], 3), 90, np.uint8)
    for x1, y1, x2, y2 in boxes:
        pixels[y1:y2, x1:x2] = RED
    return pixels


def boxes_of(answer: dict) -> list[tuple[float, ...]]:
    return sorted(tuple(d["box"]) for d in answer["detections"])


@pytest.mark.parametrize("merge", ["nmm", "nms"])
def test_objects_on_the_borders_of_tiles_are_found_once_where_they_are(server: Server, merge: str) -> None:
    cut = plan(*FRAME, Input(size=(640, 640)), Tiling(), 100)
    xs, ys = (sorted({origin[axis] for origin in cut.origins})[1:] for axis in (0, 1))
    truth = sorted((x - 20, y - 10, x + 22, y + 22) for x, y in itertools.product(xs, ys))
    answer = server.predict("blocks", png(blocks(FRAME, *truth)), tile="auto", merge=merge, whole="false").json()
    assert answer["tiles"] == {"width": 640, "height": 640, "count": 32, "whole": False}
    assert answer["image"] == {"width": 3850, "height": 2170, "orientation": 1}
    assert boxes_of(answer) == truth


@pytest.mark.parametrize("orientation", [6, 7])
def test_a_turned_picture_is_cut_upright(server: Server, orientation: int) -> None:
    truth = (600, 300, 660, 340)
    body = turned(blocks((1200, 800), truth), orientation, "PNG")
    answer = server.predict("small", body, tile="320").json()
    assert answer["image"]["orientation"] == orientation
    assert boxes_of(answer) == [truth]


def test_a_jpeg_is_decoded_only_as_far_as_its_tiles_need(server: Server) -> None:
    """Tiles of twice the network's input: a block that is aligned to the decoder's pixels keeps its place to one of them."""
    truth = (1200, 1000, 1296, 1080)
    answer = server.predict("blocks", encoded(blocks((3840, 2160), truth)), tile="1280", whole="false").json()
    assert answer["tiles"] == {"width": 1280, "height": 1280, "count": 8, "whole": False}
    (box,) = boxes_of(answer)
    assert np.abs(np.array(box) - truth).max() <= 2


def test_what_fills_the_picture_is_found_unless_only_tiles_are_looked_at(server: Server) -> None:
    large = (100, 100, 1900, 1400)
    body = png(blocks((2000, 1500), large))
    (box,) = boxes_of(server.predict("small", body, tile="400").json())
    assert np.abs(np.array(box) - large).max() <= 2000 / 320 * 1.5
    tiles_only = server.predict("small", body, tile="400", whole="0", merge="nms").json()["detections"]
    assert all(np.abs(np.array(d["box"]) - large).max() > 100 for d in tiles_only)


def test_many_pictures_in_tiles_at_once_are_answered_each_by_its_own(server: Server) -> None:
    """Rows of several frames share batches."""

    def one(i: int) -> tuple[list, tuple]:
        truth = (100 + 70 * i, 210 + 13 * i, 140 + 70 * i, 240 + 13 * i)
        answer = server.predict("small", png(blocks((1400 - 31 * i, 800 + 17 * i), truth)), tile="auto", whole="false").json()
        return boxes_of(answer), truth

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got, truth in pool.map(one, range(8)):
            assert got == [truth]


def test_a_picture_crosses_the_link_once_however_many_tiles_it_has_and_survives_the_loss_of_its_device(tmp_path: Path) -> None:
    graphs.write_model(tmp_path, "small", graphs.every_block((320, 320)), graphs.toml("detection", "end2end", (320, 320)))
    truth = [(310, 310, 330, 330), (1500, 1200, 1530, 1230)]
    body = png(blocks((1920, 1440), *truth))
    with serving(tmp_path, "--device", "sim:thunderbolt4,compute=2+1") as server:
        server.until(lambda: server.device("sim:0")["state"] == "serving", what="the simulated device serves")
        answer = server.predict("small", body, tile="auto").json()
        assert (answer["device"], answer["tiles"]["count"], boxes_of(answer)) == ("sim:0", 48, truth)
        crossed = re.search(r'^outboard_link_bytes_total\{device="sim:0",direction="h2d"\} (\S+)', server.client.get("/metrics").text, re.M)
        assert float(crossed[1]) == 1920 * 1440 * 3 + 320 * 320 * 3 < 0.65 * 49 * 320 * 320 * 3
        server.client.post("/v1/devices/sim:0/fault", json={"fault": "unplug", "phase": "uploading"})
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = [response.json() for response in pool.map(lambda _: server.predict("small", body, tile="auto"), range(6))]
        assert [boxes_of(answer) for answer in answers] == 6 * [truth]
        assert server.device("sim:0")["losses"] == 1 and {answer["device"] for answer in answers} >= {"cpu"}
        server.until(lambda: "outboard_frame_memory_bytes 0.0" in server.client.get("/metrics").text, what="the frame memory is given back")


def test_the_best_are_chosen_after_the_tiles_are_merged(server: Server) -> None:
    body = png(blocks((1300, 700), (10, 10, 20, 20), (310, 310, 330, 330), (1200, 600, 1230, 630)))
    answer = server.predict("small", body, tile="auto", whole="0", top_k="2").json()
    assert boxes_of(answer) == [(10, 10, 20, 20), (310, 310, 330, 330)]


def test_too_many_tiles_are_refused_with_the_numbers(server: Server) -> None:
    response = server.predict("small", png(blocks((3840, 2160))), tile="256")
    problem = response.json()
    assert (response.status_code, problem["type"]) == (422, "bad_option")
    assert problem["max_tiles"] == 100 and problem["tiles"] > 100
    enough = re.search(r"ask for tile=(\d+)", problem["detail"])[1]
    assert server.predict("small", png(blocks((3840, 2160))), tile=enough).json()["tiles"]["count"] <= 100


def test_tiles_are_for_detection(server: Server) -> None:
    response = server.predict("rgb", png(blocks((64, 64))), tile="auto")
    assert (response.status_code, response.json()["type"]) == (422, "bad_option")
    assert "detection" in response.json()["detail"] and "tensor" in response.json()["detail"]


def test_the_answer_of_tiles_can_be_drawn(server: Server) -> None:
    truth = (1000, 500, 1040, 540)
    body = png(blocks((1400, 900), truth))
    response = server.client.post("/v1/models/small/predict", content=body, params={"tile": "auto"}, headers={"accept": "image/jpeg"})
    drawn = cv2.imdecode(np.frombuffer(response.content, np.uint8), cv2.IMREAD_COLOR)[..., ::-1].astype(int)
    assert drawn.shape == (900, 1400, 3)
    changed = np.abs(drawn - blocks((1400, 900), truth).astype(int)).max(axis=2) > 60
    ys, xs = np.nonzero(changed)
    assert abs(xs.min() - 1000) < 12 and abs(ys.max() - 540) < 12


def test_what_a_detector_loses_in_a_large_photograph_it_finds_in_tiles(server: Server) -> None:
    """A collage of photographs in the size that people and animals have in a 4K frame."""
    samples = ROOT / ".cache" / "samples"
    if not (ROOT / "models" / "yolov2_tiny" / "yolov2_tiny.onnx").is_file() or not (samples / "chelsea.png").is_file():
        pytest.skip("the shipped models were not fetched; run `make models`")
    canvas = np.full((2160, 3840, 3), 127, np.uint8)
    truth = []
    for name, label, place, (left, top), scale in (
        ("chelsea.png", "cat", (20, 0, 451, 300), (300, 260), 0.8),
        ("chelsea.png", "cat", (20, 0, 451, 300), (2950, 1500), 0.7),
        ("motorcycle_left.png", "motorbike", (80, 40, 741, 470), (1500, 900), 0.5),
    ):
        photo = Image.open(samples / name).convert("RGB")
        small = np.asarray(photo.resize((round(photo.width * scale), round(photo.height * scale)), Image.Resampling.LANCZOS))
        canvas[top : top + small.shape[0], left : left + small.shape[1]] = small
        truth.append((label, [left + place[0] * scale, top + place[1] * scale, left + place[2] * scale, top + place[3] * scale]))
    body = encoded(canvas)
    whole = server.predict("yolov2_tiny", body).json()
    assert not [label for label, box in truth if any(d["label"] == label and iou(d["box"], box) > 0.5 for d in whole["detections"])]
    tiled = server.predict("yolov2_tiny", body, tile="640").json()
    for label, box in truth:
        found = [d for d in tiled["detections"] if d["label"] == label and iou(d["box"], box) > 0.5]
        assert len(found) == 1, (label, box, tiled["detections"])
