"""Checking an ONNX graph, and moving the normalisation into it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import onnx_graphs as graphs
from outboard import repository
from outboard.repository import ModelProblem
from outboard.worker import onnx_graph

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def read(folder: Path) -> tuple[onnx.ModelProto, onnx_graph.Picture]:
    return onnx_graph.read(repository.read(folder).networks[""])


def refused(folder: Path) -> ModelProblem:
    with pytest.raises(ModelProblem) as caught:
        read(folder)
    return caught.value


def pixels(n: int = 3, height: int = 6, width: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, height, width, 3), np.uint8)


def run(model: onnx.ModelProto, value: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: value})[0]


def normalised(value: np.ndarray) -> np.ndarray:
    """[n, h, w, 3] uint8 -> [n, 3, h, w] float32, as model.toml's words say it."""
    return np.ascontiguousarray(((value.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)).transpose(0, 3, 1, 2))


def test_the_rewritten_graph_agrees_with_numpy_and_the_original(tmp_path: Path) -> None:
    model, picture = read(graphs.folder(tmp_path, graphs.convolution(), mean=MEAN, std=STD))
    manifest = repository.read(tmp_path / "net").networks[""].input
    expected = run(model, normalised(pixels()))
    got = run(onnx_graph.with_uint8_input(model, picture, manifest), pixels())
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("shape", [("n", 3, "h", "w"), ("n", "h", "w", 3), (None, 3, None, None), (3, 3, 6, 8)])
@pytest.mark.parametrize("kind", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_every_layout_and_float_type_is_normalised(tmp_path: Path, shape: tuple, kind: int) -> None:
    model, picture = read(graphs.folder(tmp_path, graphs.channel_means(shape, kind), mean=MEAN, std=STD))
    got = run(onnx_graph.with_uint8_input(model, picture, repository.read(tmp_path / "net").networks[""].input), pixels())
    assert np.allclose(got, normalised(pixels()).mean((2, 3)), atol=2e-3 if kind == TensorProto.FLOAT16 else 1e-5)


@pytest.mark.parametrize("shape", [("n", 3, "h", "w"), ("n", "h", "w", 3)])
def test_a_graph_that_takes_bytes_gets_the_bytes(tmp_path: Path, shape: tuple) -> None:
    model, picture = read(graphs.folder(tmp_path, graphs.channel_means(shape, TensorProto.UINT8), mean=MEAN, std=STD))
    got = run(onnx_graph.with_uint8_input(model, picture, repository.read(tmp_path / "net").networks[""].input), pixels())
    assert np.allclose(got, pixels().mean((1, 2)), atol=1e-3)


def test_a_size_that_the_graph_does_not_take_is_refused_with_the_one_it_takes(tmp_path: Path) -> None:
    problem = refused(graphs.folder(tmp_path, graphs.channel_means((1, 3, 10, 20))))
    assert (problem.key, problem.expected) == ("input.size", "[20, 10]")


def test_a_graph_for_grey_pictures_is_refused(tmp_path: Path) -> None:
    problem = refused(graphs.folder(tmp_path, graphs.channel_means(("n", 1, "h", "w"))))
    assert "x" in problem.key and "[batch, 3, height, width]" in problem.expected


def test_a_graph_with_two_inputs_is_refused_by_their_names(tmp_path: Path) -> None:
    graph = graphs.model(
        [helper.make_node("Add", ["a", "b"], ["y"])],
        [(n, TensorProto.FLOAT, ["n", 3, "h", "w"]) for n in "ab"],
        [("y", 1, ["n", 3, "h", "w"])],
    )
    problem = refused(graphs.folder(tmp_path, graph))
    assert problem.key == "graph input" and "['a', 'b']" in problem.message


@pytest.mark.parametrize(
    "content", [b"", b"not onnx at all", graphs.convolution().SerializeToString()[:60]], ids=["empty", "text", "truncated"]
)
def test_a_file_that_is_no_whole_onnx_is_refused(tmp_path: Path, content: bytes) -> None:
    assert refused(graphs.folder(tmp_path, content)).file.endswith("net.onnx")


def external(tmp_path: Path) -> Path:
    folder = graphs.folder(tmp_path, graphs.convolution())
    onnx.save_model(graphs.convolution(), folder / "net.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    return folder


def test_external_weights_that_are_missing_are_named(tmp_path: Path) -> None:
    folder = external(tmp_path)
    (folder / "weights.bin").unlink()
    assert "'weights.bin'" in refused(folder).expected


def test_external_weights_that_are_cut_short_are_refused(tmp_path: Path) -> None:
    folder = external(tmp_path)
    (folder / "weights.bin").write_bytes(b"1234")
    assert "truncated" in refused(folder).message


@pytest.mark.parametrize("location", ["../../../etc/hostname", "/etc/hostname", "link.bin"])
def test_external_weights_outside_the_folder_are_refused(tmp_path: Path, location: str) -> None:
    folder = external(tmp_path)
    (folder / "link.bin").symlink_to("/etc/hostname")
    model = onnx.load(folder / "net.onnx", load_external_data=False)
    model.graph.initializer[0].external_data[0].value = location
    (folder / "net.onnx").write_bytes(model.SerializeToString())
    assert "leaves" in refused(folder).message
