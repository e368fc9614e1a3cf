"""ONNX Runtime: a graph that takes uint8 rows, on the CPU or on a GPU, and never silently on the other one."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from outboard.repository import ModelProblem, ModelSpec, Network
from outboard.worker import onnx_graph
from outboard.worker.devices import Device
from outboard.worker.networks import Port

log = logging.getLogger(__name__)

_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")
_OPSET = re.compile(r"Opset (\d+) is under development.*?support for domain (\S+) is till opset (\d+)", re.S)


class OnnxBackend:
    """One ORT session. Its input is uint8 [n, h, w, 3]; the normalisation of model.toml is part of the graph."""

    recompilations = 0

    def __init__(self, network: Network, spec: ModelSpec, device: Device, threads: int):
        where = str(network.file)
        model, picture = onnx_graph.read(network)
        ports = [_port(output, where) for output in model.graph.output]
        model = onnx_graph.with_uint8_input(model, picture, network.input)
        # Rows of one size: the arena and its plan for each batch size gain 2-5 % and are bounded by the number of batch sizes. Rows of
        # many sizes: the plans are kept for every shape (146 -> 239 MB over 600 random shapes) and an arena never shrinks; without
        # both, memory stays flat.
        arena = not network.input.dynamic
        self._session = Session(model, network, spec, device, threads, arena)
        self.provider = device.provider
        self.inputs: list[Port] = [(onnx_graph.PIXELS, "uint8", onnx_graph.axes(model.graph.input[0]))]
        self.outputs = ports
        self._names = [name for name, _, _ in ports]

    def batch_rows(self, rows: int) -> int:
        return rows

    def run(self, batch: Any) -> list[np.ndarray]:
        return self._session.run({onnx_graph.PIXELS: batch}, self._names)

    def optimise(self, rows: Sequence[int]) -> None:
        """The session is as fast as it gets."""

    def shrink(self) -> None:
        self._session.shrink()


class Session:
    """An ORT session on the device, and on no other. Raises ModelProblem where the file is at fault, RuntimeError where the device is."""

    def __init__(self, model: onnx.ModelProto, network: Network, spec: ModelSpec, device: Device, threads: int, arena: bool):
        if device.provider == "CUDAExecutionProvider":
            ort.preload_dlls()  # from the nvidia packages beside it: without torch nobody has loaded them
        providers = [(device.provider, _provider_options(spec) if device.provider == "CUDAExecutionProvider" else {})]
        try:
            self._session = ort.InferenceSession(
                model.SerializeToString(), _session_options(network, threads, arena), providers=providers, enable_fallback=0
            )
        except Exception as e:
            raise _load_problem(e, str(network.file)) from e
        if (got := self._session.get_providers()[0]) != device.provider:
            raise RuntimeError(
                f"{network.key}: asked for {device.provider}, ONNX Runtime gave {got}: the device's libraries cannot be used"
            )
        self._arena = arena and device.provider == "CPUExecutionProvider"
        self._next: ort.RunOptions | None = None  #: options of the next run alone

    def run(self, feeds: dict[str, Any], fetches: Sequence[str]) -> list[np.ndarray]:
        """Arrays of the host or of the device in, arrays of the host out."""
        if all(isinstance(array, np.ndarray) for array in feeds.values()):
            options, self._next = self._next, None
            return self._session.run(fetches, feeds, options)
        binding = self._session.io_binding()
        for name, array in feeds.items():
            if isinstance(array, np.ndarray):
                binding.bind_cpu_input(name, array)
            else:
                binding.bind_input(name, "cuda", 0, array.dtype, list(array.shape), array.pointer)
        for name in fetches:
            binding.bind_output(name)  # to the host: answers are small
        self._session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()

    def shrink(self) -> None:
        """The CPU's arena never gives memory back by itself; a run that is told to leaves it with what that run needed."""
        if self._arena:
            self._next = ort.RunOptions()
            self._next.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")


def _session_options(network: Network, threads: int, arena: bool) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads  # ORT knows neither OMP_NUM_THREADS nor cgroups and would take every core for each session
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = options.enable_mem_pattern = arena
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # a spinning thread takes a core from decode
    # The graph is loaded from bytes: without this, external tensors would be looked for in the current directory.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(network.file.parent))
    return options


def _provider_options(spec: ModelSpec) -> dict[str, str]:
    return {
        "device_id": "0",  # CUDA_VISIBLE_DEVICES leaves one
        "arena_extend_strategy": "kSameAsRequested",  # the default doubles, and never gives back
        "cudnn_conv_algo_search": "HEURISTIC",  # EXHAUSTIVE costs up to a second for each new shape
        # TF32 keeps 10 bits of mantissa: more than fp16 has, less than fp32 promises.
        "use_tf32": "0" if spec.toml.run.precision == "fp32" else "1",
    }


def _port(value: onnx.ValueInfoProto, where: str) -> Port:
    kind = value.type.tensor_type.elem_type
    if not value.type.HasField("tensor_type") or kind in (0, onnx.TensorProto.STRING, onnx.TensorProto.BFLOAT16):
        raise ModelProblem(
            where, f"graph output {value.name!r}", "a tensor of numbers that numpy has", "it is a sequence, a map, strings or bfloat16"
        )
    return value.name, onnx.helper.tensor_dtype_to_np_dtype(kind).name, onnx_graph.axes(value)


def _load_problem(error: Exception, where: str) -> Exception:
    """ONNX Runtime's refusal as a ModelProblem where the file is at fault; the error itself where the device may be."""
    text = str(error)
    if found := _IR.search(text):
        return ModelProblem(
            where,
            "ir_version",
            f"IR version {found[2]} or lower; save the model again with it, or upgrade onnxruntime",
            f"it has {found[1]}",
        )
    if found := _OPSET.search(text):
        return ModelProblem(
            where,
            "opset_import",
            f"opset {found[3]} or lower of {found[2]}; export again with it, or upgrade onnxruntime",
            f"it has {found[1]}",
        )
    if "[ONNXRuntimeError]" in text and "CUDA" not in text:
        return ModelProblem(where, "graph", "a graph that ONNX Runtime " + ort.__version__ + " can run", text)
    return error
