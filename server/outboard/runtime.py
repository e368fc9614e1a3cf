"""The driver of the engine in real time: commands become threads' and workers' work, what comes back becomes events.

Nothing is decided here. One object on one event loop; every method runs on that loop except `_fill_in_thread`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from outboard import resources, tasks
from outboard.core import commands as c
from outboard.core.engine import ISOLATION, Engine, EngineConfig
from outboard.core.failback import FailbackPolicy
from outboard.core.state import ANYBODY, Batch, Jpeg, Layout, Network, Sender, Shape
from outboard.devices import presence, probe, protocol
from outboard.devices.figures import Figures
from outboard.devices.simulated import EXIT_UNPLUGGED, FAULTS, LASTING_FAULTS, PHASED_FAULTS, PHASES, memory_taken
from outboard.devices.slab import Slab
from outboard.devices.supervisor import Supervisor, Worker
from outboard.imaging import coded
from outboard.problems import Problem
from outboard.repository import ModelSpec
from outboard.repository import Network as ModelNetwork
from outboard.settings import Settings
from outboard.tasks.golden import agree, plausible
from outboard.telemetry import logs, metrics, tracing
from outboard.telemetry.statistics import ModelStatistics

log = logging.getLogger(__name__)

T = TypeVar("T")
#: A row's outputs, or why there are none.
Answer = dict[str, np.ndarray] | Problem

#: By the setting `devices.spill_over`. A simulated card computes on this very CPU, which would only take cores from it.
SPILL_BESIDE = {"auto": ("gpu",), "on": ("gpu", "sim"), "off": ()}
#: `Loaded.provider` of code that torch has compiled.
COMPILED = "torch compiled"
#: Exit status of a worker whose device cannot be opened (worker/__main__.py).
EXIT_NO_DEVICE = 3
#: A tensor of so many bytes is copied into the slab by the loop itself: handing it to a thread takes longer.
FILL_HERE = 2 << 20
#: Answers of a batch of more elements than this are copied out by a thread: the loop would do nothing else for a millisecond or more.
READ_HERE = 1 << 20
#: Seconds to copy a byte of a tensor into the slab, pages that are touched for the first time included.
COPY_SECONDS = 0.5e-9
#: A JPEG for a device's decoder of so many bytes is copied by the loop itself: 0.1 ms.
COPY_HERE = 256 << 10
#: A card that is back on the bus need not work: after a fatal error the driver refuses every process until its module is loaded anew.
DRIVER_HINT = (
    ". If `nvidia-smi` works and this goes on, the driver's memory module needs a reload, which only root can do: stop what uses the GPU, "
    "then `rmmod nvidia_uvm && modprobe nvidia_uvm`"
)


@dataclass(slots=True)
class Outcome:
    """What a frame's rows gave: one dict of arrays (no batch axis) for each row, and where and how long. Times in seconds."""

    rows: list[dict[str, np.ndarray]]
    device: str
    degraded: bool
    filled: Any  #: what the job's `fill` returned, or would have
    decode: float
    queue: float
    infer: float
    decoded_on: str = "host"  #: or the device's id


@dataclass(slots=True)
class _Ticket:
    """A frame between submission and outcome, on the driver's side."""

    network: str
    shape: Shape
    fill: Callable[[np.ndarray], Any]
    future: asyncio.Future[Outcome]
    body: bytes | memoryview | None  #: what was submitted; None where it is not at hand
    rows: list[dict[str, np.ndarray]]
    arrived: float
    filled: Any = None
    decode: float = 0.0
    infer: float = 0.0
    problem: Problem | None = None
    row_bytes: int = 0  #: of a tensor model; 0: its rows are uint8 `shape`
    layout: Layout | None = None  #: None: rows lie side by side
    trace: tracing.Trace | None = None  #: of the request; None: nobody wants to know
    filled_at: float = 0.0  #: with a trace
    kind: str = ""  #: of image, by which its decoding is expected to take
    head: bytes = b""  #: a JPEG that a device may decode: what lies before it in frame memory
    shows: Callable[[], Any] | None = None  #: and what its `fill` would return
    coded: bool = False  #: a device is to decode it, or has
    whole: bool = True  #: it is its request's only frame, or its first

    @property
    def memory(self) -> tuple[int, ...]:
        """The shape, in bytes, of the slab's part that its rows lie in."""
        if self.layout is not None:
            return (self.layout.nbytes,)
        return (len(self.rows), self.row_bytes) if self.row_bytes else (len(self.rows), *self.shape)


@dataclass(slots=True)
class Member:
    """A network that the engine knows, by its id."""

    spec: ModelSpec
    part: str
    providers: dict[str, str] = field(default_factory=dict)  #: device -> what really runs it
    failure: protocol.LoadFailed | None = None
    golden: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  #: device -> outputs for the golden input
    measuring: dict[str, tuple[float, bool]] = field(default_factory=dict)  #: device -> seconds of it, and whether a profile was at hand
    accepted: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  #: accelerator -> those of the first worker that served it
    loaded: protocol.Loaded | None = None  #: what the worker that loaded it first says of its inputs and outputs
    statistics: ModelStatistics = field(default_factory=ModelStatistics)


