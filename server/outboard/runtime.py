"""The driver of the engine in real time: commands become threads' and workers' work, what comes back becomes events.

Nothing is decided here. One object on one event loop; every method runs on that loop except `_fill_in_thread`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from outboard import resources, tasks
from outboard.core import commands as c
from outboard.core.engine import ISOLATION, Engine, EngineConfig
from outboard.core.failback import FailbackPolicy
from outboard.core.state import Network
from outboard.devices import presence, probe, protocol
from outboard.devices.simulated import FAULTS
from outboard.devices.slab import Slab
from outboard.devices.supervisor import Supervisor, Worker
from outboard.problems import Problem
from outboard.repository import ModelSpec
from outboard.settings import Settings
from outboard.tasks.golden import agree
from outboard.telemetry import metrics

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Exit status of a worker whose device cannot be opened (worker/__main__.py).
EXIT_NO_DEVICE = 3
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
    filled: Any  #: what the job's `fill` returned
    decode: float
    queue: float
    infer: float


@dataclass(slots=True)
class _Ticket:
    """A frame between submission and outcome, on the driver's side."""

    network: str
    shape: tuple[int, int, int]
    fill: Callable[[np.ndarray], Any]
    future: asyncio.Future[Outcome]
    body: bytes | None
    rows: list[dict[str, np.ndarray]]
    arrived: float
    filled: Any = None
    decode: float = 0.0
    infer: float = 0.0
    problem: Problem | None = None


@dataclass(slots=True)
class Member:
    """A network that the engine knows, by its id."""

    spec: ModelSpec
    part: str
    providers: dict[str, str] = field(default_factory=dict)  #: device -> what really runs it
    failure: protocol.LoadFailed | None = None
    golden: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  #: device -> outputs for the golden input


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
    start_fault: str = ""  #: simulated devices: a fault that the next worker starts with
    hello: protocol.Hello | None = None
    memory_free: int = 0


