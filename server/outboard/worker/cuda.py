"""A GPU through the CUDA runtime's own Python bindings, so that a server without torch has one too.

Rows go from the slab straight into the device's memory. The slab is pinned a chunk at a time, where rows really lie: pinning all of it
would back and lock every page of a slab that is mostly never touched. Where it cannot be pinned, rows pass through a pinned buffer.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import runtime as cudart

from outboard.devices import slab
from outboard.worker.devices import Device

log = logging.getLogger(__name__)

MIB = 1024 * 1024
PROBE_BYTES = 32 * MIB  #: large enough that the copy's latency no longer counts
PROBE_COPIES = 4
PIN_CHUNK = 64 * MIB

_TO_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
_TO_HOST = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost


def call(result: tuple[Any, ...]) -> Any:
    """A CUDA runtime call's result, unpacked. Raises RuntimeError "CUDA failure N: …", which `errors.classify` understands."""
    error, *values = result
    if error != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA failure {int(error)}: {error.name}")
    return values[0] if values else None


class DeviceArray:
    """uint8 memory of the device with a shape, as torch (`__cuda_array_interface__`) and ORT's binding (`pointer`) take it."""

    def __init__(self, pointer: int, shape: tuple[int, ...]):
        self.pointer, self.shape = pointer, shape

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": "|u1", "data": (self.pointer, False), "version": 3}


class PinnedHost:
    """Page-locked host memory as a uint8 array; lives as long as the process."""

    def __init__(self, nbytes: int):
        self.pointer = int(call(cudart.cudaHostAlloc(nbytes, 0)))
        self.array = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * nbytes).from_address(self.pointer))

    def free(self) -> None:
        call(cudart.cudaFreeHost(self.pointer))


class PinnedSlab:
    """The slab's mapping, page-locked a chunk at a time on first use."""

    def __init__(self, memory: np.ndarray):
        self.memory = memory
        self._base = memory.ctypes.data
        self._pinned: set[int] = set()
        self._lock = threading.Lock()
        attribute = cudart.cudaDeviceAttr.cudaDevAttrHostRegisterReadOnlySupported
        # The worker's mapping is read-only: without this flag CUDA would ask for writable pages and be refused.
        self._flags = cudart.cudaHostRegisterReadOnly if call(cudart.cudaDeviceGetAttribute(attribute, 0)) else 0
        self.usable = True

    def pieces(self, offset: int, nbytes: int) -> list[tuple[int, int]]:
        """(address, length) of a stretch, cut where one chunk ends: a copy may not span two registrations. Pins what it needs."""
        found, end = [], offset + nbytes
        while offset < end:
            chunk = offset // PIN_CHUNK
            self._pin(chunk)
            stop = min(end, (chunk + 1) * PIN_CHUNK)
            found.append((self._base + offset, stop - offset))
            offset = stop
        return found

    def _pin(self, chunk: int) -> None:
        with self._lock:
            if chunk in self._pinned or not self.usable:
                return
            start = chunk * PIN_CHUNK
            length = min(PIN_CHUNK, self.memory.nbytes - start)
            (error,) = cudart.cudaHostRegister(self._base + start, length, self._flags)
            if error != cudart.cudaError_t.cudaSuccess:
                cudart.cudaGetLastError()  # not sticky, but the next call would report it
                log.warning("the frame memory cannot be pinned (%s): rows go through a buffer", error.name)
                self.usable = False
            else:
                self._pinned.add(chunk)


class _Slot(threading.local):
    """What one batch thread uses again and again: a stream, a device buffer, and a pinned buffer where the slab is not pinned."""

    def __init__(self) -> None:
        self.stream = call(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking))
        self.device_pointer, self.device_bytes = 0, 0
        self.host: PinnedHost | None = None

    def on_device(self, nbytes: int) -> int:
        if self.device_bytes < nbytes:
            if self.device_pointer:
                call(cudart.cudaFree(self.device_pointer))
            self.device_pointer, self.device_bytes = 0, 0
            self.device_pointer = int(call(cudart.cudaMalloc(nbytes)))
            self.device_bytes = nbytes
        return self.device_pointer

    def on_host(self, nbytes: int) -> PinnedHost:
        if self.host is None or self.host.array.nbytes < nbytes:
            if self.host is not None:
                self.host.free()
            self.host = PinnedHost(nbytes)
        return self.host