@dataclass(slots=True)
class DeviceEntry:
    """What the driver knows of a device beyond the engine's state."""

    id: str
    kind: str  #: cpu | gpu | sim | isolation
    spec: str  #: as given: "cpu", "cuda:0", a UUID, "sim:…"
    slots: int
    threads: int
    external: bool = False
    uuid: str = ""  #: GPUs: once known, kept over replugs
    pci: str = ""  #: GPUs: the address, which may be another one after a replug
    present: bool = True  #: simulated devices: plugged in
    faults: dict[str, str] = field(default_factory=dict)  #: simulated devices: phase ("": at once) -> a fault of the next worker
    power_limit_w: float = 0.0  #: as it was when the card was first seen, or when an operator last reset the device; 0: unknown
    notice: str = ""  #: what an operator should know of a device that serves
    hello: protocol.Hello | None = None
    figures: Figures | None = None  #: GPUs in use: what NVML said last


class FillCosts:
    """Seconds of a decode thread for a body of some bytes, by image format; learned as images pass."""

    def __init__(self) -> None:
        self._per_byte: dict[str, float] = {}

    def expected(self, kind: str, nbytes: int) -> float:
        return self._per_byte.get(kind, 1.2e-8) * nbytes

    def known(self, kind: str) -> bool:
        return kind in self._per_byte

    def observe(self, kind: str, nbytes: int, seconds: float) -> None:
        if nbytes:
            before = self._per_byte.get(kind)
            rate = seconds / nbytes
            self._per_byte[kind] = rate if before is None else before + 0.05 * (min(rate, 4 * before) - before)


