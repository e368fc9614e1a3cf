"""A GPU through the CUDA runtime's own Python bindings, so that a server without torch has one too.

Rows go from the slab straight into the device's memory. The slab is pinned a chunk at a time, where rows really lie: pinning all of it
would back and lock every page of a slab that is mostly never touched. Where it cannot be pinned, rows pass through a pinned buffer.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cuda.bindings import runtime as cudart

from outboard.core import link
from outboard.core.state import Coded, Picture
from outboard.devices import slab
from outboard.devices.protocol import Slot
from outboard.devices.rows import BFLOAT16, BYTES, aligned
from outboard.repository import Input
from outboard.worker import decoding, nvml, pictures
from outboard.worker.decoding import Decoded
from outboard.worker.devices import Device
from outboard.worker.slots import gather as gather_on_host

log = logging.getLogger(__name__)

MIB = 1024 * 1024
PIN_CHUNK = 64 * MIB

_TO_DEVICE = cudart.cudaMemcpyKind.cudaMemcpyHostToDevice
_TO_HOST = cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost
_WITHIN = cudart.cudaMemcpyKind.cudaMemcpyDeviceToDevice


def call(result: tuple[Any, ...]) -> Any:
    """A CUDA runtime call's result, unpacked. Raises RuntimeError "CUDA failure N: …", which `errors.classify` understands."""
    error, *values = result
    if error != cudart.cudaError_t.cudaSuccess:
        raise RuntimeError(f"CUDA failure {int(error)}: {error.name}")
    return values[0] if values else None