class CudaDevice(Device):
    """The one GPU that CUDA_VISIBLE_DEVICES leaves to this process."""

    provider = "CUDAExecutionProvider"
    torch_device = "cuda"

    def __init__(self, spec: str):
        call(cudart.cudaSetDevice(0))
        properties = call(cudart.cudaGetDeviceProperties(0))
        name = properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        found = f"GPU-{uuid.UUID(bytes=bytes(properties.uuid.bytes))}"
        super().__init__(spec, name, found)
        if spec.startswith("GPU-") and not found.startswith(spec):
            raise RuntimeError(f"CUDA shows {found} where {spec} was asked for")
        self.memory_total = call_pair(cudart.cudaMemGetInfo())[1]
        self._slab: PinnedSlab | None = None
        self._slot = _Slot()
        self.h2d_bytes_per_s, self.d2h_bytes_per_s = measure_link()

    def memory_free(self) -> int:
        return call_pair(cudart.cudaMemGetInfo())[0]

    def attach(self, memory: np.ndarray) -> None:
        self._slab = PinnedSlab(memory)

    def gather(self, memory: np.ndarray, rows: Sequence[int], shape: tuple[int, ...], total: int) -> DeviceArray:
        nbytes = int(np.prod(shape, dtype=np.int64))
        views = [slab.view(memory, offset, shape, "uint8") for offset in rows]
        slot = self._slot
        target = slot.on_device(total * nbytes)
        pinned = self._slab if self._slab is not None and memory is self._slab.memory else None
        sources = [pinned.pieces(offset, nbytes) for offset in rows] if pinned is not None else []
        if pinned is not None and pinned.usable:
            for i, pieces in enumerate(sources):
                at = target + i * nbytes
                for address, length in pieces:
                    call(cudart.cudaMemcpyAsync(at, address, length, _TO_DEVICE, slot.stream))
                    at += length
        else:
            host = slot.on_host(len(rows) * nbytes)
            for i, view in enumerate(views):
                host.array[i * nbytes : (i + 1) * nbytes] = view.reshape(-1)
            call(cudart.cudaMemcpyAsync(target, host.pointer, len(rows) * nbytes, _TO_DEVICE, slot.stream))
        if total > len(rows):
            call(cudart.cudaMemsetAsync(target + len(rows) * nbytes, 0, (total - len(rows)) * nbytes, slot.stream))
        call(cudart.cudaStreamSynchronize(slot.stream))  # the runtimes work on streams of their own
        return DeviceArray(target, (total, *shape))


def call_pair(result: tuple[Any, ...]) -> tuple[int, int]:
    """As `call`, for calls with two results."""
    call(result[:1])
    return int(result[1]), int(result[2])


def measure_link() -> tuple[float, float]:
    """Bytes a second to the device and back, by copies of pinned memory whose content is compared afterwards.

    The fastest of a few copies: the link's clock rises under load, and a slow first copy says nothing. Raises RuntimeError where the
    bytes that come back are not those that were sent.
    """
    out, back = PinnedHost(PROBE_BYTES), PinnedHost(PROBE_BYTES)
    pointer = int(call(cudart.cudaMalloc(PROBE_BYTES)))
    try:
        out.array[:] = np.random.default_rng(0).integers(0, 256, PROBE_BYTES, np.uint8)
        rates = []
        for target, source, kind in ((pointer, out.pointer, _TO_DEVICE), (back.pointer, pointer, _TO_HOST)):
            seconds = []
            for _ in range(PROBE_COPIES):
                call(cudart.cudaDeviceSynchronize())
                began = time.perf_counter()
                call(cudart.cudaMemcpy(target, source, PROBE_BYTES, kind))
                call(cudart.cudaDeviceSynchronize())
                seconds.append(time.perf_counter() - began)
            rates.append(PROBE_BYTES / min(seconds))
        if not np.array_equal(out.array, back.array):
            raise RuntimeError(f"{PROBE_BYTES} bytes came back from the device changed: the link or its memory is faulty")
        return rates[0], rates[1]
    finally:
        cudart.cudaFree(pointer)
        out.free()
        back.free()
