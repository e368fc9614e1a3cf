"""Streams in real time: frames of any route go in, outcomes come out in order; who may be resumed, who watches, what memory is held.

`OpenStream` drives one `core.streams.Stream`, `Hub` holds them all. A frame's path: `offer` (take it, or wait until it may be taken) ->
`Predictor` (as any image) -> `_settle` (one outcome, in order) -> the link's writer and the viewers. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from outboard.bundles import Bundler
from outboard.core.engine import ISOLATION
from outboard.core.state import Sender
from outboard.core.streams import Bounds, Clock, Outcome, Policy, Reason, Stream
from outboard.frames import Frame
from outboard.predictor import Predictor, Request
from outboard.problems import Problem, mistake
from outboard.registry import Registry
from outboard.runtime import Runtime
from outboard.telemetry import frame_traces, tracing
from outboard.telemetry import streams as metrics

if TYPE_CHECKING:
    from outboard.telemetry.spans import Spans

log = logging.getLogger(__name__)

#: Why a frame that a problem ended has no answer; any other problem: "failed".
REASONS: dict[str, Reason] = {
    "superseded": "superseded",
    "deadline_missed": "stale",
    "overloaded": "stale",
    "memory_full": "memory_full",
    "frame_too_large": "memory_full",
    "model_not_ready": "unavailable",
    "model_not_found": "unavailable",
    "model_invalid": "unavailable",
    "device_unavailable": "unavailable",
    "empty_body": "undecodable",
    "not_an_image": "undecodable",
    "unsupported_media_type": "undecodable",
    "heic_not_supported": "undecodable",
    "image_too_large": "undecodable",
    "image_truncated": "undecodable",
    "image_invalid": "undecodable",
    "bad_input": "undecodable",
    "bad_frame": "undecodable",
    "body_too_large": "undecodable",
}
#: What `lossless` waits for: it passes.
_PASSING = frozenset({"model_not_ready", "device_unavailable", "overloaded", "memory_full", "deadline_missed"})
#: Events that a slow viewer may be behind.
VIEWER_EVENTS = 1024

_encode = msgspec.json.Encoder().encode


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a client asks of a stream, checked."""

    policy: Policy
    station: str
    max_age: float | None  #: seconds
    expect: tuple[str, ...]  #: the parts that a bundle should have
    request: Request  #: options of each frame's prediction


class Viewer:
    """One who reads what a stream says, and who may be slow: what it does not fetch in time, it misses."""

    def __init__(self) -> None:
        self._texts: deque[tuple[str, int, bytes]] = deque()
        self._missed = 0
        self._news = asyncio.Event()
        self.ended = False

    def put(self, kind: str, seq: int, text: bytes) -> None:
        if len(self._texts) >= VIEWER_EVENTS:
            self._texts.popleft()
            self._missed += 1
        self._texts.append((kind, seq, text))
        self._news.set()

    @property
    def empty(self) -> bool:
        return not self._texts

    def wake(self) -> None:
        """Let `get` return now."""
        self._news.set()

    def end(self) -> None:
        self.ended = True
        self._news.set()

    async def get(self, patience: float) -> list[tuple[str, int, bytes]]:
        """(kind, seq, message) of what there is; nothing after `patience` seconds, when it is woken, or when the stream has ended."""
        if not self._texts and not self.ended:
            try:
                async with asyncio.timeout(patience):
                    await self._news.wait()
            except TimeoutError:
                return []
        self._news.clear()
        texts, self._texts = list(self._texts), deque()
        if self._missed:
            texts.insert(0, ("missed", 0, _encode({"type": "missed", "outcomes": self._missed})))
            self._missed = 0
        return texts


@dataclass(slots=True)
class Newest:
    """The newest frame that was answered."""

    seq: int
    frame: Frame
    answer: dict[str, Any]
    age: float
    at: float  #: when it was answered, the loop's seconds
    drawn: dict[int, asyncio.Task[bytes]] = field(default_factory=dict)  #: JPEGs by width, for all who watch


