"""A link that can be cut and stalled: a TCP proxy in front of a server, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class Cable:
    """`url` leads to the server; `cut` ends every connection at once, `stalled` makes nothing pass."""

    def __init__(self, target: str):
        self._host, self._port = urlsplit(target).hostname, urlsplit(target).port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flows: asyncio.Event
        self.links = 0
        self.url = ""

    async def serve(self, started: threading.Event) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._ends = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await self._ends.wait()
        server.close()
        self._cut()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        self.links += 1
        self._writers |= {writer, far_writer}
        pipes = [asyncio.create_task(self._pipe(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
        await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
        for pipe in pipes:
            pipe.cancel()
        for end in (writer, far_writer):
            self._writers.discard(end)
            end.transport.abort()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    def cut(self) -> None:
        """What is on the way is lost."""
        self._loop.call_soon_threadsafe(self._cut)

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.clear)

    def flow(self) -> None:
        self._loop.call_soon_threadsafe(self._flows.set)

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)


@contextmanager
def cable(target: str) -> Iterator[Cable]:
    """A cable to the server at `target`."""
    proxy, started = Cable(target), threading.Event()
    thread = threading.Thread(target=lambda: proxy._loop.run_until_complete(proxy.serve(started)), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield proxy
    finally:
        proxy.end()
        thread.join(10)
