"""`Client` and `AsyncClient`: images to answers over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx

from outboard_client import calls
from outboard_client.answers import Answer, Device, Model, Readiness
from outboard_client.calls import Attempts, Call, Options
from outboard_client.errors import OutboardError, Problem
from outboard_client.images import PNG, Encoding, ImageLike, encoded

T = TypeVar("T")
H = TypeVar("H", httpx.Client, httpx.AsyncClient)
I = TypeVar("I", bound=ImageLike)  # noqa: E741

#: Told after each image how many are done, and of how many (None: not known).
Progress = Callable[[int, int | None], None]


@dataclass(frozen=True, slots=True)
class Done(Generic[I]):
    """One image of many: its answer, or why there is none."""

    image: I
    answer: Answer | None = None
    error: Exception | None = None


class _Session(Generic[H]):
    """What both clients are made of."""

    _transport: type[H]

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        timeout: float = 60.0,
        patience: float = 30.0,
        encoding: Encoding = PNG,
    ):
        self.url = calls.server_url(url)
        self.patience = patience
        self.encoding = encoding
        limits = httpx.Timeout(timeout, connect=min(timeout, 10.0))
        self._http = self._transport(base_url=self.url, headers=calls.key_headers(key), timeout=limits)


class Client(_Session[httpx.Client]):
    """A client for threads; one may be shared by many.

        with Client("http://127.0.0.1:8000") as client:
            for found in client.predict("yolov2_tiny", "photo.jpg").detections:
                print(found.label, found.score, found.box)

    `url` and `key` default to OUTBOARD_URL and OUTBOARD_KEY. `timeout` is for one attempt; `patience` bounds the seconds in which a
    refusal that may pass (503 with Retry-After) or a broken link is tried again; 0 tries once. `encoding` is for images that are not
    encoded yet. Raises Problem (the server refused) or Unreachable.
    """

    _transport = httpx.Client

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def predict(self, model: str, image: ImageLike, **options: Any) -> Answer:
        """The answer for one image. `options`: min_score, top_k, tile, overlap, merge, whole, deadline_ms, strict_device."""
        return self._ask(calls.predict(model, encoded(image, self.encoding), Options(**options)))

    def predict_several(self, model: str, images: Iterable[ImageLike], **options: Any) -> list[Answer | Problem]:
        """Several images in one request: answers in their order, a bad image's problem in its place."""
        return self._ask(calls.predict_several(model, [encoded(i, self.encoding) for i in images], Options(**options)))

    def predict_many(
        self, model: str, images: Iterable[I], *, concurrency: int = 4, progress: Progress | bool = False, **options: Any
    ) -> Iterator[Done[I]]:
        """Any number of images, `concurrency` at a time, in their order. They are taken one by one, so a generator of a million is fine.

        An image without an answer does not end the others: its `error` says why. `progress=True` shows a bar.
        """
        checked = Options(**options)

        def one(image: I) -> Done[I]:
            try:
                return Done(image, self._ask(calls.predict(model, encoded(image, self.encoding), checked)))
            except (OutboardError, OSError, TypeError, ValueError) as e:
                return Done(image, error=e)

        with _reporting(images, progress) as report, ThreadPoolExecutor(concurrency, "outboard-client") as pool:
            waiting: deque[Any] = deque()
            try:
                for image in images:
                    waiting.append(pool.submit(one, image))
                    if len(waiting) >= 2 * concurrency:  # as many again, so that a slow one in front holds up nobody
                        yield report(waiting.popleft().result())
                while waiting:
                    yield report(waiting.popleft().result())
            finally:
                for future in waiting:
                    future.cancel()

    def picture(self, model: str, image: ImageLike, **options: Any) -> bytes:
        """The image as JPEG with the answer drawn on."""
        return self._ask(calls.picture(model, encoded(image, self.encoding), Options(**options)))

    def models(self) -> list[Model]:
        return self._ask(calls.models())

    def model(self, name: str) -> Model:
        return self._ask(calls.model(name))

    def load(self, name: str) -> Model:
        """Read the model's files again and load it."""
        return self._ask(calls.load(name))

    def unload(self, name: str) -> Model:
        return self._ask(calls.unload(name))

    def devices(self) -> list[Device]:
        return self._ask(calls.devices())

    def device(self, device_id: str) -> Device:
        return self._ask(calls.device(device_id))

    def ready(self, *, strict: bool = False) -> Readiness:
        """Whether every model is served; with `strict`, by the device that was asked for."""
        return self._ask(calls.ready(strict))

    def _ask(self, call: Call[T]) -> T:
        attempts, began = Attempts(self.patience), time.monotonic()
        while True:
            try:
                return call.result(self._http.request(call.method, call.path, params=call.params, **call.request))
            except (Problem, httpx.TransportError) as e:
                pause = attempts.pause(call, e, time.monotonic() - began)
            time.sleep(pause)