class FillCosts:
    """Seconds of a decode thread for a body of some bytes, by image format; learned as images pass."""

    def __init__(self) -> None:
        self._per_byte: dict[str, float] = {}

    def expected(self, kind: str, nbytes: int) -> float:
        return self._per_byte.get(kind, 1.2e-8) * nbytes

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
        self._answers: list[dict[str, np.ndarray] | Problem] = []  #: of the batch that is just ending
        self._seconds = 0.0

    # ---------------------------------------------------------------- life

    def start(self) -> None:
        """Call on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(self.decode_threads, thread_name_prefix="decode")
        cache = self.settings.cache.expanduser()
        self.supervisor = Supervisor(self.slab, cache, self._on_message, self._on_exit)
        log.info("%d cores may be used: %d decode threads; %d MiB of frame memory", self.cores, self.decode_threads, self.slab.size >> 20)
        self.devices[ISOLATION] = DeviceEntry(ISOLATION, "isolation", "cpu", 1, 1)

    def add_device(self, entry: DeviceEntry, rank: int, *, present: bool = True, why: str = "") -> None:
        self.devices[entry.id] = entry
        log.info("%s runs %d batches at once, each with %d thread(s)", entry.id, entry.slots, entry.threads)
        self.engine.add_device(self.now(), entry.id, entry.kind, entry.slots, rank, present=present, why=why)
        self._act()

    async def close(self) -> None:
        self._closing = True
        self.engine.drain(self.now())
        self._act()
        if self._timer is not None:
            self._timer.cancel()
        await self.supervisor.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def now(self) -> float:
        return self._loop.time()

    async def in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Run in a decode thread: for work of more than a fraction of a millisecond."""
        return await self._loop.run_in_executor(self._pool, function, *args)

    # ---------------------------------------------------------------- devices, by hand

    def fault(self, device: str, fault: str) -> None:
        """Play a fault on a simulated device (design.md section 4). Raises Problem."""
        entry = self.devices[device]
        if entry.kind != "sim":
            raise Problem("conflict", f"{device} is a real device: faults are played on simulated ones only (--device sim:thunderbolt4)")
        if fault not in FAULTS:
            raise Problem("bad_option", f"fault is {fault[:40]!r}, expected one of {', '.join(FAULTS)}")
        state = self.engine.devices[device]
        log.info("%s: fault %s is played", device, fault)
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
                entry.start_fault = fault
                self.lose(device, "lost for a moment (simulated), it will answer wrongly")
            case _:
                if fault == "clear":
                    entry.start_fault = ""
                    entry.present = True
                    self.engine.seen(self.now(), device)
                if (worker := self.supervisor.get(device, state.generation)) is not None:
                    self.supervisor.send(worker, protocol.Fault(fault))
        self._act()

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
        """An operator ends a quarantine or an ejection."""
        self.engine.reset(self.now(), device)
        self._act()

    # ---------------------------------------------------------------- networks

    def add_model(self, spec: ModelSpec) -> list[str]:
        """Load every network of a model version; returns their ids. Progress is told through `on_network`."""
        ids = []
        for part, network in spec.networks.items():
            key = f"{network.key}@{spec.version}"
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

    def submit(
        self,
        network: str,
        shape: tuple[int, int, int],
        fill: Callable[[np.ndarray], Any],
        *,
        deadline: float,
        rows: int = 1,
        kind: str = "",
        body: bytes | None = None,
    ) -> asyncio.Future[Outcome]:
        """One frame of `rows` rows. `fill` runs in a decode thread with a writable uint8 view [rows, *shape] of the slab; it may
        raise Problem. Cancel the future when the client has left. The future raises Problem."""
        self._frames += 1
        frame = self._frames
        future: asyncio.Future[Outcome] = self._loop.create_future()
        ticket = _Ticket(network, shape, fill, future, body, [{}] * rows, self.now())
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
            fill_cost=self.fill_costs.expected(kind, len(body)) if body is not None else 0.0,
            digest=digest,
        )
        self._act()
        return future

    def _left(self, frame: int) -> None:
        if frame in self._tickets:
            self.engine.leave(self.now(), frame)
            self._act()

    def _fill_in_thread(self, frame: int, ticket: _Ticket, offset: int, rows: int) -> None:
        began = time.perf_counter()
        problem: Problem | None = None
        result: Any = None
        try:
            if not ticket.future.done():
                result = ticket.fill(self.slab.view(offset, (rows, *ticket.shape)))
        except Problem as e:
            problem = e
        except Exception as e:
            log.exception("decoding failed")
            problem = Problem("internal", f"{type(e).__name__} while the image was prepared; this is a bug, please report it")
        if not self._closing:
            self._loop.call_soon_threadsafe(self._on_filled, frame, result, problem, time.perf_counter() - began)

    def _on_filled(self, frame: int, result: Any, problem: Problem | None, seconds: float) -> None:
        ticket = self._tickets.get(frame)
        if ticket is not None:
            ticket.filled, ticket.decode = result, seconds
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
                d = self.engine.devices[device]
                batch = d.running.get(message.batch) if d.generation == generation else None
                if batch is not None:
                    self._answers = self._read(worker, message, batch.network, len(batch.rows))
                    self._seconds = message.seconds
                worker.freed.append(message.batch)
                self.engine.batch_done(now, device, generation, message.batch, message.seconds)
            case protocol.Failed():
                log.warning("%s: a batch failed (%s): %s", device, message.kind, message.message)
                self.engine.batch_failed(now, device, generation, message.batch, message.kind, message.message)
            case protocol.Hello():
                self.devices[device].hello = message
                self.devices[device].memory_free = message.memory_free
                self.engine.hello(now, device, generation)
            case protocol.Loaded():
                self._on_loaded(now, worker, message)
            case protocol.LoadFailed():
                network = f"{message.model}@{message.version}"
                if (member := self.networks.get(network)) is not None:
                    member.failure = message
                self.engine.load_failed(now, device, generation, network, message.message or f"{message.key}: expected {message.expected}")
                self._tell(network)
            case protocol.Pong():
                self.devices[device].memory_free = message.memory_free
                self.engine.heard(now, device, generation)
        self._act()

    def _on_loaded(self, now: float, worker: Worker, message: protocol.Loaded) -> None:
        network = f"{message.model}@{message.version}"
        member = self.networks.get(network)
        if member is not None:
            member.providers[worker.device] = message.provider
            member.golden[worker.device] = worker.read(message.golden)
            worker.freed.append(message.golden_batch)
            log.info(
                "%s: %s is loaded (%s); seconds a batch: %s",
                worker.device,
                message.model,
                message.provider,
                ", ".join(f"{rows}: {seconds:.4f}" for rows, seconds in message.costs),
            )
        self.engine.loaded(now, worker.device, worker.generation, network, message.costs, message.fixed_rows)
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
                    self.supervisor.send(worker, protocol.Run(command.batch, key, version, command.shape, command.offsets, freed))
                    metrics.batch(command.device, key, len(command.offsets))
            case c.Fill():
                ticket = self._tickets.get(command.frame)
                if ticket is None:
                    self.engine.fill_failed(self.now(), command.frame, "client_left", "")
                else:
                    self._pool.submit(self._fill_in_thread, command.frame, ticket, command.offset, len(ticket.rows))
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
                    self.supervisor.send(worker, protocol.Load(key, version, str(member.spec.directory.absolute()), member.part))
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
                log.log(level, "device %s is %s%s", command.device, command.state, f": {command.why}" if command.why else "")
                metrics.device_state(command.device, command.state, self.engine.devices[command.device].history.total)
                for callback in self.on_state:
                    callback(command.device, command.state, command.why)
            case c.Retired():
                self.networks.pop(command.network, None)

    def _read(self, worker: Worker, done: protocol.Done, network: str, n: int) -> list[dict[str, np.ndarray] | Problem]:
        """The batch's answers, row by row: copied out, so that nothing the worker writes later can change them."""
        try:
            return _split(self.networks[network], worker.read(done.outputs), n)
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
        if not command.last:
            return
        del self._tickets[command.frame]
        metrics.frame(ticket.network, command.device, ticket.problem.slug if ticket.problem else "answered")
        if ticket.future.done():
            return
        if ticket.problem is not None:
            ticket.future.set_exception(ticket.problem)
            return
        queue = max(0.0, self.now() - ticket.arrived - ticket.decode - ticket.infer)
        ticket.future.set_result(Outcome(ticket.rows, command.device, command.degraded, ticket.filled, ticket.decode, queue, ticket.infer))

    def _refused(self, command: c.Refuse) -> None:
        ticket = self._tickets.pop(command.frame)
        metrics.frame(ticket.network, "", command.slug)
        if command.slug == "poison_frame" and ticket.body is not None:
            self.engine.remember_poison(self.now(), _digest(ticket.body))
        if not ticket.future.done():
            ticket.future.set_exception(Problem(command.slug, command.detail, retry_after=command.retry_after))

    def _start(self, command: c.Start) -> None:
        entry = self.devices[command.device]
        if entry.kind == "gpu":
            self._looking[entry.id] = self._loop.create_task(self._find_and_start(entry, command.generation))
        elif not entry.present:
            self.engine.not_found(self.now(), entry.id, command.generation, "unplugged (simulated)")
        else:
            self._spawn(entry, command.generation, f"{entry.spec},fault={entry.start_fault}" if entry.start_fault else entry.spec)

    async def _find_and_start(self, entry: DeviceEntry, generation: int) -> None:
        """Ask the driver for the GPU first: it may be unplugged, or its driver may hang."""
        found = await probe.ask()
        wanted = entry.uuid or entry.spec
        gpu = next((g for i, g in enumerate(found) if wanted in (g["uuid"], f"cuda:{i}")), None)
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
            log.error("cannot start a worker for %s: %s", entry.id, e)
            self.engine.not_found(self.now(), entry.id, generation, f"cannot start its worker: {e}")

    def _check_golden(self, command: c.CheckGolden) -> None:
        member = self.networks.get(command.network)
        if member is None:
            return
        reference = next((member.golden[d] for d, e in self.devices.items() if e.kind == "cpu" and d in member.golden), None)
        got = member.golden.get(command.device)
        why = "" if reference is None or got is None else agree(reference, got, member.spec)
        self.engine.golden_checked(self.now(), command.device, command.generation, command.network, not why, why)

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


def _split(member: Member, outputs: dict[str, np.ndarray], n: int) -> list[dict[str, np.ndarray]]:
    if member.part:
        return [{name: array[i] for name, array in outputs.items()} for i in range(n)]
    return tasks.rows(member.spec.toml.output.decoder, outputs, n)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=16).digest()
