"""A TCP proxy whose link can be cut, stalled and slowed: what a field link does, without the field."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator


class Link:
    """Connections to the near end go to the target. Bytes are never changed."""

    def __init__(self) -> None:
        self.cuts = 0
        self.up = asyncio.Event()
        self.up.set()
        self.bytes_per_s = 0.0  #: of the way to the server; 0: as fast as it goes
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Reset every connection (RST): what is on its way is lost."""
        self.cuts += 1
        for writer in self._open:
            writer.transport.abort()

    async def stall(self, seconds: float) -> None:
        """Nothing moves, and nobody is told."""
        self.up.clear()
        await asyncio.sleep(seconds)
        self.up.set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, slowed: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(32 << 10):
                await self.up.wait()
                if slowed and self.bytes_per_s:
                    await asyncio.sleep(len(data) / self.bytes_per_s)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError):
            if not writer.is_closing() and writer.can_write_eof():
                writer.write_eof()


@contextlib.asynccontextmanager
async def linked(url: str) -> AsyncIterator[tuple[Link, str]]:
    """A link to the server at `url`, and the URL of its near end."""
    host, _, port = url.removeprefix("http://").partition(":")
    link = Link()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = None
        try:
            far_reader, far = await asyncio.open_connection(host, int(port), limit=64 << 10)
            link._open |= {writer, far}
            await asyncio.gather(link.pump(reader, far, True), link.pump(far_reader, writer, False))
        except OSError:
            pass  # the server is not there: the near end sees its connection close
        finally:
            for end in (writer, far):
                if end is not None:
                    link._open.discard(end)
                    end.transport.abort()

    near = socket.socket()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)  # not megabytes, as on loopback: a link holds little
    near.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(accept, sock=near, limit=64 << 10)
    try:
        yield link, f"http://127.0.0.1:{near.getsockname()[1]}"
    finally:
        server.close()
        link.cut()
        await server.wait_closed()
