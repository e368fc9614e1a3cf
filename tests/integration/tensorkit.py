"""Batches of tensors for a real worker process."""

from __future__ import annotations

import numpy as np

from integration.workerkit import WorkerKit
from outboard.devices.protocol import Done, Failed, Loaded, Run
from outboard.devices.rows import lay_out, pack, room_for, unpack


def run(worker: WorkerKit, network: Loaded, *columns: np.ndarray) -> Done | Failed:
    """One batch: `columns` are the inputs in the network's order, rows on the first axis (one row where it runs whole)."""
    rows = 1 if network.whole else len(columns[0])
    contents = [
        [
            pack(x for x in row.reshape(-1)) if row.dtype == object else np.ascontiguousarray(row).tobytes()
            for row in ([column] if network.whole else [column[i] for i in range(rows)])
        ]
        for column in columns
    ]
    slots, row_bytes = lay_out(
        [
            (name, dtype, c.shape if network.whole else c.shape[1:], room_for(max(map(len, rows_))) if dtype == "bytes" else len(rows_[0]))
            for (name, dtype, _), c, rows_ in zip(network.inputs, columns, contents, strict=True)
        ]
    )
    base = worker.allocator.alloc(rows * row_bytes)
    for slot, of_rows in zip(slots, contents, strict=True):
        for i, content in enumerate(of_rows):
            worker.slab.view(base + i * row_bytes + slot.offset, (len(content),))[...] = np.frombuffer(content, np.uint8)
    worker.batches += 1
    offsets = [base + i * row_bytes for i in range(rows)]
    worker.send(Run(worker.batches, network.model, network.version, (), offsets, worker.freed, slots))
    worker.freed = []
    answer = worker.expect((Done, Failed))
    worker.allocator.free(base)
    return answer


def outputs(worker: WorkerKit, network: Loaded, *columns: np.ndarray) -> dict[str, np.ndarray]:
    done = run(worker, network, *columns)
    assert isinstance(done, Done), done
    region = worker.region.bytes
    arrays = {t.name: unpack(region[t.offset :], t.shape) for t in done.outputs if t.dtype == "bytes"}
    plain = Done(done.batch, [t for t in done.outputs if t.dtype != "bytes"], done.took)
    return arrays | worker.outputs(plain)
