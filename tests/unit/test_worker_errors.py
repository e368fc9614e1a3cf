"""What an exception of a runtime means, on the texts that people reported."""

from __future__ import annotations

import pytest

from outboard.worker.errors import InputRefused, classify


class AcceleratorError(RuntimeError):
    """Shaped as torch's: known by its name and `error_code`."""

    def __init__(self, text: str, code: int):
        super().__init__(text)
        self.error_code = code


class OutOfMemoryError(RuntimeError):
    """Shaped as torch's."""


class NVMLError(Exception):
    """Shaped as pynvml's: the code is in `value`."""

    def __init__(self, value: int):
        super().__init__(f"NVML {value}")
        self.value = value


class InvalidArgument(Exception):
    """Shaped as ONNX Runtime's."""


class Fail(Exception):
    """Shaped as ONNX Runtime's."""


class RuntimeException(Exception):
    """Shaped as ONNX Runtime's."""


@pytest.mark.parametrize("code", [46, 100, 700, 710, 714, 718, 719, 802, 911, 999])
def test_a_code_that_ends_the_context_is_sticky(code: int) -> None:
    assert classify(AcceleratorError("CUDA error: something", code)) == "sticky"


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: unknown error\nSearch for `cudaErrorUnknown' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html",
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: unspecified launch failure",
        "CUDA error: device-side assert triggered",
        "CUDA error: no CUDA-capable device is detected",
        "CUDA failure 999: unknown error ; GPU=0 ; hostname=h ; file=/onnxruntime_src/cuda_execution_provider.cc ; expr=cudaSetDevice(info_.device_id)",  # noqa: E501
        'Failed to parse provider option "device_id": CUDA failure 100: no CUDA-capable device is detected ; GPU=-1',
        "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. CUDA failure 719: unspecified launch failure",  # noqa: E501
        "GPU has fallen off the bus",
        "GPU is lost",
    ],
)
def test_a_text_of_a_lost_device_is_sticky_whatever_the_type(text: str) -> None:
    assert classify(RuntimeError(text)) == "sticky"
    assert classify(RuntimeException(text)) == "sticky"


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
        AcceleratorError("CUDA error: out of memory", 2),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA failure 2: out of memory ; GPU=0"),
        RuntimeException(
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 12"  # noqa: E501
        ),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError(),
    ],
)
def test_out_of_memory_is_never_taken_for_a_lost_device(error: Exception) -> None:
    assert classify(error) == "oom"


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument(
            "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x for the following indices index: 2 Got: 3 Expected: 4"  # noqa: E501
        ),
        ValueError("Required inputs (['x']) are missing from input feed (['y'])."),
        InputRefused("height of the rows is 3, expected 4"),
    ],
)
def test_rows_that_the_model_refuses_are_an_input_error(error: Exception) -> None:
    assert classify(error) == "input"


@pytest.mark.parametrize(
    "error",
    [
        Fail("[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Reshape node"),
        RuntimeException("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Gather node"),
        AcceleratorError("CUDA error: invalid argument", 1),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("CUDA failure 1: invalid argument ; GPU=0"),
        RuntimeError("run_func_(...) API call failed at model_container_runner.cpp, line 145"),
        NVMLError(3),
        KeyError("x"),
    ],
)
def test_all_else_is_unknown_and_left_to_the_front(error: Exception) -> None:
    assert classify(error) == "unknown"


@pytest.mark.parametrize("value", [15, 16, 999])
def test_nvml_tells_a_lost_gpu_by_number(value: int) -> None:
    assert classify(NVMLError(value)) == "sticky"
