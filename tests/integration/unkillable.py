"""`outboard` with workers that no signal ends for some seconds, and that go on reading the frame memory, writing answers and sending them:
worse than a process in the kernel's uninterruptible sleep. `test_failover.py` starts it in place of the command."""

from __future__ import annotations

import asyncio

from outboard import cli, runtime
from outboard.devices import protocol
from outboard.devices.supervisor import Supervisor, Worker

#: Seconds from the kill to the end, and between two batches that the worker runs again meanwhile.
STUCK = 6.0
AGAIN = 0.03


class Powerless(Supervisor):
    """Its kill comes late, and the worker repeats its last batch until then."""

    def send(self, worker: Worker, message: protocol.ToWorker) -> None:
        if isinstance(message, protocol.Run):
            worker.last = message  # type: ignore[attr-defined]
        super().send(worker, message)

    def kill(self, worker: Worker) -> None:
        asyncio.get_running_loop().call_later(STUCK, super().kill, worker)
        self._again(worker)

    def _again(self, worker: Worker) -> None:
        if self.get(worker.device, worker.generation) is worker and (last := getattr(worker, "last", None)) is not None:
            super().send(worker, last)
            asyncio.get_running_loop().call_later(AGAIN, self._again, worker)


if __name__ == "__main__":
    runtime.Supervisor = Powerless  # type: ignore[misc]
    cli.main()