class Runtime:
    """The engine, its slab, decode threads and workers."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.cores = resources.cores()
        # One more than cores: while the loop hands a thread its next frame, the others keep the cores busy (4K: +6 %).
        self.decode_threads = settings.decode_threads or self.cores + 1
        fb = settings.failback
        self.slab = Slab(resources.frame_memory(settings.limits.frame_memory), "outboard-frames")
        self.engine = Engine(
            EngineConfig(
                slab_bytes=self.slab.size,
                fill_slots=self.decode_threads,
                headroom=settings.devices.headroom,
                spill_beside=SPILL_BESIDE[settings.devices.spill_over],
                decode=settings.devices.decode,
                failback=FailbackPolicy(
                    first_retry=fb.first_retry,
                    max_retry=fb.max_retry,
                    max_losses=fb.max_losses,
                    window=fb.window,
                    quarantine=fb.quarantine,
                    quarantine_max=fb.quarantine_max,
                ),
            ),
            seed=int.from_bytes(time.time_ns().to_bytes(8, "big")[-4:], "big"),
        )
        self.networks: dict[str, Member] = {}
        self.devices: dict[str, DeviceEntry] = {}
        self.fill_costs = FillCosts()
        self.body_bytes = 0  #: of requests in progress, counted by the HTTP layer; bounded by the frame memory's size
        self.on_network: list[Callable[[str], None]] = []  #: called with a network's id when a device has loaded or refused it
        self.on_state: list[Callable[[str, str, str], None]] = []  #: called with device, state, why
        self._tickets: dict[int, _Ticket] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}  #: device -> the search for it
        self._frames = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._acting = False
        self._closing = False
        self._answers: list[Answer] = []  #: of the batch that is just ending
        self._seconds = 0.0
        self._decoding = 0.0  #: of its decoding on the device

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Call on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(self.decode_threads, thread_name_prefix="decode")
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy")  # for devices' decoders: while every decode thread is busy, too
        cache = self.settings.cache.expanduser()
        logging_as = logs.worker_arguments(self.settings.log_level, self.settings.log_format)
        self.supervisor = Supervisor(self.slab, cache, self._on_message, self._on_exit, logging_as)
        log.info("%d cores may be used: %d decode threads; %d MiB of frame memory", self.cores, self.decode_threads, self.slab.size >> 20)
        self.devices[ISOLATION] = DeviceEntry(ISOLATION, "isolation", "cpu", 1, 1)

    def add_device(self, entry: DeviceEntry, rank: int, *, present: bool = True, why: str = "") -> None:
        self.devices[entry.id] = entry
        log.info("%s runs %d batches at once, each with %d thread(s)", entry.id, entry.slots, entry.threads, extra={"device": entry.id})
        self.engine.add_device(self.now(), entry.id, entry.kind, entry.slots, rank, present=present, why=why)
        self._act()

    async def close(self) -> None:
        self._closing = True
        self.engine.drain(self.now())
        self._act()
        if self._timer is not None:
            self._timer.cancel()
        await self.supervisor.close()
        for pool in (self._pool, self._copier):
            pool.shutdown(wait=False, cancel_futures=True)

    def now(self) -> float:
        return self._loop.time()

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run in a decode thread: for work of more than a fraction of a millisecond."""
        return await self._loop.run_in_executor(self._pool, function, *args)

    # ---------------------------------------------------------------- devices, by hand

    def fault(self, device: str, fault: str, phase: str = "") -> None:
        """Play a fault on a simulated device, at once or when it enters `phase`. Raises Problem."""
        entry = self.devices[device]
        if entry.kind != "sim":
            raise Problem("conflict", f"{device} is a real device: faults are played on simulated ones only (--device sim:thunderbolt4)")
        if fault not in FAULTS and memory_taken(fault) is None:
            expected = f"one of {', '.join(FAULTS)}, or vram=SIZE: another program takes so much of the card's memory"
            raise Problem("bad_option", f"fault is {fault[:40]!r}, expected {expected}")
        if phase:
            self._fault_later(entry, fault, phase)
            return
        state = self.engine.devices[device]
        log.info("%s: fault %s is played", device, fault, extra={"device": device})
        match fault:
            case "unplug":
                entry.present = False
                self.lose(device, "unplugged (simulated)")
            case "replug":
                entry.present = True
                self.engine.seen(self.now(), device)
            case "flap":
                self._flap(device, 4)
            case "wrong-answers":
                # A card that answers wrongly after it came back: its next worker does, and the golden check must find it.
                entry.faults[""] = fault
                self.lose(device, "lost for a moment (simulated), it will answer wrongly")
            case _:
                if fault in LASTING_FAULTS:
                    entry.faults[""] = fault
                if fault == "clear":
                    entry.faults.clear()
                    entry.present = True
                    self.engine.seen(self.now(), device)
                if (worker := self.supervisor.get(device, state.generation)) is not None:
                    self.supervisor.send(worker, protocol.Fault(fault))
        self._act()

    def _fault_later(self, entry: DeviceEntry, fault: str, phase: str) -> None:
        """The worker itself plays it when the phase comes: the one that runs, or, for the phases of a start, the next one."""
        if phase not in PHASES or fault not in PHASED_FAULTS:
            expected = f"a fault of {', '.join(PHASED_FAULTS)} and a phase of {', '.join(PHASES)}"
            raise Problem("bad_option", f"fault {fault[:40]!r} in phase {phase[:40]!r}: expected {expected}")
        log.info("%s: fault %s waits until the device is %s", entry.id, fault, phase, extra={"device": entry.id})
        worker = self.supervisor.get(entry.id, self.engine.devices[entry.id].generation)
        if worker is None or phase in ("starting", "warming"):
            entry.faults[phase] = fault
        else:
            self.supervisor.send(worker, protocol.Fault(fault, phase))

    def lose(self, device: str, why: str) -> None:
        """The device itself is gone: no frame is to blame."""
        self.engine.device_lost(self.now(), device, self.engine.devices[device].generation, why, explained=True)
        self._act()

    def _flap(self, device: str, times: int) -> None:
        """A loose plug: out for 0.2 s, in for 0.8 s."""
        if times and not self._closing:
            self.fault(device, "unplug")
            self._loop.call_later(0.2, self.fault, device, "replug")
            self._loop.call_later(1.0, self._flap, device, times - 1)

    async def eject(self, device: str, patience: float = 5.0) -> bool:
        """Hand the device's work to the CPU and end its worker. True when its process has ended (and so has let go of the device)."""
        generation = self.engine.devices[device].generation
        self.engine.eject(self.now(), device)
        self._act()
        return await self.supervisor.gone(lambda: self.supervisor.get(device, generation) is None, patience)

    def seen(self, device: str) -> None:
        """A lost device shows up again: try it at once."""
        self.engine.seen(self.now(), device)
        self._act()

    def reset(self, device: str) -> None:
        """An operator ends a quarantine or an ejection, and takes the device as it is now."""
        entry = self.devices[device]
        entry.power_limit_w = entry.hello.power_limit_w if entry.hello else 0.0
        entry.notice = ""
        self.engine.reset(self.now(), device)
        self._act()

    # ---------------------------------------------------------------- networks

    def add_model(self, spec: ModelSpec) -> list[str]:
        """Load every network of a model version; returns their ids. Progress is told through `on_network`."""
        ids = []
        for part, network in spec.networks.items():
            key = id_of(spec, network)
            self.networks[key] = Member(spec, part)
            batching = network.batching
            self.engine.add_network(
                self.now(), Network(key, max_rows=batching.max, max_delay=batching.max_delay_ms / 1e3, standby=spec.toml.run.standby)
            )
            ids.append(key)
        self._act()
        return ids

    def retire(self, network: str) -> None:
        self.engine.retire_network(self.now(), network)
        self._act()

    # ---------------------------------------------------------------- frames

    def submit_image(
        self, network: str, job: coded.Job, body: bytes | memoryview, *, deadline: float, sender: Sender = ANYBODY
    ) -> asyncio.Future[Outcome]:
        """One frame with the rows that `job` makes of an image. Decoded by a decode thread, or on the device, as the engine finds; what it
        costs here is learned."""
        member = self.networks[network]
        given = member.spec.networks[member.part].input
        width, height = given.size
        # In tiles, it is decoded in full and cut: a cost of its own.
        kind = f"{job.header.format} in tiles" if job.plan else job.header.format
        head = b""
        if self.engine.decodes(network) and coded.for_devices(job.header, body):
            if self.fill_costs.known(kind) or self.settings.devices.decode == "device":  # else nobody knows what it costs here
                head = coded.packed(job)
        return self.submit(
            network, (height, width, 3), lambda memory: job.fill(body, given, memory),
            deadline=deadline, rows=job.plan.rows if job.plan else 1, layout=job.layout, kind=kind, body=body, sender=sender, learn=True,
            head=head, shows=lambda: job.shows(given), pixels=job.header.coded_width * job.header.coded_height,
        )  # fmt: skip

    def submit(
        self,
        network: str,
        shape: Shape,
        fill: Callable[[np.ndarray], Any],
        *,
        deadline: float,
        rows: int = 1,
        kind: str = "",
        body: bytes | memoryview | None = None,
        row_bytes: int = 0,
        layout: Layout | None = None,
        sender: Sender = ANYBODY,
        learn: bool = False,
        head: bytes = b"",
        shows: Callable[[], Any] | None = None,
        pixels: int = 0,
        whole: bool = True,
    ) -> asyncio.Future[Outcome]:
        """One frame of `rows` rows. `fill` runs in a decode thread (on the loop for a few `row_bytes`) with a writable uint8 view
        [rows, *shape] of the slab, [layout.nbytes] where there is a layout, or [rows, row_bytes] of a tensor model's, whose `shape` are
        its slots; it may raise Problem. `learn`: what it takes is what others of its `kind` will. `head`: a device may decode the `body`, a
        JPEG of so many `pixels`, which lies behind this in frame memory (imaging/coded.py); `shows` gives what `fill` would have returned.
        `whole`: false for the frames of a request after its first, as statistics count requests. Cancel the future when the client has
        left. The future raises Problem."""
        self.supervisor.poll()
        self._frames += 1
        frame = self._frames
        future: asyncio.Future[Outcome] = self._loop.create_future()
        ticket = _Ticket(
            network, shape, fill, future, body, [{}] * rows, self.now(), row_bytes=row_bytes, layout=layout, trace=tracing.CURRENT.get(),
            kind=kind if learn else "", head=head, shows=shows, whole=whole,
        )  # fmt: skip
        self._tickets[frame] = ticket
        future.add_done_callback(lambda done: self._left(frame) if done.cancelled() else None)
        digest = _digest(body) if self.engine.poison and body is not None else b""
        self.engine.admit(
            ticket.arrived,
            frame,
            network,
            shape=shape,
            rows=rows,
            deadline=deadline,
            fill_cost=COPY_SECONDS * rows * row_bytes if row_bytes else self.fill_costs.expected(kind, len(body or b"")),
            digest=digest,
            row_bytes=row_bytes,
            layout=layout,
            jpeg=Jpeg(len(head) + len(body), pixels) if head and body is not None else None,
            sender=sender,
        )
        self._act()
        return future

    def check_in_time(self, network: str, rows: int, deadline: float) -> None:
        """Raises Problem overloaded where so many rows that are submitted now would be answered after their deadline."""
        if late := self.engine.late(self.now(), network, rows, deadline):
            raise Problem("overloaded", late[0], retry_after=late[1])

    def _left(self, frame: int) -> None:
        if frame in self._tickets:
            self.engine.leave(self.now(), frame)
            self._act()


    def _fill_in_thread(self, frame: int, ticket: _Ticket, offset: int) -> None:
        filled = self._fill(ticket, offset)
        if not self._closing:
            self._loop.call_soon_threadsafe(self._on_filled, frame, *filled)

    def _fill(self, ticket: _Ticket, offset: int) -> tuple[Any, Problem | None, float]:
        """What the ticket's `fill` returned, or the problem that it raised, and its seconds."""
        began = time.perf_counter()
        problem: Problem | None = None
        result: Any = None
        try:
            if ticket.future.done():
                pass
            elif ticket.coded and ticket.body is not None and ticket.shows is not None:
                at = offset + math.prod(ticket.memory)
                coded.write(ticket.head, ticket.body, self.slab.view(at, (len(ticket.head) + len(ticket.body),)))
                result = ticket.shows()
            else:
                result = ticket.fill(self.slab.view(offset, ticket.memory))
        except Problem as e:
            problem = e.with_traceback(None)  # which holds this frame, and so the picture, in a cycle
        except Exception as e:
            log.exception("decoding failed", extra={"model": _model_of(ticket.network), **(ticket.trace.fields() if ticket.trace else {})})
            problem = Problem("internal", f"{type(e).__name__} while the image was prepared; this is a bug, please report it")
        return result, problem, time.perf_counter() - began

    def _on_filled(self, frame: int, result: Any, problem: Problem | None, seconds: float) -> None:
        ticket = self._tickets.get(frame)
        if ticket is not None:
            ticket.filled, ticket.decode = result, seconds
            if problem is None and ticket.kind and ticket.body is not None and not ticket.coded:
                self.fill_costs.observe(ticket.kind, len(ticket.body), seconds)
            if ticket.trace is not None and problem is None:
                ticket.filled_at = self.now()
        if problem is None:
            self.engine.filled(self.now(), frame)
        else:
            self.engine.fill_failed(self.now(), frame, problem.slug, problem.detail)
        self._act()

    # ---------------------------------------------------------------- workers

    def _on_message(self, worker: Worker, message: protocol.ToFront) -> None:
        now, device, generation = self.now(), worker.device, worker.generation
        match message:
            case protocol.Done():
                batch = self._running(worker, message)
                if batch is not None and sum(math.prod(t.shape) for t in message.outputs) > READ_HERE:
                    member = self.networks[batch.network]
                    self._copier.submit(self._read_in_thread, worker, message, member, len(batch.rows))
                    return
                answers = self._read(worker, message, self.networks[batch.network], len(batch.rows)) if batch else []
                self._batch_done(worker, message, answers)
            case protocol.Failed():
                batch = self._running(worker, message)
                about = {"device": device, "model": _model_of(batch.network) if batch else None}
                level = logging.INFO if message.kind == "decode" else logging.WARNING
                log.log(level, "%s: a batch failed (%s): %s", device, message.kind, message.message, extra=about)
                self.engine.batch_failed(now, device, generation, message.batch, message.kind, message.message, message.undecoded)
            case protocol.Hello():
                self.devices[device].hello = message
                _compare_power(self.devices[device], message.power_limit_w)
                self.engine.hello(now, device, generation, message.link)
                self.engine.device_memory(now, device, generation, message.memory_total, message.memory_free)
            case protocol.Loaded():
                self._on_loaded(now, worker, message)
            case protocol.LoadFailed():
                self._load_failed(device, generation, message)
            case protocol.Pong():
                hello = self.devices[device].hello
                total = hello.memory_total if hello else 0
                self.engine.device_memory(now, device, generation, total, message.memory_free, message.memory_held)
        self._act()

    def _read_in_thread(self, worker: Worker, message: protocol.Done, member: Member, n: int) -> None:
        answers = self._read(worker, message, member, n)
        if not self._closing:
            self._loop.call_soon_threadsafe(self._batch_read, worker, message, answers)

    def _batch_read(self, worker: Worker, message: protocol.Done, answers: list[Answer]) -> None:
        self._batch_done(worker, message, answers)
        self._act()

    def _batch_done(self, worker: Worker, message: protocol.Done, answers: list[Answer]) -> None:
        now, device, generation = self.now(), worker.device, worker.generation
        batch = self._running(worker, message)
        if batch is not None:
            self._answers = answers
            if self.devices[device].kind in ("gpu", "sim"):
                metrics.link(device, "h2d", message.uploaded)
                metrics.link(device, "d2h", sum(a.nbytes for row in self._answers if isinstance(row, dict) for a in row.values()))
            self._seconds = message.took.seconds
            self.networks[batch.network].statistics.executed(len(batch.rows), message.took.seconds)
        if message.recompilations and batch is not None:
            metrics.recompiled(device, _model_of(batch.network), message.recompilations)
        worker.freed.append(message.batch)
        took = message.took
        seconds = took.seconds if self.engine.devices[device].parallel else took.own
        self._decoding = message.decoding
        self.engine.decoded(now, device, generation, message.batch, message.decoding)
        if batch is not None:
            metrics.predicted(device, batch.network.rpartition("@")[0], batch.cost, seconds)
        self.engine.batch_done(now, device, generation, message.batch, seconds, took.idle, took.computed)

    def _running(self, worker: Worker, message: protocol.Done | protocol.Failed) -> Batch | None:
        """The batch that a worker speaks of; None: its device has gone on without it."""
        device = self.engine.devices[worker.device]
        return device.running.get(message.batch) if device.generation == worker.generation else None

    def _on_loaded(self, now: float, worker: Worker, message: protocol.Loaded) -> None:
        network = f"{message.model}@{message.version}"
        member = self.networks.get(network)
        if member is not None:
            member.loaded = member.loaded or message
            member.providers[worker.device] = message.provider
            member.measuring[worker.device] = message.measuring, message.stored
            member.golden[worker.device] = worker.read(message.golden)
            worker.freed.append(message.golden_batch)
            if message.provider == COMPILED:
                metrics.recompiled(worker.device, message.model, 0)
            log.info(
                "%s: %s is loaded (%s); seconds a batch: %s",
                worker.device,
                message.model,
                message.provider,
                ", ".join(f"{c.rows}: {c.seconds:.4f}" for c in message.costs),
                extra={"device": worker.device, "model": message.model},
            )
        self.engine.loaded(now, worker.device, worker.generation, network, message.costs, message.fixed_rows, message.decoder)
        self._tell(network)

    def _load_failed(self, device: str, generation: int, message: protocol.LoadFailed) -> None:
        network = f"{message.model}@{message.version}"
        if (member := self.networks.get(network)) is not None:
            member.failure = message
        why = message.message or f"{message.key}: expected {message.expected}"
        if message.kind == "answers" and member is not None and self._proved_before(member, device):
            self.engine.golden_checked(self.now(), device, generation, network, False, why)
        else:
            sticky, oom = message.kind == "sticky", message.kind == "oom"
            self.engine.load_failed(self.now(), device, generation, network, why, sticky=sticky, oom=oom)
        self._tell(network)

    def _tell(self, network: str) -> None:
        for callback in self.on_network:
            callback(network)

    def _on_exit(self, worker: Worker, code: int) -> None:
        reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        if self._closing:
            return
        now, entry = self.now(), self.devices[worker.device]
        why, explained = f"its worker {reason}", False
        if code == EXIT_NO_DEVICE:
            why, explained = "its worker could not open it; the log says why" + (DRIVER_HINT if entry.kind == "gpu" else ""), True
        elif code == EXIT_UNPLUGGED and entry.kind == "sim":
            entry.present = False
            why, explained = "unplugged (simulated)", True
        elif entry.kind == "gpu" and entry.pci and (gone := presence.gone(entry.pci)):
            why, explained = gone, True
        self.engine.device_lost(now, worker.device, worker.generation, why, explained=explained)
        self.engine.worker_gone(now, worker.device, worker.generation)
        self._act()

    # ---------------------------------------------------------------- commands

    def _act(self) -> None:
        """Carry out what the engine has decided. Carrying out may lead to events and so to more commands: a loop, not recursion."""
        if self._acting:
            return
        self._acting = True
        try:
            while commands := self.engine.take():
                for command in commands:
                    self._carry_out(command)
        finally:
            self._acting = False
        self._set_timer()

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.RowDone():
                self._row_done(command)
            case c.Dispatch():
                key, _, version = command.network.rpartition("@")
                worker = self.supervisor.get(command.device, command.generation)
                if worker is not None:
                    freed, worker.freed = worker.freed, []
                    self.supervisor.send(worker, _run(command, key, version, freed))
                    metrics.batch(command.device, key, len(command.offsets))
            case c.Fill():
                ticket = self._tickets.get(command.frame)
                if ticket is None:
                    self.engine.fill_failed(self.now(), command.frame, "client_left", "")
                    return
                ticket.coded = command.coded
                if command.coded:
                    if len(ticket.body or b"") <= COPY_HERE:
                        self._on_filled(command.frame, *self._fill(ticket, command.offset))
                    else:
                        self._copier.submit(self._fill_in_thread, command.frame, ticket, command.offset)
                elif 0 < ticket.row_bytes * len(ticket.rows) <= FILL_HERE:
                    self._on_filled(command.frame, *self._fill(ticket, command.offset))
                else:
                    self._pool.submit(self._fill_in_thread, command.frame, ticket, command.offset)
            case c.Refuse():
                self._refused(command)
            case c.Start():
                self._start(command)
            case c.Kill():
                if (worker := self.supervisor.get(command.device, command.generation)) is not None:
                    self.supervisor.kill(worker)
                else:
                    self.engine.worker_gone(self.now(), command.device, command.generation)
            case c.Load():
                key, _, version = command.network.rpartition("@")
                member = self.networks[command.network]
                worker = self.supervisor.get(command.device, command.generation)
                if worker is not None:
                    folder, backend = str(member.spec.directory.absolute()), member.spec.toml.backend
                    self.supervisor.send(worker, protocol.Load(key, version, folder, member.part, backend))
            case c.GiveUp():
                key, _, version = command.network.rpartition("@")
                where = str(self.networks[command.network].spec.directory)
                failure = protocol.LoadFailed(key, version, where, "load", "a model that its worker survives", command.why)
                self._load_failed(command.device, command.generation, failure)
            case c.Unload():
                key, _, version = command.network.rpartition("@")
                if (worker := self.supervisor.get(command.device, command.generation)) is not None:
                    self.supervisor.send(worker, protocol.Unload(key, version))
            case c.CheckGolden():
                self._check_golden(command)
            case c.Ping():
                if (worker := self.supervisor.get(command.device, command.generation)) is not None:
                    self.supervisor.send(worker, protocol.Ping(command.n))
            case c.StateChanged():
                level = (
                    logging.WARNING if command.state in ("lost", "quarantined", "suspect") and command.device != ISOLATION else logging.INFO
                )
                why = f": {command.why}" if command.why else ""
                about = {"device": command.device, "state": command.state, "why": command.why}
                log.log(level, "device %s is %s%s", command.device, command.state, why, extra=about)
                device = self.engine.devices[command.device]
                metrics.device_state(command.device, command.state, device.history.total, device.quarantined_for)
                for callback in self.on_state:
                    callback(command.device, command.state, command.why)
            case c.Starved():
                about = {"device": command.device, "model": _model_of(command.network)}
                log.warning("%s has no memory for %s: others serve it (%s)", command.device, command.network, command.why, extra=about)
            case c.Retired():
                self.networks.pop(command.network, None)

    def _read(self, worker: Worker, done: protocol.Done, member: Member, n: int) -> list[Answer]:
        """The batch's answers, row by row: copied out, so that nothing the worker writes later can change them. In any thread."""
        try:
            return _split(member, worker.read(done.outputs), n)
        except Problem as e:
            return [e] * n
        except (ValueError, TypeError) as e:
            return [Problem("inference_failed", f"the worker's answer cannot be read: {e}")] * n

    def _row_done(self, command: c.RowDone) -> None:
        ticket = self._tickets[command.frame]
        row = self._answers[command.index]
        if isinstance(row, Problem):
            ticket.problem = row
        else:
            ticket.rows[command.row] = row
        ticket.infer = max(ticket.infer, self._seconds)
        if ticket.coded:
            ticket.decode += self._decoding
        if not command.last:
            return
        del self._tickets[command.frame]
        outcome = ticket.problem.slug if ticket.problem else "answered"
        decoded_on = command.device if ticket.coded else "host"
        if ticket.kind:
            metrics.decoded(ticket.network, decoded_on)
        metrics.frame(ticket.network, command.device, outcome)
        if ticket.trace is not None:
            self._trace(ticket, command.device, outcome, command.degraded)
        member = self.networks.get(ticket.network)
        if ticket.future.done():
            return
        if ticket.problem is not None:
            if member is not None:
                member.statistics.failed(self.now() - ticket.arrived, ticket.whole)
            ticket.future.set_exception(ticket.problem)
            return
        total = self.now() - ticket.arrived
        queue = max(0.0, total - ticket.decode - ticket.infer)
        if member is not None:
            member.statistics.answered(total, queue, ticket.decode, ticket.infer, ticket.whole)
        ticket.future.set_result(
            Outcome(ticket.rows, command.device, command.degraded, ticket.filled, ticket.decode, queue, ticket.infer, decoded_on)
        )

    def _refused(self, command: c.Refuse) -> None:
        ticket = self._tickets.pop(command.frame)
        metrics.frame(ticket.network, "", command.slug)
        if ticket.trace is not None:
            self._trace(ticket, "", command.slug, False)
        if (member := self.networks.get(ticket.network)) is not None:
            member.statistics.failed(self.now() - ticket.arrived, ticket.whole)
        if command.slug == "poison_frame" and ticket.body is not None:
            self.engine.remember_poison(self.now(), _digest(ticket.body))
        if not ticket.future.done():
            ticket.future.set_exception(Problem(command.slug, command.detail, retry_after=command.retry_after))

    def _trace(self, ticket: _Ticket, device: str, outcome: str, degraded: bool) -> None:
        assert ticket.trace is not None
        times = (ticket.arrived, ticket.filled_at, self.now(), ticket.decode, ticket.infer)
        ticket.trace.frame(tracing.FrameTimes(_model_of(ticket.network), device, outcome, degraded, *times))

    def _start(self, command: c.Start) -> None:
        entry = self.devices[command.device]
        if entry.kind == "gpu":
            self._looking[entry.id] = self._loop.create_task(self._find_and_start(entry, command.generation))
        elif not entry.present:
            self.engine.not_found(self.now(), entry.id, command.generation, "unplugged (simulated)")
        else:
            faults = [f",fault={fault}@{phase}" if phase else f",fault={fault}" for phase, fault in entry.faults.items()]
            self._spawn(entry, command.generation, entry.spec + "".join(faults))
            entry.faults = {phase: fault for phase, fault in entry.faults.items() if not phase}  # in its phase a fault strikes once

    async def _find_and_start(self, entry: DeviceEntry, generation: int) -> None:
        """Ask the driver for the GPU first: it may be unplugged, or its driver may hang."""
        found = await probe.ask()
        wanted = entry.uuid or entry.spec
        gpu = probe.named(found, wanted)
        if gpu is None:
            self.engine.not_found(self.now(), entry.id, generation, f"the NVIDIA driver shows no {wanted}")
        else:
            entry.uuid, entry.pci, entry.external = gpu["uuid"], gpu["pci"], gpu["external"]
            self._spawn(entry, generation, entry.uuid)
        self._act()

    def _spawn(self, entry: DeviceEntry, generation: int, spec: str) -> None:
        try:
            self.supervisor.start(entry.id, generation, spec, entry.slots, entry.threads)
        except OSError as e:
            log.error("cannot start a worker for %s: %s", entry.id, e, extra={"device": entry.id})
            self.engine.not_found(self.now(), entry.id, generation, f"cannot start its worker: {e}")

    def _check_golden(self, command: c.CheckGolden) -> None:
        member = self.networks.get(command.network)
        if member is None:
            return
        got = member.golden[command.device]
        reference = self._reference(member, command.device)
        if reference is None:
            why = plausible(got)
            if not why and not (member.spec.directory / "golden.npz").is_file():
                log.warning(
                    "%s: nothing proves its answers of %s: the CPU does not hold the model (standby), and it has no golden.npz. They are "
                    "finite and fit the decoder; from now on they are what it and others are compared with",
                    command.device,
                    command.network,
                    extra={"device": command.device, "model": _model_of(command.network)},
                )
        else:
            why = agree(reference, got, member.spec)
        if not why:
            member.accepted.setdefault(command.device, got)
        self.engine.golden_checked(self.now(), command.device, command.generation, command.network, not why, why)
        self._tell(command.network)

    def _reference(self, member: Member, device: str) -> dict[str, np.ndarray] | None:
        """What the device's golden answers are compared with: the CPU's, or what was accepted of itself or of another device before."""
        cpu = next((member.golden[d] for d, e in self.devices.items() if e.kind == "cpu" and d in member.golden), None)
        return cpu or member.accepted.get(device) or next(iter(member.accepted.values()), None)

    def _proved_before(self, member: Member, device: str) -> bool:
        """The network was accepted somewhere, so that its files are right and an accelerator that refuses it for its answers is wrong."""
        return self.devices[device].kind in ("gpu", "sim") and self._reference(member, device) is not None

    # ---------------------------------------------------------------- time

    def _set_timer(self) -> None:
        """One timer for the engine's earliest time; an early call is harmless, so an earlier timer is left alone."""
        at = self.engine.next_timer()
        if at is None or self._closing:
            return
        if self._timer is not None:
            if self._timer_at <= at and self._timer_at > self.now():
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._timer_at = float("inf")
        self.engine.tick(self.now())
        self._act()


