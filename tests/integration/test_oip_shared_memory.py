"""System shared memory with tritonclient's own utilities, and what it must not open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

import tensor_graphs as tensors
from integration.oipkit import OipServer, oip_serving
from integration.serverkit import serving

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(params=["http", "grpc"])
def triton(request: pytest.FixtureRequest) -> ModuleType:
    return tritonclient.http if request.param == "http" else tritonclient.grpc


@pytest.fixture
def client(oip: OipServer, triton: ModuleType) -> Iterator[Any]:
    made = triton.InferenceServerClient(oip.http if triton is tritonclient.http else oip.grpc)
    yield made
    made.unregister_system_shared_memory()
    made.close()


@contextmanager
def region(nbytes: int, key: str = "") -> Iterator[Any]:
    """A shared memory region of tritonclient."""
    key = key or f"/outboard_test_{os.getpid()}_{os.urandom(4).hex()}"
    handle = shm.create_shared_memory_region("r", key, nbytes)
    try:
        yield handle
    finally:
        shm.destroy_shared_memory_region(handle)


def test_inputs_and_outputs_in_shared_memory(client: Any, triton: ModuleType) -> None:
    a, b = np.arange(16, dtype=np.int32)[None], np.full((1, 16), 3, np.int32)
    with region(256) as handle:
        shm.set_shared_memory_region(handle, [a, b])
        client.register_system_shared_memory("r", handle._shm_key, 256)
        inputs = [triton.InferInput(f"INPUT{i}", [1, 16], "INT32") for i in (0, 1)]
        inputs[0].set_shared_memory("r", 64)
        inputs[1].set_shared_memory("r", 64, offset=64)
        outputs = [triton.InferRequestedOutput(f"OUTPUT{i}") for i in (0, 1)]
        outputs[0].set_shared_memory("r", 64, offset=128)
        outputs[1].set_shared_memory("r", 64, offset=192)
        found = client.infer("simple", inputs, outputs=outputs)
        assert np.array_equal(shm.get_contents_as_numpy(handle, np.int32, [1, 16], 128), a + b)
        assert np.array_equal(shm.get_contents_as_numpy(handle, np.int32, [1, 16], 192), a - b)
        told = found.get_output("OUTPUT1")
        parameters = told["parameters"] if triton is tritonclient.http else told.parameters
        assert {"shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"} <= set(parameters)


def test_many_rows_and_one_input_in_shared_memory(client: Any, triton: ModuleType) -> None:
    x = np.random.default_rng(0).standard_normal((1500, 4), np.float32)
    with region(x.nbytes) as handle:
        shm.set_shared_memory_region(handle, [x])
        client.register_system_shared_memory("r", handle._shm_key, x.nbytes)
        given = triton.InferInput("x", x.shape, "FP32")
        given.set_shared_memory("r", x.nbytes)
        assert np.array_equal(client.infer("same_fp32", [given]).as_numpy("y"), x)


def test_many_rows_and_several_inputs_in_shared_memory(client: Any, triton: ModuleType) -> None:
    """Those of one frame are read, and those only: rows of the region's end, and of its middle, come where they belong."""
    a, b = np.random.default_rng(1).integers(-1000, 1000, (2, 3000, 16), np.int32)
    with region(2 * a.nbytes) as handle:
        shm.set_shared_memory_region(handle, [a, b])
        client.register_system_shared_memory("r", handle._shm_key, 2 * a.nbytes)
        inputs = [triton.InferInput(f"INPUT{i}", a.shape, "INT32") for i in (0, 1)]
        for i, given in enumerate(inputs):
            given.set_shared_memory("r", a.nbytes, offset=i * a.nbytes)
        found = client.infer("simple", inputs)
        assert np.array_equal(found.as_numpy("OUTPUT0"), a + b) and np.array_equal(found.as_numpy("OUTPUT1"), a - b)


