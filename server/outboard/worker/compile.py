"""`python -m outboard.worker.compile FOLDER …`: compile a torch network into inductor's on-disk cache, at the lowest priority.

Started by a worker, with its environment (cache directory, threads), so that the worker's own compilation finds everything in the cache.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outboard.worker.compile")
    parser.add_argument("folder", type=Path, help="the model's folder")
    parser.add_argument("--part", default="", help="the part of a pipeline")
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, nargs="+", required=True, help="the batch sizes")
    options = parser.parse_args()
    os.nice(19)

    from outboard import repository
    from outboard.worker.backend_torch import CompiledBackend, TorchBackend
    from outboard.worker.devices import open_device

    spec = repository.read(options.folder)
    network, device = spec.networks[options.part], open_device(options.device)
    CompiledBackend(TorchBackend(network, spec, device, options.threads), network, device, options.rows)


if __name__ == "__main__":
    main()