async def all_of(work: Sequence[asyncio.Future[T]]) -> list[T]:
    """Every result; where one fails or the caller is cancelled, the others are cancelled too."""
    try:
        return await asyncio.gather(*work)
    finally:
        abandon(work)
        del work  # see there


def abandon(work: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel what is not done. Whoever raises what one of them raised lets go of them, too: the exception's traceback holds his frame, and
    so whatever they were made of, in a cycle."""
    for future in work:
        if not future.cancel() and not future.cancelled():
            future.exception()  # looked at, or the log would tell of it


def _run(command: c.Dispatch, key: str, version: str, freed: list[int]) -> protocol.Run:
    slots = isinstance(command.shape[0], protocol.Slot)
    shape, inputs = ((), command.shape) if slots else (command.shape, ())
    return protocol.Run(command.batch, key, version, shape, command.offsets, freed, inputs, command.pictures, command.coded)


def _split(member: Member, outputs: dict[str, np.ndarray], n: int) -> list[dict[str, np.ndarray]]:
    if member.loaded is not None and member.loaded.whole:
        return [outputs]
    if member.part:
        return [{name: array[i] for name, array in outputs.items()} for i in range(n)]
    return tasks.rows(member.spec.toml.output.decoder, outputs, n)


def id_of(spec: ModelSpec, network: ModelNetwork) -> str:
    """The engine's id of a network of this version."""
    return f"{network.key}@{spec.version}"


def _model_of(network: str) -> str:
    """The model, or part of one, of an engine's id."""
    return network.rpartition("@")[0]


def _compare_power(entry: DeviceEntry, watts: float) -> None:
    """Without a persistence daemon the driver forgets a power limit when its last user leaves, so a card may come back with another one."""
    entry.power_limit_w = entry.power_limit_w or watts
    entry.notice = ""
    if watts and abs(watts - entry.power_limit_w) > 1:
        entry.notice = (
            f"its power limit is {watts:.0f} W since it came back, it was {entry.power_limit_w:.0f} W; "
            f"`nvidia-smi -pl {entry.power_limit_w:.0f}` (as root) sets it, `outboard devices reset {entry.id}` takes it as it is"
        )
        log.warning("%s: %s", entry.id, entry.notice, extra={"device": entry.id})


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
