"""The application: routes over a runtime and a registry that live as long as it does."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from outboard import __version__
from outboard.devices import discovery
from outboard.http import dashboard, health, ingest, listings, predict, problems, reference, stream, streams
from outboard.http.counted import Counted
from outboard.http.keyed import Keyed
from outboard.http.origin import OwnPagesOnly
from outboard.http.traced import Traced
from outboard.keys.store import Keyring
from outboard.oip import rest, routes
from outboard.oip.service import Service
from outboard.registry import Registry
from outboard.runtime import Runtime
from outboard.settings import Settings
from outboard.streams import Hub
from outboard.telemetry import metrics

if TYPE_CHECKING:
    from outboard.telemetry.spans import Spans

log = logging.getLogger(__name__)


def create(settings: Settings, on_ready: Callable[[Runtime, Registry], None] | None = None) -> ASGIApp:
    """Build the server. `on_ready` is called once, when every model is served or has been refused."""
    runtime = Runtime(settings)
    registry = Registry(runtime, settings.models)
    spans = _spans() if settings.traces else None
    hub = Hub(runtime, registry, spans)
    live = dashboard.Live(runtime, registry, hub)
    service = Service(runtime, registry)
    v2 = rest.Rest(service)
    keyring = Keyring(settings.http.keys) if settings.http.keys is not None else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        runtime.start()
        works = [_lag(), live.run(), _serve(runtime, registry, on_ready)]
        if settings.oip.grpc_port is not None:
            from outboard.oip.grpc_server import GrpcServer  # grpc takes 20 MB and a thread: only where it is wanted

            works.append(GrpcServer(service, settings.host, settings.oip.grpc_port, keyring, spans).run())
        background = [asyncio.create_task(work) for work in works]
        for task in background:
            task.add_done_callback(_complain)
        try:
            yield
        finally:
            log.info("stopping")
            for task in background:
                task.cancel()
            await runtime.close()
            if spans is not None:
                spans.close()

    app = FastAPI(
        title="Outboard",
        version=__version__,
        summary="An inference server for the GPU outside the box",
        lifespan=lifespan,
        docs_url=None,  # they load scripts from another host; http/reference.py has a page of our own
        redoc_url=None,
    )
    problems.install(app)
    predicting = predict.PredictRoute(runtime, registry)
    app.include_router(predict.router())
    app.include_router(listings.router(runtime, registry))
    app.include_router(health.router(runtime, registry))
    app.include_router(routes.router())
    app.include_router(dashboard.router(live))
    app.include_router(reference.router(app))
    ingesting = ingest.IngestRoute(hub)
    app.include_router(ingest.router())
    app.include_router(stream.router(hub))
    app.include_router(streams.router(hub))

    others = Counted(app)

    async def outboard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and predict.model_of(scope["path"]):
            await predicting(scope, receive, send)
        elif scope["type"] == "http" and scope["method"] == "POST" and ingest.model_of(scope["path"]):
            await ingesting(scope, receive, send)
        elif scope["type"] == "http" and rest.matches(scope["path"]):
            await v2(scope, receive, send)
        else:
            await others(scope, receive, send)

    keyed = Keyed(outboard, keyring) if keyring is not None else outboard
    return Traced(OwnPagesOnly(keyed, settings), spans, settings.log_requests)


def _spans() -> Spans:
    from outboard.telemetry.spans import Spans  # 0.2 s and an extra: only where they are wanted

    return Spans()


async def _serve(runtime: Runtime, registry: Registry, on_ready: Callable[[Runtime, Registry], None] | None) -> None:
    """Start the devices, load the models, then follow changes of the repository."""
    await discovery.attach(runtime)
    await registry.scan()
    watching = asyncio.gather(registry.watch(), discovery.follow(runtime))
    try:
        await registry.settled.wait()
        if on_ready is not None:
            on_ready(runtime, registry)
        await asyncio.gather(watching, _tend_garbage())
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _tend_garbage(every: float = 10.0) -> None:
    """What lives now lives long: it is not looked through again (tens of milliseconds each time). And what a request leaves in cycles is
    little: looked for seldom (the front takes 4 % less of a core for each request). But one object of a cycle may hold a picture, and
    by numbers of objects alone gigabytes of them would wait: so also by time, for a millisecond or two."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    while True:
        await asyncio.sleep(every)
        gc.collect()


async def _lag(every: float = 0.5) -> None:
    """How late the loop runs: what a blocked loop would show first (S02)."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every
        await asyncio.sleep(every)
        metrics.loop_lag.set(max(0.0, loop.time() - due))


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (e := task.exception()) is not None:
        log.error("a background task ended", exc_info=e)
