"""Models that come, change, break and go while the server answers."""

from __future__ import annotations

import concurrent.futures
import shutil
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest

import graphs
from integration.pictures import encoded
from integration.serverkit import Server, serving

WHITE = encoded(np.full((32, 32, 3), 255, np.uint8), "PNG")
MEANS = graphs.toml("tensor", "tensor", (32, 32))


def doubled() -> bytes:
    """channel_means, times two: another version whose answers can be told apart."""
    model = onnx.load_from_string(graphs.channel_means())
    graph = model.graph
    graph.node[-1].output[0] = "half"
    graph.node.append(onnx.helper.make_node("Add", ["half", "half"], ["means"]))
    return model.SerializeToString()


def first(response) -> float:
    assert response.status_code == 200, response.text
    return response.json()["outputs"][0]["data"][0]


def broken_repository(folder: Path) -> dict[str, tuple[str, str]]:
    """Two good models and six that are broken, each in its own way: name -> (key, part of what was expected)."""
    graphs.write_model(folder, "good", graphs.channel_means(), MEANS)
    graphs.write_model(folder, "good_too", doubled(), MEANS)
    graphs.write_model(folder, "unknown_key", graphs.channel_means(), MEANS.replace("[output]", "[output]\nmin_scor = 0.5"))
    graphs.write_model(folder, "no_file", graphs.channel_means(), MEANS)
    (folder / "no_file" / "model.onnx").unlink()
    graphs.write_model(folder, "truncated", graphs.channel_means()[:-40], MEANS)
    graphs.write_model(folder, "wrong_size", graphs.channel_means((64, 64)), MEANS)
    new = onnx.load_from_string(graphs.channel_means())
    new.ir_version = 99
    graphs.write_model(folder, "too_new", new.SerializeToString(), MEANS)
    graphs.write_model(folder, "damaged", graphs.channel_means(), MEANS.replace("[input]", f'sha256 = "{"0" * 64}"\n[input]'))
    return {
        "unknown_key": ("output.min_scor", "no such key"),
        "no_file": ("file", ".onnx"),
        "truncated": ("", "ONNX"),
        "wrong_size": ("input.size", "64"),
        "too_new": ("ir_version", ""),
        "damaged": ("sha256", "0000"),
    }


def test_six_broken_models_are_refused_by_file_key_and_expectation_and_the_good_ones_serve(tmp_path: Path) -> None:
    expected = broken_repository(tmp_path)
    with serving(tmp_path) as server:
        listed = {m["name"]: m for m in server.client.get("/v1/models").json()["models"]}
        assert {n for n, m in listed.items() if m["state"] == "ready"} == {"good", "good_too"}
        for name, (key, want) in expected.items():
            error = listed[name]["error"]
            assert listed[name]["state"] == "failed"
            assert name in error["file"] and key in error["key"] and want in error["expected"], (name, error)
            response = server.predict(name, WHITE)
            assert response.status_code == 422 and response.json()["type"] == "model_invalid"
        assert first(server.predict("good", WHITE)) == pytest.approx(1)
        assert first(server.predict("good_too", WHITE)) == pytest.approx(2)
        assert server.client.get("/readyz").status_code == 200


@pytest.fixture
def live(tmp_path: Path):
    graphs.write_model(tmp_path, "m", graphs.channel_means(), MEANS)
    with serving(tmp_path) as server:
        yield server, tmp_path


def hammer(server: Server, stop: threading.Event) -> list[float]:
    answers = []
    while not stop.is_set():
        answers.append(first(server.predict("m", WHITE)))
    return answers


def test_a_new_version_takes_over_without_a_failed_request_and_a_broken_one_never_does(live: tuple[Server, Path]) -> None:
    server, folder = live
    before = server.model("m")["version"]
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        load = [pool.submit(hammer, server, stop) for _ in range(4)]
        try:
            whole = (folder / "m" / "model.onnx").read_bytes()
            (folder / "m" / "model.onnx").write_bytes(whole[:60])  # broken under load
            server.until(lambda: server.model("m")["error"], what="the broken version is noticed")
            assert server.model("m")["state"] == "ready" and server.model("m")["version"] == before
            (folder / "m" / "model.onnx").write_bytes(doubled())
            server.until(lambda: server.model("m")["version"] != before, what="the new version serves")
            assert server.model("m")["error"] is None
            server.until(lambda: first(server.predict("m", WHITE)) == pytest.approx(2))
        finally:
            stop.set()
        answers = [a for f in load for a in f.result()]
    assert set(np.round(answers, 3)) == {1.0, 2.0}, "every request was answered, by the old version or by the new one"


