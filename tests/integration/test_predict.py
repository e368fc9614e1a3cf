"""Images over HTTP to answers: what people send, and what they get."""

from __future__ import annotations

import concurrent.futures
import io
import math
from importlib.util import find_spec

import numpy as np
import pytest
from PIL import Image

from graphs import STRANGE_NUMBERS
from integration.pictures import RED, bomb, encoded, multipart, scene, turned
from integration.serverkit import Server

FINDER = "finder_yolov8"


def box(answer: dict) -> list[float]:
    assert len(answer["detections"]) == 1, answer
    return answer["detections"][0]["box"]


def close(got: list[float], want: list[float], within: float) -> bool:
    return all(abs(a - b) <= within for a, b in zip(got, want, strict=True))


def problem(response, slug: str, status: int) -> dict:
    assert response.headers["content-type"] == "application/problem+json", response.text
    body = response.json()
    assert (body["type"], response.status_code, body["status"]) == (slug, status, status), body
    assert len(body["detail"]) > 20 and len(response.content) < 2048
    return body


def means(answer: dict) -> list[float]:
    (output,) = answer["outputs"]
    return output["data"]


def test_an_answer_has_the_members_that_the_design_fixes(server: Server) -> None:
    response = server.predict(FINDER, encoded(scene(640, 480, 100, 200, 80)), "image/jpeg")
    assert response.status_code == 200
    answer = response.json()
    assert set(answer) == {"id", "model", "version", "task", "device", "degraded", "image", "detections", "timing_ms"}
    assert (answer["model"], answer["task"], answer["device"], answer["degraded"]) == (FINDER, "detection", "cpu", False)
    assert answer["version"].startswith("sha256:") and len(answer["version"]) == 7 + 12
    assert answer["image"] == {"width": 640, "height": 480, "orientation": 1}
    assert set(answer["timing_ms"]) == {"receive", "decode", "queue", "infer", "post", "total"}
    assert close(box(answer), [100, 200, 180, 280], 4)
    assert "total;dur=" in response.headers["server-timing"]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_same_scene_gives_the_same_box_however_it_is_stored(server: Server, kind: str, orientation: int) -> None:
    answer = server.predict(FINDER, turned(scene(320, 240, 200, 40, 60), orientation, kind)).json()
    assert answer["image"] == {"width": 320, "height": 240, "orientation": orientation}
    assert close(box(answer), [200, 40, 260, 100], 2.5)