def test_a_region_of_many_rows_takes_no_memory_of_the_server(oip: OipServer) -> None:
    """Of 512 MiB, of which nothing was written: each frame read them all once more, while three frames were on their way."""
    rows, width = 4096, 32 << 10
    key = f"/outboard_test_{os.getpid()}_sparse"
    with tritonclient.http.InferenceServerClient(oip.http, network_timeout=60) as http, region(rows * width * 4, key):
        http.register_system_shared_memory("r", key, rows * width * 4)
        given = tritonclient.http.InferInput("x", [rows, width], "FP32")
        given.set_shared_memory("r", rows * width * 4)
        front = psutil.Process(oip.server.process.pid)
        before, peak, over = front.memory_full_info().uss, 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not over.wait(0.01):
                peak = max(peak, front.memory_full_info().uss)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            assert http.infer("row_sums", [given]).as_numpy("y").shape == (rows, 1)
        finally:
            over.set()
            watching.join()
        http.unregister_system_shared_memory()
    assert peak - before < 100 << 20, f"{(peak - before) >> 20} MiB"


def test_strings_in_shared_memory(client: Any, triton: ModuleType) -> None:
    words = np.array([["cat", "Füchse"], ["dog", "?"]], object)
    packed = serialize_byte_tensor(words).item()
    with region(4096) as handle:
        handle._mpsm_handle.buf[: len(packed)] = packed
        client.register_system_shared_memory("r", handle._shm_key, 4096)
        given = triton.InferInput("x", [2, 2], "BYTES")
        given.set_shared_memory("r", len(packed))
        assert client.infer("words", [given]).as_numpy("y").tolist() == [[1, 3], [2, -1]]
        given.set_shared_memory("r", 1024)  # more than the strings take
        assert client.infer("words", [given]).as_numpy("y").tolist() == [[1, 3], [2, -1]]
        wanted = triton.InferRequestedOutput("y")
        wanted.set_shared_memory("r", 1024, offset=2048)
        client.infer("same_bytes", [_four(triton)], outputs=[wanted])
        assert shm.get_contents_as_numpy(handle, np.object_, [1, 4], 2048).tolist() == [[b"a", b"b", b"c", b"d"]]


def test_strings_in_shared_memory_are_bounded_as_bodies_are(client: Any, triton: ModuleType) -> None:
    name, nbytes = f"outboard_test_{os.getpid()}_sparse", 1 << 40
    path = Path("/dev/shm") / name
    with path.open("wb") as file:
        file.truncate(nbytes)
    try:
        client.register_system_shared_memory("sparse", f"/{name}", nbytes)
        given = triton.InferInput("x", [2, 2], "BYTES")
        given.set_shared_memory("sparse", nbytes)
        with pytest.raises(InferenceServerException, match="shared_memory_byte_size"):
            client.infer("words", [given])
    finally:
        path.unlink()


def _four(triton: ModuleType) -> Any:
    return triton.InferInput("x", [1, 4], "BYTES").set_data_from_numpy(np.array([["a", "b", "c", "d"]], object))


def test_regions_are_listed_and_forgotten(client: Any, triton: ModuleType) -> None:
    def names() -> set[str]:
        status = client.get_system_shared_memory_status()
        return set(status.regions) if triton is tritonclient.grpc else {r["name"] for r in status}

    with region(64) as handle:
        client.register_system_shared_memory("a", handle._shm_key, 32)
        client.register_system_shared_memory("b", handle._shm_key, 32, offset=32)
        assert names() == {"a", "b"}
        with pytest.raises(InferenceServerException, match="registered already"):
            client.register_system_shared_memory("a", handle._shm_key, 64)
        client.unregister_system_shared_memory("a")
        client.unregister_system_shared_memory("a")
        assert names() == {"b"}
        with pytest.raises(InferenceServerException, match="no shared memory region 'a'"):
            client.get_system_shared_memory_status("a")
        client.unregister_system_shared_memory()
        assert names() == set()