def test_models_may_be_added_removed_unloaded_and_loaded_again(live: tuple[Server, Path]) -> None:
    server, folder = live
    graphs.write_model(folder, "another", doubled(), MEANS)
    server.until(lambda: server.predict("another", WHITE).status_code == 200)
    shutil.rmtree(folder / "another")
    server.until(lambda: server.predict("another", WHITE).status_code == 404)

    assert server.client.post("/v1/models/m/unload").json()["state"] == "unloaded"
    response = server.predict("m", WHITE)
    assert response.status_code == 503 and "load" in response.json()["detail"]
    assert server.client.post("/v1/models/m/load").json()["state"] == "ready"
    assert first(server.predict("m", WHITE)) == pytest.approx(1)


def test_a_golden_answer_that_differs_keeps_a_model_out(tmp_path: Path) -> None:
    picture = np.full((32, 32, 3), 255, np.uint8)
    for name, value in (("right", 1.0), ("wrong", 0.5)):
        folder = graphs.write_model(tmp_path, name, graphs.channel_means(), MEANS)
        np.savez(folder / "golden.npz", input=picture, means=np.full((1, 3), value, np.float32))
    with serving(tmp_path) as server:
        assert server.model("right")["state"] == "ready"
        error = server.model("wrong")["error"]
        assert server.model("wrong")["state"] == "failed" and "golden" in error["key"] + error["file"]


def test_side_files_are_named_when_missing_and_never_read_from_outside(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(3, 3, 1, 1)).astype(np.float32)

    def model(location: str) -> onnx.ModelProto:
        h = onnx.helper
        tensor = onnx.numpy_helper.from_array(np.tile(weights, (40, 1, 1, 1)), "w")
        graph = h.make_graph(
            [h.make_node("Conv", ["images", "w"], ["out"])],
            "g",
            [h.make_tensor_value_info("images", 1, ["n", 3, 32, 32])],
            [h.make_tensor_value_info("out", 1, ["n", 120, 32, 32])],
            [tensor],
        )
        built = h.make_model(graph, opset_imports=[h.make_opsetid("", 17)], ir_version=8)
        onnx.external_data_helper.set_external_data(tensor_of(built), location)
        return built

    def tensor_of(built: onnx.ModelProto) -> onnx.TensorProto:
        return built.graph.initializer[0]

    for name, location in (("missing", "weights.bin"), ("outside", "../../../etc/hostname"), ("whole", "weights.bin")):
        built = model(location)
        folder = tmp_path / name
        folder.mkdir()
        if name == "whole":
            (folder / "weights.bin").write_bytes(tensor_of(built).raw_data)
        tensor_of(built).ClearField("raw_data")
        (folder / "model.onnx").write_bytes(built.SerializeToString())
        (folder / "model.toml").write_text(MEANS)
    with serving(tmp_path) as server:
        assert "weights.bin" in str(server.model("missing")["error"])
        assert "hostname" in str(server.model("outside")["error"])
        assert server.model("whole")["state"] == "ready", server.model("whole")


def test_files_that_cannot_even_be_named_are_refused_once_and_the_watch_goes_on(live: tuple[Server, Path]) -> None:
    server, folder = live
    loop = graphs.write_model(folder, "loop", graphs.channel_means(), MEANS)
    (loop / "model.onnx").unlink()
    (loop / "model.onnx").symlink_to("model.onnx")
    graphs.write_model(folder, "long", graphs.channel_means(), MEANS.replace("model.onnx", "x" * 400 + ".onnx"))
    graphs.write_model(folder, "truncated", graphs.channel_means()[:-40], MEANS)
    graphs.write_model(folder, "fine", doubled(), MEANS)
    server.until(lambda: server.predict("fine", WHITE).status_code == 200)
    for name in ("loop", "long", "truncated"):
        server.until(lambda n=name: server.model(n)["state"] == "failed" and server.model(n)["error"], what=name)
    refusals = server.log.count("model truncated: ")
    graphs.write_model(folder, "later", doubled(), MEANS)
    server.until(lambda: server.predict("later", WHITE).status_code == 200)
    assert server.log.count("model truncated: ") == refusals, "a version that was refused is not tried again and again"