class OpenStream:
    """One stream, with or without a link."""

    def __init__(self, hub: Hub, id: str, model: str, asked: Asked, bounds: Bounds):
        self.hub = hub
        self.id = id
        self.session = secrets.token_hex(16)
        self.model = model
        self.asked = asked
        self.books = Stream(asked.policy, bounds, hub.now())
        self.clock = Clock()
        self.news = asyncio.Event()  #: something is to be told
        self.link: asyncio.Future[None] | None = None  #: of the connection that has the stream; resolved when another takes it over
        self.state: dict[str, Any] = {}  #: where its frames run
        self.newest: Newest | None = None
        self.watchers: set[asyncio.Event] = set()  #: set when `newest` has changed, or the stream has ended
        self.viewers: set[Viewer] = set()
        self.began = time.time()
        self.ended = False
        self._expiry: asyncio.TimerHandle | None = None
        self._room = asyncio.Event()
        self._frames: dict[int, Frame] = {}  # without an outcome
        self._work: dict[int, asyncio.Task[None]] = {}
        self._bundle: Frame | None = None  # live: the newest bundle, which waits for the one that runs
        self._traced_by: tracing.Parent | None = None  # what the link's request said
        live = id + "/" + self.session[:8] if asked.policy == "live" else ""
        self._sender, self._part_sender = Sender(asked.station, live), Sender(asked.station)

    # ---------------------------------------------------------------- frames in

    async def offer(self, frame: Frame) -> None:
        """Take a frame in. Returns when the next one may be read: at once in `live`, in `lossless` when there is room."""
        if self.asked.policy == "lossless":
            await self.hub.fits(frame.nbytes)
        if not self.books.take(self.hub.now(), frame.seq, frame.nbytes):
            return
        frame.arrived = time.time()
        if self._traced_by is not None:
            frame.trace = frame_traces.begin(self._traced_by, self.hub.spans)
        self._frames[frame.seq] = frame
        full = not self.hub.hold(frame.nbytes)
        if frame.problem is not None:
            self._drop(frame, frame.problem)
        elif full:
            self._drop(frame, Problem("memory_full", "the frames of all streams fill the memory for frames"))
        elif self.asked.policy == "live" and frame.parts is not None and any(self._frames[s].parts is not None for s in self._work):
            if self._bundle is not None:
                self._drop(self._bundle, Problem("superseded", "a newer bundle took its place"))
            self._bundle = frame
        else:
            self._begin(frame)
        while self.books.full():
            self._room.clear()
            await self._room.wait()

    def _begin(self, frame: Frame) -> None:
        self._work[frame.seq] = asyncio.create_task(self._answer(frame), context=tracing.context_of(frame.trace))

    async def _answer(self, frame: Frame) -> None:
        """From a frame that was taken to its outcome."""
        try:
            answer = await self._content(frame)
        except Problem as e:
            if e.slug == "shutting_down":
                return  # no outcome: the client sends it again to the server that comes after this one
            self._drop(frame, e)
        except Exception as e:
            log.exception("a frame of stream %s failed", self.id)
            self._drop(frame, mistake(e))
        else:
            self._result(frame, answer)
        finally:
            self._work.pop(frame.seq, None)
            if frame.parts is not None and self._bundle is not None and not self.books.stopped:
                waiting, self._bundle = self._bundle, None
                self._begin(waiting)

    async def _content(self, frame: Frame) -> dict[str, Any]:
        """The answer. Raises Problem."""
        while True:
            request = self._request(frame)
            try:
                if frame.parts is not None:
                    return await self.hub.bundler.answer(self.model, frame.parts, request, self.asked.expect)
                with self.hub.registry.use(self.model) as version:
                    return await self.hub.predictor.predict(version, frame.image, request)
            except Problem as e:
                if self.asked.policy == "live" or e.slug not in _PASSING or (e.slug == "memory_full" and e.retry_after is None):
                    raise
                await asyncio.sleep(e.retry_after or 1.0)

    def _request(self, frame: Frame) -> Request:
        """Raises Problem: the frame is too old."""
        sender = self._sender if frame.parts is None else self._part_sender
        if self.asked.policy == "lossless":
            return msgspec.structs.replace(self.asked.request, deadline=inf, sender=sender)
        left = self.hub.runtime.settings.limits.deadline
        if self.asked.max_age is not None:
            left = self.asked.max_age - self._age(frame)
            if left <= 0:
                raise Problem("deadline_missed", f"it is {-left * 1e3:.0f} ms older than max_age_ms")
        return msgspec.structs.replace(self.asked.request, deadline=self.hub.now() + left, sender=sender)

    def _age(self, frame: Frame) -> float:
        now = time.time()
        return now - frame.arrived if frame.captured is None else self.clock.age(frame.captured, now)

    # ---------------------------------------------------------------- outcomes out

    def _result(self, frame: Frame, answer: dict[str, Any]) -> None:
        age = self._age(frame)
        if frame.parts is None and (self.newest is None or frame.seq > self.newest.seq):
            self._show(Newest(frame.seq, frame, answer, age, self.hub.now()))
        self._settle(frame, "result", answer, age, None)

    def _drop(self, frame: Frame, problem: Problem) -> None:
        reason = REASONS.get(problem.slug, "failed")
        told = {"reason": reason} if reason in ("superseded", "stopped") else {"reason": reason, "problem": problem.body()}
        self._settle(frame, "drop", told, self._age(frame), reason)

    def _settle(self, frame: Frame, kind: str, content: dict[str, Any], age: float, reason: Reason | None) -> None:
        message = {"type": kind, "seq": frame.seq, "age_ms": round(age * 1e3, 1)}
        if frame.meta is not None:
            message["meta"] = frame.meta
        del self._frames[frame.seq]
        if self.newest is None or self.newest.frame is not frame:
            self.hub.release(frame.nbytes)
        metrics.outcome(self.model, reason, age if reason is None else None)
        if frame.trace is not None:
            self._end_trace(frame, content, age, reason)
        leaving = self.books.settle(self.hub.now(), frame.seq, _encode(message | content), age=age, reason=reason)
        for viewer in self.viewers:
            for outcome in leaving:
                viewer.put("drop" if outcome.reason else "result", outcome.seq, outcome.text)
        self.news.set()
        self._room.set()

    def _end_trace(self, frame: Frame, content: dict[str, Any], age: float, reason: Reason | None) -> None:
        assert frame.trace is not None
        about: dict[str, Any] = {"outboard.model": self.model, "outboard.stream": self.id, "outboard.seq": frame.seq}
        about |= {"outboard.outcome": reason or "answered", "outboard.age_ms": round(age * 1e3, 1)}
        about |= {f"outboard.{name}": content[name] for name in ("device", "degraded") if name in content}  # a bundle has them in its parts
        frame_traces.end(frame.trace, self.hub.spans, about, failed=reason == "failed")

    def _show(self, newest: Newest) -> None:
        """Keep it for those who watch: its bytes stay held until a newer one takes its place."""
        if self.newest is not None:
            self.hub.release(self.newest.frame.nbytes)
        self.newest = newest
        for watcher in self.watchers:
            watcher.set()

    def tell(self, most: int) -> list[Outcome]:
        """Outcomes for the link, in order, each once."""
        outcomes = self.books.tell(most)
        if outcomes:
            self._room.set()
        return outcomes

    def stop(self) -> None:
        """No more frames; those without an outcome are dropped now."""
        for seq in self.books.stop():
            if (work := self._work.pop(seq, None)) is not None:
                work.cancel()
            frame = self._frames[seq]
            self._settle(frame, "drop", {"reason": "stopped"}, self._age(frame), "stopped")
        self._bundle = None
        self.news.set()

    # ---------------------------------------------------------------- links

    def attach(self, after: int | None) -> asyncio.Future[None]:
        """A connection takes the stream; the future resolves when another one takes it over. `after`: the last outcome that its client
        holds; None: it reads as a viewer does."""
        if self.link is not None:
            self.link.set_result(None)
        else:
            metrics.opened(self.asked.policy, 1)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if after is not None:
            self.books.attach(after)
        self._traced_by = frame_traces.parent_of_link()
        self.state = self.where()
        self.link = self.hub.loop.create_future()
        return self.link

    def detach(self, link: asyncio.Future[None]) -> None:
        """The connection is gone. The stream goes on, and can be resumed for a while."""
        if self.link is not link:
            return
        self.link = None
        metrics.opened(self.asked.policy, -1)
        self.books.detach(self.hub.now())
        self._expiry = self.hub.loop.call_later(self.hub.runtime.settings.streams.kept_seconds, self.hub.close, self)

    # ---------------------------------------------------------------- watching

    @contextmanager
    def watched(self) -> Iterator[Viewer]:
        viewer = Viewer()
        self.viewers.add(viewer)
        try:
            yield viewer
        finally:
            self.viewers.discard(viewer)

    def where(self) -> dict[str, Any]:
        """Where its frames run: the members of a `state` message."""
        engine = self.hub.runtime.engine
        why = engine.away()
        try:
            version = self.hub.registry.serving(self.model)
        except Problem as e:
            return {"device": None, "degraded": True, "why": e.detail}
        ready = engine.ready_on(next(iter(version.ids.values())))
        if not ready:
            return {"device": None, "degraded": True, "why": why or "no device runs the model now"}
        device = next((d for d in ready if self.hub.runtime.devices[d].kind != "cpu"), ready[0])
        return {"device": device, "degraded": engine.degraded(), "why": why or None}

    def look(self) -> None:
        """Something about the devices has changed: tell, if it concerns this stream."""
        state = self.where()
        if state == self.state:
            return
        self.state = state
        for viewer in self.viewers:
            viewer.put("state", 0, _encode({"type": "state", **state}))
        self.news.set()

    def entry(self) -> dict[str, Any]:
        """One entry of /v1/streams. received == processed + dropped + waiting."""
        now, books, figures = self.hub.now(), self.books, self.books.figures
        ages = {name: figures.age(share) for name, share in (("p50", 0.5), ("p99", 0.99))}
        offset = self.clock.offset
        return {
            "id": self.id,
            "station": self.asked.station,
            "model": self.model,
            "policy": self.asked.policy,
            "status": books.status(now),
            "connected": self.link is not None,
            "began": self.began,
            "received": figures.received,
            "processed": figures.answered,
            "dropped": dict(figures.dropped),
            "waiting": figures.received - figures.answered - figures.dropped.total(),
            "fps": round(figures.rate(now), 2),
            "age_ms": {
                "last": round(self.newest.age * 1e3, 1) if self.newest else None,
                **{name: round(age * 1e3, 1) if age is not None else None for name, age in ages.items()},
            },
            "clock_offset_ms": round(offset * 1e3, 1) if offset is not None else None,
            "last_seq": books.last,
            **self.state,
        }

    def end(self) -> None:
        """Let go of everything."""
        for work in self._work.values():
            work.cancel()
        self.hub.release(sum(frame.nbytes for frame in self._frames.values()))
        if self.newest is not None:
            self.hub.release(self.newest.frame.nbytes)
            self.newest = None
        self._work, self._frames, self._bundle = {}, {}, None
        if self._expiry is not None:
            self._expiry.cancel()
        self.ended = True
        for viewer in self.viewers:
            viewer.end()
        for watcher in self.watchers:
            watcher.set()


