"""A stream's other end, as the protocol's page describes it, without the product's client; and servers that streams are tried on."""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection as SyncConnection
from websockets.sync.client import connect as sync_connect

import graphs
import tensor_graphs
from integration.serverkit import Server, serving

FRAMES = "outboard.frames"


def address(url: str, model: str, **query: object) -> str:
    asked = "&".join(f"{name}={value}" for name, value in query.items())
    return f"{url.replace('http', 'ws', 1)}/v1/models/{model}/stream?{asked}"


def now_us() -> int:
    return time.time_ns() // 1000


def packed(seq: int, image: bytes, *, captured: int | None = None, meta: Any = None, parts: list[dict] | None = None) -> bytes:
    """The binary message of a frame."""
    members = {k: v for k, v in (("meta", meta), ("parts", parts)) if v is not None}
    header = json.dumps(members).encode() if members else b""
    return struct.pack(">QQI", seq, now_us() if captured is None else captured, len(header)) + header + image


def bundle(seq: int, parts: dict[str, tuple[dict, bytes]], **options: Any) -> bytes:
    """`parts`: name -> (its description but for name and length, its bytes)."""
    listed = [{"name": name, "length": len(data), **about} for name, (about, data) in parts.items()]
    return packed(seq, b"".join(data for _, data in parts.values()), parts=listed, **options)


def talk(server: Server, model: str, *, framed: bool = False, **query: object) -> SyncConnection:
    """One link, without any comfort."""
    return sync_connect(
        address(server.url, model, **query), subprotocols=[FRAMES] if framed else None, max_size=None, compression=None, close_timeout=2
    )


def hear(link: SyncConnection, *kinds: str, timeout: float = 30) -> dict:
    """The next message of one of these kinds (none given: result or drop)."""
    end = time.monotonic() + timeout
    while True:
        message = json.loads(link.recv(timeout=max(0.01, end - time.monotonic())))
        if message["type"] in (kinds or ("result", "drop")):
            return message


class Station:
    """Sends frames and counts outcomes; comes back when its link is cut. Every frame is kept until it has an outcome."""

    def __init__(self, url: str, model: str, *, window: int = 32, **query: object):
        self.url, self.model, self.query = url, model, query
        self.window = window
        self.outcomes: dict[int, dict] = {}
        self.ages: list[float] = []  #: seconds from capture to the arrival of the answer here
        self.states: list[dict] = []
        self.codes: Counter[int] = Counter()  #: how links ended
        self.links = self.resumed = self.repeats = 0
        self.order: list[int] = []  #: seqs of outcomes as they came, without repeats
        self.session = ""
        self._pending: dict[int, tuple[int, bytes]] = {}  # seq -> (captured, image): no outcome yet
        self._unsent: list[int] = []
        self._news = asyncio.Event()
        self._changed = asyncio.Event()

    @property
    def held(self) -> int:
        """The last outcome of the unbroken row."""
        return self.order[-1] if self.order else 0

    def give(self, seq: int, image: bytes) -> None:
        self._pending[seq] = now_us(), image
        self._unsent.append(seq)
        self._news.set()

    @property
    def open(self) -> int:
        return len(self._pending)

    async def finish(self, seconds: float) -> None:
        """Wait until every frame has its outcome."""
        await self.until(lambda: not self._pending, seconds)

    async def until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until something that the server says makes it true."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self._changed.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            query = self.query | ({"session": self.session, "after": self.held} if self.session else {})
            try:
                # No pings of its own: the server's heartbeats show that the link lives.
                async with connect(
                    address(self.url, self.model, **query),
                    subprotocols=[FRAMES],
                    max_size=None,
                    compression=None,
                    open_timeout=30,
                    close_timeout=0.2,
                    ping_interval=None,
                ) as link:
                    await self._use(link)
            except ConnectionClosed as e:
                self.codes[e.rcvd.code if e.rcvd else 1006] += 1
            except (OSError, InvalidHandshake, EOFError, TimeoutError):
                pass
            await asyncio.sleep(0.05)

    async def _use(self, link: ClientConnection) -> None:
        hello = json.loads(await link.recv())
        assert hello["type"] == "hello", hello
        self.links += 1
        self.resumed += hello["resumed"]
        self.session = hello["session"]
        has = hello["last"] if hello["resumed"] else 0
        self._unsent = sorted(seq for seq in self._pending if seq > has)
        tasks = [asyncio.create_task(self._send(link)), asyncio.create_task(self._receive(link))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _send(self, link: ClientConnection) -> None:
        while True:
            while self._unsent and len(self._pending) - len(self._unsent) < self.window:
                seq = self._unsent.pop(0)
                captured, image = self._pending[seq]
                await link.send(packed(seq, image, captured=captured))
            self._news.clear()
            await self._news.wait()

    async def _receive(self, link: ClientConnection) -> None:
        while True:
            message = json.loads(await link.recv())
            self._heard(message)
            if message["type"] == "hb":
                await link.send(json.dumps({"type": "hb", "at": message["at"], "clock": now_us()}))
            self._changed.set()
            self._changed = asyncio.Event()

    def _heard(self, message: dict) -> None:
        match message["type"]:
            case "result" | "drop":
                self._outcome(message)
            case "state":
                self.states.append(message)

    def _outcome(self, message: dict) -> None:
        seq = message["seq"]
        if seq in self.outcomes:
            self.repeats += 1
            return
        captured, _ = self._pending.pop(seq)
        self.outcomes[seq] = message
        self.order.append(seq)
        if message["type"] == "result":
            self.ages.append((now_us() - captured) / 1e6)
        self._news.set()

    def kinds(self) -> Counter[str]:
        return Counter(m["type"] if m["type"] == "result" else m["reason"] for m in self.outcomes.values())


@contextmanager
def running(station: Station) -> Iterator[None]:
    task = asyncio.ensure_future(station.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()


def stream_models(folder: Path) -> Path:
    """`rgb` answers with the picture's mean colour, `slow` too, one row at a time; `finder` finds blocks; `numbers` takes tensors."""
    means, stretch = graphs.channel_means((32, 32)), 'fit = "stretch"'
    graphs.write_model(folder, "rgb", means, graphs.toml("tensor", "tensor", (32, 32), input=stretch))
    one = graphs.toml("tensor", "tensor", (32, 32), input=stretch, rest="[batching]\nmax = 1")
    graphs.write_model(folder, "slow", means, one)
    graphs.write_model(folder, "finder", graphs.block_finder("yolov8"), graphs.toml("detection", "yolov8", (320, 320)))
    tensor_graphs.write(folder, "numbers", tensor_graphs.same("FP32"))
    return folder


@contextmanager
def stream_server(folder: Path, *, batch_ms: float, **settings: object) -> Iterator[Server]:
    """A server with a simulated device that needs `batch_ms` for a batch, whatever its rows. `settings`: streams_window=8, limits_…"""
    env = {f"OUTBOARD_{name.upper()}": str(value) for name, value in settings.items()}
    with serving(stream_models(folder), "--device", f"sim:oculink,compute={batch_ms}+0", env=env) as server:
        server.until(lambda: all("sim:0" in m["devices"] for m in server.client.get("/v1/models").json()["models"]), 90, "the device")
        yield server