class DeviceArray:
    """Memory of the device with a shape and a dtype, as torch (`__cuda_array_interface__`) and ORT's binding (`pointer`) take it."""

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: str = "uint8"):
        self.pointer, self.shape, self.dtype = pointer, shape, np.dtype(dtype)

    def reshape(self, shape: Sequence[int]) -> DeviceArray:
        return DeviceArray(self.pointer, tuple(shape), self.dtype.name)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.pointer, False), "version": 3}


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
    keeps_memory = True

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
        self._pictures = pictures.Kept(
            int(self.memory_total * pictures.SHARE),
            lambda nbytes: int(call(cudart.cudaMalloc(nbytes))),
            lambda pointer: call(cudart.cudaFree(pointer)),
        )
        self._decoder: Any = None  # torch's stream for it
        self.decoded = Decoded(int(self.memory_total * pictures.SHARE), self._decoded_buffer, lambda buffer: None)
        self.driver = f"CUDA {call(cudart.cudaRuntimeGetVersion())}, driver {call(cudart.cudaDriverGetVersion())}"
        self._memory_before = self.memory_free()
        self.link = LinkProbe.measure()
        self.h2d_bytes_per_s, self.d2h_bytes_per_s = self.link.h2d_bytes_per_s, self.link.d2h_bytes_per_s
        self.power_limit_w = nvml.power_limit_w(spec)

    def memory_free(self) -> int:
        return call_pair(cudart.cudaMemGetInfo())[0]

    def watch_memory(self) -> None:
        self._memory_before = self.memory_free()
        if self.allocator is not None:
            self.allocator.watch()

    def memory_grown(self) -> int:
        """By what is free now, which misses what an allocator had kept before and others have given back, and by the allocator's count."""
        grown = self._memory_before - self.memory_free()
        return max(0, grown, self.allocator.grown() if self.allocator is not None else 0)

    def attach(self, memory: np.ndarray) -> None:
        self._slab = PinnedSlab(memory)

    def gather(
        self, memory: np.ndarray, rows: Sequence[int], shape: tuple[int, ...], total: int, cut_from: Sequence[Picture] = ()
    ) -> DeviceArray:
        nbytes = int(np.prod(shape, dtype=np.int64))
        slot = self._slot
        target = slot.on_device(total * nbytes)
        self._gather_rows(memory, dict(enumerate(rows)), shape, target, cut_from)
        if total > len(rows):
            call(cudart.cudaMemsetAsync(target + len(rows) * nbytes, 0, (total - len(rows)) * nbytes, slot.stream))
        call(cudart.cudaStreamSynchronize(slot.stream))  # the runtimes work on streams of their own
        return DeviceArray(target, (total, *shape))

    def _gather_rows(
        self, memory: np.ndarray, rows: Mapping[int, int], shape: tuple[int, ...], target: int, cut_from: Sequence[Picture]
    ) -> None:
        """`rows`: index in the batch, which begins at `target` -> offset."""
        nbytes = int(np.prod(shape, dtype=np.int64))
        if cut_from:
            self._gather_cut(memory, rows, shape, target, cut_from)
        else:
            self._copy(memory, [(target + i * nbytes, offset) for i, offset in rows.items()], nbytes)

    def _gather_cut(
        self, memory: np.ndarray, rows: Mapping[int, int], shape: tuple[int, ...], target: int, cut_from: Sequence[Picture]
    ) -> None:
        """Lines of pictures cross the link once and are cut on the device; where there is no room for a picture, its rows cross by
        themselves."""
        nbytes, index = int(np.prod(shape, dtype=np.int64)), list(rows)
        with self._pictures as kept:
            for picture, group in pictures.grouped([*rows.values()], cut_from).items():
                cuts = {index[i]: offset for i, offset in group.items()}
                views = {i: pictures.cut(memory, offset, shape, cut_from) for i, offset in cuts.items()}  # raises where one lies outside
                if picture is None:
                    self._copy(memory, [(target + i * nbytes, offset) for i, offset in cuts.items()], nbytes)
                    continue

                def upload(buffer: int, first: int, count: int, picture: Picture = picture) -> None:
                    at = first * picture.pitch
                    self._copy(memory, [(buffer + at, picture.offset + at)], count * picture.pitch)

                buffer = kept.bring(picture, list(cuts.values()), shape[0], upload)
                if buffer is None:
                    self._copy_through_host([(target + i * nbytes, view) for i, view in views.items()])
                    continue
                width = shape[1] * shape[2]
                for i, offset in cuts.items():
                    source = buffer + offset - picture.offset
                    at, stream = target + i * nbytes, self._slot.stream
                    call(cudart.cudaMemcpy2DAsync(at, width, source, picture.pitch, width, shape[0], _WITHIN, stream))
            call(cudart.cudaStreamSynchronize(self._slot.stream))  # before another batch drops a picture

    def decodes(self, provider: str) -> bool:
        """nvJPEG comes with torchvision, and torch with the backend that is torch's: for others it would only take memory."""
        return provider.startswith("torch") and importlib.util.find_spec("torchvision") is not None

    def gather_coded(
        self,
        memory: np.ndarray,
        rows: Sequence[int],
        shape: tuple[int, ...],
        total: int,
        cut_from: Sequence[Picture],
        coded: Sequence[Coded],
        input: Input,
    ) -> DeviceArray:
        nbytes, width = int(np.prod(shape, dtype=np.int64)), shape[1] * shape[2]
        slot = self._slot
        target = slot.on_device(total * nbytes)
        with self.decoded as decoded:
            found = decoded.bring(coded, rows, self._count, lambda c, buffer: self._decode(memory, c, input, buffer))
            for i, (offset, decoded_row) in enumerate(zip(rows, found, strict=True)):
                if decoded_row is None:
                    continue
                c, buffer = decoded_row
                inside, at = decoding.within(c, cut_from), offset - c.offset
                pictures.cut(slab.view(memory, c.offset, (c.nbytes,), "uint8"), at, shape, inside)  # raises where it lies outside
                source, to = buffer.data_ptr() + at, target + i * nbytes
                if (picture := pictures.find(inside, at)) is not None:
                    call(cudart.cudaMemcpy2DAsync(to, width, source, picture.pitch, width, shape[0], _WITHIN, slot.stream))
                else:
                    call(cudart.cudaMemcpyAsync(to, source, nbytes, _WITHIN, slot.stream))
            call(cudart.cudaStreamSynchronize(slot.stream))  # before another batch drops a picture
        if here := decoding.others(coded, rows):
            self._gather_rows(memory, here, shape, target, cut_from)
        if total > len(rows):
            call(cudart.cudaMemsetAsync(target + len(rows) * nbytes, 0, (total - len(rows)) * nbytes, slot.stream))
        call(cudart.cudaStreamSynchronize(slot.stream))
        return DeviceArray(target, (total, *shape))

    def _count(self, nbytes: int) -> None:
        """nvJPEG sends the file itself, and how is not known: where it decodes Huffman codes on the host, more than the file's bytes."""
        self.uploaded.nbytes += nbytes

    def _decode(self, memory: np.ndarray, c: Coded, input: Input, buffer: Any) -> None:
        """On a stream of its own: batches that compute go on meanwhile."""
        import torch

        from outboard.worker import torch_decode

        with torch.inference_mode(), torch.cuda.stream(self._decoder):
            job, jpeg = decoding.source(memory, c)
            torch_decode.fill(job, jpeg, input, buffer.view(job.shape(input)))
        self._decoder.synchronize()

    def _decoded_buffer(self, nbytes: int) -> Any:
        import torch

        self._decoder = self._decoder or torch.cuda.Stream()
        with torch.cuda.stream(self._decoder):  # torch gives a stream's memory again in the order of its work
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    def to_host(self, batch: DeviceArray) -> np.ndarray:
        array = np.empty(batch.shape, batch.dtype)
        call(cudart.cudaMemcpy(array.ctypes.data, batch.pointer, array.nbytes, _TO_HOST))
        return array

    def gather_slots(self, memory: np.ndarray, rows: Sequence[int], slots: Sequence[Slot]) -> list[Any]:
        n = len(rows)
        starts, total = [], 0
        for slot in slots:
            starts.append(total)
            total += aligned(n * slot.nbytes)
        target = self._slot.on_device(max(total, 1))
        arrays: list[Any] = []
        for start, slot in zip(starts, slots, strict=True):
            if slot.dtype in (BYTES, BFLOAT16):
                arrays += gather_on_host(memory, rows, [slot], lambda nbytes: np.empty(nbytes, np.uint8))
                continue
            copies = [(target + start + i * slot.nbytes, row + slot.offset) for i, row in enumerate(rows)]
            self._copy(memory, copies, slot.nbytes)
            arrays.append(DeviceArray(target + start, (n, *slot.shape), slot.dtype))
        call(cudart.cudaStreamSynchronize(self._slot.stream))
        return arrays

    def _copy(self, memory: np.ndarray, copies: Sequence[tuple[int, int]], nbytes: int) -> None:
        """Start copies of `nbytes` each, (address on the device, offset into the memory), on this thread's stream."""
        if not nbytes:
            return
        slot = self._slot
        views = [(at, slab.view(memory, offset, (nbytes,), "uint8")) for at, offset in copies]  # raises where one lies outside
        pinned = self._slab if self._slab is not None and memory is self._slab.memory else None
        sources = [pinned.pieces(offset, nbytes) for _, offset in copies] if pinned is not None else []
        if pinned is not None and pinned.usable:
            for (at, _), pieces in zip(copies, sources, strict=True):
                for address, length in pieces:
                    call(cudart.cudaMemcpyAsync(at, address, length, _TO_DEVICE, slot.stream))
                    at += length
            self.uploaded.nbytes += len(copies) * nbytes
            return
        self._copy_through_host(views)

    def _copy_through_host(self, copies: Sequence[tuple[int, np.ndarray]]) -> None:
        """Copy arrays of one size, (address on the device, array), through a pinned buffer."""
        slot, nbytes = self._slot, copies[0][1].nbytes
        host = slot.on_host(len(copies) * nbytes)
        for i, (at, array) in enumerate(copies):
            host.array[i * nbytes : (i + 1) * nbytes].reshape(array.shape)[...] = array
            call(cudart.cudaMemcpyAsync(at, host.pointer + i * nbytes, nbytes, _TO_DEVICE, slot.stream))
        call(cudart.cudaStreamSynchronize(slot.stream))  # the buffer is used again for the next input
        self.uploaded.nbytes += len(copies) * nbytes

