"""`python -m outboard.worker.compile FOLDER …`: compile a torch network into inductor's on-disk cache, at the lowest priority.

Started by a worker, with its environment (cache directory, threads), so that the worker's own compilation finds everything in the cache.
It ends with that worker. A compiler that is killed leaves half a library in the cache, which inductor would trip over for ever: such
a file is removed here and compiled again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from outboard.worker.environment import die_with_parent

_LIBRARY = re.compile(r"(/\S+\.so)\b")


def damaged_library(error: BaseException | None, cache: Path) -> Path | None:
    """The file below `cache` that the error, or one that it came from, could not load as a shared library."""
    while error is not None:
        if isinstance(error, (ImportError, OSError)):
            for found in _LIBRARY.findall(str(error)):
                if Path(found).is_relative_to(cache) and Path(found).is_file():
                    return Path(found)
        error = error.__cause__ or error.__context__
    return None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outboard.worker.compile")
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--part", default="", help="the part of a pipeline")
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True, help="the batch sizes")
    options = parser.parse_args()
    os.nice(19)
    die_with_parent()

    from outboard import repository
    from outboard.worker.backend_torch import CompiledBackend, TorchBackend
    from outboard.worker.devices import open_device

    spec = repository.read(options.folder)
    network, device = spec.networks[options.part], open_device(options.device)
    eager = TorchBackend(network, spec, device, options.threads)
    try:
        CompiledBackend(eager, network, device, options.rows)
    except Exception as e:
        damaged = damaged_library(e, Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
        if damaged is None:
            raise
        damaged.unlink()
        os.execv(sys.executable, sys.orig_argv)  # anew: inductor remembers in memory what it failed to load


if __name__ == "__main__":
    main()
