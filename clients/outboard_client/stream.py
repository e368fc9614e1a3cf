"""`FrameStream`: frames in, one outcome for each, over links that fail."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import quote, urlencode

import msgspec
import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from outboard_client import frames as wire
from outboard_client.backoff import Backoff
from outboard_client.calls import Options, key_headers, server_url
from outboard_client.errors import StreamLost, Unreachable, problem_of
from outboard_client.frames import Bundle, Drop, Frame, Hello, Outcome, encoded_bundle
from outboard_client.images import Encoding, ImageLike, encoded, fitted
from outboard_client.ledger import NOT_AN_IMAGE, TOO_LARGE, Ledger
from outboard_client.transit import Transit
from outboard_client.uplink import Uplink

#: Unsent bytes that the socket may hold. More would only make a live frame older, and hide how fast the link is.
_UNSENT = 128 << 10
#: A larger message is sent in fragments of so many bytes: whole, it would be copied five times into new memory on its way to the socket,
#: whose pages cost more than the rest (a bundle of 5.8 MB: 12 ms of 17; so 2 of 7).
_FRAGMENT = 1 << 20
#: Refusals of the upgrade that a moment may change.
_PASSING = frozenset({408, 425, 429})
#: Outcomes are acknowledged so often, at the latest (the server keeps them until then).
_ACK_SECONDS = 0.5
_AGES = 2_000  #: ages that the percentiles are of
_TOO_BIG = 1009  #: the close code that says so
#: Close codes after which coming back would end the same way: the protocol was broken, or another connection took the session.
_FINAL = frozenset({1002, 1003, 1007, 1008, 4001})
#: Frames without an outcome, of a live stream. Those that the server has read cost nothing here and wait for the one that runs there.
_LIVE_WINDOW = 1_000
#: Outcomes that nobody asked for, beyond which a live stream takes no more frames.
_UNCLAIMED = 10_000


@dataclass
class Figures:
    """What a stream has done so far. `sent == answered + sum(dropped) + unanswered`, always."""

    sent: int = 0
    answered: int = 0
    unanswered: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    doubles: int = 0  #: outcomes that came again and were discarded
    links: int = 0  #: connections that said hello
    resumed: int = 0  #: of those, the ones that went on with the session
    closed: dict[str, int] = field(default_factory=dict)  #: how links ended: close code, or the error's name
    connected: bool = False
    device: str | None = None
    degraded: bool = False
    why: str | None = None
    server_queue: int = 0
    age_ms: dict[str, float] = field(default_factory=dict)  #: p50, p95, p99 of the last results
    last_result: float | None = None  #: time.monotonic() of the newest


class FrameStream:
    """A stream of one sender's frames to one model.

        stream = FrameStream("yolov2_tiny", "http://127.0.0.1:8000", policy="lossless")
        async for outcome in stream.run(frames):
            if isinstance(outcome, Result):
                print(outcome.seq, outcome.answer.detections)

    `frames` is an iterable or an async one, of images (see ImageLike) or Frames. Outcomes come in the frames' order, exactly one for
    each. A broken link is brought back after 1 to 30 s ±20 % for as long as it takes, or for `give_up` seconds: then StreamLost.

    policy: "live": the newest frame wins, and what it displaces is dropped; "lossless": nothing is dropped, the source waits.
    session, after: resume the session of an earlier process, whose outcomes up to `after` are held.
    in_flight: frames that may be without an outcome at once (default: 1,000 live, 64 lossless), `in_flight_bytes` likewise. Of a live
    stream no more are on their way than the server reads within a tenth of a second, and no more than half a second of what the uplink
    carries, so that what comes next is sent young, however slow the model is.
    eager: take frames as fast as the source gives them. False (live): take the next one when it can be sent, for a source that itself
    forgets all but the newest.
    uplink: the JPEG quality of images that are not encoded yet; in `live` it follows the link.
    silence: seconds without a word from the server after which the link counts as dead (it says something every few seconds).
    durable: the session outlives this process. An outcome counts as held when `ack` says so, and leaving does not stop the stream.
    expect: names of the parts that each bundle should have.
    options: those of `Client.predict`, without `deadline_ms` (`max_age_ms` counts from capture).
    """

    def __init__(
        self,
        model: str,
        url: str | None = None,
        *,
        key: str | None = None,
        policy: Literal["live", "lossless"] = "live",
        station: str | None = None,
        max_age_ms: float | None = None,
        session: str | None = None,
        after: int = 0,
        in_flight: int | None = None,
        in_flight_bytes: int = 64 << 20,
        eager: bool = True,
        uplink: Uplink | None = None,
        backoff: Backoff | None = None,
        silence: float = 20.0,
        give_up: float | None = None,
        durable: bool = False,
        expect: Iterable[str] = (),
        **options: Any,
    ):
        if policy not in ("live", "lossless"):
            raise ValueError(f"policy is {policy!r}, expected 'live' or 'lossless'")
        self.policy = policy
        self.session = session
        self.uplink = uplink or Uplink()
        query = {"policy": policy, "station": station, "max_age_ms": max_age_ms, "expect": ",".join(expect) or None}
        query |= Options(**options).query()
        self._query = {k: str(v) for k, v in query.items() if v is not None}
        self._url = f"ws{server_url(url)[4:]}/v1/models/{quote(model, safe='')}/stream"
        self._headers = key_headers(key)
        self._backoff = backoff or Backoff()
        self._silence = silence
        self._give_up = math.inf if give_up is None else give_up
        self._window = in_flight or (_LIVE_WINDOW if policy == "live" else 64)
        self._window_bytes = in_flight_bytes
        self._eager = eager or policy == "lossless"
        self._durable = durable
        self._ledger = Ledger(live=policy == "live", after=after)
        self._transit = Transit()
        self._waiters: list[asyncio.Future[None]] = []
        self._limits = wire.Limits()
        self._too_big = ""  # why the last link was closed, if a message was too big
        self._figures = Figures()
        self._closed: Counter[str] = Counter()
        self._ages: deque[float] = deque(maxlen=_AGES)

    @property
    def figures(self) -> Figures:
        books = self._ledger
        ages = np.array(self._ages) * 1e3
        percentiles = {f"p{p}": round(float(np.percentile(ages, p)), 1) for p in (50, 95, 99)} if len(ages) else {}
        return replace(
            self._figures,
            sent=books.registered,
            answered=books.answered,
            unanswered=books.unsettled,
            dropped=dict(books.dropped),
            doubles=books.doubles,
            closed=dict(self._closed),
            age_ms=percentiles,
        )

    async def run(self, frames: Iterable[ImageLike | Frame] | AsyncIterable[ImageLike | Frame]) -> AsyncIterator[Outcome]:
        """Send all of `frames` and give the outcome of each. An outcome counts as held when the next one is asked for (see `durable`).

        Raises Problem when the server refuses the stream, StreamLost after `give_up`, and whatever `frames` raises.
        """
        taking = asyncio.create_task(self._take(frames))
        linking = asyncio.create_task(self._keep_link())
        for task in (taking, linking):
            task.add_done_callback(lambda _: self._notify())
        books = self._ledger
        try:
            while True:
                while (outcome := books.pop()) is not None:
                    yield outcome
                    if not self._durable:
                        self.ack(outcome.seq)
                for task in (taking, linking):
                    if task.done() and (error := task.exception()) is not None:
                        raise error
                if taking.done() and not books.open:
                    return
                await self._change()
        finally:
            for task in (taking, linking):
                task.cancel()
            await asyncio.gather(taking, linking, return_exceptions=True)

    def ack(self, seq: int) -> None:
        """The outcomes up to `seq` are held: they need not be given again, not even to another process."""
        self._ledger.keep(seq)
        self._notify()

    # Two tasks wait for each other's doings. There is no await between a look at the state and `_change`, so no change is missed.

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    def _notify(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # From the source into the ledger.

    async def _take(self, frames: Iterable[ImageLike | Frame] | AsyncIterable[ImageLike | Frame]) -> None:
        async with contextlib.aclosing(_each(frames)) as source:
            while True:
                await self._until(self._room)
                try:
                    item = await anext(source)
                except StopAsyncIteration:
                    return
                frame = item if isinstance(item, Frame) else Frame(item)
                refused = ""
                if not self._ledger.live:  # now, so that what waits is small; a live frame that is displaced need not be encoded at all
                    frame, refused = await self._encoded(frame)
                seq = self._ledger.register(frame)
                if refused:
                    self._ledger.settle(Drop(seq, NOT_AN_IMAGE, refused, here=True))
                self._notify()
                await asyncio.sleep(0)  # a source that never waits must not hold up the link

    def _room(self) -> bool:
        books = self._ledger
        if not self._eager:
            return self._figures.connected and not books.queued and books.in_flight < self._window and self._link_has_room()
        if books.live:
            return books.open < _UNCLAIMED
        return books.open < self._window and books.nbytes < self._window_bytes

    async def _encoded(self, frame: Frame) -> tuple[Frame, str]:
        """The frame with its image encoded, or why it cannot be."""
        if isinstance(frame.image, bytes):
            return frame, ""
        try:
            if isinstance(frame.image, Bundle):
                data, parts = encoded_bundle(frame.image)
                return replace(frame, image=data, parts=parts), ""
            data, _ = await asyncio.to_thread(encoded, frame.image, Encoding("jpeg", self.uplink.quality))
        except (OSError, TypeError, ValueError) as e:
            return frame, f"{type(e).__name__}: {e}"
        return replace(frame, image=data), ""

    # The link.

    async def _keep_link(self) -> None:
        """Connect, use the link until it breaks, wait, again."""
        lost_at = time.monotonic()
        while True:
            at_least = 0.0
            try:
                await self._link()
            except InvalidStatus as e:
                problem = problem_of(e.response.status_code, e.response.headers, bytes(e.response.body or b""))
                if 400 <= problem.status < 500 and problem.status not in _PASSING:
                    raise problem from None
                at_least, why = problem.retry_after or 0.0, problem.slug
            except ConnectionClosed as e:
                code = e.rcvd.code if e.rcvd else 1006
                if code in _FINAL:
                    raise StreamLost(f"the server ended the stream: {e.rcvd}", self._ledger.unanswered()) from e
                self._too_big = (e.rcvd.reason or str(e.rcvd)) if e.rcvd and code == _TOO_BIG else ""
                why = str(code)
            except ssl.SSLCertVerificationError as e:
                raise Unreachable(f"{self._url}: {e.verify_message}") from e
            except (OSError, EOFError, InvalidHandshake, TimeoutError, msgspec.MsgspecError) as e:
                why = type(e).__name__
            if self._figures.connected:
                lost_at = time.monotonic()
                self._figures.connected = False
            self._closed[why] += 1
            self.uplink.cut()
            self._transit.cut()
            self._notify()
            pause = max(at_least, self._backoff.next())
            if time.monotonic() + pause - lost_at > self._give_up:
                waited = time.monotonic() - lost_at
                raise StreamLost(f"{self._url}: no link for {waited:.0f} s ({why})", self._ledger.unanswered())
            await asyncio.sleep(pause)

    async def _link(self) -> None:
        """One connection, from its handshake to its end. Returns never: raises what ended it."""
        query = dict(self._query)
        if self.session:
            query |= {"session": self.session, "after": str(self._ledger.acknowledged)}
        async with connect(
            f"{self._url}?{urlencode(query)}",
            subprotocols=[wire.SUBPROTOCOL],  # type: ignore[list-item]
            additional_headers=self._headers,
            compression=None,  # JPEGs do not deflate
            open_timeout=self._silence,
            # The server's heartbeats show that the link lives. A ping of ours would wait behind a frame on a slow uplink, and time out.
            ping_interval=None,
            close_timeout=2.0,
            max_size=64 << 20,
        ) as link:
            _hold_little(link)
            async with asyncio.timeout(self._silence):
                hello = wire.decode(await link.recv())
            if not isinstance(hello, Hello):
                raise InvalidHandshake(f"expected hello, got {type(hello).__name__}")
            self._begin(hello)
            try:
                await self._use(link)
            finally:
                if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    await self._leave(link)

    def _begin(self, hello: Hello) -> None:
        self.session = hello.session
        self._limits = hello.limits
        self._figures.connected = True
        self._figures.links += 1
        self._figures.resumed += hello.resumed
        self._ledger.link_up(hello.last, resumed=hello.resumed)
        if self._too_big and (taken := self._ledger.take()):
            # The first that the server does not have is what it closed the link for; sent again, it would do so for ever.
            self._settle(Drop(taken[0], TOO_LARGE, self._too_big, here=True))
        self._too_big = ""
        self._notify()

    async def _use(self, link: ClientConnection) -> None:
        tasks = [asyncio.create_task(work(link)) for work in (self._send, self._receive, self._acknowledge)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, link: ClientConnection) -> None:
        """The last word of a stream that ends: what is held, and that the rest is not wanted any more."""
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(1.0):
                await link.send(wire.ack(self._ledger.acknowledged))
                if not self._durable:
                    await link.send(wire.STOP)

    async def _send(self, link: ClientConnection) -> None:
        books = self._ledger
        window = self._window if books.live else min(self._window, self._limits.window or self._window)
        while True:
            await self._until(lambda: bool(books.queued) and books.in_flight < window and self._link_has_room())
            taken = books.take()
            assert taken is not None
            seq, frame = taken
            frame, refused = await self._encoded(frame)
            if refused:
                self._settle(Drop(seq, NOT_AN_IMAGE, refused, here=True))
                continue
            books.replace(seq, frame)
            head, image, refused = await self._sized(seq, frame)
            if refused:
                self._settle(Drop(seq, TOO_LARGE, refused, here=True))
                continue
            self.uplink.sent(seq, len(head) + len(image), time.monotonic())
            if books.live:
                self._transit.sent(seq, time.monotonic())
            # A message that was begun is ended, else nothing could be said after it, not even `stop`.
            await asyncio.shield(link.send(head + image if len(head) + len(image) <= _FRAGMENT else _fragments(head, image)))
            if books.live:
                pong = await link.ping()
                pong.add_done_callback(lambda pong, seq=seq: None if pong.cancelled() or pong.exception() else self._read(seq))
            self._notify()

    def _read(self, seq: int) -> None:
        """The server has the frames up to this one."""
        self._transit.read(seq, time.monotonic())
        self._ledger.read(seq)
        self._notify()

    def _link_has_room(self) -> bool:
        books = self._ledger
        if not books.live:
            return True
        return self._transit.room(time.monotonic()) and (len(self._transit) < 2 or books.nbytes < self.uplink.room)

    async def _sized(self, seq: int, frame: Frame) -> tuple[bytes, bytes, str]:
        """What the frame's message begins with and its image, within the server's limits, or why there is none (S03: a message too big
        costs the link, not only itself)."""
        limit, image = self._limits.message, frame.image
        assert isinstance(image, bytes)
        try:
            head = wire.head(seq, frame.captured, frame.meta, frame.parts)
        except ValueError as e:
            return b"", b"", str(e)
        if not limit or len(head) + len(image) <= limit:
            return head, image, ""
        smaller = None if frame.parts else await asyncio.to_thread(fitted, image, limit - len(head))
        if smaller is None:
            return b"", b"", f"the message has {len(head) + len(image)} bytes, the server takes {limit}; send JPEG, or fewer pixels"
        return head, smaller, ""

    async def _receive(self, link: ClientConnection) -> None:
        began, proved = time.monotonic(), False
        while True:
            async with asyncio.timeout(self._silence):
                said = wire.decode(await link.recv())
            match said:
                case wire.ResultMessage() | wire.DropMessage():
                    self._outcome(said)
                case wire.State():
                    self._figures.device, self._figures.degraded, self._figures.why = said.device, said.degraded, said.why
                case wire.Heartbeat():
                    self._figures.server_queue = said.queue
                    await link.send(wire.heartbeat(said.at))
            # A link that is accepted and cut at once, again and again, is not one that works.
            if not proved and (isinstance(said, wire.ResultMessage) or time.monotonic() - began > 10):
                proved = True
                self._backoff.worked()

    def _outcome(self, said: wire.ResultMessage | wire.DropMessage) -> None:
        known = isinstance(said, wire.ResultMessage) and "total" in said.timing_ms
        self.uplink.arrived(said.seq, time.monotonic() - said.timing_ms["total"] / 1e3 if known else None)
        self._read(said.seq)
        frame = self._ledger.frame(said.seq)
        age = max(0.0, (wire.now_us() - frame.captured) / 1e6) if frame else math.nan  # without: from before this process
        if self._settle(wire.outcome(said, age)) and isinstance(said, wire.ResultMessage):
            self._figures.last_result = time.monotonic()
            if frame:
                self._ages.append(age)

    def _settle(self, outcome: Outcome) -> bool:
        new = self._ledger.settle(outcome)
        self._notify()
        return new

    async def _acknowledge(self, link: ClientConnection) -> None:
        told = self._ledger.acknowledged
        while True:
            while self._ledger.acknowledged == told:
                await self._change()
            await asyncio.sleep(_ACK_SECONDS)
            told = self._ledger.acknowledged
            await link.send(wire.ack(told))


def _fragments(head: bytes, image: bytes) -> list[bytes | memoryview]:
    whole = memoryview(image)
    return [head, *(whole[at : at + _FRAGMENT] for at in range(0, len(whole), _FRAGMENT))]


def _hold_little(link: ClientConnection) -> None:
    """Keep what waits in the kernel small."""
    raw = link.transport.get_extra_info("socket")
    if raw is None:
        return
    with contextlib.suppress(OSError):
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # Linux, macOS
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        else:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _UNSENT)


async def _each(frames: Iterable[Any] | AsyncIterable[Any]) -> AsyncGenerator[Any]:
    if isinstance(frames, AsyncGenerator):
        async with contextlib.aclosing(frames):
            async for frame in frames:
                yield frame
    elif isinstance(frames, AsyncIterable):
        async for frame in frames:
            yield frame
    elif isinstance(frames, (list, tuple)):
        for frame in frames:
            yield frame
    else:
        source, end = iter(frames), object()
        while (frame := await asyncio.to_thread(next, source, end)) is not end:  # it may wait for a camera
            yield frame
