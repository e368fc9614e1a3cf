"""Tensor models in a real worker process: what it finds out about a graph, what it refuses, what a row may hold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import tensor_graphs as graphs
from integration.tensorkit import outputs, run
from integration.workerkit import WorkerKit
from outboard.devices.protocol import Failed, Loaded, LoadFailed, Run, Slot
from outboard.devices.rows import lay_out, pack, room_for, spans, unpack

TORCH = 'task = "tensor"\nbackend = "torch"\nfile = "model.pt2"\n[output]\ndecoder = "tensor"\n'


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerKit]:
    with WorkerKit(tmp_path_factory.mktemp("cache")) as kit:
        yield kit


def loaded(worker: WorkerKit, folder: Path) -> Loaded:
    message = worker.load(folder)
    assert isinstance(message, Loaded), message
    worker.freed.append(message.golden_batch)
    return message


def refused(worker: WorkerKit, folder: Path) -> LoadFailed:
    message = worker.load(folder)
    assert isinstance(message, LoadFailed), message
    return message


# ---------------------------------------------------------------- what it finds out


def test_the_inputs_and_outputs_of_a_graph_are_told(worker: WorkerKit, tmp_path: Path) -> None:
    found = loaded(worker, graphs.write(tmp_path, "mixed", graphs.mixed()))
    assert found.inputs == [("x", "float32", ["n", "width"]), ("k", "int64", ["n"]), ("z", "float64", ["n", 3, 1])]
    assert found.outputs == [("sums", "float32", ["n", "width"])]
    assert not found.whole and found.fixed_rows == 0 and [c.rows for c in found.costs][:2] == [1, 2]


def test_a_first_axis_that_is_no_batch_is_found_by_its_answers(worker: WorkerKit, tmp_path: Path) -> None:
    assert loaded(worker, graphs.write(tmp_path, "softmax", graphs.softmax_over_rows())).whole
    assert loaded(worker, graphs.write(tmp_path, "scalar", graphs.scalar_times_vector())).whole
    assert not loaded(worker, graphs.write(tmp_path, "fixed", graphs.add_and_subtract(4))).whole


def test_the_length_of_free_axes_is_found_by_trying(worker: WorkerKit, tmp_path: Path) -> None:
    wide = graphs.graph(
        [helper.make_node("Slice", ["x", "start", "end", "axis"], ["cut"]), helper.make_node("Reshape", ["cut", "shape"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", "width"])],
        [("y", TensorProto.FLOAT, ["n", 40])],
        {"start": np.array([0]), "end": np.array([40]), "axis": np.array([1]), "shape": np.array([-1, 40])},
    )
    found = loaded(worker, graphs.write(tmp_path, "wide", wide))
    x = np.arange(128, dtype=np.float32).reshape(2, 64)
    assert np.array_equal(outputs(worker, found, x)["y"], x[:, :40])


def test_zipmap_gives_a_tensor_and_its_labels(worker: WorkerKit, tmp_path: Path) -> None:
    found = loaded(worker, graphs.write(tmp_path, "trees", graphs.trees()))
    assert found.outputs[1][:2] == ("probabilities", "float32") and found.labels == {"probabilities": ["cat", "dog", "fox"]}
    got = outputs(worker, found, np.array([[0, 0], [1, 1]], np.float32))
    assert got["label"].tolist() == [b"cat", b"fox"] and got["probabilities"].tolist() == [[1, 0, 0], [0, 0, 1]]


def test_bfloat16_keeps_its_bits(worker: WorkerKit, tmp_path: Path) -> None:
    found = loaded(worker, graphs.write(tmp_path, "bf16", graphs.same("BF16")))
    x = np.array([[1.5, -0.0, np.inf, 3e38], [1e-38, np.nan, 7, -2]], ml_dtypes.bfloat16)
    assert found.inputs[0][1] == "bfloat16" and outputs(worker, found, x)["y"].tobytes() == x.tobytes()


# ---------------------------------------------------------------- golden.npz


def test_a_golden_file_gives_the_input_and_what_must_come_out(worker: WorkerKit, tmp_path: Path) -> None:
    folder = graphs.write(tmp_path, "mixed", graphs.mixed())
    x, k, z = np.ones((1, 5), np.float32), np.array([2]), np.zeros((1, 3, 1))
    np.savez(folder / "golden.npz", x=x, k=k, z=z, sums=x + 2)
    assert isinstance(loaded(worker, folder), Loaded)
    np.savez(folder / "golden.npz", x=x, k=k, z=z, sums=x + 3)
    failure = refused(worker, folder)
    assert failure.key == "golden" and "sums" in failure.expected and "differ" in failure.message
    np.savez(folder / "golden.npz", x=x.astype(np.float64), k=k, z=z)
    assert "input 'x' as float32" in refused(worker, folder).expected
    np.savez(folder / "golden.npz", x=x, k=k)
    assert "each input" in refused(worker, folder).expected


def test_what_takes_no_made_up_input_asks_for_a_golden_file(worker: WorkerKit, tmp_path: Path) -> None:
    picky = graphs.graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [("x", TensorProto.FLOAT, ["n", "width"])],
        [("y", TensorProto.FLOAT, ["n", 7919])],
        {"shape": np.array([-1, 7919], np.int64)},
    )
    folder = graphs.write(tmp_path, "picky", picky)
    failure = refused(worker, folder)
    assert failure.key == "golden" and "golden.npz" in failure.expected
    np.savez(folder / "golden.npz", x=np.zeros((1, 7919), np.float32))
    assert isinstance(loaded(worker, folder), Loaded)


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: Slot("z", s.dtype, s.shape, 0, s.nbytes), "input 'x' is missing"),
        (lambda s: Slot(s.name, "int32", s.shape, 0, s.nbytes), "expected float32"),
        (lambda s: Slot(s.name, s.dtype, (5,), 0, 20), "is 5, expected 4"),
        (lambda s: Slot(s.name, s.dtype, (2, 2), 0, 16), "expected float32 [4]"),
    ],
)
def test_rows_that_do_not_fit_are_refused_as_input(worker: WorkerKit, tmp_path: Path, change, said: str) -> None:
    found = loaded(worker, graphs.write(tmp_path, "same", graphs.same("FP32")))
    slot = change(Slot("x", "float32", (4,), 0, 16))
    worker.batches += 1
    worker.send(Run(worker.batches, found.model, found.version, (), [0], worker.freed, (slot,)))
    worker.freed = []
    failed = worker.expect(Failed)
    assert failed.kind == "input" and said in failed.message


def test_strings_that_are_no_text_are_refused(worker: WorkerKit, tmp_path: Path) -> None:
    found = loaded(worker, graphs.write(tmp_path, "words", graphs.words_to_numbers()))
    failed = run(worker, found, np.array([[b"\xff", b"cat"]], object))
    assert isinstance(failed, Failed) and failed.kind == "input" and "UTF-8" in failed.message


def test_graphs_that_take_no_tensors_are_refused(worker: WorkerKit, tmp_path: Path) -> None:
    sequence = helper.make_value_info("x", helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2])))
    node = helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0)
    made = helper.make_graph([node], "g", [sequence], [helper.make_tensor_value_info("y", TensorProto.FLOAT, [None])])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    failure = refused(worker, graphs.write(tmp_path, "sequence", model.SerializeToString()))
    assert failure.key == "graph input 'x'" and "it is a sequence" in failure.message
    complex_ = onnx.load_from_string(graphs.same("FP32"))
    complex_.graph.input[0].type.tensor_type.elem_type = TensorProto.COMPLEX64
    assert "COMPLEX64" in refused(worker, graphs.write(tmp_path, "complex", complex_.SerializeToString())).message


# ---------------------------------------------------------------- torch


def test_a_torch_export_takes_tensors(tmp_path: Path) -> None:
    import torch

    class Twice(torch.nn.Module):
        def forward(self, a: torch.Tensor, k: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"twice": a * 2, "sum": a.sum(1) + k, "half": a.to(torch.bfloat16)}

    n = torch.export.Dim("n", min=1, max=1024)
    program = torch.export.export(
        Twice(), (torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)), dynamic_shapes={"a": {0: n}, "k": {0: n}}
    )
    folder = tmp_path / "twice"
    folder.mkdir()
    torch.export.save(program, folder / "model.pt2")
    (folder / "model.toml").write_text(TORCH)
    with WorkerKit(tmp_path / "cache") as worker:
        found = loaded(worker, folder)
        assert [(name, dtype) for name, dtype, _ in found.inputs] == [("a", "float32"), ("k", "int64")]
        assert [(name, dtype) for name, dtype, _ in found.outputs] == [("twice", "float32"), ("sum", "float32"), ("half", "bfloat16")]
        a, k = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([1, 2, 3, 4])
        got = outputs(worker, found, a, k)
        assert np.array_equal(got["twice"], 2 * a) and np.array_equal(got["sum"], a.sum(1) + k)
        assert got["half"].dtype == ml_dtypes.bfloat16 and np.array_equal(got["half"].astype(np.float32), a)


# ---------------------------------------------------------------- rows


def test_rows_of_one_input_have_no_gaps_and_those_of_several_are_aligned() -> None:
    (slot,), row_bytes = lay_out([("x", "float32", (3,), 12)])
    assert (slot.offset, row_bytes) == (0, 12)
    slots, row_bytes = lay_out([("x", "float32", (3,), 12), ("k", "int64", (), 8)])
    assert [s.offset for s in slots] == [0, 64] and row_bytes == 128
    assert lay_out([("x", "float32", (0,), 0)])[1] == 1


def test_packed_strings_come_back_and_cut_ones_are_refused() -> None:
    words = [b"", b"a\x00b", b"x" * 1000]
    packed = pack(words)
    assert unpack(packed, (3, 1)).tolist() == [[w] for w in words]
    assert spans(packed, 3)[-1][1] == len(packed)
    for cut in range(len(packed)):
        with pytest.raises(ValueError, match="string"):
            spans(packed[:cut], 3)
    assert [room_for(n) for n in (0, 1, 64, 65, 1000)] == [64, 64, 64, 128, 1024]
