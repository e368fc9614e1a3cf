"""The worker process over its protocol, with real graphs on the CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_graphs as graphs
from integration.workerkit import MIB, WorkerKit
from outboard.devices import protocol
from outboard.devices.protocol import Done, Failed, Loaded, LoadFailed, Ping, Pong, Run, Stop, Unload

HEIGHT, WIDTH = 6, 8


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerKit]:
    with WorkerKit(tmp_path / "cache") as kit:
        yield kit


def pictures(n: int, height: int = HEIGHT, width: int = WIDTH) -> list[np.ndarray]:
    return list(np.random.default_rng(0).integers(0, 256, (n, height, width, 3), np.uint8))


def means(images: list[np.ndarray]) -> np.ndarray:
    return np.stack([image.mean((0, 1)) / 255 for image in images])


def loaded(worker: WorkerKit, folder: Path) -> Loaded:
    message = worker.load(folder)
    assert isinstance(message, Loaded), message
    return message


def refused(worker: WorkerKit, folder: Path) -> LoadFailed:
    message = worker.load(folder)
    assert isinstance(message, LoadFailed), message
    return message


def slow_graph() -> onnx.ModelProto:
    """A graph that takes some seconds a row: a loop of matrix products."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("MatMul", ["m", "m"], ["m2"]),
            helper.make_node("Tanh", ["m2"], ["m_next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info(n, t, s)
            for n, t, s in (("i", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("m", TensorProto.FLOAT, [256, 256]))
        ],
        [
            helper.make_tensor_value_info(n, t, s)
            for n, t, s in (("go_on", TensorProto.BOOL, []), ("m_next", TensorProto.FLOAT, [256, 256]))
        ],
    )
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["brightest"], keepdims=0),
        helper.make_node("Mul", ["brightest", "most"], ["turns_f"]),
        helper.make_node("Cast", ["turns_f"], ["turns"], to=TensorProto.INT64),
        helper.make_node("Loop", ["turns", "", "start"], ["m_end"], body=body),
        helper.make_node("ReduceMean", ["m_end"], ["mean"], keepdims=0),
        helper.make_node("ReduceMean", ["x"], ["y_x"], axes=[2, 3], keepdims=0),
        helper.make_node("Add", ["y_x", "mean"], ["y"]),
    ]
    constants = {"most": np.float32(3000), "start": np.full((256, 256), 0.01, np.float32)}
    return graphs.model(nodes, [("x", TensorProto.FLOAT, [1, 3, HEIGHT, WIDTH])], [("y", TensorProto.FLOAT, [1, 3])], constants)


def dark_golden(folder: Path) -> None:
    """A golden input of black pixels, so that loading the slow graph is quick."""
    np.savez(folder / "golden.npz", input=np.zeros((HEIGHT, WIDTH, 3), np.uint8))


def test_rows_come_back_as_answers_in_their_order(worker: WorkerKit, tmp_path: Path) -> None:
    network = loaded(worker, graphs.folder(tmp_path, graphs.channel_means()))
    images = pictures(4)
    assert np.allclose(worker.run(network, images)["y"], means(images), atol=1e-5)
    assert np.allclose(worker.run(network, images[::-1])["y"], means(images[::-1]), atol=1e-5)


def test_rows_that_lie_side_by_side_are_used_in_place(worker: WorkerKit, tmp_path: Path) -> None:
    network = loaded(worker, graphs.folder(tmp_path, graphs.channel_means()))
    images = pictures(3)
    offset = worker.allocator.alloc(3 * images[0].nbytes)
    worker.slab.view(offset, (3, HEIGHT, WIDTH, 3))[...] = images
    worker.submit(network, images[0].shape, [offset + i * images[0].nbytes for i in range(3)])
    assert np.allclose(worker.outputs(worker.expect(Done))["y"], means(images), atol=1e-5)