class AsyncClient(_Session[httpx.AsyncClient]):
    """The same for asyncio: `async with AsyncClient() as client: answer = await client.predict("yolov2_tiny", "photo.jpg")`."""

    _transport = httpx.AsyncClient

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def predict(self, model: str, image: ImageLike, **options: Any) -> Answer:
        """The answer for one image. `options`: min_score, top_k, tile, overlap, merge, whole, deadline_ms, strict_device."""
        return await self._ask(calls.predict(model, await self._encoded(image), Options(**options)))

    async def predict_several(self, model: str, images: Iterable[ImageLike], **options: Any) -> list[Answer | Problem]:
        """Several images in one request: answers in their order, a bad image's problem in its place."""
        return await self._ask(calls.predict_several(model, [await self._encoded(i) for i in images], Options(**options)))

    async def predict_many(
        self,
        model: str,
        images: Iterable[I] | AsyncIterable[I],
        *,
        concurrency: int = 4,
        progress: Progress | bool = False,
        **options: Any,
    ) -> AsyncIterator[Done[I]]:
        """Any number of images, `concurrency` at a time, in their order; see `Client.predict_many`."""
        checked = Options(**options)
        room = asyncio.Semaphore(concurrency)

        async def one(image: I) -> Done[I]:
            async with room:
                try:
                    return Done(image, await self._ask(calls.predict(model, await self._encoded(image), checked)))
                except (OutboardError, OSError, TypeError, ValueError) as e:
                    return Done(image, error=e)

        waiting: deque[asyncio.Task[Done[I]]] = deque()
        with _reporting(images, progress) as report:
            try:
                async for image in _each(images):
                    waiting.append(asyncio.create_task(one(image)))
                    if len(waiting) >= 2 * concurrency:
                        yield report(await waiting.popleft())
                while waiting:
                    yield report(await waiting.popleft())
            finally:
                for task in waiting:
                    task.cancel()

    async def picture(self, model: str, image: ImageLike, **options: Any) -> bytes:
        """The image as JPEG with the answer drawn on."""
        return await self._ask(calls.picture(model, await self._encoded(image), Options(**options)))

    async def models(self) -> list[Model]:
        return await self._ask(calls.models())

    async def model(self, name: str) -> Model:
        return await self._ask(calls.model(name))

    async def load(self, name: str) -> Model:
        """Read the model's files again and load it."""
        return await self._ask(calls.load(name))

    async def unload(self, name: str) -> Model:
        return await self._ask(calls.unload(name))

    async def devices(self) -> list[Device]:
        return await self._ask(calls.devices())

    async def device(self, device_id: str) -> Device:
        return await self._ask(calls.device(device_id))

    async def ready(self, *, strict: bool = False) -> Readiness:
        """Whether every model is served; with `strict`, by the device that was asked for."""
        return await self._ask(calls.ready(strict))

    async def _encoded(self, image: ImageLike) -> tuple[bytes, str]:
        if isinstance(image, (bytes, bytearray, memoryview)):
            return encoded(image)
        return await asyncio.to_thread(encoded, image, self.encoding)  # reading and compressing would hold up the loop

    async def _ask(self, call: Call[T]) -> T:
        attempts, began = Attempts(self.patience), time.monotonic()
        while True:
            try:
                return call.result(await self._http.request(call.method, call.path, params=call.params, **call.request))
            except (Problem, httpx.TransportError) as e:
                pause = attempts.pause(call, e, time.monotonic() - began)
            await asyncio.sleep(pause)


async def _each(images: Iterable[T] | AsyncIterable[T]) -> AsyncIterator[T]:
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
    else:
        for image in images:
            yield image


@contextmanager
def _reporting(images: object, progress: Progress | bool) -> Iterator[Callable[[Done[I]], Done[I]]]:
    """A function that counts what passes through it, and tells `progress`."""
    total = len(images) if hasattr(images, "__len__") else None
    count = 0

    def counted(done: Done[I], tell: Progress | None) -> Done[I]:
        nonlocal count
        count += 1
        if tell is not None:
            tell(count, total)
        return done

    if progress is not True:
        yield lambda done: counted(done, progress or None)
        return
    from rich import progress as bars

    with bars.Progress("images", bars.BarColumn(), bars.MofNCompleteColumn(), bars.TimeRemainingColumn()) as bar:
        task = bar.add_task("images", total=total)
        yield lambda done: counted(done, lambda n, of: bar.update(task, completed=n, total=of))
