"""The Python client against a real server."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time

import numpy as np
import pytest
from PIL import Image

from integration.pictures import encoded, scene
from integration.serverkit import Server
from outboard_client import AsyncClient, Client, Problem, Unreachable

FINDER = "finder_yolov8"
SCENE = scene(320, 240, 60, 80, 40)
BOX = [60, 80, 100, 120]


@pytest.fixture
def client(server: Server):
    with Client(server.url, patience=20) as client:
        yield client


def near(answer) -> bool:
    (found,) = answer.detections
    return all(abs(a - b) <= 3 for a, b in zip(found.box, BOX, strict=True))


def test_every_form_of_an_image_gets_the_same_typed_answer(client: Client, tmp_path) -> None:
    path = tmp_path / "scene.png"
    path.write_bytes(encoded(SCENE, "PNG"))
    with open(path, "rb") as file:
        for image in (path, str(path), path.read_bytes(), file, Image.open(path), np.asarray(SCENE)):
            answer = client.predict(FINDER, image, min_score=0.5)
            assert near(answer), image
    assert (answer.model, answer.task, answer.device, answer.degraded) == (FINDER, "detection", "cpu", False)
    assert (answer.image.width, answer.image.height, answer.image.orientation) == (320, 240, 1)
    assert answer.timing_ms["total"] > 0 and answer.classes is None and answer.source_bit_depth == 8


def test_a_tensor_answer_becomes_an_array(client: Client) -> None:
    answer = client.predict("rgb", np.full((32, 32, 3), (255, 0, 0), np.uint8))
    assert np.allclose(answer.outputs[0].array(), [1, 0, 0], atol=1e-6)


def test_several_images_in_one_request_with_a_bad_one_among_them(client: Client) -> None:
    good = encoded(SCENE)
    results = client.predict_several(FINDER, [good, good[:-40], np.asarray(SCENE)])
    assert near(results[0]) and near(results[2])
    assert isinstance(results[1], Problem) and results[1].slug == "image_truncated" and results[1].status == 422
    assert len(client.predict_several(FINDER, [good])) == 1
    with pytest.raises(ValueError, match="no images"):
        client.predict_several(FINDER, [])


def test_refusals_are_exceptions_that_say_why(client: Client) -> None:
    with pytest.raises(Problem) as caught:
        client.predict("nothing", encoded(SCENE))
    assert caught.value.slug == "model_not_found" and caught.value.status == 404 and "nothing" in caught.value.detail
    with pytest.raises(Problem) as caught:
        client.predict(FINDER, encoded(SCENE), min_score=7)
    assert caught.value.slug == "bad_option"
    with pytest.raises(TypeError, match="min_scoer"):
        client.predict(FINDER, encoded(SCENE), min_scoer=0.5)


def test_many_images_come_back_in_their_order_with_bad_ones_in_place(client: Client, tmp_path) -> None:
    paths = []
    for i in range(30):
        paths.append(tmp_path / f"{i}.jpg")
        paths[-1].write_bytes(b"broken" if i == 7 else encoded(scene(320, 240, 10 * i, 80, 40)))
    paths[9].unlink()
    told: list[tuple[int, int | None]] = []
    done = list(client.predict_many(FINDER, paths, concurrency=6, progress=lambda n, of: told.append((n, of))))
    assert [d.image for d in done] == paths and told == [(n, 30) for n in range(1, 31)]
    assert done[7].error.slug == "not_an_image" and isinstance(done[9].error, FileNotFoundError)
    for i, d in enumerate(done):
        if i not in (7, 9) and i < 28:
            assert abs(d.answer.detections[0].box[0] - 10 * i) <= 3


def test_many_images_are_taken_as_they_are_needed(client: Client) -> None:
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield encoded(SCENE)

    for count, done in enumerate(client.predict_many(FINDER, endless(), concurrency=2), 1):
        assert near(done.answer)
        if count == 5:
            break
    assert taken <= 10


def test_the_drawn_picture(client: Client) -> None:
    picture = Image.open(io.BytesIO(client.picture(FINDER, np.asarray(SCENE))))
    assert picture.format == "JPEG" and picture.size == (320, 240)


def test_models_devices_and_readiness(client: Client) -> None:
    models = {m.name: m for m in client.models()}
    assert models[FINDER].state == "ready" and models[FINDER].task == "detection"
    assert (models[FINDER].input.width, models[FINDER].input.height) == (320, 320)
    assert client.model(FINDER).name == FINDER
    (cpu,) = [d for d in client.devices() if d.id == "cpu"]
    assert cpu.state in ("serving", "standby") and cpu.losses == 0 and not cpu.simulated
    assert client.device("cpu").kind == "cpu"
    assert client.ready().ready and client.ready(strict=True).ready


async def test_the_same_for_asyncio(server: Server) -> None:
    async with AsyncClient(server.url) as client:
        assert near(await client.predict(FINDER, np.asarray(SCENE)))
        results = await client.predict_several(FINDER, [encoded(SCENE), b"broken"])
        assert near(results[0]) and results[1].slug == "not_an_image"
        done = [d async for d in client.predict_many(FINDER, [encoded(SCENE)] * 20 + [b"broken"], concurrency=5)]
        assert [near(d.answer) for d in done[:-1]] == [True] * 20 and done[-1].error.slug == "not_an_image"
        assert {m.name for m in await client.models()} >= {FINDER} and (await client.devices())[0].id == "cpu"
        assert (await client.ready()).ready and (await client.model(FINDER)).name == FINDER
        with pytest.raises(Problem):
            await client.device("cuda:7")
        assert Image.open(io.BytesIO(await client.picture(FINDER, encoded(SCENE)))).size == (320, 240)
        taken = await asyncio.gather(*(client.predict(FINDER, encoded(SCENE)) for _ in range(30)))
        assert all(map(near, taken))


def test_a_model_that_is_taken_out_of_service_and_back(client: Client) -> None:
    assert client.unload("bgr").state == "unloaded"
    with Client(client.url, patience=0) as impatient, pytest.raises(Problem) as caught:
        impatient.predict("bgr", np.zeros((8, 8, 3), np.uint8))
    assert caught.value.status == 503
    loading = threading.Timer(1.0, lambda: client.load("bgr"))
    loading.start()
    try:  # asked again until it is back
        assert client.predict("bgr", np.zeros((8, 8, 3), np.uint8)).model == "bgr"
    finally:
        loading.join()


def test_nothing_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    began = time.monotonic()
    with Client(url, patience=1.0) as client, pytest.raises(Unreachable, match="ConnectError"):
        client.models()
    assert time.monotonic() - began < 10