def test_hello_names_the_processor_and_loaded_says_what_runs_and_what_it_costs(worker: WorkerKit, tmp_path: Path) -> None:
    assert worker.hello.uuid == "cpu" and worker.hello.name and worker.hello.pid == worker.process.pid
    network = loaded(worker, graphs.folder(tmp_path, graphs.channel_means()))
    assert network.provider == "CPUExecutionProvider"
    assert network.outputs == [("y", "float32", ["n", 3])]
    assert network.fixed_rows == 0
    assert network.costs[0].rows == 1 and all(cost.seconds > 0 for cost in network.costs)
    assert [cost.rows for cost in network.costs] == [1, 2, 4][: len(network.costs)]
    assert worker.outputs(network)["y"].shape == (1, 3)


@pytest.mark.parametrize("frozen", [1, 3])
def test_a_frozen_batch_size_takes_any_number_of_rows(worker: WorkerKit, tmp_path: Path, frozen: int) -> None:
    network = loaded(worker, graphs.folder(tmp_path, graphs.channel_means((frozen, 3, HEIGHT, WIDTH))))
    assert network.fixed_rows == frozen
    for n in (1, 2, 3, 4):
        images = pictures(n)
        assert np.allclose(worker.run(network, images)["y"], means(images), atol=1e-5)


def test_a_graph_whose_rows_depend_on_each_other_runs_them_singly(worker: WorkerKit, tmp_path: Path) -> None:
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("ReduceMax", ["m"], ["most"], axes=[0], keepdims=1),
        helper.make_node("Div", ["m", "most"], ["y"]),
    ]
    graph = graphs.model(nodes, [("x", TensorProto.FLOAT, ["n", 3, HEIGHT, WIDTH])], [("y", TensorProto.FLOAT, ["n", 3])])
    network = loaded(worker, graphs.folder(tmp_path, graph))
    assert network.fixed_rows == 1
    assert np.allclose(worker.run(network, pictures(4))["y"], 1)


def test_a_full_answer_region_fails_the_batch_with_numbers_and_recovers(tmp_path: Path) -> None:
    with WorkerKit(tmp_path / "cache", answer_bytes=MIB) as worker:
        network = loaded(worker, graphs.folder(tmp_path, graphs.convolution(64), size=(64, 24), batch_max=1))
        images = pictures(1, 24, 64)
        offsets = worker.place(images)
        answer = 64 * 64 * 24 * 4  # the golden answer holds one such, two more are too many
        worker.submit(network, images[0].shape, offsets)
        first = worker.expect(Done)
        worker.submit(network, images[0].shape, offsets)
        failed = worker.expect(Failed)
        assert failed.kind == "unknown" and f"{answer} bytes wanted" in failed.message and str(MIB) in failed.message
        worker.outputs(network), worker.outputs(first)  # frees both with the next batch
        for _ in range(5):
            assert worker.run(network, images)["y"].shape == (1, 64, 24, 64)


def test_rows_of_another_size_are_an_input_error_that_names_the_axis(worker: WorkerKit, tmp_path: Path) -> None:
    network = loaded(worker, graphs.folder(tmp_path, graphs.channel_means(("n", 3, HEIGHT, WIDTH))))
    failed = worker.run_fails(network, pictures(1, height=7))
    assert failed.kind == "input" and "height of the rows is 7, expected 6" in failed.message


def test_nothing_that_a_batch_does_ends_the_loops(worker: WorkerKit, tmp_path: Path) -> None:
    network = loaded(worker, graphs.folder(tmp_path, graphs.channel_means()))
    bad = [
        Run(101, "nobody", "sha256:0", (HEIGHT, WIDTH, 3), [0], []),
        Run(102, network.model, network.version, (HEIGHT, WIDTH, 3), [], []),
        Run(103, network.model, network.version, (HEIGHT, WIDTH, 3), [worker.slab.size - 1], []),
        Run(104, network.model, network.version, (HEIGHT, WIDTH, 3), [-5], []),
        Run(105, network.model, network.version, (HEIGHT,), [0], []),
        Run(106, network.model, network.version, (0, 0, 3), [0], []),
        Run(107, network.model, network.version, (-1, -1, 3), [0], [4, 5, 6]),
    ]
    for run in bad:
        worker.send(run)
        failed = worker.expect(Failed)
        assert failed.batch == run.batch and failed.message
    images = pictures(2)
    assert np.allclose(worker.run(network, images)["y"], means(images), atol=1e-5)


