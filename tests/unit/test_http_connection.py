"""An answer's head and body as they leave, through uvicorn and real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn

from outboard.http.connection import Connection, limited
from outboard.settings import Limits

HEAD = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def connected(app) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    config = uvicorn.Config(app, port=0, http=limited(Connection, Limits()), lifespan="off", log_level="warning", loop="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 (uvicorn has no event for it)
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        server.should_exit = True
        await serving


def answering(*pieces: bytes, gap: float = 0.0, length: int | None = None):
    async def app(scope, receive, send) -> None:
        while (await receive()).get("more_body"):
            pass
        headers = [] if length is None else [(b"content-length", b"%d" % length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for i, piece in enumerate(pieces):
            await asyncio.sleep(gap)
            await send({"type": "http.response.body", "body": piece, "more_body": i + 1 < len(pieces)})

    return app


async def at_once(app) -> bytes:
    """What the client's first read gives."""
    async with connected(app) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        return await asyncio.wait_for(reader.read(1 << 20), 5)


async def test_head_and_body_leave_together() -> None:
    got = await at_once(answering(b"whole", length=5))
    assert got.startswith(HEAD) and got.endswith(b"\r\n\r\nwhole")


async def test_an_empty_body_lets_the_head_go() -> None:
    assert (await at_once(answering(b"", length=0))).startswith(HEAD)


async def test_a_head_does_not_wait_for_a_body_that_comes_later() -> None:
    async with connected(answering(b"first", b"second", gap=1.0)) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.8)
        assert head.startswith(HEAD)
        rest = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 5)
        assert rest == b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"


@pytest.mark.parametrize("request_line", [b"HEAD / HTTP/1.1", b"GET / HTTP/1.1"])
async def test_the_last_answer_of_a_connection_is_whole(request_line: bytes) -> None:
    async with connected(answering(b"whole", length=5)) as (reader, writer):
        writer.write(request_line + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = await asyncio.wait_for(reader.read(), 5)
        assert got.startswith(HEAD) and got.endswith(b"\r\n\r\n" if request_line.startswith(b"HEAD") else b"\r\n\r\nwhole")


async def test_answers_in_a_row_keep_their_order() -> None:
    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": scope["path"].encode()})

    async with connected(app) as (reader, writer):
        last = b"GET /3 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        writer.write(b"HEAD /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n" + last)
        got = (await asyncio.wait_for(reader.read(), 5)).split(HEAD)
        assert [answer.rpartition(b"\r\n\r\n")[2] for answer in got[1:]] == [b"", b"/2", b"/3"]


async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with connected(answering(b"whole", length=5)) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"abc")
        assert (await asyncio.wait_for(reader.read(1 << 20), 5)).startswith(HEAD)
