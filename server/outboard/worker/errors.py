"""What an exception out of a model means: `classify` gives the `kind` of a `Failed` message.

By type, error code and text, in this order of certainty, because no runtime tells it in one way: torch has `OutOfMemoryError` and
`AcceleratorError.error_code`, extensions built on it raise a plain RuntimeError (pytorch#169385), ONNX Runtime only speaks in text
(onnxruntime#14211, #16307). Types are known by name, so that neither runtime needs to be imported here.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["input", "oom", "sticky", "decode", "unknown"]

#: CUDA error codes after which every later call of the process fails too, or before which no device was usable.
STICKY_CODES = frozenset({46, 100, 214, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 802, 911, 999})
OOM_CODE = 2  # cudaErrorMemoryAllocation
#: NVML: GPU_IS_LOST, RESET_REQUIRED, UNKNOWN.
NVML_STICKY_CODES = frozenset({15, 16, 999})

_OOM = re.compile(
    r"out of memory|cudaErrorMemoryAllocation|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
    r"|Failed to allocate memory for requested buffer|std::bad_alloc|bad allocation",
    re.I,
)
_CUDA_CODE = re.compile(r"CUDA (?:failure|error) (\d+)", re.I)
_LOST = re.compile(r"fallen off the bus|GPU is lost|device lost|DEVICE_LOST|cudaErrorUnknown|cudaErrorNoDevice", re.I)
_CUDA_TEXT = re.compile(r"CUDA error: ?(?P<what>[^\n;]*)|CUDA (?:failure|driver error)", re.I)
#: "CUDA error: …" texts that leave the context usable: the call was wrong, not the device.
_HARMLESS = re.compile(
    r"invalid argument|invalid configuration argument|no kernel image|invalid resource handle|not supported|invalid value", re.I
)


class InputRefused(ValueError):
    """The model cannot take these rows; the sentence says what it takes."""


class NotDecoded(RuntimeError):
    """The device cannot decode the JPEGs of these rows of a batch (their indexes). The host can, or says what is wrong with them."""

    def __init__(self, why: str, rows: list[int]):
        super().__init__(why)
        self.rows = rows


def classify(error: BaseException) -> Kind:
    """ "input": the rows are at fault; "oom": recoverable with less; "sticky": this process is lost; "decode": the host is to decode;
    "unknown": all else."""
    if isinstance(error, NotDecoded):
        return "decode"
    types = {t.__name__ for t in type(error).__mro__}
    text = str(error)
    if "OutOfMemoryError" in types or isinstance(error, MemoryError):
        return "oom"
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and "AcceleratorError" in types:
        return _by_code(code)
    if "NVMLError" in types:
        return "sticky" if getattr(error, "value", None) in NVML_STICKY_CODES else "unknown"
    if found := _CUDA_CODE.search(text):
        return _by_code(int(found[1]))
    if _LOST.search(text):
        return "sticky"
    if _OOM.search(text):
        return "oom"
    if found := _CUDA_TEXT.search(text):
        return "unknown" if _HARMLESS.search(found["what"] or "") else "sticky"
    if "InvalidArgument" in types or isinstance(error, ValueError):
        return "input"
    return "unknown"


def _by_code(code: int) -> Kind:
    return "oom" if code == OOM_CODE else "sticky" if code in STICKY_CODES else "unknown"