def test_garbage_datagrams_are_passed_over(worker: WorkerKit) -> None:
    for datagram in (b"\x00", b"\xff" * 1000, b"\x81\xa4type\xa4what", os.urandom(protocol.MAX_DATAGRAM), protocol.encode(Pong(1))):
        worker.channel.send(datagram)
    worker.send(Ping(9))
    assert worker.expect(Pong).n == 9


def test_a_model_that_fails_at_run_time_fails_its_batch_only(worker: WorkerKit, tmp_path: Path) -> None:
    # Gather at the brightest pixel's value: out of range for bright pictures, fine for black ones.
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["brightest"], keepdims=0),
        helper.make_node("Mul", ["brightest", "many"], ["index_f"]),
        helper.make_node("Cast", ["index_f"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["offset"]),
        helper.make_node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0),
        helper.make_node("Add", ["m", "offset"], ["y"]),
    ]
    constants = {"many": np.float32(100), "table": np.zeros(4, np.float32)}
    graph = graphs.model(nodes, [("x", TensorProto.FLOAT, ["n", 3, HEIGHT, WIDTH])], [("y", TensorProto.FLOAT, ["n", 3])], constants)
    folder = graphs.folder(tmp_path, graph)
    dark_golden(folder)
    network = loaded(worker, folder)
    failed = worker.run_fails(network, pictures(1))
    assert failed.kind in ("unknown", "input") and "Gather" in failed.message
    black = [np.zeros((HEIGHT, WIDTH, 3), np.uint8)]
    for _ in range(20):
        assert np.allclose(worker.run(network, black)["y"], 0)


def test_ping_is_answered_while_every_thread_is_busy_and_loading_never_blocks_running(worker: WorkerKit, tmp_path: Path) -> None:
    slow = graphs.folder(tmp_path, slow_graph(), name="slow")
    dark_golden(slow)
    network = loaded(worker, slow)
    bright = [np.full((HEIGHT, WIDTH, 3), 255, np.uint8)]
    offsets = worker.place(bright)
    for _ in range(2):
        worker.submit(network, bright[0].shape, offsets)
    began = time.monotonic()
    worker.send(Ping(1))
    assert worker.expect(Pong).n == 1
    assert time.monotonic() - began < 0.5
    loaded(worker, graphs.folder(tmp_path, graphs.channel_means((1, 3, HEIGHT, WIDTH)), name="quick"))
    assert {worker.expect(Done).batch for _ in range(2)} == {1, 2}


def test_the_socket_s_end_ends_the_worker_even_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    slow = graphs.folder(tmp_path, slow_graph())
    dark_golden(slow)
    with WorkerKit(tmp_path / "cache") as worker:
        network = loaded(worker, slow)
        worker.submit(network, (HEIGHT, WIDTH, 3), worker.place([np.full((HEIGHT, WIDTH, 3), 255, np.uint8)]))
        worker.channel.close()
        assert worker.wait_gone(timeout=1) == 0


def test_a_killed_worker_shows_as_the_end_of_the_socket(worker: WorkerKit) -> None:
    worker.process.kill()
    with pytest.raises(EOFError):
        worker.receive()


def test_ctrl_c_is_left_to_the_front_and_stop_ends_after_the_running_batches(worker: WorkerKit, tmp_path: Path) -> None:
    network = loaded(worker, graphs.folder(tmp_path, graphs.channel_means()))
    worker.process.send_signal(signal.SIGINT)
    images = pictures(1)
    offsets = worker.place(images)
    for _ in range(10):
        worker.submit(network, images[0].shape, offsets)
    worker.send(Stop())
    assert sorted(worker.expect(Done).batch for _ in range(10)) == list(range(1, 11))
    assert worker.wait_gone() == 0


def test_the_worker_dies_with_a_front_that_is_killed(tmp_path: Path) -> None:
    front = (
        "import sys, pathlib, time; from integration.workerkit import WorkerKit; "
        "kit = WorkerKit(pathlib.Path(sys.argv[1])); kit.__enter__(); print(kit.process.pid, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", front, str(tmp_path)], stdout=subprocess.PIPE, env=env)
    assert process.stdout
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/status").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline, "the worker outlives its front"
        time.sleep(0.01)


