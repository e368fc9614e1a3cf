"""Noticing that a client has left while its answer is being made (H05)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from outboard.problems import Problem

T = TypeVar("T")

#: Most answers are out before this; only longer ones pay for a task that listens to the connection.
WATCH_AFTER = 0.05


async def unless_left(receive: Receive, work: Awaitable[T]) -> T:
    """The work's result. When the client closes the connection first, the work is cancelled and Problem client_left raised.

    The work runs in the caller's own task, which is what gets cancelled: a task for each request would cost more than it is worth.
    """
    caller = asyncio.current_task()
    assert caller is not None
    watcher: asyncio.Task[None] | None = None
    left = False

    async def listen() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        caller.cancel()

    def begin() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(listen())

    timer = asyncio.get_running_loop().call_later(WATCH_AFTER, begin)
    try:
        return await work
    except asyncio.CancelledError:
        if left and caller.uncancel() == 0:
            raise Problem("client_left", "the client closed the connection") from None
        raise
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()
