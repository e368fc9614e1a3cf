"""loop.py SECONDS PROCESSES BATCH FILE...: the physical limit. The work of work.py in a bare loop over the files, without any server.

Prints one JSON line: {"fps": images a second of all processes together, "classes": the best five classes of each file}.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from pathlib import Path

import work


def loop(files: list[str], batch: int, seconds: float, start, results) -> None:
    jpegs = [Path(file).read_bytes() for file in files]
    model = work.open_model()
    classes = [[entry["class_id"] for entry in work.classify(model, [jpeg])[0]["classes"]] for jpeg in jpegs]
    start.wait()
    done, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        work.classify(model, [jpegs[(done + i) % len(jpegs)] for i in range(batch)])
        done += batch
    results.put((done / elapsed, classes))


def main(seconds: float, processes: int, batch: int, files: list[str]) -> None:
    spawn = multiprocessing.get_context("spawn")
    start, results = spawn.Barrier(processes), spawn.Queue()
    workers = [spawn.Process(target=loop, args=(files, batch, seconds, start, results), daemon=True) for _ in range(processes)]
    for worker in workers:
        worker.start()
    rates, classes = zip(*(results.get() for _ in workers), strict=True)
    print(json.dumps({"fps": sum(rates), "classes": classes[0]}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
