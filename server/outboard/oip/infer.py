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
from outboard.devices.rows import BYTES, lay_out, pack, room_for, spans
from outboard.oip.request import InferRequest, InferResult, InputTensor, Source, WantedOutput
from outboard.oip.signature import ANSWER, DTYPES, IMAGE, Signature, TensorSpec, signature
from outboard.predictor import Predictor
from outboard.predictor import Request as PredictRequest
from outboard.problems import Problem
from outboard.registry import Registry, Version
from outboard.runtime import Outcome, Runtime, all_of

#: Rows of one frame in the engine; a request that carries more becomes several frames.
FRAME_ROWS = 1024
#: Of so many at once: enough to keep every slot of a device busy.
FRAMES_AT_ONCE = 3
#: Rows of one request. Each costs the engine some 50 us whatever it holds, and other models' rows wait meanwhile: rows of no bytes at all,
#: ten thousand million of them, fit a request of 90 bytes.
MAX_ROWS = 64 * FRAME_ROWS
#: Strings that the classification extension gives for one output; from so many elements on a thread makes them.
MAX_CLASS_STRINGS, IN_THREAD = 100_000, 20_000
#: Shapes of rows whose layout is kept for each model.
LAYOUTS_KEPT = 256

_encode = msgspec.json.Encoder().encode


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

    async def infer(self, model: str, version: str, request: InferRequest, arrived: float) -> tuple[Signature, InferResult]:
        """`arrived` in the loop's seconds. Raises Problem."""
        self.serving(model, version)
        limit = self.runtime.settings.limits.deadline
        deadline = arrived + min(limit, request.seconds or limit)
        with self.registry.use(model) as serving:
            known = self.signature(serving)
            wanted = _wanted(known, request)
            if known.pictures:
                result = await self._pictures(serving, known, request, wanted, deadline)
            else:
                result = await self._tensors(known, request, wanted, deadline)
        result.outputs = [await self._classified(known, w, array) if w.classes else (w, array) for w, array in result.outputs]
        return known, result

    async def _classified(self, known: Signature, wanted: WantedOutput, array: np.ndarray) -> tuple[WantedOutput, np.ndarray]:
        rows = len(array) if known.batched else 1
        strings = rows * min(wanted.classes, array.size // max(rows, 1))
        if strings > MAX_CLASS_STRINGS:
            raise Problem(
                "bad_option",
                f"output {wanted.name!r}: {wanted.classes} classes of {rows} rows are {strings} strings, at most {MAX_CLASS_STRINGS} are "
                "given; ask for fewer classes, or send fewer rows at once",
            )
        if array.size < IN_THREAD:
            return _with_classes(known, wanted, array)
        return await self.runtime.in_thread(_with_classes, known, wanted, array)

    async def _strings(self, tensor: InputTensor) -> memoryview:
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
        if tensor.data.nbytes < 1 << 20:
            return _copied(tensor.data)
        return await self.runtime.in_thread(_copied, tensor.data)

    # ---------------------------------------------------------------- tensors

    async def _tensors(self, known: Signature, request: InferRequest, wanted: list[WantedOutput], deadline: float) -> InferResult:
        given, rows = _checked(known, request.inputs)
        strings = {t.name: _rows_of_strings(t, await self._strings(t), rows) for t in given if t.datatype == "BYTES"}
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
            )

        outcomes = [await submit(0, rows, deadline)] if rows <= FRAME_ROWS else await self._in_turns(submit, rows, deadline)
        answers = [row for outcome in outcomes for row in outcome.rows]
        outputs = [(w, answers[0][w.name] if not known.batched else _stacked(w.name, answers)) for w in wanted]
        return InferResult(outputs, outcomes[0].device, any(o.degraded for o in outcomes))

    async def _in_turns(self, submit: Callable[[int, int, float], asyncio.Future[Outcome]], rows: int, deadline: float) -> list[Outcome]:
        """The outcomes of a request of several frames. They are ordered among others' as if a client sent one after the other: all at once
        they would be due before whatever comes meanwhile, and a model beside this one would wait for seconds."""
        under_way: deque[asyncio.Future[Outcome]] = deque()
        outcomes = []
        try:
            async with asyncio.timeout_at(deadline if deadline < inf else None):
                for first in range(0, rows, FRAME_ROWS):
                    if len(under_way) >= FRAMES_AT_ONCE:
                        outcomes.append(await under_way[0])
                        under_way.popleft()
                    # Later ones are due when they have waited for long, however soon the request's own deadline is.
                    patient = first >= FRAMES_AT_ONCE * FRAME_ROWS
                    under_way.append(submit(first, min(FRAME_ROWS, rows - first), inf if patient else deadline))
                return outcomes + await all_of(under_way)
        except TimeoutError as e:
            done = len(outcomes) * FRAME_ROWS
            raise Problem(
                "deadline_missed", f"{done} of {rows} rows were answered when the deadline was over; send fewer at once, or allow more time"
            ) from e
        finally:
            for future in under_way:
                future.cancel()

    # ---------------------------------------------------------------- pictures

    async def _pictures(
        self, version: Version, known: Signature, request: InferRequest, wanted: list[WantedOutput], deadline: float
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
        packed = await self._strings(given[0])
        images = [bytes(packed[start:end]) for start, end in _spans(given[0], packed, n)]
        asked = PredictRequest(options=tasks.Options(), deadline=deadline)

        async def one(index: int, image: bytes) -> tuple[dict[str, Any], Outcome]:
            try:
                return await self._predictor.predict_rows(version, image, asked)
            except Problem as e:
                raise Problem(e.slug, f"image {index}: {e.detail}" if n > 1 else e.detail, retry_after=e.retry_after) from e

        answers = await all_of([asyncio.ensure_future(one(i, image)) for i, image in enumerate(images)])
        outputs = []
        for w in wanted:
            if w.name == ANSWER:
                array = np.empty(n, object)
                array[:] = [_encode(answer) for answer, _ in answers]
            else:
                array = _stacked(w.name, [outcome.rows[0] for _, outcome in answers])
            outputs.append((w, array))
        return InferResult(outputs, answers[0][0]["device"], any(answer["degraded"] for answer, _ in answers))


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
            _fill_from(place, slot, content, first, rows)


def _fill_from(place: np.ndarray, slot: Slot, source: Any, first: int, rows: int) -> None:
    if place.flags.c_contiguous and len(place) == rows:
        source.read_into(memoryview(place.reshape(-1)))
    else:  # several inputs, or several frames: what lies together in the region does not in the rows
        whole = np.empty(source.nbytes, np.uint8)
        source.read_into(memoryview(whole))
        np.copyto(place, whole.reshape(rows, -1)[first : first + len(place)])
    if slot.dtype == "bool" and place.size and place.max() > 1:
        raise Problem("bad_input", f"input {slot.name!r} is BOOL: each byte must be 0 or 1")


def _stacked(name: str, rows: list[dict[str, np.ndarray]]) -> np.ndarray:
    if len(rows) == 1:
        return rows[0][name][None]
    try:
        return np.stack([row[name] for row in rows])
    except ValueError:
        shapes = sorted({str(list(row[name].shape)) for row in rows})
        raise Problem(
            "inference_failed", f"output {name!r} has rows of different shapes ({', '.join(shapes[:4])}): send them one by one"
        ) from None


def _with_classes(known: Signature, wanted: WantedOutput, array: np.ndarray) -> tuple[WantedOutput, np.ndarray]:
    """The classification extension: the best `classes` values of each row as "value:index" or "value:index:label"."""
    labels = known.outputs[wanted.name].labels
    rows = array.reshape(len(array), -1) if known.batched else array.reshape(1, -1)
    best = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, : wanted.classes]
    strings = np.empty(best.shape, object)
    for (i, j), index in np.ndenumerate(best):
        label = f":{labels[index]}" if index < len(labels) else ""
        strings[i, j] = f"{float(rows[i, index]):f}:{index}{label}".encode()
    return wanted, strings if known.batched else strings[0]


def packed_output(array: np.ndarray) -> bytes | memoryview:
    """An output's bytes on the wire."""
    if array.dtype.kind == "O":
        return pack(array.reshape(-1))
    array = np.ascontiguousarray(array)
    return memoryview(array.reshape(-1).view(np.uint8)) if array.size else b""
