"""A real worker process at the end of a real socket: start it, feed it rows, read its messages, end it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outboard import repository
from outboard.core.memory import Allocator
from outboard.core.state import Coded, Picture
from outboard.devices import protocol
from outboard.devices.protocol import Done, Failed, Hello, Load, Loaded, LoadFailed, Run, Start, Stop
from outboard.devices.slab import Slab, view

MIB = 1024 * 1024


class WorkerKit:
    """The front's side of one worker. Use as a context manager; the process is gone afterwards."""

    def __init__(
        self,
        cache_dir: Path,
        device: str = "cpu",
        *,
        concurrency: int = 2,
        threads: int = 1,
        slab_bytes: int = 64 * MIB,
        answer_bytes: int = 16 * MIB,
    ):
        self.slab, self.region = Slab(slab_bytes), Slab(answer_bytes)
        self.allocator = Allocator(slab_bytes)
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = theirs.fileno()
        self.process = subprocess.Popen([sys.executable, "-m", "outboard.worker", "--fd", str(fd)], pass_fds=[fd])
        theirs.close()
        start = Start(protocol.VERSION, device, slab_bytes, answer_bytes, concurrency, threads, str(cache_dir))
        readonly = self.slab.readonly_fd()
        socket.send_fds(self.channel, [protocol.encode(start)], [readonly, self.region.fd])
        os.close(readonly)
        self.batches = 0
        self.freed: list[int] = []

    def __enter__(self) -> WorkerKit:
        self.hello = self.expect(Hello)
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self.process.kill()
        self.process.wait()
        self.slab.close()
        self.region.close()

    def send(self, message: protocol.ToWorker) -> None:
        self.channel.send(protocol.encode(message))

    def receive(self, timeout: float = 60) -> protocol.ToFront:
        """The next message. Raises EOFError when the worker is gone, TimeoutError when it says nothing."""
        self.channel.settimeout(timeout)
        try:
            datagram = self.channel.recv(protocol.MAX_DATAGRAM)
        except ConnectionResetError:
            datagram = b""
        if not datagram:
            raise EOFError(f"the worker is gone, exit code {self.process.poll()}")
        return protocol.decode_to_front(datagram)

    def expect(self, kind: type[Any] | tuple[type[Any], ...], timeout: float = 60) -> Any:
        """The next message, which must be of this kind."""
        message = self.receive(timeout)
        assert isinstance(message, kind), f"expected {kind}, got {message}"
        return message

    def load(self, folder: Path, part: str = "", timeout: float = 120) -> Loaded | LoadFailed:
        spec = repository.read(folder)
        self.send(Load(spec.networks[part].key, spec.version, str(folder), part))
        return self.expect((Loaded, LoadFailed), timeout)

    def place(self, images: Sequence[np.ndarray]) -> list[int]:
        """Copy uint8 pictures into the slab; their offsets."""
        offsets = []
        for image in images:
            offset = self.allocator.alloc(image.nbytes)
            self.slab.view(offset, image.shape)[...] = image
            offsets.append(offset)
        return offsets

    def submit(
        self,
        loaded: Loaded,
        shape: Sequence[int],
        offsets: Sequence[int],
        pictures: tuple[Picture, ...] = (),
        coded: tuple[Coded, ...] = (),
    ) -> int:
        self.batches += 1
        self.send(Run(self.batches, loaded.model, loaded.version, tuple(shape), list(offsets), self.freed, pictures=pictures, coded=coded))
        self.freed = []
        return self.batches

    def outputs(self, done: Done | Loaded) -> dict[str, np.ndarray]:
        """Copies of the arrays that the message names; its memory is freed with the next batch."""
        tensors = done.outputs if isinstance(done, Done) else done.golden
        arrays = {t.name: view(self.region.bytes, t.offset, t.shape, t.dtype).copy() for t in tensors}
        self.freed.append(done.batch if isinstance(done, Done) else done.golden_batch)
        return arrays

    def run(self, loaded: Loaded, images: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Answers for pictures of one shape; fails the test where the worker fails."""
        offsets = self.place(images)
        self.submit(loaded, images[0].shape, offsets)
        done = self.expect(Done)
        for offset in offsets:
            self.allocator.free(offset)
        return self.outputs(done)

    def run_fails(self, loaded: Loaded, images: Sequence[np.ndarray]) -> Failed:
        self.submit(loaded, images[0].shape, self.place(images))
        return self.expect(Failed)

    def send_stop_and_wait(self) -> None:
        """Let the worker end after its running batches."""
        self.send(Stop())
        assert self.wait_gone() == 0

    def wait_gone(self, timeout: float = 10) -> int:
        """The exit code, once the process has ended."""
        began = time.monotonic()
        code = self.process.wait(timeout)
        assert time.monotonic() - began < timeout
        return code
