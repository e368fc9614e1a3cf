"""A station at work: from its source over the spool (or straight) into the stream, and the outcomes into the results file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from outboard_client.errors import SourceFailed
from outboard_client.frames import Drop, Frame, Outcome
from outboard_client.station.journal import Journal, record
from outboard_client.station.sources import Captured, Source
from outboard_client.station.spool import Entry, Spool, SpoolError
from outboard_client.stream import FrameStream

#: Outcomes are put on the disk together, so often.
_SYNC_SECONDS = 0.2
#: Frames that wait for the spool's next transaction; while they do, the source waits.
_WAITING = 8
_BATCH = 16  # frames that are read from the spool at once


@dataclass
class Station:
    """What a run is made of. `spool` and `journal` may be missing; with a spool there is always a journal."""

    source: Source
    stream: FrameStream
    spool: Spool | None = None
    journal: Journal | None = None
    sidecars: Path | None = None  #: folder for a JSON file beside each image's result
    spooled: int = 0
    refused: int = 0  #: frames of a camera that found the spool full
    taken_before: int = 0
    _disk: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "spool"))  # SQLite and fsync wait for the disk
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _session: str | None = None  # the one that the spool remembers
    _recorded: bool = False  # the source has ended, and all of it is in the spool

    async def run(self) -> None:
        """Until the source ends and every frame has its outcome. Raises SourceFailed, Problem, StreamLost, SpoolError."""
        try:
            if self.spool is None:
                await self._straight()
            else:
                await self._over_the_spool(self.spool)
        finally:
            for closing in (self.journal, self.spool):
                if closing is not None:
                    await self._on_disk(closing.close)
            self._disk.shutdown()

    async def _straight(self) -> None:
        async with contextlib.aclosing(self._frames()) as frames, contextlib.aclosing(self.stream.run(frames)) as outcomes:
            async for outcome in outcomes:
                if self.journal is not None:
                    self.journal.append(outcome)
                    self.journal.flush()
                await self._sidecar(outcome)

    async def _frames(self) -> AsyncGenerator[Frame]:
        async with contextlib.aclosing(self.source.frames(set())) as captured:
            async for one in captured:
                yield Frame(one.image, one.captured, one.meta)

    async def _over_the_spool(self, spool: Spool) -> None:
        taken = await self._on_disk(spool.taken, self.source.name)
        self.taken_before = len(taken)
        recording = asyncio.create_task(self._record(spool, taken))
        sending = asyncio.create_task(self._send(spool))
        try:
            # A source that fails does not end what it has given before: that is sent, and then the failure is told.
            await sending
            await recording
        finally:
            for task in (recording, sending):
                task.cancel()
            await asyncio.gather(recording, sending, return_exceptions=True)

    # Into the spool.

    async def _record(self, spool: Spool, taken: set[str]) -> None:
        waiting: asyncio.Queue[Captured | None] = asyncio.Queue(_WAITING)
        failure: SourceFailed | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write(spool, waiting))
                try:
                    async with contextlib.aclosing(self.source.frames(taken)) as captured:
                        async for one in captured:
                            await waiting.put(one)
                except SourceFailed as e:
                    failure = e
                await waiting.put(None)
        except* SpoolError as failed:
            raise failed.exceptions[0] from None
        finally:
            self._recorded = True
            self._wake.set()
        if failure is not None:
            raise failure

    async def _write(self, spool: Spool, waiting: asyncio.Queue[Captured | None]) -> None:
        """What waits goes into one transaction: more of it when the disk is slow."""
        ended = False
        while not ended:
            batch = [await waiting.get()]
            while not waiting.empty():
                batch.append(waiting.get_nowait())
            ended = batch[-1] is None
            entries = [Entry(c.image, c.captured, c.meta, self.source.name, c.key) for c in batch if c is not None]
            while entries:
                room = spool.fitting(entries)
                if room and await self._on_disk(spool.add, entries[:room]):
                    self.spooled += room
                    del entries[:room]
                    self._wake.set()
                elif not room and not spool.frames:
                    size = len(entries[0].image)
                    raise SpoolError(f"a frame of {size} bytes does not fit into a spool of {spool.limit}; raise its limit")
                elif self.source.live:  # it does not wait: these are lost, and counted
                    self.refused += len(entries)
                    entries.clear()
                else:
                    await asyncio.sleep(_SYNC_SECONDS)

    # Out of it.

    async def _send(self, spool: Spool) -> None:
        assert self.journal is not None
        unsynced: list[int] = []
        async with contextlib.aclosing(self._spooled(spool)) as frames, contextlib.aclosing(self.stream.run(frames)) as outcomes:
            syncing = asyncio.create_task(self._sync(spool, self.journal, unsynced))
            try:
                async for outcome in outcomes:
                    self.journal.append(outcome)
                    await self._sidecar(outcome)
                    unsynced.append(outcome.seq)
                    if syncing.done():
                        syncing.result()
            finally:
                syncing.cancel()
                await asyncio.gather(syncing, return_exceptions=True)
                await self._hold(spool, self.journal, unsynced)

    async def _sync(self, spool: Spool, journal: Journal, unsynced: list[int]) -> None:
        while True:
            await asyncio.sleep(_SYNC_SECONDS)
            await self._hold(spool, journal, unsynced)

    async def _hold(self, spool: Spool, journal: Journal, unsynced: list[int]) -> None:
        """Outcomes onto the disk, then their frames off it, then tell the server. In this order a crash at any point loses nothing."""
        if self.stream.session and self.stream.session != self._session:
            self._session = self.stream.session
            await self._on_disk(spool.remember, "session", self._session)
        if not unsynced:
            return
        last = unsynced[-1]
        unsynced.clear()
        await self._on_disk(journal.sync)
        await self._on_disk(spool.settle, last)
        self.stream.ack(last)

    async def _spooled(self, spool: Spool) -> AsyncGenerator[Frame]:
        after = await self._on_disk(lambda: spool.held)
        while True:
            self._wake.clear()
            ended = self._recorded
            frames = await self._on_disk(spool.next, after, _BATCH)
            for frame in frames:
                yield frame
                after = frame.seq
            if not frames:
                if ended:
                    return
                await self._wake.wait()

    async def _sidecar(self, outcome: Outcome) -> None:
        """`photo.jpg.json` for `photo.jpg`; whole or not at all."""
        if self.sidecars is None or isinstance(outcome, Drop):
            return
        line = record(outcome)
        meta = line.get("meta")
        if not isinstance(meta, dict) or "file" not in meta:
            return
        path = self.sidecars / f"{meta['file']}.json"

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.name + ".part")
            part.write_bytes(msgspec.json.format(msgspec.json.encode(line), indent=1))
            os.replace(part, path)

        await asyncio.to_thread(write)

    async def _on_disk(self, work: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work, *args)
