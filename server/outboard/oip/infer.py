"""A request to its result: checked against what the model takes, copied once into frame memory, run, put together again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import msgspec
import numpy as np

from outboard import tasks
from outboard.devices.protocol import Slot
from outboard.devices.rows import BYTES, lay_out, room_for, spans
from outboard.oip.outputs import (
    MANY_BYTES,
    MANY_ELEMENTS,
    Collector,
    least_bytes,
    refuse_larger,
    refuse_many_strings,
    with_classes,
)
from outboard.oip.request import InferRequest, InferResult, InputTensor, Source, WantedOutput
from outboard.oip.signature import ANSWER, DTYPES, IMAGE, Signature, TensorSpec, signature
from outboard.predictor import Predictor
from outboard.predictor import Request as PredictRequest
from outboard.problems import Problem
from outboard.registry import Registry, Version
from outboard.runtime import Outcome, Runtime, abandon, all_of

#: Of one frame in the engine, at most so many rows, of so many bytes, that keep the devices busy for so long; a request that carries more
#: becomes several frames.
FRAME_ROWS, FRAME_BYTES, FRAME_SECONDS = 1024, 32 << 20, 0.02
#: Of so many at once: enough to keep every slot of a device busy.
FRAMES_AT_ONCE = 3
#: So many rows of a request are as urgent as it says; beyond, a model beside it would wait for seconds.
URGENT_ROWS = FRAMES_AT_ONCE * FRAME_ROWS
#: Rows of one request. Each costs the engine some 50 us whatever it holds, and other models' rows wait meanwhile: rows of no bytes at all,
#: ten thousand million of them, fit a request of 90 bytes.
MAX_ROWS = 64 * FRAME_ROWS
#: Of shared memory that are copied twice, as the rows of several inputs are, so many at a time.
COPY_BYTES = 1 << 20
#: Shapes of rows whose layout is kept for each model.
LAYOUTS_KEPT = 256

_encode = msgspec.json.Encoder().encode

#: Takes a number of bytes. Raises Problem memory_full.
Account = Callable[[int], None]


class Inferer:
    """Answers requests with the models of a registry."""

    def __init__(self, runtime: Runtime, registry: Registry):
        self.runtime = runtime
        self.registry = registry
        self._predictor = Predictor(runtime)
        self._signatures: dict[tuple[str, str], Signature] = {}

    def signature(self, version: Version) -> Signature:
        """Raises Problem model_not_ready."""
        key = (version.spec.name, version.spec.version)
        known = self._signatures.get(key)
        if known is None or (known.network and known.network not in self.runtime.networks):
            known = signature(self.runtime, version)
            if len(self._signatures) > 1024:  # versions come and go
                self._signatures.clear()
            self._signatures[key] = known
        return known

    def serving(self, model: str, version: str = "") -> Version:
        """The version that answers. Raises Problem model_not_found, model_not_ready, model_invalid."""
        found = self.registry.serving(model)
        if version and version != found.spec.version:
            raise Problem(
                "model_not_found", f"{model} has no version {version[:80]!r}; {found.spec.version} serves, or leave the version out"
            )
        return found

    async def infer(
        self, model: str, version: str, request: InferRequest, arrived: float, account: Account
    ) -> tuple[Signature, InferResult]:
        """`arrived` in the loop's seconds. `account` is told of bytes that are held until the answer has left. Raises Problem."""
        self.serving(model, version)
        limit = self.runtime.settings.limits.deadline
        deadline = arrived + min(limit, request.seconds or limit)
        with self.registry.use(model) as serving:
            known = self.signature(serving)
            wanted = _wanted(known, request)
            if known.pictures:
                result = await self._pictures(serving, known, request, wanted, deadline, account)
            else:
                result = await self._tensors(known, request, wanted, deadline, account)
        result.outputs = [await self._classified(known, w, array) if w.classes else (w, array) for w, array in result.outputs]
        return known, result

    async def _classified(self, known: Signature, wanted: WantedOutput, array: np.ndarray) -> tuple[WantedOutput, np.ndarray]:
        rows = len(array) if known.batched else 1
        refuse_many_strings(known, [wanted], rows, array.size // max(rows, 1))
        if array.size < MANY_ELEMENTS:
            return with_classes(known, wanted, array)
        return await self.runtime.in_thread(with_classes, known, wanted, array)

    async def _strings(self, tensor: InputTensor, account: Account) -> memoryview:
        """The packed strings of a BYTES input, out of shared memory into memory of our own. Raises Problem."""
        if isinstance(tensor.data, memoryview):
            return tensor.data
        limit = self.runtime.settings.limits.body
        if tensor.data.nbytes > limit:
            raise Problem(
                "body_too_large",
                f"input {tensor.name!r} has {tensor.data.nbytes} bytes in shared memory, at most {limit} are taken as strings; say in "
                "shared_memory_byte_size how many they are, or set [limits] body to take more",
            )
        account(tensor.data.nbytes)
        if tensor.data.nbytes < 1 << 20:
            return _copied(tensor.data)
        return await self.runtime.in_thread(_copied, tensor.data)

    # ---------------------------------------------------------------- tensors

    async def _tensors(
        self, known: Signature, request: InferRequest, wanted: list[WantedOutput], deadline: float, account: Account
    ) -> InferResult:
        given, rows = _checked(known, request.inputs)
        limit, answer_bytes = self.runtime.settings.limits.answer, least_bytes(known, wanted)
        refuse_larger(rows * answer_bytes, rows, limit)
        refuse_many_strings(known, wanted, rows)
        strings = {t.name: _rows_of_strings(t, await self._strings(t, account), rows) for t in given if t.datatype == "BYTES"}
        shapes = tuple([t.shape for t in given])
        layout = None if strings else known.layouts.get(shapes)
        if layout is None:
            layout = _layout(known, given, strings)
            if not strings:
                if len(known.layouts) >= LAYOUTS_KEPT:
                    known.layouts.clear()
                known.layouts[shapes] = layout
        slots, row_bytes, contents = *layout, _contents(given, rows, strings)

        def submit(first: int, count: int, deadline: float) -> asyncio.Future[Outcome]:
            return self.runtime.submit(
                known.network,
                slots,
                lambda view: _fill(view, slots, contents, first, rows),
                deadline=deadline,
                rows=count,
                body=request.body,
                row_bytes=row_bytes,
                whole=not first,
            )

        collected = Collector(wanted, known.batched, rows, limit, account)
        part = self._rows_of_a_frame(known.network, max(row_bytes, answer_bytes))
        if rows <= part:
            outcomes = [await submit(0, rows, deadline)]
            await self._collect(collected, outcomes[0])
        else:
            outcomes = await self._in_turns(submit, known.network, rows, part, deadline, collected)
        return InferResult(collected.outputs(), outcomes[0].device, any(o.degraded for o in outcomes))

    def _rows_of_a_frame(self, network: str, row_bytes: int) -> int:
        most = max(1, min(FRAME_ROWS, FRAME_BYTES // max(row_bytes, 1)))
        return min(most, self.runtime.engine.rows_within(network, FRAME_SECONDS) or most)

    async def _collect(self, collected: Collector, outcome: Outcome) -> None:
        """What is taken of an outcome's rows is let go of."""
        rows, outcome.rows = outcome.rows, []
        if collected.empty:
            collected.expect(rows[0])
        if len(rows) > 1 and len(rows) * sum(array.nbytes for array in rows[0].values()) > MANY_BYTES:
            await self.runtime.in_thread(collected.add, rows)
        else:
            collected.add(rows)

    async def _in_turns(
        self,
        submit: Callable[[int, int, float], asyncio.Future[Outcome]],
        network: str,
        rows: int,
        part: int,
        deadline: float,
        collected: Collector,
    ) -> list[Outcome]:
        """The outcomes of a request of several frames. They are ordered among others' as if a client sent one after the other: all at once
        they would be due before whatever comes meanwhile, and a model beside this one would wait for seconds."""
        self.runtime.check_in_time(network, rows, deadline)
        allowed = deadline - self.runtime.now()
        under_way: deque[asyncio.Future[Outcome]] = deque()
        outcomes: list[Outcome] = []

        async def first_of_them() -> None:
            outcomes.append(await under_way[0])
            under_way.popleft()
            await self._collect(collected, outcomes[-1])

        try:
            async with asyncio.timeout_at(deadline if deadline < inf else None):
                for first in range(0, rows, part):
                    if len(under_way) >= FRAMES_AT_ONCE:
                        await first_of_them()
                    due = self.runtime.now() + allowed if first < URGENT_ROWS else inf
                    under_way.append(submit(first, min(part, rows - first), due))
                while under_way:
                    await first_of_them()
            return outcomes
        except TimeoutError as e:
            done = len(outcomes) * part
            raise Problem(
                "deadline_missed", f"{done} of {rows} rows were answered when the deadline was over; send fewer at once, or allow more time"
            ) from e
        finally:
            abandon(under_way)
            under_way.clear()

    # ---------------------------------------------------------------- pictures

    async def _pictures(
        self, version: Version, known: Signature, request: InferRequest, wanted: list[WantedOutput], deadline: float, account: Account
    ) -> InferResult:
        given = request.inputs
        if len(given) != 1 or given[0].name != IMAGE or given[0].datatype != "BYTES" or len(given[0].shape) not in (1, 2):
            said = ", ".join(f"{t.name!r} {t.datatype} {list(t.shape)}" for t in given) or "none"
            raise Problem(
                "bad_input",
                f"{known.model} takes one input {IMAGE!r}, BYTES [n] or [n, 1], each element a whole JPEG or PNG file; got {said}",
            )
        n, most = prod(given[0].shape), self.runtime.settings.limits.images
        if not 0 < n <= most:
            raise Problem("too_many_images" if n else "bad_input", f"{n} images, expected 1 to {most} in one request")
        limit = self.runtime.settings.limits.answer
        refuse_larger(n * least_bytes(known, wanted), n, limit)
        refuse_many_strings(known, wanted, n)
        packed = await self._strings(given[0], account)
        images = [bytes(packed[start:end]) for start, end in _spans(given[0], packed, n)]
        asked = PredictRequest(options=tasks.Options(), deadline=deadline)

        async def one(index: int, image: bytes) -> tuple[dict[str, Any], Outcome]:
            try:
                return await self._predictor.predict_rows(version, image, asked)
            except Problem as e:
                raise Problem(e.slug, f"image {index}: {e.detail}" if n > 1 else e.detail, retry_after=e.retry_after) from e

        answers = await all_of([asyncio.ensure_future(one(i, image)) for i, image in enumerate(images)])
        rows = [{ANSWER: _string(_encode(answer))} | outcome.rows[0] for answer, outcome in answers]
        collected = Collector(wanted, True, n, limit, account)
        collected.expect(rows[0])
        collected.add(rows)
        return InferResult(collected.outputs(), answers[0][0]["device"], any(answer["degraded"] for answer, _ in answers))


# -------------------------------------------------------------------- checks


def _wanted(known: Signature, request: InferRequest) -> list[WantedOutput]:
    if not request.outputs:
        return [WantedOutput(name, request.binary) for name in known.usual]
    seen: set[str] = set()
    for w in request.outputs:
        if w.name not in known.outputs or w.name in seen:
            what = "is asked for twice" if w.name in seen else "does not exist"
            raise Problem("bad_input", f"output {w.name[:80]!r} {what}; {known.model} has {', '.join(known.outputs)}")
        if w.classes and known.outputs[w.name].datatype == "BYTES":
            raise Problem("bad_input", f"output {w.name!r} holds strings, which have no best classes")
        seen.add(w.name)
    return request.outputs


def _checked(known: Signature, given: Sequence[InputTensor]) -> tuple[list[InputTensor], int]:
    """The inputs in the model's order, and their rows. Raises Problem bad_input that names the input."""
    by_name = {t.name: t for t in given}
    if len(by_name) < len(given):
        names = [t.name for t in given]
        raise Problem("bad_input", f"input {next(n for n in names if names.count(n) > 1)[:80]!r} is given twice")
    for name in by_name:
        if name not in known.inputs:
            raise Problem("bad_input", f"input {name[:80]!r} does not exist; {known.model} takes {', '.join(known.inputs)}")
    rows = 1
    ordered = []
    for spec in known.inputs.values():
        t = by_name.get(spec.name)
        if t is None:
            raise Problem("bad_input", f"input {spec.name!r} is missing; {known.model} takes {', '.join(known.inputs)}")
        if t.datatype != spec.datatype:
            raise Problem("bad_input", f"input {spec.name!r} is {t.datatype[:20]}, expected {spec.datatype}")
        if not _fits(t.shape, spec, known.batched):
            raise Problem("bad_input", f"input {spec.name!r} has shape {list(t.shape)}, expected {spec.shape(known.batched)}")
        if known.batched:
            if ordered and t.shape[0] != rows:
                raise Problem("bad_input", f"input {spec.name!r} has {t.shape[0]} rows, input {ordered[0].name!r} has {rows}")
            rows = t.shape[0]
            if not rows:
                raise Problem("bad_input", f"input {spec.name!r} has no rows")
            if rows > MAX_ROWS:
                raise Problem("bad_input", f"input {spec.name!r} has {rows} rows, at most {MAX_ROWS} are taken at once; send it in parts")
        ordered.append(t)
    return ordered, rows


def _fits(shape: tuple[int, ...], spec: TensorSpec, batched: bool) -> bool:
    axes = shape[1:] if batched else shape
    return len(shape) == len(spec.axes) + batched and all(want in (None, got) for got, want in zip(axes, spec.axes, strict=True))


def _string(value: bytes) -> np.ndarray:
    array = np.empty((), object)
    array[()] = value
    return array


def _copied(source: Source) -> memoryview:
    buffer = memoryview(bytearray(source.nbytes))
    source.read_into(buffer)
    return buffer


def _spans(tensor: InputTensor, packed: memoryview, count: int) -> list[tuple[int, int]]:
    try:
        found = spans(packed, count)
    except ValueError as e:
        raise Problem("bad_input", f"input {tensor.name!r}: {e}") from e
    end = found[-1][1] if found else 0
    # A region of shared memory may be larger than what lies in it.
    if isinstance(tensor.data, memoryview) and end != len(packed):
        raise Problem("bad_input", f"input {tensor.name!r} of shape {list(tensor.shape)} ends after {end} of {len(packed)} bytes")
    return found


# -------------------------------------------------------------------- rows


def _layout(known: Signature, given: Sequence[InputTensor], strings: dict[str, list[tuple[int, int]]]) -> tuple[tuple[Slot, ...], int]:
    """Where each input lies in a row. `strings`: of each BYTES input (start, end) of its rows."""
    places = []
    for t, spec in zip(given, known.inputs.values(), strict=True):
        axes = t.shape[1:] if known.batched else t.shape
        if t.datatype == "BYTES":
            places.append((t.name, BYTES, axes, room_for(max(end - start for start, end in strings[t.name]))))
        else:
            dtype = DTYPES[spec.datatype]
            places.append((t.name, dtype, axes, prod(axes) * np.dtype(dtype).itemsize))
    return lay_out(places)


def _rows_of_strings(tensor: InputTensor, packed: memoryview, rows: int) -> list[tuple[int, int]]:
    """(start, end) of each row's packed strings; leaves the bytes in `tensor.data`."""
    each = prod(tensor.shape) // rows
    found = _spans(tensor, packed, rows * each)
    tensor.data = packed
    if not each:
        return [(0, 0)] * rows
    return [(found[i * each][0] - 4, found[(i + 1) * each - 1][1]) for i in range(rows)]


def _contents(given: Sequence[InputTensor], rows: int, strings: dict[str, list[tuple[int, int]]]) -> list[Any]:
    """What is copied into the rows, by input: an array of bytes [rows, n], a source of all rows, or a list of a row's strings."""
    contents: list[Any] = []
    for t in given:
        if t.datatype == "BYTES":
            contents.append([t.data[start:end] for start, end in strings[t.name]])
            continue
        dtype = np.dtype(DTYPES[t.datatype])
        expected = prod(t.shape) * dtype.itemsize
        got = t.data.nbytes
        if got != expected:
            raise Problem("bad_input", f"input {t.name!r} has {got} bytes, expected {expected} for {t.datatype} {list(t.shape)}")
        if not isinstance(t.data, memoryview):
            contents.append(t.data)
            continue
        array = np.frombuffer(t.data, np.uint8)
        if t.datatype == "BOOL" and array.size and array.max() > 1:
            raise Problem("bad_input", f"input {t.name!r} is BOOL: each byte must be 0 or 1")
        contents.append(array.reshape(rows, -1) if expected else array.reshape(rows, 0))
    return contents


def _fill(view: np.ndarray, slots: Sequence[Slot], contents: Sequence[Any], first: int, rows: int) -> None:
    """Copy rows `first` … into `view`, uint8 [count, row_bytes]."""
    count = len(view)
    for slot, content in zip(slots, contents, strict=True):
        place = view[:, slot.offset : slot.offset + slot.nbytes]
        if isinstance(content, list):
            for i in range(count):
                row = content[first + i]
                place[i, : len(row)] = np.frombuffer(row, np.uint8)
        elif isinstance(content, np.ndarray):
            np.copyto(place, content[first : first + count])
        else:
            _fill_from(place, slot, content, first)


def _fill_from(place: np.ndarray, slot: Slot, source: Source, first: int) -> None:
    """Rows `first` … of a source of rows that lie side by side."""
    at = first * slot.nbytes
    if place.flags.c_contiguous:
        source.read_into(memoryview(place.reshape(-1)), at)
    else:  # several inputs: what lies together there does not here
        step = max(1, COPY_BYTES // max(slot.nbytes, 1))
        for i in range(0, len(place), step):
            some = place[i : i + step]
            together = np.empty(some.shape, np.uint8)
            source.read_into(memoryview(together.reshape(-1)), at + i * slot.nbytes)
            np.copyto(some, together)
    if slot.dtype == "bool" and place.size and place.max() > 1:
        raise Problem("bad_input", f"input {slot.name!r} is BOOL: each byte must be 0 or 1")