class Hub:
    """Every stream of the server."""

    def __init__(self, runtime: Runtime, registry: Registry, spans: Spans | None = None):
        self.runtime = runtime
        self.registry = registry
        self.spans = spans
        self.predictor = Predictor(runtime)
        self.bundler = Bundler(runtime, registry, self.predictor)
        self.streams: dict[str, OpenStream] = {}  #: by id
        self._sessions: dict[str, OpenStream] = {}
        self._bytes = 0
        self._freed = asyncio.Event()
        runtime.on_state.append(lambda device, state, why: device == ISOLATION or self._look())
        runtime.on_network.append(lambda network: self._look())

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def now(self) -> float:
        return self.runtime.now()

    def open(self, model: str, asked: Asked, *, resumable: bool) -> OpenStream:
        """A new stream; only of one that can be resumed outcomes are kept. Raises Problem."""
        self.registry.get(model)
        settings = self.runtime.settings.streams
        if sum(s.link is not None for s in self._sessions.values()) >= settings.max:
            raise Problem("too_many_streams", f"{settings.max} streams are open; set [streams] max to take more", retry_after=5.0)
        lost = sorted((s for s in self._sessions.values() if s.link is None), key=lambda s: s.books.since)
        for oldest in lost[: max(0, len(lost) - settings.max + 1)]:
            self.close(oldest)
        kept, kept_bytes = (settings.kept, settings.kept_bytes) if resumable else (0, 0)
        bounds = Bounds(settings.window, settings.window_bytes, kept, kept_bytes, settings.offline)
        stream = OpenStream(self, self._id(f"{asked.station}.{model}"), model, asked, bounds)
        self.streams[stream.id] = self._sessions[stream.session] = stream
        return stream

    def _id(self, wanted: str) -> str:
        """The station's id, as soon as nobody is connected under it."""
        id, n = wanted, 1
        while (other := self.streams.get(id)) is not None and other.link is not None:
            n += 1
            id = f"{wanted}-{n}"
        return id

    def resume(self, session: str, model: str, policy: Policy, after: int) -> OpenStream | None:
        """The stream of this session, if every outcome above `after` is still there."""
        stream = self._sessions.get(session)
        if stream is None or (stream.model, stream.asked.policy) != (model, policy) or not stream.books.can_resume(after):
            return None
        metrics.resumed.inc()
        return stream

    def get(self, id: str) -> OpenStream:
        """Raises Problem stream_not_found."""
        stream = self.streams.get(id)
        if stream is None:
            known = ", ".join(sorted(self.streams)[:20]) or "none"
            raise Problem("stream_not_found", f"there is no stream {id[:100]!r}; there are: {known}")
        return stream

    def entries(self) -> list[dict[str, Any]]:
        return [stream.entry() for _, stream in sorted(self.streams.items())]

    def close(self, stream: OpenStream) -> None:
        """Forget it."""
        stream.end()
        self._sessions.pop(stream.session, None)
        if self.streams.get(stream.id) is stream:
            del self.streams[stream.id]

    def _look(self) -> None:
        for stream in self._sessions.values():
            if stream.link is not None:
                stream.look()

    # ---------------------------------------------------------------- memory

    def _has_room(self, nbytes: int) -> bool:
        """Streams hold at most half of what bodies may take, so that single requests find room."""
        size = self.runtime.slab.size
        return self._bytes + nbytes <= size // 2 and self.runtime.body_bytes + nbytes <= size

    def hold(self, nbytes: int) -> bool:
        """Account for a frame's bytes, until `release`; False: there is no room for it (it is held all the same until it is dropped)."""
        room = self._has_room(nbytes)
        self._bytes += nbytes
        self.runtime.body_bytes += nbytes
        metrics.memory.set(self._bytes)
        return room

    def release(self, nbytes: int) -> None:
        self._bytes -= nbytes
        self.runtime.body_bytes -= nbytes
        metrics.memory.set(self._bytes)
        self._freed.set()

    async def fits(self, nbytes: int) -> None:
        """Wait until there is room. Requests give room back without a word: hence the look every 50 ms."""
        while not self._has_room(nbytes) and self._bytes:
            self._freed.clear()
            try:
                async with asyncio.timeout(0.05):
                    await self._freed.wait()
            except TimeoutError:
                pass
