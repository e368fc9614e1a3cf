"""What a worker's process is given before numpy, torch, ONNX Runtime and CUDA are imported; they read the environment then."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from pathlib import Path

_PR_SET_PDEATHSIG = 1

#: The variable that says why compiled code cannot be kept, where it cannot.
CACHE_PROBLEM = "OUTBOARD_CACHE_PROBLEM"
#: Added to the niceness of a process that computes on the CPU: what the front does for a request, on the same cores, takes a fraction of a
#: millisecond, and must not wait until a batch gives up a core (five pairs of runs: 1.06 times as many tensors a second).
NICE = 5


def is_gpu(spec: str) -> bool:
    """A GPU's (or MIG instance's) UUID, the only name that survives a replug."""
    return spec.startswith(("GPU-", "MIG-"))


def prepare_environment(spec: str, threads: int, cache_dir: str) -> None:
    """Set what the runtimes read while they are imported, and what their threads inherit. Must run before numpy, torch or onnxruntime."""
    if spec == "cpu":
        os.nice(NICE)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # waiting threads sleep: decode needs the same cores
    os.environ["CUDA_VISIBLE_DEVICES"] = spec if is_gpu(spec) else ""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    inductor = Path(cache_dir) / "inductor"
    os.environ.pop(CACHE_PROBLEM, None)
    if problem := _cannot_be_written(inductor):
        # torch makes the folder even where it only loads an archive, and an error there looks like the archive's. One that exists does.
        inductor = Path(tempfile.gettempdir())
        os.environ[CACHE_PROBLEM] = problem
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(inductor)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compiler processes beside the worker
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def _cannot_be_written(folder: Path) -> str:
    """Why not; empty when it can be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as e:
        return f"{folder} cannot be written ({e.strerror})"


def die_with_parent() -> None:
    """SIGKILL when the thread that started this process ends, even while this one is inside a driver call and reads no socket."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