@pytest.mark.parametrize(
    ("width", "height"), [(1920, 1080), (1080, 1920), (1000, 1000), (2520, 1080), (3775, 1571), (427, 640), (581, 640)]
)
def test_boxes_lie_in_the_submitted_image_whatever_its_shape(server: Server, width: int, height: int) -> None:
    side = max(24, min(width, height) // 8)
    left, top = width - 2 * side, height // 5
    got = box(server.predict(FINDER, encoded(scene(width, height, left, top, side))).json())
    assert close(got, [left, top, left + side, top + side], 1.6 * max(width, height) / 320)


def test_a_4k_frame_is_answered_in_4k_pixels(server: Server) -> None:
    answer = server.predict(FINDER, encoded(scene(3840, 2160, 3000, 1500, 480))).json()
    assert answer["image"]["width"] == 3840
    assert close(box(answer), [3000, 1500, 3480, 1980], 20)


def test_grey_rgba_16_bit_and_cmyk_pictures_are_answered_rightly(server: Server) -> None:
    grey = means(server.predict("rgb", encoded(np.full((40, 40), 128, np.uint8))).json())
    assert grey == pytest.approx([128 / 255] * 3, abs=0.01)

    clear = np.zeros((32, 32, 4), np.uint8)
    assert means(server.predict("rgb", encoded(clear, "PNG")).json()) == pytest.approx([114 / 255] * 3, abs=0.005)

    ramp = np.tile(np.linspace(0, 65535, 256).astype(np.uint16), (32, 1))
    answer = server.predict("rgb", encoded(Image.fromarray(ramp), "PNG")).json()
    assert answer["source_bit_depth"] == 16
    assert means(answer) == pytest.approx([0.5] * 3, abs=0.01)

    cmyk = Image.new("RGB", (32, 32), RED).convert("CMYK")
    red, green, blue = means(server.predict("rgb", encoded(cmyk, quality=95)).json())
    assert red > 0.9 and green < 0.1 and blue < 0.1

    assert server.predict("rgb", encoded(scene(64, 64, 0, 0, 8))).status_code == 200


def test_colour_order_is_the_models(server: Server) -> None:
    red = encoded(np.full((32, 32, 3), RED, np.uint8), "PNG")
    assert means(server.predict("rgb", red).json()) == pytest.approx([1, 0, 0], abs=1e-6)
    assert means(server.predict("bgr", red).json()) == pytest.approx([0, 0, 1], abs=1e-6)


def test_truncated_pictures_are_refused_and_never_made_up(server: Server) -> None:
    whole = encoded(scene(640, 480, 10, 10, 40))
    for cut in (
        whole[: len(whole) // 2],
        whole[:-2],
        encoded(scene(99, 99, 0, 0, 9), "PNG")[:-20],
        encoded(scene(99, 99, 0, 0, 9), "WEBP")[:-30],
    ):
        problem(server.predict(FINDER, cut), "image_truncated", 422)


def test_decompression_bombs_are_refused_by_their_header(server: Server) -> None:
    assert len(bomb(11000, 11000)) <= 70
    body = problem(server.predict(FINDER, bomb(11000, 11000)), "image_too_large", 413)
    assert "121" in body["detail"] and "50" in body["detail"]
    problem(server.predict(FINDER, bomb(20000, 20000)), "image_too_large", 413)
    problem(server.predict(FINDER, bomb(0, 10)), "image_invalid", 422)


@pytest.mark.parametrize(
    ("body", "slug", "status"),
    [
        (b"", "empty_body", 400),
        (b"hello world", "not_an_image", 415),
        (b"%PDF-1.7\n...........", "not_an_image", 415),
        (b"PK\x03\x04" + bytes(60), "not_an_image", 415),
        # With the extra `heif` it is looked into, and is none.
        (b"\x00\x00\x00\x18ftypheic" + bytes(40), *(("image_truncated", 422) if find_spec("pillow_heif") else ("heic_not_supported", 415))),
    ],
)
def test_what_is_no_picture_is_named(server: Server, body: bytes, slug: str, status: int) -> None:
    problem(server.predict(FINDER, body), slug, status)


def test_pictures_of_one_pixel_and_strips_are_answered(server: Server) -> None:
    for size in ((1, 1), (5000, 1), (1, 5000)):
        assert server.predict(FINDER, encoded(Image.new("RGB", size, RED), "PNG")).status_code == 200, size


@pytest.mark.parametrize("model", ["finder_yolov8", "finder_end2end_batch_column", "finder_boxes_single"])
def test_nothing_found_is_an_empty_list(server: Server, model: str) -> None:
    assert server.predict(model, encoded(np.zeros((64, 64, 3), np.uint8))).json()["detections"] == []


@pytest.mark.parametrize("model", ["finder_yolov8", "finder_end2end_batch_column", "finder_boxes_single"])
def test_rows_of_a_batch_are_never_mixed_up(server: Server, model: str) -> None:
    places = [(40 * i, 24 * i) for i in range(8)]
    bodies = [encoded(scene(480, 320, x, y, 48)) for x, y in places]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda b: server.predict(model, b), bodies * 4))
    for answer, (x, y) in zip(answers, places * 4, strict=True):
        assert close(box(answer.json()), [x, y, x + 48, y + 48], 3)


def test_mixed_sizes_and_one_bad_picture_do_not_hurt_their_neighbours(server: Server) -> None:
    good = [
        encoded(scene(w, h, 30, 30, 40)) for w, h in ((320, 240), (640, 480), (200, 600), (1000, 500), (333, 111), (320, 320), (90, 90))
    ]
    bad = encoded(scene(640, 480, 10, 10, 40))[:3000]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        codes = [r.status_code for r in pool.map(lambda b: server.predict(FINDER, b), [*good, bad])]
    assert codes == [200] * 7 + [422]
    assert all(server.predict(FINDER, good[0]).status_code == 200 for _ in range(50))


def test_several_images_in_one_request_keep_their_order_and_a_bad_one_has_its_problem(server: Server) -> None:
    body, kind = multipart(encoded(scene(320, 240, 10, 10, 40)), b"not a picture", encoded(scene(320, 240, 200, 150, 40)))
    response = server.predict(FINDER, body, kind)
    assert response.status_code == 200
    first, second, third = response.json()["results"]
    assert close(box(first), [10, 10, 50, 50], 3) and close(box(third), [200, 150, 240, 190], 3)
    assert (second["type"], second["status"]) == ("not_an_image", 415)


def test_multipart_takes_options_as_fields_and_query_wins(server: Server) -> None:
    body, kind = multipart(encoded(scene(320, 240, 10, 10, 40)), min_score="0.99")
    assert server.predict(FINDER, body, kind).json()["detections"] == []
    assert len(server.predict(FINDER, body, kind, min_score=0.1).json()["detections"]) == 1


def test_a_multipart_body_that_was_cut_is_refused(server: Server) -> None:
    picture = encoded(scene(320, 240, 10, 10, 40))
    for end in (b"--B\r\n", b""):
        body, kind = multipart(picture, end=end)
        problem(server.predict(FINDER, body, kind), "multipart_truncated", 400)
    body, kind = multipart(picture, field="file")
    assert "image" in problem(server.predict(FINDER, body, kind), "bad_multipart", 400)["detail"]


