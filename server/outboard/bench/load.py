"""Requests to a server, and what became of each.

Closed loop: so many connections, each sends when it has its answer: what the server can do. Open loop: requests at fixed times, whatever
the answers do, and a request's time counts from when it was due: how old answers get at that rate, with the bursts that a closed loop
hides.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

#: Requests of an open loop that may be under way: beyond it the generator, not the server, would be measured.
MOST_UNDER_WAY = 1024
#: Seconds for one answer; a server says no before (its own deadline is 30 s).
PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent again and again."""

    url: str  #: with the query
    content: bytes
    headers: dict[str, str]


class _Answer(msgspec.Struct):
    """What is read of an answer; tensors have none of it."""

    device: str = ""
    degraded: bool = False
    simulated: bool = False
    timing_ms: dict[str, float] = {}
    type: str = ""  #: of a problem
    detail: str = ""
    error: str = ""  #: under /v2


@dataclass(slots=True)
class Observed:
    """Of the time after the warm-up. Times in seconds."""

    seconds: float = 0.0  #: from the end of the warm-up to the last answer
    latencies: list[float] = field(default_factory=list)  #: of the answers
    timings: list[dict[str, float]] = field(default_factory=list)  #: of the answers, as the server says them, milliseconds
    devices: dict[str, int] = field(default_factory=dict)  #: answers by device
    degraded: int = 0
    simulated: bool = False
    refused: dict[str, int] = field(default_factory=dict)  #: by the problem's slug, or what failed
    example: str = ""  #: why the first of them was refused
    not_sent: int = 0  #: due in an open loop while MOST_UNDER_WAY were
    own_cpu: float = 0.0  #: seconds of a core that the generator took


class Load:
    """One run."""

    def __init__(self, requests: Sequence[Request], warm_up: float, seconds: float):
        self._turn = itertools.cycle(requests)
        self._warm_up = warm_up
        self._length = seconds
        self._observed = Observed()
        self._decode = msgspec.json.Decoder(_Answer).decode

    async def closed(self, connections: int) -> Observed:
        async with self._client(connections) as client:
            self._start()
            async with asyncio.TaskGroup() as group:
                for _ in range(connections):
                    group.create_task(self._keep_sending(client))
        return self._end()

    async def open(self, rate: float) -> Observed:
        """`rate`: requests a second."""
        async with self._client(MOST_UNDER_WAY) as client:
            self._start()
            under_way: set[asyncio.Task[None]] = set()
            for i in itertools.count():
                due = self._began + i / rate
                if due >= self._until:
                    break
                await asyncio.sleep(due - time.perf_counter())
                if len(under_way) >= MOST_UNDER_WAY:
                    self._observed.not_sent += due >= self._counts_from
                    continue
                task = asyncio.create_task(self._send(client, due))
                under_way.add(task)
                task.add_done_callback(under_way.discard)
            await asyncio.gather(*under_way)
        return self._end()

    def _client(self, connections: int) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        return httpx.AsyncClient(limits=limits, timeout=PATIENCE, trust_env=False)

    def _start(self) -> None:
        self._began = time.perf_counter()
        self._counts_from = self._began + self._warm_up
        self._until = self._counts_from + self._length
        self._cpu = time.process_time()

    def _end(self) -> Observed:
        wall = time.perf_counter() - self._began
        self._observed.own_cpu = (time.process_time() - self._cpu) / wall
        self._observed.seconds = max(self._length, wall - self._warm_up)
        return self._observed

    async def _keep_sending(self, client: httpx.AsyncClient) -> None:
        while (now := time.perf_counter()) < self._until:
            await self._send(client, now)

    async def _send(self, client: httpx.AsyncClient, due: float) -> None:
        request = next(self._turn)
        try:
            response = await client.post(request.url, content=request.content, headers=request.headers)
        except httpx.HTTPError as e:
            if due >= self._counts_from:
                self._refuse(f"connection ({type(e).__name__})", str(e))
            await asyncio.sleep(0.05)  # a server that is not there is not asked a thousand times a second
            return
        if due >= self._counts_from:
            self._count(response, time.perf_counter() - due)

    def _count(self, response: httpx.Response, latency: float) -> None:
        seen = self._observed
        answer = _Answer()
        if response.headers.get("content-type", "").split(";")[0].endswith("json"):
            try:
                answer = self._decode(response.content)
            except msgspec.MsgspecError:
                self._refuse(f"status {response.status_code}, no answer of an Outboard server", response.text)
                return
        if response.is_error:
            self._refuse(answer.type or f"status {response.status_code}", answer.detail or answer.error or response.text)
            return
        seen.latencies.append(latency)
        seen.degraded += answer.degraded
        seen.simulated |= answer.simulated
        if answer.device:
            seen.devices[answer.device] = seen.devices.get(answer.device, 0) + 1
            seen.timings.append(answer.timing_ms)

    def _refuse(self, why: str, detail: str) -> None:
        self._observed.refused[why] = self._observed.refused.get(why, 0) + 1
        self._observed.example = self._observed.example or " ".join(detail.split())[:300]


def summary(seen: Observed) -> dict[str, Any]:
    """`--json`: `{"answered", "fps", "latency_ms": {"p50", "p95", "p99", "p99_9", "max"}, "server_ms": {part: median}, "devices":
    {id: answers}, "degraded", "simulated", "refused": {why: count}, "not_sent", "seconds", "generator_cpu"}`. None where nothing was
    answered."""
    ordered = sorted(seen.latencies)
    parts = list(dict.fromkeys(part for timing in seen.timings for part in timing))
    return {
        "answered": len(ordered),
        "fps": round(len(ordered) / seen.seconds, 2) if seen.seconds else 0.0,
        "latency_ms": {
            name: round(percentile(ordered, share) * 1e3, 2) if ordered else None
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("p99_9", 0.999), ("max", 1.0))
        },
        "server_ms": {part: percentile(sorted(t[part] for t in seen.timings if part in t), 0.5) for part in parts},
        "devices": seen.devices,
        "degraded": seen.degraded,
        "simulated": seen.simulated,
        "refused": seen.refused,
        "not_sent": seen.not_sent,
        "seconds": round(seen.seconds, 2),
        "generator_cpu": round(seen.own_cpu, 2),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed (nearest rank): no value between two is made up."""
    return ordered[max(0, -(-round(share * len(ordered) * 1e6) // 10**6) - 1)]
