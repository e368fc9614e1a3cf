"""Models whose files are whole, and whose networks do not fit what model.toml says: refused at load, not at every picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import graphs
from integration.serverkit import Server, serving

SIZE = (64, 64)
F32 = TensorProto.FLOAT
ANCHORS = "anchors = [[1.0, 1.0], [2.0, 2.0]]"


def grid(channels: int, stride: int, gain: float = 0.01) -> bytes:
    """`maps` [N, channels, rows, columns]: a convolution with one output for each `stride` pixels."""
    g = graphs.Graph(SIZE)
    weights = np.random.default_rng(0).normal(size=(channels, 3, stride, stride)) * gain
    g.op("Conv", "images", g.const(weights), strides=[stride, stride], out="maps")
    return g.model({"maps": (F32, ["batch", channels, SIZE[1] // stride, SIZE[0] // stride])})


def logits(gain: float = 100.0) -> bytes:
    """`scores` [N, 3], some of them far above 1."""
    g = graphs.Graph(SIZE)
    g.op("Mul", g.op("ReduceMean", "images", axes=[2, 3], keepdims=0), g.const(gain), out="scores")
    return g.model({"scores": (F32, ["batch", 3])})


def integers(model: bytes) -> bytes:
    """`model` with its only output cast to int64."""
    built = onnx.load_from_string(model)
    output = built.graph.output[0]
    for node in built.graph.node:
        node.output[:] = ["float" if name == output.name else name for name in node.output]
    built.graph.node.append(onnx.helper.make_node("Cast", ["float"], [output.name], to=TensorProto.INT64))
    output.type.tensor_type.elem_type = TensorProto.INT64
    return built.SerializeToString()


def block_finder(layout: str) -> bytes:
    return graphs.block_finder(layout, SIZE)


#: name -> (graph, task, decoder, [output] lines, labels, part of the key, of what was expected, of the message).
REFUSED: dict[str, tuple[bytes, str, str, str, int, str, str, str]] = {
    "labels_logits": (
        logits(),
        "classification",
        "logits",
        "",
        2,
        "labels",
        "3 lines",
        "it has 2; the outputs of one image are scores float32 [3]",
    ),
    "labels_yolov2": (grid(2 * 7, 32), "detection", "yolov2", ANCHORS, 80, "labels", "2 lines", "it has 80"),
    "labels_yolov5": (block_finder("yolov5"), "detection", "yolov5", "", 3, "labels", "2 lines", "it has 3"),
    "labels_yolov5_few": (block_finder("yolov5"), "detection", "yolov5", "", 1, "labels", "2 lines", "it has 1"),
    "labels_yolov8": (block_finder("yolov8"), "detection", "yolov8", "", 3, "labels", "2 lines", "it has 3"),
    "labels_ssd": (
        block_finder("ssd"),
        "detection",
        "boxes",
        "background_class = true\nfirst_class = 1",
        3,
        "labels",
        "2 lines, one for each class of the network, counted from class 1",
        "it has 3",
    ),
    "labels_detr": (block_finder("detr"), "detection", "detr", "", 5, "labels", "2 or 3 lines", "it has 5"),
    "means_as_yolov5": (graphs.channel_means(SIZE), "detection", "yolov5", "", 0, "output.decoder", "[N, 5 + classes]", "means [3]"),
    "means_as_boxes": (graphs.channel_means(SIZE), "detection", "boxes", "", 0, "output.decoder", "boxes [N, 4]", "means [3]"),
    "yolov8_as_logits": (block_finder("yolov8"), "classification", "logits", "", 0, "output.decoder", "one axis", "float32 [6, 16]"),
    "boxes_as_detr": (graphs.channel_means(SIZE), "detection", "detr", "", 0, "output.decoder", "pred_boxes [Q, 4]", "means [3]"),
    "maps_as_end2end": (grid(14, 32), "detection", "end2end", "", 0, "output.decoder", "[N, 6]", "maps [14, 2, 2]"),
    "maps_as_centerface": (
        grid(14, 4),
        "detection",
        "centerface",
        "",
        0,
        "output.decoder",
        "heat map [1, rows, columns]",
        "maps [14, 16, 16]",
    ),
    "yolov2_of_other_anchors": (grid(15, 32), "detection", "yolov2", ANCHORS, 0, "output.decoder", "2 anchors x", "[15, 2, 2]"),
    "yolov2_of_other_stride": (
        grid(14, 16),
        "detection",
        "yolov2",
        ANCHORS,
        0,
        "output.decoder",
        "a grid of 32 pixels a cell: [2, 2]",
        "[14, 4, 4]",
    ),
    "yolov2_of_integers": (integers(grid(14, 32)), "detection", "yolov2", ANCHORS, 0, "output.decoder", "floating-point", "int64"),
    "logits_of_integers": (integers(logits()), "classification", "logits", "", 0, "output.decoder", "floating-point", "int64 [3]"),
    "yolov8_of_integers": (
        integers(block_finder("yolov8")),
        "detection",
        "yolov8",
        "",
        0,
        "output.decoder",
        "[4 + classes, N]",
        "of int64",
    ),
    "logits_as_probabilities": (
        logits(),
        "classification",
        "probabilities",
        "",
        0,
        "output.decoder",
        "probabilities from 0 to 1",
        "scores float32 [3]",
    ),
}

#: The same graphs with a model.toml that fits: name -> (graph, task, decoder, [output] lines, labels).
TAKEN: dict[str, tuple[bytes, str, str, str, int]] = {
    "logits": (logits(), "classification", "logits", "", 3),
    "yolov2": (grid(2 * 7, 32), "detection", "yolov2", ANCHORS, 2),
    "yolov5": (block_finder("yolov5"), "detection", "yolov5", "", 2),
    "yolov8": (block_finder("yolov8"), "detection", "yolov8", "", 2),
    "yolov8_unlabelled": (block_finder("yolov8"), "detection", "yolov8", "", 0),
    "ssd": (block_finder("ssd"), "detection", "boxes", "background_class = true\nfirst_class = 1", 2),
    "detr": (block_finder("detr"), "detection", "detr", "", 2),
    "rt_detr": (block_finder("rt_detr"), "detection", "detr", "", 2),
    "end2end": (block_finder("end2end"), "detection", "end2end", "", 2),
    "efficient_nms": (block_finder("efficient_nms"), "detection", "end2end", "", 2),
    "boxes": (block_finder("boxes"), "detection", "boxes", "", 2),
    "strange": (graphs.nan_model(SIZE), "classification", "logits", "", 6),
}


def write(root: Path, name: str, graph: bytes, task: str, decoder: str, output: str, labels: int) -> None:
    text = graphs.toml(task, decoder, SIZE, output=output, rest="[batching]\nmax = 2")
    folder = graphs.write_model(root, name, graph, ('labels = "labels.txt"\n' if labels else "") + text)
    (folder / "labels.txt").write_text("".join(f"class {i}\n" for i in range(labels)))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    for name, (graph, task, decoder, output, labels, *_) in REFUSED.items():
        write(root, name, graph, task, decoder, output, labels)
    for name, (graph, task, decoder, output, labels) in TAKEN.items():
        write(root, "fits_" + name, graph, task, decoder, output, labels)
    with serving(root, "--device", "cpu") as running:
        yield running


@pytest.mark.parametrize("name", REFUSED)
def test_a_network_that_does_not_fit_its_model_toml_is_refused_by_file_key_and_expectation(server: Server, name: str) -> None:
    key, expected, said = REFUSED[name][5:]
    listed = server.model(name)
    error = listed["error"]
    assert listed["state"] == "failed" and error["key"] == key, listed
    assert error["file"].endswith(f"{name}/{'labels.txt' if key == 'labels' else 'model.toml'}")
    assert expected in error["expected"] and said in error["message"], error


@pytest.mark.parametrize("name", TAKEN)
def test_one_that_fits_is_served(server: Server, name: str) -> None:
    listed = server.model("fits_" + name)
    assert listed["state"] == "ready" and listed["error"] is None, listed


def test_a_model_that_kills_whatever_loads_it_is_refused_and_its_neighbours_are_served(tmp_path: Path) -> None:
    toml = graphs.toml("tensor", "tensor", (32, 32))
    for name in ("before", "killer", "later"):
        graphs.write_model(tmp_path, name, graphs.dies_of_poison(), toml)
    np.savez(tmp_path / "killer" / "golden.npz", input=np.full((32, 32, 3), graphs.POISON, np.uint8))
    with serving(tmp_path, "--device", "cpu") as running:
        assert [running.model(name)["state"] for name in ("before", "killer", "later")] == ["ready", "failed", "ready"]
        error = running.model("killer")["error"]
        assert error["file"].endswith("killer") and error["key"] == "load" and "died 3 times while it loaded this model" in error["message"]
