"""Noticing that a client has left while its answer is being made (H05)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

from outboard.problems import Problem

T = TypeVar("T")

#: Most answers are out before this; only longer ones pay for a task that listens to the connection.
WATCH_AFTER = 0.05


async def unless_left(request: Request, work: Awaitable[T]) -> T:
    """The work's result. When the client closes the connection first, the work is cancelled and Problem client_left raised."""
    task = asyncio.ensure_future(work)
    watcher: asyncio.Task[None] | None = None
    left = False

    async def listen() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(listen())

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER, begin)
    try:
        return await task
    except asyncio.CancelledError:
        if left:
            raise Problem("client_left", "the client closed the connection") from None
        task.cancel()
        raise
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
