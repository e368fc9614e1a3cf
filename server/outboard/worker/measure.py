"""Proving and measuring a network before it serves: golden input, rows independent of their neighbours, cost of each batch size."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from outboard.core import measuring
from outboard.core.costs import BatchCost, batch_sizes
from outboard.core.costs import Costs as CostModel
from outboard.repository import ModelProblem
from outboard.worker.errors import classify
from outboard.worker.networks import LoadedNetwork

log = logging.getLogger(__name__)

BUDGET_S = 0.6  #: time to spend on one network's costs, over all batch sizes, while a server waits to be ready
THOROUGH_S = 6.0  #: and where nobody waits
SIZE_SHARE = 1 / 10  #: of it for one batch size, so that it is enough for all, and for those between them; each is run twice in any case
SLOW_S = 0.2  #: above this a batch is run as rarely as a judgement allows: the server is waiting to be ready

#: A stored profile that says this many times as long as a batch takes now was measured on a machine that was busy.
STALE = 2.0

Costs = list[BatchCost]


def seeded_image(width: int, height: int) -> np.ndarray:
    """uint8 [h, w, 3], the same on every machine: soft colours with noise, so that no layer sees a constant."""
    x, y = np.linspace(0, 1, width), np.linspace(0, 1, height)[:, None]
    soft = np.stack([np.broadcast_to(x, (height, width)), np.broadcast_to(y, (height, width)), (x + y) / 2], axis=-1)
    noise = np.random.default_rng(0).integers(0, 64, (height, width, 3))
    return (soft * 191 + noise).astype(np.uint8)


def golden(network: LoadedNetwork) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The golden input [h, w, 3] and the network's answers for it (batch of 1). Raises ModelProblem where golden.npz disagrees."""
    width, height = network.network.input.size
    path = network.spec.directory / "golden.npz"
    expected: dict[str, np.ndarray] = {}
    image = seeded_image(width, height)
    if path.is_file() and not network.spec.toml.parts:
        try:
            with np.load(path, allow_pickle=False) as stored:
                expected = {name: stored[name] for name in stored.files}
            image = np.ascontiguousarray(expected.pop("input"))
        except (OSError, ValueError, KeyError) as e:
            raise ModelProblem(
                str(path), "golden", "an .npz with `input`, uint8 [height, width, 3], and the outputs by name", str(e)
            ) from e
        if image.dtype != np.uint8 or image.ndim != 3:
            raise ModelProblem(str(path), "golden", "`input` as uint8 [height, width, 3]", f"it is {image.dtype} {list(image.shape)}")
    answers = network.run(image.reshape(-1), [0], image.shape)
    for name, want in expected.items():
        if name not in answers:
            raise ModelProblem(str(path), "golden", f"outputs named {sorted(answers)}", f"it has {name!r}")
        if difference := disagreement(
            answers[name], want.reshape(answers[name].shape) if want.size == answers[name].size else want, network.spec.rtol
        ):
            raise ModelProblem(str(path), "golden", f"output {name!r} as stored", difference)
    return image, answers


def difference(network: LoadedNetwork, other: LoadedNetwork) -> str:
    """Empty if both answer the golden input alike, else which output differs and how."""
    image, answers = golden(network)
    _, expected = golden(other)
    for name, want in expected.items():
        if why := disagreement(answers[name], want, network.spec.rtol):
            return f"output {name!r}: {why}"
    return ""


def disagreement(got: np.ndarray, want: np.ndarray, relative: float) -> str:
    """Empty if the arrays agree within `relative` of the largest finite magnitude of `want`, else how they differ."""
    if got.shape != want.shape:
        return f"shape {list(got.shape)} instead of {list(want.shape)}"
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return "other values are NaN or infinite"
    difference = np.abs(np.nan_to_num(a - b)).max(initial=0.0)
    allowed = relative * np.abs(np.where(np.isfinite(b), b, 0)).max(initial=0.0)
    return "" if difference <= allowed else f"values differ by up to {difference:.3g}, {allowed:.3g} is allowed"


