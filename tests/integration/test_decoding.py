"""A server whose (simulated) device decodes JPEGs itself: the same answers as from one that decodes on the host, and nothing is lost."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

import graphs
from imaging_samples import astronaut, encoded
from integration.serverkit import Server, serving

DECODES = "sim:thunderbolt4,vram=8GiB,decode=2"
SIZE = (96, 64)
PHOTO = np.tile(astronaut(), (2, 3, 1))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    graphs.write_model(folder, "same", graphs.identity(SIZE), graphs.toml("tensor", "tensor", SIZE))
    graphs.write_model(folder, "blocks", graphs.every_block((320, 320)), graphs.toml("detection", "end2end", (320, 320)))
    return folder


def running(models: Path, device: str, decode: str) -> Iterator[Server]:
    with serving(models, "--device", device, env={"OUTBOARD_DEVICES_DECODE": decode}) as server:
        serves(server)
        yield server


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[Server]:
    yield from running(models, DECODES, "host")


@pytest.fixture(scope="module")
def device(models: Path) -> Iterator[Server]:
    yield from running(models, DECODES, "device")


def serves(server: Server) -> None:
    server.until(lambda: all("sim:0" in server.model(m)["devices"] for m in ("same", "blocks")), what="the device serves every model")


def decoded(server: Server) -> Counter[str]:
    """Images by where they were decoded."""
    found: Counter[str] = Counter()
    for where, n in re.findall(r'outboard_decoded_images_total\{model="\w+",where="([\w:]+)"\} (\S+)', server.client.get("/metrics").text):
        found[where] += int(float(n))
    return found


def answer(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return {key: value for key, value in response.json().items() if key not in ("id", "timing_ms")}


IMAGES = {
    "photo": encoded(PHOTO),
    "progressive": encoded(PHOTO, progressive=True),
    "grey": encoded(PHOTO[..., 0]),
    "on its side": encoded(PHOTO, orientation=6),
    "mirrored": encoded(PHOTO, orientation=5),
    "smaller than the input": encoded(PHOTO[:40, :50]),
    "of an odd size": encoded(PHOTO[:763, :1129]),
}


@pytest.mark.parametrize("name", IMAGES)
def test_answers_are_those_of_a_server_that_decodes_on_the_host(host: Server, device: Server, name: str) -> None:
    before = decoded(device)
    for model, options in (("same", {}), ("blocks", {}), ("blocks", {"tile": "auto"}), ("blocks", {"tile": "500"})):
        got, wanted = (answer(server.predict(model, IMAGES[name], **options)) for server in (device, host))
        assert got["device"] == wanted["device"] == "sim:0"
        assert got == wanted
    assert decoded(device) - before == Counter({"sim:0": 4}), "all four were decoded on the device"
    assert decoded(host)["sim:0"] == 0


@pytest.mark.parametrize("name", ["PNG", "CMYK", "with a comment behind its end"])
def test_what_not_every_decoder_reads_is_decoded_on_the_host(device: Server, name: str) -> None:
    body = {
        "PNG": encoded(PHOTO, "PNG"),
        "CMYK": encoded(Image.fromarray(PHOTO).convert("CMYK")),
        "with a comment behind its end": IMAGES["photo"] + b"made by a camera",
    }[name]
    before = decoded(device)
    assert answer(device.predict("same", body))["device"] == "sim:0"
    assert decoded(device) - before == Counter({"host": 1})


@pytest.mark.parametrize("name", ["cut", "cut with an end", "damaged in the middle"])
def test_a_damaged_jpeg_has_the_same_problem_wherever_it_is_decoded(host: Server, device: Server, name: str) -> None:
    photo = IMAGES["photo"]
    half = len(photo) // 2
    body = {
        "cut": photo[:half],
        "cut with an end": photo[:half] + b"\xff\xd9",
        "damaged in the middle": photo[:half] + bytes(2000) + photo[half + 2000 :],
    }[name]
    problems = [server.predict("same", body) for server in (host, device)]
    assert [p.status_code for p in problems] == [422, 422]
    assert problems[0].json() == problems[1].json() and problems[0].json()["type"].endswith("image_truncated")
    assert answer(device.predict("same", photo))["device"] == "sim:0", "its neighbours have their answers"


def test_what_decoding_costs_there_is_told(device: Server) -> None:
    decoder = device.device("sim:0")["batches"]["same"]["decoder"]
    assert decoder["used"] and decoder["seconds_per_megapixel"] > 0
    assert device.device("cpu")["batches"]["same"]["decoder"] is None


def test_a_decoder_that_is_slower_than_the_host_is_not_used(models: Path) -> None:
    for server in running(models, "sim:thunderbolt4,vram=8GiB,decode=300", "auto"):
        for _ in range(4):
            assert answer(server.predict("same", IMAGES["photo"]))["device"] == "sim:0"
        assert decoded(server) == Counter({"host": 4})


def test_pulling_the_cable_while_the_device_decodes_loses_nothing(device: Server) -> None:
    """Clients ask all the time, of photographs in one row and in tiles; every answer is right, whoever gives it."""
    asked = [("same", "photo", {}), ("blocks", "on its side", {"tile": "auto"}), ("same", "of an odd size", {})]
    wanted = [device.predict(model, IMAGES[name], **options).json() for model, name, options in asked]
    stop, answers, bad = threading.Event(), Counter[str](), []

    def client(n: int) -> None:
        with httpx.Client(base_url=device.url, timeout=60) as http:
            while not stop.is_set():
                model, name, options = asked[n % len(asked)]
                response = http.post(f"/v1/models/{model}/predict", content=IMAGES[name], params=options)
                body = response.json()
                if response.status_code != 200:
                    bad.append(response.text)
                elif any(body.get(key) != wanted[n % len(asked)].get(key) for key in ("outputs", "detections")):
                    bad.append(f"{name} was answered otherwise by {body['device']}")
                else:
                    answers[body["device"]] += 1
                n += 1

    def more(where: str) -> None:
        enough = answers[where] + 8
        device.until(lambda: bad or answers[where] > enough, what=f"{where} answers")

    threads = [threading.Thread(target=client, args=[n]) for n in range(6)]
    for thread in threads:
        thread.start()
    try:
        for fault in ("unplug", "sticky"):
            more("sim:0")
            assert device.client.post("/v1/devices/sim:0/fault", json={"fault": fault}).status_code == 200
            if fault == "unplug":
                more("cpu")
                device.client.post("/v1/devices/sim:0/fault", json={"fault": "replug"})
            else:
                device.until(lambda: device.device("sim:0")["losses"] >= 2, what="the second loss")
            serves(device)
        before = decoded(device)["sim:0"]
        more("sim:0")
        assert decoded(device)["sim:0"] > before, "it decodes again"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not bad, bad[:3]
    assert "outboard_frame_memory_bytes 0.0" in device.client.get("/metrics").text