def test_what_lies_outside_a_region_is_refused(client: Any, triton: ModuleType) -> None:
    def refused(match: str, nbytes: int = 16, offset: int = 0, name: str = "r", output: bool = False) -> None:
        given = triton.InferInput("x", [1, 4], "FP32")
        wanted = triton.InferRequestedOutput("y")
        if output:
            given.set_data_from_numpy(np.zeros((1, 4), np.float32))
            wanted.set_shared_memory(name, nbytes, offset=offset)
        else:
            given.set_shared_memory(name, nbytes, offset=offset)
        with pytest.raises(InferenceServerException, match=match):
            client.infer("same_fp32", [given], outputs=[wanted])

    with region(64) as handle:
        client.register_system_shared_memory("r", handle._shm_key, 64)
        refused("outside", nbytes=80)
        refused("outside", offset=60)
        refused("'q'", name="q")
        refused("input 'x' has 20 bytes", nbytes=20)
        refused("16 bytes, its place", nbytes=8, output=True)
        for match, key, nbytes, offset in (
            ("cannot be opened", "/outboard_nothing", 64, 0),
            ("has 64", handle._shm_key, 65, 0),
            ("has 64", handle._shm_key, 1, 64),
            ("expected a name", "/../etc/passwd", 64, 0),
            ("expected a name", "/..", 64, 0),
            ("byte_size 0", handle._shm_key, 0, 0),
        ):
            with pytest.raises(InferenceServerException, match=match):
                client.register_system_shared_memory("other", key, nbytes, offset=offset)


def test_a_link_in_dev_shm_is_not_followed(client: Any) -> None:
    name = f"outboard_link_{os.getpid()}"
    link = Path("/dev/shm") / name
    link.symlink_to("/etc/passwd")
    try:
        with pytest.raises(InferenceServerException, match="cannot be opened"):
            client.register_system_shared_memory("r", name, 16)
    finally:
        link.unlink()


def test_a_region_that_its_client_truncates_ends_a_request_and_not_the_server(client: Any, triton: ModuleType, oip: OipServer) -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096)
    try:
        client.register_system_shared_memory("r", memory.name, 4096)
        os.truncate(f"/dev/shm/{memory.name}", 8)
        given = triton.InferInput("x", [1, 4], "FP32")
        given.set_shared_memory("r", 16)
        with pytest.raises(InferenceServerException, match="truncated"):
            client.infer("same_fp32", [given])
        wanted = triton.InferRequestedOutput("y")
        wanted.set_shared_memory("r", 16, offset=2048)
        whole = triton.InferInput("x", [1, 4], "FP32").set_data_from_numpy(np.zeros((1, 4), np.float32))
        with pytest.raises(InferenceServerException, match="truncated"):
            client.infer("same_fp32", [whole], outputs=[wanted])
        assert os.stat(f"/dev/shm/{memory.name}").st_size == 8
    finally:
        memory.close()
        memory.unlink()
    assert client.is_server_ready() and oip.server.process.poll() is None


def test_cuda_shared_memory_is_refused_with_a_reason(client: Any) -> None:
    client.unregister_cuda_shared_memory()  # what examples do before they begin
    with pytest.raises(InferenceServerException, match="CUDA shared memory is not supported: .* use system shared memory"):
        client.register_cuda_shared_memory("r", b"aGFuZGxl", 0, 64)


def test_shared_memory_is_off_unless_it_is_switched_on(tmp_path: Path) -> None:
    tensors.write(tmp_path, "same", tensors.same("FP32"))
    with oip_serving(tmp_path, shared_memory=False) as off, region(64) as handle:
        for module, address in ((tritonclient.http, off.http), (tritonclient.grpc, off.grpc)):
            with module.InferenceServerClient(address) as client:
                with pytest.raises(InferenceServerException, match=r"\[oip\] shared_memory = true"):
                    client.register_system_shared_memory("r", handle._shm_key, 64)
        with tritonclient.http.InferenceServerClient(off.http) as client:
            assert "system_shared_memory" not in client.get_server_metadata()["extensions"]


def test_without_a_port_there_is_no_grpc(tmp_path: Path) -> None:
    tensors.write(tmp_path, "same", tensors.same("FP32"))
    with serving(tmp_path, "--device", "cpu") as server:
        assert "gRPC" not in server.log