def mixed_rows(image: np.ndarray, rows: int) -> tuple[np.ndarray, list[int]]:
    """`rows` different pictures in one memory, and their offsets: the image, moved and darkened from row to row."""
    pictures = np.stack([np.roll(image, 7 * i, axis=1) // (1 + i % 3) for i in range(rows)])
    return pictures.reshape(-1), [i * image.nbytes for i in range(rows)]


def check_rows_independent(network: LoadedNetwork, image: np.ndarray) -> None:
    """Run singly any network whose batch of 2 or 3 does not answer each row as alone."""
    if network.max_rows == 1:
        return
    began = time.perf_counter()
    network.run(image.reshape(-1), [0], image.shape)
    rows = min(2 if time.perf_counter() - began > SLOW_S else 3, network.max_rows)
    memory, offsets = mixed_rows(image, rows)
    why = ""
    try:
        together = network.run(memory, offsets, image.shape)
    except Exception as e:  # a graph that takes one row only may fail in any way
        why = f"a batch of {rows} fails: {e}"
    else:
        alone = [network.run(memory, [offset], image.shape) for offset in offsets]
        for name, array in together.items():
            if array.ndim == 0 or array.shape[0] != rows:
                why = why or f"output {name!r} of {rows} rows has shape {list(array.shape)}"
                continue
            for i, single in enumerate(alone):
                difference = disagreement(array[i : i + 1], single[name], network.spec.rtol)
                why = why or (difference and f"row {i} of output {name!r} depends on its neighbours: {difference}")
    if why:
        log.warning("%s: rows run singly: %s", network.network.key, why)
        network.run_singly()


def picture_costs(network: LoadedNetwork, image: np.ndarray, slots: int, known: Costs | None, budget_s: float) -> Costs:
    """`costs` of a network that takes pictures, rows that depend on their neighbours found before (`known`: they were)."""

    def batch(rows: int) -> Callable[[], object]:
        memory, offsets = mixed_rows(image, rows)
        return lambda: network.run(memory, offsets, image.shape)

    if known is None:
        check_rows_independent(network, image)
    return costs(network, batch, image.nbytes, slots, known, budget_s)


def costs(
    network: LoadedNetwork,
    batch: Callable[[int], Callable[[], object]],
    row_bytes: int,
    slots: int,
    known: Costs | None,
    budget_s: float,
) -> Costs:
    """What is known, once a few batches have shown that it is still so; else as `cost_table` measures."""
    network.device.watch_memory()
    if known and still_true(network, batch, known):
        measured = known
    else:
        measured = cost_table(network, batch, row_bytes, slots, budget_s)
        network.backend.shrink()  # the largest batch that was tried took three times what the usual one needs
        batch(1)()
    network.kept_bytes = network.device.memory_grown() if network.device.keeps_memory else 0
    return measured


def cost_table(
    network: LoadedNetwork, batch: Callable[[int], Callable[[], object]], row_bytes: int, slots: int, budget_s: float
) -> Costs:
    """What batches of 1, 2, 4, 8 … up to `network.max_rows` rows cost, with `slots` of them at once, and of a few sizes between where an
    accelerator's costs bend. `batch` makes what runs a batch of so many rows of `row_bytes`.

    Every batch size that will be used is thereby warmed. Stops early where a batch gets long, throughput falls clearly, or an
    out-of-memory shows the limit.
    """
    device = network.device
    busy = _busy_seconds if device.parallel else _interval_seconds
    alone = {} if device.parallel else _alone(network, batch, budget_s)
    deadline = time.perf_counter() + budget_s

    def seconds(rows: int) -> float | None:
        try:
            return busy(batch(rows), slots, min(SIZE_SHARE * budget_s, max(0.0, deadline - time.perf_counter()) / 3))
        except Exception as e:
            if rows in alone and classify(e) == "oom":
                return alone[rows][0]  # one fits, two at once do not: it never has company
            return _not_used(network, rows, e)

    def late() -> bool:
        return time.perf_counter() > deadline

    company = measuring.beside({rows: took for rows, (took, _) in alone.items()}, seconds, late)
    measured: Costs = []
    for rows, took in measuring.table(list(alone) or batch_sizes(network.max_rows), company, late):
        quiet, memory = alone.get(rows, (took, 0))
        upload = min(device.link.upload(rows * row_bytes), quiet) if device.link else 0.0
        measured.append(BatchCost(rows, took, quiet, upload, memory))
    return measured


def _alone(network: LoadedNetwork, batch: Callable[[int], Callable[[], object]], budget_s: float) -> dict[int, tuple[float, int]]:
    """rows -> (seconds of a batch that has the device to itself, bytes that it needs there).

    All sizes before any of them is run beside others: allocators keep what they have taken, so the growth that one batch causes is only
    seen while nothing larger has run.
    """
    memory: dict[int, int] = {}
    deadline = time.perf_counter() + budget_s

    def late() -> bool:
        return time.perf_counter() > deadline

    def seconds(rows: int) -> float | None:
        try:
            return _busy_seconds(batch(rows), 1, min(SIZE_SHARE * budget_s, max(0.0, deadline - time.perf_counter()) / 3))
        except Exception as e:
            return _not_used(network, rows, e)

    def growing(rows: int) -> float | None:
        took = seconds(rows)
        memory[rows] = network.device.memory_grown()
        return took

    tried = measuring.table(batch_sizes(network.max_rows), growing, late)
    # What those between need is not seen any more.
    return {rows: (took, memory.get(rows, 0)) for rows, took in measuring.refined(tried, seconds, late)}


def _not_used(network: LoadedNetwork, rows: int, error: Exception) -> None:
    """Batches of `rows` rows fail. Where single ones do, too, the network cannot serve: raises `error`."""
    if rows == 1:
        raise error
    log.warning("%s: batches of %d and more are not used: %s", network.network.key, rows, error)


def still_true(network: LoadedNetwork, batch: Callable[[int], Callable[[], object]], known: Costs) -> bool:
    """Warm the batch sizes that the network will get here, and compare what is known with what a batch of the usual size takes now.

    An accelerator is warmed for every size. The CPU needs it for none, and it is busy with other loads: there, and on a simulated device
    that computes on it, a batch that takes longer says nothing, one that takes much less tells that the profile was measured on a busy
    machine.
    """
    device = network.device
    usual = CostModel(known).knee(network.max_rows)
    if not device.shared:
        for cost in known:
            batch(cost.rows)()
    run = batch(usual)
    if usual > 1 and not device.shared:  # a batch of 1 was warmed by the golden input
        run()
    began = time.perf_counter()
    run()
    ratio = (time.perf_counter() - began) / next(c.alone or c.seconds for c in known if c.rows == usual)
    if ratio < 1 / STALE or (ratio > STALE and not device.shared):
        log.info("%s: a batch of %d rows takes %.2f of what its profile says: measured anew", network.network.key, usual, ratio)
        return False
    return True


def is_faster(network: LoadedNetwork, other: LoadedNetwork, sizes: Sequence[int], slots: int) -> bool:
    """Whether `network` answers more rows a second than `other`, each at its best of `sizes`.

    In turns, because a machine's speed drifts by more than the two differ: costs measured minutes apart cannot be compared.
    """
    width, height = network.network.input.size
    image = seeded_image(width, height)
    rates = [0.0, 0.0]
    for _ in range(3):
        for i, candidate in enumerate((network, other)):
            for rows in sizes:
                memory, offsets = mixed_rows(image, rows)
                seconds = _busy_seconds(lambda c=candidate, m=memory, o=offsets: c.run(m, o, image.shape), slots, 0.0)
                rates[i] = max(rates[i], rows / seconds)
    return rates[0] > rates[1]


def _busy_seconds(batch: Callable[[], object], slots: int, budget_s: float) -> float:
    """Seconds of `batch` while `slots` threads run it."""
    return measuring.usual(end - start for start, end in _spans(batch, slots, budget_s))


def _interval_seconds(batch: Callable[[], object], slots: int, budget_s: float) -> float:
    """Seconds from one batch's end to the next one's while `slots` threads keep a pipeline full."""
    ends = [end for _, end in _spans(batch, slots, budget_s, least=3)]
    return measuring.usual(b - a for a, b in zip(ends, ends[slots:], strict=False)) / slots


def _spans(batch: Callable[[], object], slots: int, budget_s: float, least: int = 2) -> list[tuple[float, float]]:
    """(start, end) of runs of `batch` in `slots` threads, by their ends, after one run in each to warm up: at least `least` runs each and
    until two are alike, or one less where it is slow."""
    spans: list[tuple[float, float]] = []
    errors: list[BaseException] = []
    barrier = threading.Barrier(slots)

    def slot() -> None:
        try:
            start = time.perf_counter()
            batch()
            slow = time.perf_counter() - start > max(SLOW_S, budget_s)
            barrier.wait()
            until = time.perf_counter() + budget_s
            own: list[float] = []
            while time.perf_counter() < until or not (len(own) >= least - 1 if slow else measuring.enough(own, least)):
                start = time.perf_counter()
                batch()
                end = time.perf_counter()
                spans.append((start, end))
                own.append(end - start)
        except threading.BrokenBarrierError:
            pass
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=slot, name="measure") for _ in range(slots)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sorted(spans, key=lambda span: span[1])
