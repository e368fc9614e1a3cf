"""What must hold in every simulated world, whatever happens in it.

The referee keeps books of its own from the commands and events that pass by, and compares the engine with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outboard.core import commands as c
from outboard.core.engine import ISOLATION, Engine
from outboard.core.memory import PAGE
from outboard.core.state import LIVE, Device, Frame
from outboard.problems import PROBLEMS
from simulation.scenario import Arrival, ModelSpec, Scenario

#: A frame with this much time must not be refused as `overloaded` by a server that has nothing else to do.
GENEROUS = 25.0


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class FrameRecord:
    arrival: Arrival
    network: str
    deadline: float
    end: str = ""  #: "answered" or the slug of the refusal
    answered: set[int] = field(default_factory=set)
    stretch: tuple[int, int] | None = None  #: (offset, bytes) in the slab, from Fill until nobody can touch it
    filling: bool = False
    filled: bool = False
    coded: bool = False  #: a device is to decode it
    readers: set[int] = field(default_factory=set)  #: batches whose process may still read it
    killed: int = 0  #: workers that died of it


@dataclass(slots=True)
class BatchRecord:
    device: str
    generation: int
    rows: list[tuple[FrameRecord, int]]


@dataclass(slots=True)
class Proof:
    """What a worker of one generation has shown to the engine."""

    ready: set[str] = field(default_factory=set)  #: networks that passed load and golden check
    caps: dict[str, tuple[int, float]] = field(default_factory=dict)  #: rows, learned from out of memory, and for how long that holds
    memory: int | None = None  #: bytes that batches may hold, as it reported last; None: it has not
    ended: bool = False  #: told to end, or gone


class Referee:
    def __init__(self, scenario: Scenario, engine: Engine):
        self.scenario = scenario
        self.engine = engine
        self.models: dict[str, ModelSpec] = {}  # network -> its model
        self.frames: dict[int, FrameRecord] = {}
        self.batches: dict[int, BatchRecord] = {}
        self.proofs: dict[tuple[str, int], Proof] = {}
        self.open = 0  #: frames without an end
        self.held: dict[int, tuple[int, int]] = {}  #: frame -> stretch
        self.held_bytes = 0
        self.ending: int | None = None  #: the batch whose answers are being delivered
        self.memory_was_short = False  #: the CPU was out of memory for a single row
        self.isolation_deaths = 0  #: of the isolation worker while it loaded
        self._steps = 0

    # ---------------------------------------------------------------- events

    def arrives(self, now: float, arrival: Arrival, network: str) -> None:
        assert arrival.frame not in self.frames
        self.frames[arrival.frame] = FrameRecord(arrival, network, now + arrival.allowed)
        self.open += 1

    def fill_ends(self, frame: int, ok: bool) -> None:
        f = self.frames[frame]
        f.filling, f.filled = False, ok
        self._forget_if_done(f)

    def batch_ends(self, batch: int) -> None:
        """Its worker was not told to end before it said so: the process reads these rows no more."""
        for f, _ in self.batches[batch].rows:
            f.readers.discard(batch)
            self._forget_if_done(f)

    def process_ends(self, device: str, generation: int) -> None:
        self.proofs[device, generation].ended = True
        for n, b in self.batches.items():
            if (b.device, b.generation) == (device, generation):
                self.batch_ends(n)

    def memory_is_reported(self, device: str, generation: int, nbytes: int, total: int) -> None:
        """`nbytes` of the device's memory are free or held by its worker's batches."""
        self.proofs[device, generation].memory = nbytes - min(self.engine.config.headroom, total // 8)

    def out_of_memory(self, now: float, device: str, generation: int, network: str, rows: int) -> None:
        if rows == 1:
            self.memory_was_short |= device == "cpu"
        else:
            caps = self.proofs[device, generation].caps
            before, until = caps.get(network, (rows, 0.0))
            caps[network] = min(before if until > now else rows, rows // 2), now + self.engine.config.oom_patience

    def _forget_if_done(self, f: FrameRecord) -> None:
        if f.end and not f.filling and not f.readers and f.stretch is not None:
            del self.held[f.arrival.frame]
            self.held_bytes -= f.stretch[1]
            f.stretch = None

    # ---------------------------------------------------------------- commands

    def sees(self, now: float, command: c.Command) -> None:
        match command:
            case c.Fill():
                self._fill(command)
            case c.Dispatch():
                self._dispatch(now, command)
            case c.RowDone():
                self._row_done(now, command)
            case c.Refuse():
                self._refuse(now, command)
            case c.Start():
                self.proofs[command.device, command.generation] = Proof()
            case c.Kill():
                self.proofs[command.device, command.generation].ended = True
            case c.Unload():
                proof = self.proofs[command.device, command.generation]
                proof.ready.discard(command.network)
                proof.caps.pop(command.network, None)
            case c.Retired():
                left = [n for n, f in self.frames.items() if f.network == command.network and not f.end]
                self._must(not left, f"network {command.network} is retired under frames {left}")

    @staticmethod
    def _must(holds: bool, otherwise: str) -> None:
        if not holds:
            raise Violation(otherwise)

    def _fill(self, command: c.Fill) -> None:
        f = self.frames[command.frame]
        again = f.coded and not command.coded  # no device has decoded it: here, in the same memory
        jpeg = f.arrival.jpeg.nbytes if f.arrival.jpeg and (command.coded or again) else 0
        length = -(-(f.arrival.nbytes + jpeg) // PAGE) * PAGE
        start, stop = command.offset, command.offset + length
        f.coded = command.coded
        self._must(not command.coded or f.arrival.jpeg is not None, f"frame {command.frame} is no JPEG, and a device is to decode it")
        self._must(not f.end, f"frame {command.frame} is filled after its end")
        if again:
            self._must(f.stretch == (start, length) and f.filled, f"frame {command.frame} is decoded here after all, and not in its memory")
            f.filling, f.filled = True, False
            return
        self._must(f.stretch is None, f"frame {command.frame} is filled twice")
        self._must(0 <= start and stop <= self.engine.memory.size, f"frame {command.frame} lies outside of the slab: {start}..{stop}")
        for other, (offset, nbytes) in self.held.items():
            self._must(
                stop <= offset or offset + nbytes <= start, f"frame {command.frame} is given bytes {start}..{stop} that frame {other} holds"
            )
        f.filling, f.stretch = True, (start, length)
        self.held[command.frame] = f.stretch
        self.held_bytes += length

    def _dispatch(self, now: float, command: c.Dispatch) -> None:
        name = f"batch {command.batch} for {command.device} (generation {command.generation})"
        proof = self.proofs.get((command.device, command.generation))
        self._must(proof is not None and not proof.ended, f"{name}: no worker")
        assert proof is not None
        self._must(command.network in proof.ready, f"{name}: {command.network} has not proved itself there")
        state = self.engine.devices[command.device].state
        self._must(state in LIVE, f"{name}: the device is {state}")
        rows = [self._row_at(offset) for offset in command.offsets]
        pictures = {p.id: (p.offset, p.nbytes, p.pitch) for p in command.pictures}
        laid = {f.arrival.frame: (f.stretch[0], f.arrival.layout.picture, f.arrival.layout.pitch) for f, _ in rows if f.arrival.layout}
        self._must(pictures == laid, f"{name}: its rows are said to be cut out of {pictures}, and are of {laid}")
        model = self.models[command.network]
        learned, until = proof.caps.get(command.network, (model.max_rows, 0.0))
        cap = 1 if command.device == ISOLATION else min(model.max_rows, learned) if now < until else model.max_rows
        self._must(0 < len(rows) <= cap, f"{name}: {len(rows)} rows, at most {cap}")
        self._must(len(set(command.offsets)) == len(rows), f"{name}: a row twice")
        self._fits_the_device(name, command, proof)
        sources = {s.id: (s.offset, s.nbytes, s.source, s.length) for s in command.coded}
        coded = {}
        for f, _ in rows:
            if f.coded and f.stretch and f.arrival.jpeg:
                start, nbytes = f.stretch[0], f.arrival.nbytes
                coded[f.arrival.frame] = start, nbytes, start + nbytes, f.arrival.jpeg.nbytes
        self._must(sources == coded, f"{name}: its rows are said to be decoded from {sources}, and are from {coded}")
        spec = next((d for d in self.scenario.devices if d.id == command.device), None)
        self._must(not coded or (spec is not None and spec.decoder is not None), f"{name}: the device decodes nothing")
        for f, row in rows:
            frame = f.arrival.frame
            self._must(not f.end and f.filled, f"{name}: frame {frame} has ended or holds no pixels")
            self._must(
                f.network == command.network and f.arrival.shape == command.shape, f"{name}: frame {frame} is of another network or shape"
            )
            self._must(row not in f.answered, f"{name}: row {row} of frame {frame} is already answered")
            suspect = self.engine.frames[frame].suspect
            self._must(suspect == (command.device == ISOLATION), f"{name}: frame {frame} is {'a' if suspect else 'no'} suspect")
            f.readers.add(command.batch)
        self.batches[command.batch] = BatchRecord(command.device, command.generation, rows)

    def _fits_the_device(self, name: str, command: c.Dispatch, proof: Proof) -> None:
        if proof.memory is None:
            return
        running = list(self.engine.devices[command.device].running.values())
        if any(len(b.rows) == 1 for b in running):
            return  # rows that run singly after their batch failed: the worker runs as many at once as it has slots, the others wait there
        need = sum(max(len(b.rows), self.models[b.network].fixed_rows) * self.models[b.network].row_memory for b in running)
        self._must(need <= max(proof.memory, 0), f"{name}: its device's batches need {need} bytes of {proof.memory}")

    def _row_at(self, offset: int) -> tuple[FrameRecord, int]:
        for frame, (start, length) in self.held.items():
            if start <= offset < start + length:
                f = self.frames[frame]
                layout, row_bytes = f.arrival.layout, f.arrival.row_bytes
                starts = list(layout.starts) if layout else [row * row_bytes for row in range(f.arrival.rows)]
                self._must(offset - start in starts, f"offset {offset} is not the start of a row of frame {frame}")
                return f, starts.index(offset - start)
        raise Violation(f"offset {offset} is in nobody's memory")

    def _row_done(self, now: float, command: c.RowDone) -> None:
        f = self.frames[command.frame]
        name = f"row {command.row} of frame {command.frame}"
        self._must(self.ending is not None, f"{name} is answered though no worker that counts has answered")
        assert self.ending is not None
        batch = self.batches[self.ending]
        self._must(
            batch.device == command.device, f"{name} is said to come from {command.device}, batch {self.ending} ran on {batch.device}"
        )
        self._must(batch.rows[command.index] == (f, command.row), f"{name} is given the answer of another row")
        self._must(not f.end, f"{name} is answered after the frame's end: {f.end}")
        self._must(command.row not in f.answered, f"{name} is answered twice")
        f.answered.add(command.row)
        self._must(
            command.last == (len(f.answered) == f.arrival.rows),
            f"{name}: last={command.last} with {len(f.answered)} of {f.arrival.rows} rows",
        )
        if command.last:
            self._must(not f.arrival.flaw, f"frame {command.frame} is answered though it is {f.arrival.flaw}")
            self._end(now, f, "answered")

    def _refuse(self, now: float, command: c.Refuse) -> None:
        f = self.frames[command.frame]
        frame, slug, arrival = command.frame, command.slug, f.arrival
        self._must(not f.end, f"frame {frame} ends twice: {f.end}, then {slug}")
        self._must(slug in PROBLEMS, f"{slug} is not in the table of problems")
        expected = {
            "poison_frame": arrival.flaw == "poison",
            "bad_input": arrival.flaw == "bad_input",
            "not_an_image": arrival.flaw == "undecodable",
            "client_left": arrival.leaves is not None,
            "inference_failed": self.isolation_deaths >= self.engine.config.isolation_tries,
            "shutting_down": False,
            "memory_full": self.memory_was_short,
            "frame_too_large": arrival.nbytes > self.engine.memory.size,
            "overloaded": self.open > 1 or arrival.allowed < GENEROUS,
            "deadline_missed": now >= f.deadline or self.open > 1 or arrival.allowed < GENEROUS,  # given up for others, or in vain
            "superseded": slug != "superseded" or self._newer_waits(arrival),
        }
        self._must(
            expected.get(slug, True), f"frame {frame} ({arrival.flaw or 'nothing wrong with it'}) is refused: {slug}: {command.detail}"
        )
        self._end(now, f, slug)

    def _newer_waits(self, arrival: Arrival) -> bool:
        """A frame of its live stream that came later has no end yet."""
        live = self.scenario.sender(arrival).live
        later = list(self.frames)[list(self.frames).index(arrival.frame) + 1 :]
        return bool(live) and any(not self.frames[n].end and self.scenario.sender(self.frames[n].arrival).live == live for n in later)

    def _end(self, now: float, f: FrameRecord, end: str) -> None:
        late = now - f.deadline - self.scenario.lateness
        self._must(late < 1e-9, f"frame {f.arrival.frame} ends {late:.6f} s after its deadline: {end}")
        f.end = end
        self.open -= 1
        self._forget_if_done(f)

    # ---------------------------------------------------------------- after every event

    def looks(self, now: float, commands: int) -> None:
        """Compare the engine with the books. `commands`: how many this event has caused."""
        engine = self.engine
        self._steps += 1
        self._must(engine.memory.used == self.held_bytes, f"{engine.memory.used} bytes are allocated, frames hold {self.held_bytes}")
        known = self.open + sum(1 for n in self.held if self.frames[n].end)
        self._must(len(engine.frames) == known, f"the engine knows {len(engine.frames)} frames, {known} are open or hold memory")
        most = 50 + 4 * len(self.frames) + 20 * len(engine.devices) * max(1, len(engine.networks))
        self._must(commands <= most, f"one event caused {commands} commands")
        self._work_is_conserved(now)
        if self._steps % 8 == 0:
            self._no_row_is_forgotten()

    def _work_is_conserved(self, now: float) -> None:
        engine = self.engine
        for network in engine.networks:
            ready = sorted((d for d in engine.devices.values() if d.kind != ISOLATION and engine._ready(d, network)), key=lambda d: d.rank)
            home = [d for d in ready if d.kind != "cpu"] or ready
            self._must([d.id for d in engine._home(network)] == [d.id for d in home], f"the remembered placement of {network} is stale")
            waiting = 0
            for queue in engine._queues.values():
                if queue.network != network or not len(queue):
                    continue
                waiting += len(queue)
                stranded = queue.coded and all(engine._decodes(d, network) is None for d in home)
                self._must(not stranded, f"{len(queue)} rows of {network} wait to be decoded on a device, and none is left that could")
                head = queue.head()
                assert head is not None
                for d in home:
                    if queue.coded and engine._decodes(d, network) is None:
                        continue
                    holds = len(queue) < engine._cap(d, network) and now <= engine._hold(now, d, queue, head) + self.scenario.lateness
                    deferred, _ = engine._timers._at.get(("deferred", d.id, network, queue.shape, queue.coded), (0.0, 0))
                    deferred = now <= deferred + self.scenario.lateness  # to a quicker device
                    waits = deferred or self._waits_for_others(now, d, head)
                    idle = d.free_slots() > 0 and not holds and not waits
                    self._must(not idle, f"{len(queue)} ready rows of {network} wait while {d.id} has {d.free_slots()} free slots")
            if home and not waiting + engine.networks[network].copying and engine._filling < engine.config.fill_slots:
                self._nothing_waits_to_be_filled(network)

    def _waits_for_others(self, now: float, d: Device, head: Frame) -> bool:
        """Rows whose turn it is do not fit beside the batches that run there, gain nothing beside them, or are taken just in time: others
        do not overtake them."""
        engine = self.engine
        queues = [q for q in engine._queues.values() if len(q) and engine._ready(d, q.network)]
        if any(engine._fitting(d, d.networks[q.network], 1) == 0 or not engine._has_place(now, d, q) for q in queues):
            return True
        if not d.running or d.parallel:
            return False
        if d.late(now) and any(len(d.running) >= engine._depth(d, q.network) for q in queues):
            return True  # what may still join it in time becomes less with each moment: the next event finds that, no timer does
        earlier = [(q, first) for q in queues if (first := q.head()) is not None and first.due < head.due]
        return any(len(q) < engine._cap(d, q.network) and now <= engine._hold(now, d, q, f) + self.scenario.lateness for q, f in earlier)

    def _nothing_waits_to_be_filled(self, network: str) -> None:
        engine = self.engine
        undecoded = [f for f in engine.frames.values() if not f.finished and not f.filled and not f.filling]
        largest = max((length for _, length in engine.memory._free), default=0)
        fits = all(-(-f.nbytes // PAGE) * PAGE <= largest for f in undecoded)
        # A live frame is decoded when a device is about to take it, not before.
        early = bool(engine.networks[network].decoded) or any(d.running for d in engine._home(network))
        mine = [f.id for f in undecoded if f.network == network and not (early and f.sender.live)]
        self._must(
            not (mine and fits), f"frames {mine} wait to be decoded while decode threads, memory and a device for {network} are free"
        )

    def _no_row_is_forgotten(self) -> None:
        engine = self.engine
        somewhere = {(f.id, row) for d in engine.devices.values() for b in d.running.values() for f, row in b.rows}
        somewhere |= {(f.id, row) for f, row in engine._suspects}
        for f in engine.frames.values():
            if f.filled and not f.finished:
                lost = [row for row in f.waiting if row not in f.queued and (f.id, row) not in somewhere]
                self._must(not lost, f"rows {lost} of frame {f.id} are neither queued nor running")

    # ---------------------------------------------------------------- the end of the world

    def is_at_rest(self) -> str:
        """What is not yet as it was before the first frame came; "" when all is."""
        engine = self.engine
        left = [n for n, f in self.frames.items() if not f.end]
        away = {d.id: d.state for d in engine.devices.values() if d.state not in ("serving", "standby")}
        if away.get(ISOLATION) == "off":
            del away[ISOLATION]
        elif ISOLATION in engine.devices:
            away[ISOLATION] = engine.devices[ISOLATION].state
        books = {
            "frames without an end": left,
            "frames": list(engine.frames),
            "bytes": engine.memory.used,
            "devices": away,
            "zombies": [d.id for d in engine.devices.values() if d.zombies],
            "rows to fill": {n: rows for n, rows in engine._unfilled.items() if rows},
            "decode threads": engine._filling,
            "rows that are copied": {n.id: n.copying for n in engine.networks.values() if n.copying},
            "frames to decode on a device": {n.id: n.coded for n in engine.networks.values() if n.coded},
            "seconds to decode": engine._fill_backlog if engine._fill_backlog > 1e-6 else 0,
            "queued rows": sum(len(q) for q in engine._queues.values()),
            "overdue timers": [key for key in engine._timers._at if isinstance(key, tuple) and key[0] in ("overdue", "deadline")],
        }
        return ", ".join(f"{what}: {n}" for what, n in books.items() if n)
