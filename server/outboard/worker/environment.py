"""The environment variables that numpy, torch, ONNX Runtime and CUDA read while they are imported. Imports none of them."""

from __future__ import annotations

import os
from pathlib import Path


def is_gpu(spec: str) -> bool:
    """A GPU's (or MIG instance's) UUID, the only name that survives a replug."""
    return spec.startswith(("GPU-", "MIG-"))


def prepare_environment(spec: str, threads: int, cache_dir: str) -> None:
    """Set what the runtimes read while they are imported. Must run before numpy, torch or onnxruntime."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # waiting threads sleep: decode needs the same cores
    os.environ["CUDA_VISIBLE_DEVICES"] = spec if is_gpu(spec) else ""
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(cache_dir) / "inductor")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of compiler processes beside the worker
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
