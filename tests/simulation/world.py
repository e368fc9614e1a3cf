"""A world in virtual time around the real engine: devices, workers, clients, cables and operators, all from one seed.

`World(scenario).run()` plays a scenario; it raises `Violation`, or whatever the engine raises, when something is wrong. The
driver follows `outboard.runtime`: commands are carried out in order, and what is carried out at once may lead to more of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from outboard.core import commands as c
from outboard.core.costs import BatchCost
from outboard.core.engine import ISOLATION, Engine, EngineConfig
from outboard.core.failback import FailbackPolicy
from outboard.core.state import Network
from simulation.referee import Referee, Violation
from simulation.scenario import Arrival, DeviceSpec, Fault, ModelSpec, Operator, Scenario, describe

FAILBACK = FailbackPolicy(first_retry=0.5, max_retry=5.0, max_losses=3, window=60.0, quarantine=5.0, quarantine_max=20.0)
#: Seconds after the last fault within which everything must be as it was before the first frame.
PATIENCE = 300.0
#: A worker that cannot be killed dies this many seconds after it was told to.
UNKILLABLE = 10.0


@dataclass(slots=True)
class Process:
    """A worker process."""

    device: DeviceSpec
    generation: int
    wrong: bool
    exists: bool = True
    hung: bool = False
    sticky: bool = False
    broken: bool = False
    unkillable: bool = False
    busy: list[float] = field(default_factory=list)  #: when each of its slots is free
    loading_until: float = 0.0
    batches: int = 0  #: bytes of device memory that its batches hold
    unsaid: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)  #: what it will say when it moves again


class World:
    def __init__(self, scenario: Scenario, engine: type[Engine] = Engine):
        self.scenario = scenario
        self.now = 0.0
        self.rng = random.Random(scenario.seed)
        config = EngineConfig(
            slab_bytes=scenario.slab_bytes,
            fill_slots=scenario.fill_slots,
            cpu_hang=5.0,
            start_limit=10.0,
            load_limit=30.0,
            isolation_idle=5.0,
            headroom=1 << 20,
            decode="device" if scenario.seed % 4 == 1 else "auto",
            spill_beside=("gpu", "sim") if scenario.seed % 2 else (),
            failback=FAILBACK,
        )
        self.engine = engine(config, seed=scenario.seed)
        self.referee = Referee(scenario, self.engine)
        self.processes: dict[tuple[str, int], Process] = {}
        self.devices = {d.id: d for d in scenario.devices} | {ISOLATION: DeviceSpec(ISOLATION, ISOLATION, 1, 0, 1.0)}
        self.until: dict[tuple[str, str], float] = {}  #: (fault, device) -> when it ends
        self.oom_above: dict[str, int] = {}
        self.taken: dict[str, int] = {}  #: device -> per cent of its memory that another program holds
        self.golden: set[str] = set()  #: networks of which the CPU's golden answer is known
        self.given_up: set[tuple[str, str]] = set()  #: (device, network) that is not loaded there any more
        self.accepted: set[str] = set()  #: networks of which an accelerator's golden answer was accepted
        self.current = {m.name: f"{m.name}@0" for m in scenario.models}
        self.versions = 0
        self.trace: list[tuple[float, str, Any]] = []
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n = 0
        self._ticks = 0
        self._events = 0

    # ---------------------------------------------------------------- time

    def after(self, delay: float, what: Callable[..., None], *args: Any) -> None:
        self._at(self.now + delay, what, *args)

    def _at(self, at: float, what: Callable[..., None], *args: Any) -> None:
        if self.scenario.grid:
            at = math.ceil(at / self.scenario.grid - 1e-9) * self.scenario.grid
        self._n += 1
        heappush(self._heap, (max(at, self.now), self.rng.random(), self._n, what, args))  # the order at equal times is drawn

    def run(self) -> Counter[str]:
        """Play everything; returns how the frames ended."""
        for model in self.scenario.models:
            self._add_network(model, self.current[model.name])
        for d in self.scenario.devices:
            self.engine.add_device(0.0, d.id, d.kind, d.slots, d.rank, present=d.present)
            self._act("add_device", d.id)
        for happening in self.scenario.happenings:
            self._at(happening.at, self._happens, happening.what)
        self._at(self.scenario.horizon, self._heal)
        while not self._ended():
            timer = self.engine.next_timer()
            late = self.scenario.lateness * self.rng.random()
            if timer is not None and (not self._heap or timer + late < self._heap[0][0]):
                self._tick(max(self.now, timer + late))
            else:
                self.now, _, _, what, args = heappop(self._heap)
                self._events += 1
                what(*args)
        return Counter(f.end for f in self.referee.frames.values())

    def _tick(self, now: float) -> None:
        self.now = now
        self._ticks += 1
        self.engine.tick(now)
        self._act("tick")
        timer = self.engine.next_timer()
        if timer is not None and timer <= now:
            raise Violation(f"after tick({now}) the next timer is {timer}: nothing would ever act on it")
        if self._ticks > 1000 + 10 * self._events + 40 * now * len(self.engine.devices):
            raise Violation(f"{self._ticks} ticks in {now:.1f} s with {self._events} events: the engine spins")

    def _ended(self) -> bool:
        if self._heap and self._heap[0][0] <= self.scenario.horizon:
            return False
        if not (left := self.referee.is_at_rest()):
            return True
        if self.now > self.scenario.horizon + PATIENCE:
            raise Violation(f"{PATIENCE:.0f} s after the last fault something is left: {left}")
        return not self._heap and self.engine.next_timer() is None

    # ---------------------------------------------------------------- what happens

    def _happens(self, what: Arrival | Fault | Operator) -> None:
        self._note("happens", what)
        match what:
            case Arrival():
                self._arrives(what)
            case Fault():
                self._breaks(what)
            case Operator():
                self._operates(what)

    def _arrives(self, a: Arrival) -> None:
        network = self.current[a.model]
        self.referee.arrives(self.now, a, network)
        self.engine.admit(
            self.now,
            a.frame,
            network,
            shape=a.shape,
            rows=a.rows,
            deadline=self.now + a.allowed,
            fill_cost=a.fill_cost,
            digest=a.digest if self.engine.poison else b"",
            layout=a.layout,
            jpeg=a.jpeg,
            sender=self.scenario.sender(a),
        )
        self._act("admit", a.frame)
        if a.leaves is not None:
            self.after(a.leaves, self._leaves, a.frame)

    def _leaves(self, frame: int) -> None:
        self.engine.leave(self.now, frame)
        self._act("leave", frame)

    def _is(self, fault: str, device: str) -> bool:
        return self.until.get((fault, device), -1.0) > self.now

    def _breaks(self, fault: Fault) -> None:
        device = fault.device
        processes = [p for p in self.processes.values() if p.device.id == device and p.exists]
        newest = processes[-1] if processes else None
        if fault.kind in ("unplug", "slow", "oom", "wrong", "silent-start", "dies-loading", "memory"):
            self.until[fault.kind, device] = self.now + fault.seconds
        match fault.kind:
            case "unplug":
                explained = self.rng.random() < 0.7  # the process often dies before the bus tells why
                for p in processes:
                    if not p.unkillable:
                        self.after(self.rng.uniform(0, 0.05), self._exits, p, explained)
                self.after(fault.seconds + self.rng.uniform(0, 0.1), self._returns, device)
            case "oom":
                self.oom_above[device] = fault.argument
            case "memory":
                self.taken[device] = fault.argument
            case "kill" if newest is not None:
                self.after(0.0, self._exits, newest, False)
            case "sticky" if newest is not None:
                newest.sticky = True
            case "broken" if newest is not None:
                newest.broken = True
            case "hang" | "unkillable" if newest is not None:
                newest.hung = True
                newest.unkillable = fault.kind == "unkillable"
                self.after(fault.seconds, self._moves_again, newest)

    def _returns(self, device: str) -> None:
        if not self._is("unplug", device) and self.rng.random() < 0.5:
            self.engine.seen(self.now, device)
            self._act("seen", device)

    def _moves_again(self, p: Process) -> None:
        p.hung = False
        unsaid, p.unsaid = p.unsaid, []
        for what, args in unsaid:
            what(*args)

    def _heal(self) -> None:
        """From here on no device is broken, and the operator takes every ejected one back."""
        self.until.clear()
        self.oom_above.clear()
        for p in list(self.processes.values()):
            if p.hung:
                self._moves_again(p)
        for d in list(self.engine.devices.values()):
            if d.state == "ejected":
                self.engine.reset(self.now, d.id)
                self._act("reset", d.id)

    def _operates(self, operator: Operator) -> None:
        match operator.kind:
            case "eject":
                self.engine.eject(self.now, operator.target)
                self._act("eject", operator.target)
            case "reset":
                self.engine.reset(self.now, operator.target)
                self._act("reset", operator.target)
            case "reload":
                self.versions += 1
                network = f"{operator.target}@{self.versions}"
                self._add_network(next(m for m in self.scenario.models if m.name == operator.target), network)
                self.after(2.0, self._switches, operator.target, network)

    def _add_network(self, model: ModelSpec, network: str) -> None:
        self.referee.models[network] = model
        self.engine.add_network(self.now, Network(network, model.max_rows, model.max_delay, model.standby))
        self._act("add_network", network)

    def _switches(self, model: str, network: str) -> None:
        """The new version takes over where it is ready, else the old one stays."""
        old = self.current[model]
        ready = bool(self.engine.ready_on(network))
        if ready:
            self.current[model] = network
        self.engine.retire_network(self.now, old if ready else network)
        self._act("retire_network", old if ready else network)

    # ---------------------------------------------------------------- workers

    def _says(self, p: Process, what: Callable[..., None], *args: Any) -> None:
        """A worker's message, or what it does: not from a dead one, later from one that hangs."""
        if not p.exists:
            return
        if p.hung:
            p.unsaid.append((self._says, (p, what, *args)))
            return
        what(p, *args)

    def _free(self, p: Process) -> int:
        """Bytes of its device's memory that nobody holds."""
        memory = p.device.memory
        return memory - (memory * self.taken[p.device.id] // 100 if self._is("memory", p.device.id) else 0) - p.batches

    def _reports(self, p: Process) -> None:
        device, generation = p.device.id, p.generation
        self.referee.memory_is_reported(device, generation, self._free(p) + p.batches, p.device.memory)
        self.engine.device_memory(self.now, device, generation, p.device.memory, self._free(p), p.batches)
        self._act("device_memory", device, generation)

    def _hello(self, p: Process) -> None:
        self.engine.hello(self.now, p.device.id, p.generation)
        self._act("hello", p.device.id, p.generation)
        if p.device.memory:
            self._reports(p)

    def _loaded(self, p: Process, network: str) -> None:
        device, model = p.device.id, self.referee.models[network]
        if device in model.fails_on:
            self.engine.load_failed(self.now, device, p.generation, network, "no kernel for this operator")
            self._act("load_failed", device, p.generation, network)
            return
        sizes = [n for n in (1, 2, 4, 8, 16, 32) if n <= model.max_rows]
        memory = model.row_memory if p.device.memory else 0
        costs = [BatchCost(n, self._seconds(p.device, model, n) * self.rng.uniform(0.9, 1.1), memory=n * memory) for n in sizes]
        if p.device.kind in ("cpu", ISOLATION):
            self.referee.proofs[device, p.generation].ready.add(network)
        if p.device.kind == "cpu":
            self.golden.add(network)
        self.engine.loaded(self.now, device, p.generation, network, costs, model.fixed_rows, p.device.decoder)
        self._act("loaded", device, p.generation, network)

    @staticmethod
    def _seconds(device: DeviceSpec, model: ModelSpec, rows: int) -> float:
        return (model.per_batch + model.per_row * rows) / device.speed

    def _runs(self, p: Process, command: c.Dispatch) -> None:
        rows = self.referee.batches[command.batch].rows
        seconds = self._seconds(p.device, self.referee.models[command.network], len(rows)) * self.rng.uniform(0.7, 1.4)
        if self._is("slow", p.device.id):
            seconds *= 20
        if p.broken:
            seconds = 0.0005
        slot = min(range(len(p.busy)), key=p.busy.__getitem__)
        if command.coded and p.device.decoder is not None:
            p.busy[slot] = max(self.now, p.busy[slot]) + self._decoding(p, command)
        p.busy[slot] = max(self.now, p.busy[slot]) + seconds
        poison = [f for f, _ in rows if f.arrival.flaw == "poison"]
        need = self._need(p, command)
        if p.device.memory and need > self._free(p):
            self._at(p.busy[slot], self._says, p, self._ends_batch, command, seconds, True)
            return
        p.batches += need
        if poison:
            self._at(p.busy[slot] - seconds * self.rng.random(), self._says, p, self._dies_of, command.batch)
        else:
            self._at(p.busy[slot], self._says, p, self._ends_batch, command, seconds, False)

    def _decoding(self, p: Process, command: c.Dispatch) -> float:
        decoder = p.device.decoder
        pixels = [jpeg.pixels for source in command.coded if (jpeg := self.referee.frames[source.id].arrival.jpeg)]
        return sum(map(decoder.seconds, pixels)) if decoder else 0.0

    def _need(self, p: Process, command: c.Dispatch) -> int:
        model = self.referee.models[command.network]
        return max(len(command.offsets), model.fixed_rows) * model.row_memory if p.device.memory else 0

    def _dies_of(self, p: Process, batch: int) -> None:
        for f in {f.arrival.frame: f for f, _ in self.referee.batches[batch].rows if f.arrival.flaw == "poison"}.values():
            f.killed += 1
            if f.killed > len(self.devices) + 1:
                raise Violation(f"frame {f.arrival.frame} has killed {f.killed} workers of {len(self.devices)} devices")
        self._exits(p, False)

    def _ends_batch(self, p: Process, command: c.Dispatch, seconds: float, short: bool) -> None:
        device, generation, batch = p.device.id, p.generation, command.batch
        rows = self.referee.batches[batch].rows
        counts = not self.referee.proofs[device, generation].ended
        kind, undecoded = "", []
        if not short:
            p.batches -= self._need(p, command)
        if p.sticky:
            kind = "sticky"
        elif p.broken:
            kind = "unknown"
        elif short or (self._is("oom", device) and len(rows) > self.oom_above[device]):
            kind = "oom"
        elif command.coded and (bad := [i for i, (f, _) in enumerate(rows) if f.coded and self._not_for_decoders(f.arrival)]):
            kind, undecoded = "decode", bad
        elif any(f.arrival.flaw == "bad_input" for f, _ in rows):
            kind = "input"
        if counts:
            self.referee.batch_ends(batch)
            if kind == "oom":
                self.referee.out_of_memory(self.now, device, generation, command.network, len(rows))
        if kind:
            self.engine.batch_failed(self.now, device, generation, batch, kind, "as the scenario says", undecoded)
            self._act("batch_failed", device, generation, batch, kind)
        else:
            self.referee.ending = batch if counts else None
            if command.coded:
                self.engine.decoded(self.now, device, generation, batch, self._decoding(p, command) * self.rng.uniform(0.7, 1.4))
            self.engine.batch_done(self.now, device, generation, batch, seconds)
            self._act("batch_done", device, generation, batch)
            self.referee.ending = None

    @staticmethod
    def _not_for_decoders(arrival: Arrival) -> bool:
        """Damaged, or of a kind that only the host's decoder knows."""
        return arrival.flaw == "undecodable" or arrival.frame % 20 == 7

    def _heard(self, p: Process) -> None:
        self.engine.heard(self.now, p.device.id, p.generation)
        self._act("heard", p.device.id, p.generation)
        if p.device.memory:
            self._reports(p)

    def _exits(self, p: Process, explained: bool) -> None:
        if not p.exists:
            return
        p.exists = False
        device, generation = p.device.id, p.generation
        self.referee.process_ends(device, generation)
        self.engine.device_lost(self.now, device, generation, "its worker has ended", explained=explained)
        self.engine.worker_gone(self.now, device, generation)
        self._act("exit", device, generation, f"explained={explained}")

    # ---------------------------------------------------------------- the driver

    def _note(self, what: str, *args: Any) -> None:
        self.trace.append((self.now, what, args))

    def _act(self, what: str, *args: Any) -> None:
        """Carry out what the engine has decided after an event."""
        self._note(what, *args)
        carried_out = 0
        while commands := self.engine.take():
            for command in commands:
                carried_out += 1
                self._note("->", command)
                self.referee.sees(self.now, command)
                self._carry_out(command)
        self.referee.looks(self.now, carried_out)

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Fill():
                cost = 0.0001 if command.coded else self.referee.frames[command.frame].arrival.fill_cost
                self.after(cost * self.rng.uniform(0.5, 2.0), self._fills, command.frame)
            case c.Refuse(slug="poison_frame"):
                self.engine.remember_poison(self.now, self.referee.frames[command.frame].arrival.digest)
            case c.Start():
                self._start(command)
            case c.Kill():
                p = self.processes.get((command.device, command.generation))
                if p is None or not p.exists:
                    self.engine.worker_gone(self.now, command.device, command.generation)
                else:
                    self.after(UNKILLABLE if p.unkillable else self.rng.uniform(0.0005, 0.05), self._exits, p, False)
            case c.CheckGolden():
                self._check_golden(command)
            case c.GiveUp():
                self.given_up.add((command.device, command.network))
                self.engine.load_failed(self.now, command.device, command.generation, command.network, command.why)
            case c.Load() | c.Dispatch() | c.Ping():
                p = self.processes.get((command.device, command.generation))
                if p is not None and p.exists:
                    self._tell(p, command)

    def _tell(self, p: Process, command: c.Load | c.Dispatch | c.Ping) -> None:
        match command:
            case c.Load():
                p.loading_until = max(self.now, p.loading_until) + self.rng.choice([0.02, 0.3, 2.0])
                if self._is("dies-loading", p.device.id):
                    self.referee.isolation_deaths += 1
                    self._at(p.loading_until, self._exits, p, False)
                else:
                    self._at(p.loading_until, self._says, p, self._loaded, command.network)
            case c.Dispatch():
                self._runs(p, command)
            case c.Ping():
                self.after(0.001, self._says, p, self._heard)

    def _fills(self, frame: int) -> None:
        record = self.referee.frames[frame]
        ok = record.coded or record.arrival.flaw != "undecodable"
        self.referee.fill_ends(frame, ok)
        if ok:
            self.engine.filled(self.now, frame)
        else:
            self.engine.fill_failed(self.now, frame, "not_an_image", "as the scenario says")
        self._act("filled" if ok else "fill_failed", frame)

    def _start(self, command: c.Start) -> None:
        device, generation = command.device, command.generation
        if self._is("unplug", device) or not self.devices[device].present and self.now < self.scenario.horizon / 2:
            self.after(self.rng.choice([0.01, 0.3]), self._not_found, device, generation)
            return
        p = Process(self.devices[device], generation, wrong=self._is("wrong", device))
        p.busy = [0.0] * (p.device.slots if p.device.kind == "cpu" else 1)
        self.processes[device, generation] = p
        if not self._is("silent-start", device):
            self.after(self.rng.choice([0.05, 0.3, 2.0]), self._says, p, self._hello)

    def _not_found(self, device: str, generation: int) -> None:
        self.engine.not_found(self.now, device, generation, "not on the bus")
        self._act("not_found", device, generation)

    def _check_golden(self, command: c.CheckGolden) -> None:
        network, model = command.network, self.referee.models[command.network]
        cpu = self.engine.devices["cpu"]
        comes = model.standby == "hot" and "cpu" not in model.fails_on and cpu.state != "ejected" and ("cpu", network) not in self.given_up
        if network not in self.golden and comes:
            raise Violation(f"{command.device} is to be compared with the CPU's golden answer for {network} before there is one")
        p = self.processes[command.device, command.generation]
        if not p.exists:
            return
        ok = not p.wrong or network not in self.golden | self.accepted
        if ok:
            self.accepted.add(network)
            self.referee.proofs[command.device, command.generation].ready.add(network)
        self.engine.golden_checked(self.now, command.device, command.generation, network, ok, "" if ok else "as the scenario says")

    # ---------------------------------------------------------------- for people

    def story(self, last: int = 120) -> str:
        """The last happenings, events and commands, one a line; without pings and what is heard of them."""
        lines = []
        for at, what, args in self.trace:
            if what == "happens":
                lines.append(f"{at:10.4f} * {describe(args[0])}")
            elif what == "->" and not isinstance(args[0], c.Ping):
                lines.append(f"{'':10}     -> {args[0]}")
            elif what not in ("->", "heard", "tick"):
                lines.append(f"{at:10.4f}   {what} {' '.join(str(a) for a in args)}")
            elif what == "tick":
                lines.append(f"{at:10.4f}   tick")
        # A tick that only pinged is no news.
        told = [line for line, after in zip(lines, [*lines[1:], ""], strict=True) if not line.endswith("tick") or "->" in after]
        return "\n".join(told[-last:])