def call_pair(result: tuple[Any, ...]) -> tuple[int, int]:
    """As `call`, for calls with two results."""
    call(result[:1])
    return int(result[1]), int(result[2])


class LinkProbe:
    """Copies of all sizes that `core/link.py` asks for, between buffers whose content is compared afterwards: bytes that never left the
    host would make any link look fast."""

    def __init__(self) -> None:
        self._bytes = max(link.SIZES)
        self._out, self._back = PinnedHost(self._bytes), PinnedHost(self._bytes)
        self._pageable = np.empty(self._bytes, np.uint8)
        self._device = [int(call(cudart.cudaMalloc(self._bytes))) for _ in range(2)]  # one for each direction
        self._streams = [call(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)) for _ in range(2)]
        self._events = [call(cudart.cudaEventCreate()) for _ in range(4)]

    @classmethod
    def measure(cls) -> link.Link:
        """Raises RuntimeError where the bytes that come back are not those that were sent."""
        probe = cls()
        try:
            out, back = probe._out.array, probe._back.array
            out[:] = np.random.default_rng(0).integers(0, 256, out.size, np.uint8)
            probe._pageable[:] = out
            for direction in ("h2d", "d2h"):
                probe._copy(direction, out.size, probe._device[0])
            if not np.array_equal(out, back):
                raise RuntimeError(f"{out.size} bytes came back from the device changed: the link or its memory is faulty")
            return link.measure(probe._timed, probe._both, probe._unpinned)
        finally:
            probe._free()

    def _copy(self, direction: link.Direction, nbytes: int, device: int) -> None:
        if direction == "h2d":
            call(cudart.cudaMemcpy(device, self._out.pointer, nbytes, _TO_DEVICE))
        else:
            call(cudart.cudaMemcpy(self._back.pointer, device, nbytes, _TO_HOST))

    def _timed(self, direction: link.Direction, nbytes: int) -> float:
        call(cudart.cudaDeviceSynchronize())
        began = time.perf_counter()
        self._copy(direction, nbytes, self._device[0])
        call(cudart.cudaDeviceSynchronize())
        return time.perf_counter() - began

    def _unpinned(self, direction: link.Direction, nbytes: int) -> float:
        host, device = self._pageable.ctypes.data, self._device[0]
        call(cudart.cudaDeviceSynchronize())
        began = time.perf_counter()
        if direction == "h2d":
            call(cudart.cudaMemcpy(device, host, nbytes, _TO_DEVICE))
        else:
            call(cudart.cudaMemcpy(host, device, nbytes, _TO_HOST))
        call(cudart.cudaDeviceSynchronize())
        return time.perf_counter() - began

    def _both(self, nbytes: int) -> tuple[float, float]:
        """By the device's own clock: from the host, two copies cannot be started at the same time."""
        up, down = self._streams
        call(cudart.cudaDeviceSynchronize())
        call(cudart.cudaEventRecord(self._events[0], up))
        call(cudart.cudaMemcpyAsync(self._device[0], self._out.pointer, nbytes, _TO_DEVICE, up))
        call(cudart.cudaEventRecord(self._events[1], up))
        call(cudart.cudaEventRecord(self._events[2], down))
        call(cudart.cudaMemcpyAsync(self._back.pointer, self._device[1], nbytes, _TO_HOST, down))
        call(cudart.cudaEventRecord(self._events[3], down))
        call(cudart.cudaDeviceSynchronize())
        milliseconds = [call(cudart.cudaEventElapsedTime(self._events[i], self._events[i + 1])) for i in (0, 2)]
        return milliseconds[0] / 1e3, milliseconds[1] / 1e3

    def _free(self) -> None:
        for event in self._events:
            cudart.cudaEventDestroy(event)
        for stream in self._streams:
            cudart.cudaStreamDestroy(stream)
        for pointer in self._device:
            cudart.cudaFree(pointer)
        self._out.free()
        self._back.free()
