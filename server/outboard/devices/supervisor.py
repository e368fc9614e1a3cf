"""Worker processes: started, spoken to, killed and never waited for.

One `Worker` is one generation of a device's worker: a process, the front's end of a SOCK_SEQPACKET pair, and the answer region
that dies with it. The supervisor tells its owner three things, on the event loop: a message came, the process has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from outboard.devices import protocol, rows
from outboard.devices.slab import Slab, view

log = logging.getLogger(__name__)

#: Answers of all batches in flight. Sparse: only what is written takes memory.
ANSWER_BYTES = 256 << 20


class Worker:
    """A started worker process of one device generation."""

    def __init__(self, device: str, generation: int, process: subprocess.Popen[bytes], channel: socket.socket, region: Slab):
        self.device = device
        self.generation = generation
        self.process = process
        self.pidfd = os.pidfd_open(process.pid)
        self.channel = channel
        self.region = region
        self.freed: list[int] = []  #: batches whose answers were copied out, told with the next Run
        self.unsent: deque[bytes] = deque()

    def read(self, tensors: Iterable[protocol.Tensor]) -> dict[str, np.ndarray]:
        """Copies of the tensors, so that nothing a worker writes later can change an answer. Raises ValueError."""
        memory = self.region.bytes
        return {
            t.name: rows.unpack(memory[t.offset :], t.shape) if t.dtype == rows.BYTES else view(memory, t.offset, t.shape, t.dtype).copy()
            for t in tensors
        }


class Supervisor:
    """Starts and kills workers. `on_message(worker, message)` and `on_exit(worker, status)` run on the event loop."""

    def __init__(
        self,
        slab: Slab,
        cache: Path,
        on_message: Callable[[Worker, protocol.ToFront], None],
        on_exit: Callable[[Worker, int], None],
        arguments: Sequence[str] = (),
    ):
        """`arguments`: more of the workers' command line."""
        self._slab = slab
        self._cache = cache
        self._on_message = on_message
        self._on_exit = on_exit
        self._arguments = arguments
        self._workers: dict[tuple[str, int], Worker] = {}
        self._exit = asyncio.Event()  #: set when a process has ended

    def start(self, device: str, generation: int, spec: str, concurrency: int, threads: int) -> Worker:
        """Spawn a worker (never fork: a CUDA context does not survive it) and send it `Start` with the slab and its region."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * protocol.MAX_DATAGRAM)
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        process = subprocess.Popen(
            [sys.executable, "-m", "outboard.worker", "--fd", str(theirs.fileno()), "--device", device, *self._arguments],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        theirs.close()
        region = Slab(ANSWER_BYTES, f"outboard-answers-{device}-{generation}")
        worker = Worker(device, generation, process, ours, region)
        start = protocol.Start(
            protocol=protocol.VERSION,
            device=spec,
            slab_bytes=self._slab.size,
            answer_bytes=region.size,
            concurrency=concurrency,
            threads=threads,
            cache_dir=str(self._cache),
        )
        readonly = self._slab.readonly_fd()
        socket.send_fds(ours, [protocol.encode(start)], [readonly, region.fd])
        os.close(readonly)
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._readable, worker)
        loop.add_reader(worker.pidfd, self._exited, worker)
        self._workers[device, generation] = worker
        return worker

    def get(self, device: str, generation: int) -> Worker | None:
        return self._workers.get((device, generation))

    def send(self, worker: Worker, message: protocol.ToWorker) -> None:
        """Send, or keep for later where a stuck worker's socket is full: its loss is found by other signs."""
        data = protocol.encode(message)
        if worker.unsent:
            worker.unsent.append(data)
            return
        try:
            worker.channel.send(data)
        except BlockingIOError:
            worker.unsent.append(data)
            asyncio.get_running_loop().add_writer(worker.channel.fileno(), self._writable, worker)
        except OSError:
            pass  # it is dead: its pidfd will say so

    def _writable(self, worker: Worker) -> None:
        try:
            while worker.unsent:
                worker.channel.send(worker.unsent[0])
                worker.unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            worker.unsent.clear()
        asyncio.get_running_loop().remove_writer(worker.channel.fileno())

    def poll(self) -> None:
        """Act on what workers have sent already. The loop does that by itself, but only between all that came at once: while it goes
        through the requests of a finished batch's clients, a worker that is done would wait for its next batch."""
        for worker in list(self._workers.values()):
            self._readable(worker)

    def _readable(self, worker: Worker) -> None:
        while True:
            try:
                data = worker.channel.recv(protocol.MAX_DATAGRAM)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # End of file: the process is ending; the pidfd tells when it has.
                asyncio.get_running_loop().remove_reader(worker.channel.fileno())
                return
            try:
                message = protocol.decode_to_front(data)
            except Exception:
                log.exception(
                    "worker of %s (generation %d) sent %d bytes that are no message: it is ended",
                    worker.device,
                    worker.generation,
                    len(data),
                )
                self.kill(worker)
                return
            self._on_message(worker, message)

    def _exited(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        self._readable_rest(worker)
        loop.remove_reader(worker.pidfd)
        loop.remove_reader(worker.channel.fileno())
        loop.remove_writer(worker.channel.fileno())
        code = worker.process.wait()
        os.close(worker.pidfd)
        worker.channel.close()
        del self._workers[worker.device, worker.generation]
        self._exit.set()
        self._on_exit(worker, code)
        worker.region.close()

    def _readable_rest(self, worker: Worker) -> None:
        """Answers that were sent before the end still count."""
        try:
            self._readable(worker)
        except OSError:
            pass

    def kill(self, worker: Worker) -> None:
        """SIGKILL; do not wait. A process stuck in the kernel stays, harmless: it cannot write what anybody reads."""
        worker.process.kill()

    async def gone(self, condition: Callable[[], bool], patience: float) -> bool:
        """Wait until enough processes have ended for `condition`, at most `patience` seconds; whether it is met."""
        try:
            async with asyncio.timeout(patience):
                while not condition():
                    self._exit.clear()
                    await self._exit.wait()
        except TimeoutError:
            pass
        return condition()

    async def close(self, patience: float = 2.0) -> None:
        """Tell every worker to stop, then kill what is left."""
        for worker in list(self._workers.values()):
            self.send(worker, protocol.Stop())
        if not await self.gone(lambda: not self._workers, patience):
            for worker in list(self._workers.values()):
                self.kill(worker)
            await self.gone(lambda: not self._workers, 1.0)