def test_an_unloaded_network_no_longer_runs_and_can_be_loaded_again(worker: WorkerKit, tmp_path: Path) -> None:
    folder = graphs.folder(tmp_path, graphs.channel_means())
    network = loaded(worker, folder)
    worker.send(Unload(network.model, network.version))
    loaded(worker, graphs.folder(tmp_path, graphs.channel_means(), name="other"))  # loads and unloads keep their order
    assert "not loaded" in worker.run_fails(network, pictures(1)).message
    loaded(worker, folder)


def test_a_new_version_serves_beside_the_old_one(worker: WorkerKit, tmp_path: Path) -> None:
    folder = graphs.folder(tmp_path, graphs.channel_means())
    old = loaded(worker, folder)
    (folder / "net.onnx").write_bytes(graphs.channel_means(("n", 3, "h", "w")).SerializeToString()[:50])
    assert isinstance(worker.load(folder), LoadFailed)
    (folder / "net.onnx").write_bytes(graphs.convolution().SerializeToString())
    new = loaded(worker, folder)
    assert new.version != old.version
    assert worker.run(old, pictures(1))["y"].shape == (1, 3)
    assert worker.run(new, pictures(1))["y"].shape == (1, 8, HEIGHT, WIDTH)


def test_golden_outputs_that_do_not_agree_are_refused(worker: WorkerKit, tmp_path: Path) -> None:
    folder = graphs.folder(tmp_path, graphs.channel_means())
    image = pictures(1)[0]
    np.savez(folder / "golden.npz", input=image, y=means([image]).astype(np.float32))
    network = loaded(worker, folder)
    assert np.allclose(worker.outputs(network)["y"], means([image]), atol=1e-5)
    np.savez(folder / "golden.npz", input=image, y=means([image]).astype(np.float32) + 0.1)
    failed = refused(worker, folder)
    assert failed.key == "golden" and failed.file.endswith("golden.npz") and "values differ" in failed.message


def newer_ir(graph: onnx.ModelProto) -> None:
    graph.ir_version = 99


def newer_opset(graph: onnx.ModelProto) -> None:
    graph.opset_import[0].version = 99


def unknown_operator(graph: onnx.ModelProto) -> None:
    graph.graph.node[0].op_type = "Levitate"


@pytest.mark.parametrize(("spoil", "key"), [(newer_ir, "ir_version"), (newer_opset, "opset_import"), (unknown_operator, "graph")])
def test_a_graph_that_the_runtime_cannot_run_is_refused_and_the_worker_goes_on(
    worker: WorkerKit, tmp_path: Path, spoil: object, key: str
) -> None:
    graph = graphs.channel_means()
    spoil(graph)  # type: ignore[operator]
    failed = refused(worker, graphs.folder(tmp_path, graph))
    assert failed.key == key and failed.file.endswith("net.onnx") and failed.expected
    loaded(worker, graphs.folder(tmp_path, graphs.channel_means(), name="good"))


def test_weights_beside_the_graph_are_loaded_from_the_model_s_folder(worker: WorkerKit, tmp_path: Path) -> None:
    inside = loaded(worker, graphs.folder(tmp_path, graphs.convolution(), name="inside"))
    folder = graphs.folder(tmp_path, graphs.convolution(), name="beside")
    onnx.save_model(graphs.convolution(), folder / "net.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0)
    beside = loaded(worker, folder)
    images = pictures(2)
    assert np.array_equal(worker.run(inside, images)["y"], worker.run(beside, images)["y"])


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (b"garbage", b"no message"),
        (protocol.encode(Ping(1)), b"got Ping"),
        (protocol.encode(protocol.Start(99, "cpu", 1, 1, 1, 1, "")), b"Start with"),
    ],
)
def test_a_wrong_first_datagram_is_said_and_ends_with_exit_code_2(first: bytes, why: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "outboard.worker", "--fd", str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
        )
        ours.send(first)
        _, stderr = process.communicate(timeout=20)
        assert process.returncode == 2 and why in stderr


def test_an_unknown_device_is_said_and_ends_with_exit_code_3(tmp_path: Path) -> None:
    worker = WorkerKit(tmp_path, device="toaster")
    try:
        assert worker.wait_gone() == 3
    finally:
        worker.__exit__()
