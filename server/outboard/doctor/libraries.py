"""Driver, CUDA, torch and ONNX Runtime: builds that fit each other. Read from what is installed; nothing of it is imported."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from outboard.devices import driver
from outboard.doctor.facts import Facts
from outboard.doctor.findings import Check, Finding

TWO_RUNTIMES = Check(
    "two-onnxruntimes",
    "problem",
    "Both onnxruntime and onnxruntime-gpu are installed.",
    "They have the same files: whichever came last has overwritten the other, and the GPU may be left out without a word.",
    ("pip uninstall --yes onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu=={version}",),
)
CPU_RUNTIME = Check(
    "onnxruntime-for-the-cpu",
    "problem",
    "Only the CPU's onnxruntime is installed, and there is an NVIDIA card.",
    "ONNX models are answered by the CPU, however fast the card is.",
    ("pip uninstall --yes onnxruntime && pip install 'outboard[server]'",),
)
CPU_TORCH = Check(
    "torch-for-the-cpu",
    "problem",
    "A torch without CUDA is installed, and there is an NVIDIA card.",
    "Torch models are answered by the CPU, however fast the card is.",
    ("pip uninstall --yes torch torchvision && pip install 'outboard[torch]'",),
)
MAJORS = Check(
    "cuda-versions-differ",
    "problem",
    "torch and ONNX Runtime are built for different major versions of CUDA.",
    "ONNX Runtime takes the CUDA libraries that torch brings; those of another major version do not load, and it falls back to the CPU "
    "without a word.",
    # Without a path, --upgrade would fetch the package of this name from PyPI, which is another project.
    ("pip install --upgrade --constraint constraints.txt '.[server,torch]'   # in a clone of Outboard: versions that fit each other",),
)
OLD_DRIVER = Check(
    "driver-too-old",
    "problem",
    "The driver is older than the CUDA that the libraries are built for.",
    "CUDA does not start, and everything is answered by the CPU. CUDA 12 needs driver 525.60.13 or later, CUDA 13 580.65.06 (CUDA "
    "Toolkit release notes).",
    ("Install driver {needed} or later and restart the machine (Debian, Ubuntu: sudo apt install nvidia-driver).",),
)
CHECKS = (TWO_RUNTIMES, CPU_RUNTIME, CPU_TORCH, MAJORS, OLD_DRIVER)

#: CUDA's major version -> the oldest Linux driver (CUDA Toolkit release notes, table of minimum driver versions).
OLDEST_DRIVER = {12: (525, 60, 13), 13: (580, 65, 6)}


def look(facts: Facts) -> Iterator[Finding]:
    installed = _installed(facts)
    gpu, cpu = installed.get("onnxruntime-gpu"), installed.get("onnxruntime")
    if gpu and cpu:
        yield TWO_RUNTIMES.found("onnxruntime", f"onnxruntime {cpu.version} and onnxruntime-gpu {gpu.version}.", version=gpu.version)
    elif cpu and facts.cards:
        yield CPU_RUNTIME.found("onnxruntime", f"onnxruntime {cpu.version} without onnxruntime-gpu.")
    majors = {name: cuda_major(installed[name]) for name in ("torch", "onnxruntime-gpu") if name in installed}
    if facts.cards and "torch" in majors and not majors["torch"]:
        yield CPU_TORCH.found("torch", f"torch {installed['torch'].version} requires no CUDA library.")
    known = {name: major for name, major in majors.items() if major}
    if len(set(known.values())) > 1:
        parts = " and ".join(f"{name} {installed[name].version} for CUDA {major}" for name, major in known.items())
        yield MAJORS.found("CUDA", f"{parts}.")
    for major in sorted(set(known.values())):
        needed = OLDEST_DRIVER.get(major, ())
        if facts.driver and facts.driver < needed:
            users = ", ".join(name for name, wants in known.items() if wants == major)
            have, least = driver.as_text(facts.driver), driver.as_text(needed)
            yield OLD_DRIVER.found("NVIDIA driver", f"Driver {have}; {users} with CUDA {major} needs {least}.", needed=least)


def _installed(facts: Facts) -> dict[str, importlib.metadata.Distribution]:
    where = {} if facts.machine.libraries is None else {"path": list(facts.machine.libraries)}
    wanted = ("torch", "onnxruntime", "onnxruntime-gpu")
    found = (importlib.metadata.distributions(name=name, **where) for name in wanted)
    return {name: first for name, each in zip(wanted, found, strict=True) if (first := next(iter(each), None))}


def cuda_major(distribution: importlib.metadata.Distribution) -> int:
    """The major version of CUDA that it requires, as its metadata say; 0: none."""
    for line in distribution.requires or ():
        name = re.match(r"[A-Za-z0-9._-]+", line)
        if name and (suffix := re.search(r"-cu(\d\d)\Z", name[0])):
            return int(suffix[1])
        if name and name[0] in ("cuda-toolkit", "nvidia-cuda-runtime") and (version := re.search(r"(?:==|~=|>=)\s*(\d+)", line)):
            return int(version[1])
    return 0
