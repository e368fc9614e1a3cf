"""torch: eager at once, and compiled for a few batch sizes when that has proved itself.

`torch.compile` takes a core for half a minute. So a child process at the lowest priority fills inductor's on-disk cache first
(`outboard.worker.compile`), and only then does the worker compile, from the cache, in seconds (measured: 26 s cold, 2 s from cache).
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._inductor.compile_fx import compile_fx

from outboard.repository import ModelProblem, ModelSpec, Network
from outboard.worker.devices import Device
from outboard.worker.environment import CACHE_PROBLEM
from outboard.worker.networks import Port
from outboard.worker.torch_memory import TorchAllocator
from outboard.worker.torch_modules import Normalised, build, flat

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 900

Forward = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Streams(threading.local):
    """A CUDA stream for each batch thread: on the default stream, batches would wait for each other."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()


class TorchBackend:
    """A module in eager mode. fp16 and bf16 by autocast, where the device is a GPU."""

    provider = "torch eager"
    recompilations = 0

    def __init__(self, network: Network, spec: ModelSpec, device: Device, threads: int):
        self._network, self._spec, self._device, self._threads = network, spec, device, threads
        torch.set_num_threads(threads)
        if spec.toml.run.precision == "fp32":
            torch.backends.cudnn.allow_tf32 = False  # on by default: 10 bits of mantissa are not fp32
        module, axes = build(network, spec)
        self.module: Normalised = module.to(device.torch_device)
        self._streams = Streams() if device.torch_device == "cuda" else None
        if self._streams:
            device.allocator = TorchAllocator()
        self.inputs: list[Port] = [("pixels", "uint8", axes)]
        self.outputs = self._ports(axes)

    def _ports(self, axes: list[int | str]) -> list[Port]:
        """Names, types and shapes of the outputs, found by one run on black rows."""
        width, height = self._network.input.size
        rows = axes[0] if isinstance(axes[0], int) else 1
        blank = torch.zeros((rows, height, width, 3), dtype=torch.uint8, device=self._device.torch_device)
        scale, shift = self.module.scale, self.module.shift
        try:
            with torch.inference_mode():
                answer = flat(self.module.network(blank.permute(0, 3, 1, 2).float() * scale + shift))
        except TypeError as e:
            raise ModelProblem(str(self._network.file), "outputs", "a tensor, a tuple or a dict of tensors", str(e)) from e
        kinds = [(name, "float32" if t.is_floating_point() else str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in answer]
        return [(name, kind, [axes[0], *shape[1:]]) for name, kind, shape in kinds]

    def batch_rows(self, rows: int) -> int:
        return rows

    def run(self, batch: Any) -> list[np.ndarray]:
        return self.run_with(self.module, batch)

    def run_with(self, forward: Forward, batch: Any) -> list[np.ndarray]:
        """`forward` on a gathered batch, in the modes that both eager and compiled code run in."""
        if isinstance(batch, np.ndarray):
            with torch.inference_mode():
                return [t.numpy() for t in forward(as_tensor(batch))]
        assert self._streams is not None
        half = _HALF.get(self._spec.toml.run.precision)
        precision = torch.autocast("cuda", half) if half else contextlib.nullcontext()
        with torch.inference_mode(), torch.cuda.stream(self._streams.stream), precision:
            return [t.cpu().numpy() for t in forward(torch.as_tensor(batch, device="cuda"))]

    def shrink(self) -> None:
        """torch's allocator keeps what batches took on a GPU; on the CPU it keeps nothing."""
        if self._streams:
            torch.cuda.empty_cache()

    def optimise(self, rows: Sequence[int]) -> CompiledBackend | None:
        """Slow: compiled code for batches of these sizes; None where there can be none (the log says why)."""
        if not self._spec.toml.run.compile:
            return None
        if problem := os.environ.get(CACHE_PROBLEM):
            log.warning(
                "%s stays eager: compiled code cannot be kept: %s. Set `cache` in outboard.toml, or OUTBOARD_CACHE, to a writable folder",
                self._network.key,
                problem,
            )
            return None
        if not has_compiler(self._device):
            log.warning("%s stays eager: [run] compile = true needs a C++ compiler (g++), and there is none", self._network.key)
            return None
        fixed = self.inputs[0][2][0]
        buckets = [fixed] if isinstance(fixed, int) else list(rows)
        if error := self._fill_cache(buckets):
            log.warning("%s stays eager: it cannot be compiled: %s", self._network.key, error)
            return None
        return CompiledBackend(self, self._network, self._device, buckets)

    def _fill_cache(self, buckets: Sequence[int]) -> str:
        """Compile in a child at the lowest priority; its last words where that fails."""
        part = self._network.key.partition("/")[2]
        command = [
            sys.executable,
            "-m",
            "outboard.worker.compile",
            str(self._spec.directory),
            "--part",
            part,
            "--device",
            self._device.spec,
        ]
        command += ["--threads", str(self._threads), "--rows", *map(str, buckets)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as e:
            return str(e)
        return "" if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit code {done.returncode}"


class CompiledBackend:
    """Compiled code for batches of `buckets` rows; any other shape runs eager, so nothing is ever compiled while a frame waits. Whether
    that is so is counted: `recompilations` are those after the warm-up."""

    provider = "torch compiled"

    def __init__(self, eager: TorchBackend, network: Network, device: Device, buckets: Sequence[int]):
        self._eager = eager
        self._buckets = sorted(buckets)
        width, height = network.input.size
        self._shapes = {(n, height, width, 3) for n in self._buckets}
        self.inputs, self.outputs = eager.inputs, eager.outputs
        # One specialisation a bucket: dynamo's limit of 8 would otherwise send the largest ones back to eager without a word.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, len(buckets) + 1)
        self._compilations = 0
        self._forward: Forward = torch.compile(eager.module, dynamic=False, fullgraph=True, backend=self._compile)
        for shape in sorted(self._shapes):
            eager.run_with(self._forward, _blank(device, shape))
        self._warm = self._compilations

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """What dynamo calls for each new graph: inductor, counted."""
        self._compilations += 1
        return compile_fx(graph, inputs)

    @property
    def recompilations(self) -> int:
        return self._compilations - self._warm

    def batch_rows(self, rows: int) -> int:
        return next((n for n in self._buckets if n >= rows), rows)

    def run(self, batch: Any) -> list[np.ndarray]:
        forward = self._forward if tuple(batch.shape) in self._shapes else self._eager.module
        return self._eager.run_with(forward, batch)

    def optimise(self, rows: Sequence[int]) -> None:
        """Nothing is faster."""

    def shrink(self) -> None:
        self._eager.shrink()


def _blank(device: Device, shape: tuple[int, ...]) -> Any:
    """A batch of black rows as the device gathers it."""
    nbytes = int(np.prod(shape[1:]))
    return device.gather(np.zeros(shape[0] * nbytes, np.uint8), [i * nbytes for i in range(shape[0])], shape[1:], shape[0])


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The array's own memory. The slab is mapped read-only; torch warns of that, and nothing here writes to its input."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return torch.frombuffer(array.reshape(-1).data.cast("B"), dtype=torch.uint8).view(dtype).view(array.shape)


def has_compiler(device: Device) -> bool:
    """Whether what inductor calls is there: a C++ compiler for the CPU, a C compiler for triton's launchers."""
    names = [os.environ.get("CXX", "g++")] if device.torch_device == "cpu" else [os.environ.get("CC", "gcc"), "clang"]
    return any(shutil.which(name) for name in names)