def test_a_wrong_content_type_is_told_with_a_command_that_works(server: Server) -> None:
    body = problem(server.predict(FINDER, b'{"image": 1}', "application/json"), "unsupported_media_type", 415)
    assert "curl" in body["detail"] and "image/png" in body["accepted"]
    assert server.predict(FINDER, encoded(scene(64, 64, 8, 8, 30)), "application/x-www-form-urlencoded").status_code == 200


@pytest.mark.parametrize(
    "options", [{"min_score": 2}, {"min_score": "x"}, {"top_k": 0}, {"min_scor": 0.5}, {"deadline_ms": -1}, {"strict_device": "maybe"}]
)
def test_bad_options_are_refused_by_name(server: Server, options: dict) -> None:
    body = problem(server.predict(FINDER, encoded(scene(64, 64, 8, 8, 30)), **options), "bad_option", 422)
    assert next(iter(options)) in body["detail"]


def test_the_picture_with_the_answer_drawn_on_is_the_same_size(server: Server) -> None:
    picture = encoded(scene(640, 480, 100, 200, 80))
    response = server.client.post(
        f"/v1/models/{FINDER}/predict", content=picture, headers={"content-type": "image/jpeg", "accept": "image/jpeg"}
    )
    assert response.headers["content-type"] == "image/jpeg"
    drawn = Image.open(io.BytesIO(response.content))
    assert drawn.size == (640, 480)
    assert np.abs(np.asarray(drawn, np.int16) - scene(640, 480, 100, 200, 80)).max() > 100
    refused = server.client.post(f"/v1/models/{FINDER}/predict", content=picture, headers={"accept": "text/html"})
    problem(refused, "not_acceptable", 406)


def test_models_with_a_frozen_batch_answer_any_number_of_requests(server: Server) -> None:
    pictures = [encoded(np.full((32, 32, 3), v, np.uint8), "PNG") for v in (0, 50, 100, 150, 200, 250)]
    for model in ("one", "four"):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda b, m=model: server.predict(m, b).json(), pictures))
        assert [a["outputs"][0]["data"][0] for a in answers] == pytest.approx([v / 255 for v in (0, 50, 100, 150, 200, 250)], abs=1e-5)


def test_strange_numbers_are_null_and_counted(server: Server) -> None:
    answer = server.predict("strange", encoded(scene(32, 32, 0, 0, 4))).json()
    assert answer["non_finite"] == 3
    got = answer["outputs"][0]["data"]
    want = [None if not math.isfinite(v) else float(v) for v in STRANGE_NUMBERS]
    assert got == want and math.copysign(1, got[3]) == -1


def test_a_row_that_fails_in_the_model_does_not_fail_its_neighbours(server: Server) -> None:
    dark, bright = encoded(np.zeros((32, 32, 3), np.uint8)), encoded(np.full((32, 32, 3), 200, np.uint8))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda b: server.predict("picky", b), [bright, dark] * 8))
    assert [r.status_code for r in responses[0::2]] == [200] * 8
    assert all(means(r.json()) == pytest.approx([200 / 255] * 3, abs=0.01) for r in responses[0::2])
    # A dark picture fails alone; beside a bright one it may have been answered, and then rightly.
    for r in responses[1::2]:
        assert r.status_code == 500 and r.json()["type"] == "inference_failed" or means(r.json()) == [0, 0, 0]
    problem(server.predict("picky", dark), "inference_failed", 500)


def test_unknown_models_and_routes_are_named(server: Server) -> None:
    assert FINDER in problem(server.predict("nosuch", b"x"), "model_not_found", 404)["detail"]
    problem(server.client.get("/v1/nothing"), "not_found", 404)
    problem(server.client.get(f"/v1/models/{FINDER}/predict"), "method_not_allowed", 405)


def test_a_deadline_that_cannot_be_met_is_refused_or_missed_but_never_ignored(server: Server) -> None:
    response = server.predict("slow", encoded(scene(32, 32, 0, 0, 4)), deadline_ms=20)
    assert response.status_code in (503, 504), response.text
    if response.status_code == 503:
        assert int(response.headers["retry-after"]) >= 1


def test_uploads_of_very_many_parts_are_refused_while_they_are_read(server: Server) -> None:
    body, kind = multipart(*[b""] * 50_000)
    problem(server.predict(FINDER, body, kind), "too_many_images", 413)
    body, _ = multipart(encoded(scene(64, 64, 8, 8, 30)))
    problem(server.predict(FINDER, body, "multipart/form-data; boundary=" + "B" * 300), "bad_multipart", 400)
