"""The engine in virtual time: the driver of `outboard plan`, what `runtime.py` is in real time.

`play` takes a machine and the frames that arrive, and says how each of them ended and what was busy for how long. It decides nothing: the
engine is the server's own. The same machine and arrivals give the same result.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from outboard.core import commands as c
from outboard.core.decoding import Setting
from outboard.core.engine import Engine, EngineConfig
from outboard.core.state import PIPELINE, Jpeg, Network, Sender
from outboard.plan.machine import Machine

_NETWORK, _DEVICE = "model", "gpu:0"
#: Bytes a second at which a core copies a JPEG into frame memory, for a card that decodes it.
_COPY = 5e9


@dataclass(frozen=True, slots=True)
class Arrival:
    """A frame reaches the server whole at `at`, seconds from the start."""

    at: float
    station: str
    nbytes: int
    decode: float  #: seconds of a core until its rows lie in frame memory
    rows: int = 1  #: the picture, or its tiles
    pixels: int = 0  #: of the picture


@dataclass(slots=True)
class Ending:
    """`end` is "answered" or the slug of a refusal; `at` when the answer had left."""

    arrival: Arrival
    end: str = ""
    at: float = 0.0


@dataclass
class Log:
    """What happened. Busy times are in seconds: of the link, in its busier direction, and of all cores together."""

    endings: list[Ending]
    duration: float = 0.0  #: until the last ending
    link: float = 0.0
    compute: float = 0.0
    cores: float = 0.0
    decoder: float = 0.0  #: of the card's
    batches: list[int] = field(default_factory=list)  #: rows of each


class Turns:
    """One after the other, in the order of asking: a direction of a cable, a processor."""

    def __init__(self, play: _Play):
        self._play = play
        self._free = 0.0
        self._taken = 0.0

    def take(self, seconds: float, then: Callable[[], None]) -> None:
        self._free = max(self._play.now, self._free) + seconds
        self._taken += seconds
        self._play.at(self._free, then)

    def busy(self) -> float:
        """Seconds until now in which it was in use."""
        return self._taken - max(0.0, self._free - self._play.now)


class Cores:
    """Cores that share their time evenly among the threads that want to run."""

    def __init__(self, play: _Play, cores: int):
        self._play = play
        self._cores = cores
        self._jobs: dict[int, tuple[float, Callable[[], None]]] = {}  # work done by every job when this one is done -> what then
        self._each = 0.0  # work that each job has been given since the start
        self._since = 0.0
        self._n = 0
        self._due = 0
        self._worked = 0.0

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        self._advance()
        self._n += 1
        self._jobs[self._n] = (self._each + seconds, then)
        self._plan()

    def wanted(self) -> float:
        """How many threads want to run for each core."""
        return len(self._jobs) / self._cores

    def busy(self) -> float:
        """Seconds of a core until now."""
        self._advance()
        return self._worked

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._jobs)) if self._jobs else 0.0

    def _advance(self) -> None:
        given = (self._play.now - self._since) * self._rate()
        self._each += given
        self._worked += given * len(self._jobs)
        self._since = self._play.now

    def _plan(self) -> None:
        """Set the time of the next end; an earlier plan is void."""
        self._due += 1
        if self._jobs:
            first = min(self._jobs, key=lambda job: (self._jobs[job][0], job))
            left = max(0.0, self._jobs[first][0] - self._each)
            self._play.at(self._play.now + left / self._rate(), lambda due=self._due: self._ends(due, first))

    def _ends(self, due: int, job: int) -> None:
        if due != self._due:
            return
        self._advance()
        _, then = self._jobs.pop(job)
        self._plan()
        then()


class Loop:
    """The front's event loop: one thing at a time, on a core that it shares with the decode threads."""

    def __init__(self, cores: Cores):
        self._cores = cores
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._running = False

    def run(self, seconds: float, then: Callable[[], None]) -> None:
        self._waiting.append((seconds, then))
        if not self._running:
            self._next()

    def _next(self) -> None:
        self._running = bool(self._waiting)
        if self._waiting:
            seconds, then = self._waiting.popleft()
            self._cores.run(seconds, lambda: self._done(then))

    def _done(self, then: Callable[[], None]) -> None:
        then()
        self._next()


class _Play:
    def __init__(self, machine: Machine, arrivals: Sequence[Arrival], allowed: float, live: bool, seed: int, decode: Setting):
        self.machine, self.allowed, self.live = machine, allowed, live
        self.now = 0.0
        host = machine.host
        self.engine = Engine(EngineConfig(slab_bytes=host.slab_bytes, fill_slots=host.decode_threads, decode=decode), seed=seed)
        self.cores = Cores(self, host.cores)
        self.loop = Loop(self.cores)
        self.up, self.down, self.processor, self.decoder = Turns(self), Turns(self), Turns(self), Turns(self)
        self._on_card: set[int] = set()  # frames that its decoder has decoded
        self.endings = [Ending(a) for a in arrivals]
        self.batches: list[int] = []
        self._seconds = [machine.batch(rows) for rows in range(machine.model.max_rows + 1)]
        self._rng = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._n = 0
        self._acting = False
        self._computed = 0.0  # when the card had computed the last batch
        self._ended = 0.0  # when that batch ended
        self._open = len(arrivals)

    def at(self, at: float, what: Callable[[], None]) -> None:
        self._n += 1
        heappush(self._heap, (at, self._n, what))

    def hand_over(self, what: Callable[[], None]) -> None:
        """Another thread or process does it, as soon as it has woken up: cores that are busy keep it waiting."""
        self.at(self.now + self._late(self.machine.host.handover), what)

    def _late(self, mean: float) -> float:
        """Seconds until a thread runs that, where no core is busy, wakes up within `mean` on average."""
        return self._rng.expovariate(1 / (mean * (1 + self.cores.wanted()))) if mean else 0.0

    def run(self) -> Log:
        engine, model = self.engine, self.machine.model
        engine.add_network(0.0, Network(_NETWORK, max_rows=model.max_rows, max_delay=model.max_delay))
        engine.add_device(0.0, _DEVICE, "gpu", PIPELINE, 0)
        self._act()
        for i, ending in enumerate(self.endings):
            self.at(ending.arrival.at, lambda i=i: self._arrives(i))
        while self._open:
            timer = engine.next_timer()
            if timer is not None and (not self._heap or timer < self._heap[0][0]):
                self.now = max(self.now, timer)
                engine.tick(self.now)
                self._act()
            else:
                self.now, _, what = heappop(self._heap)
                what()
        link = max(self.up.busy(), self.down.busy())
        return Log(self.endings, self.now, link, self.processor.busy(), self.cores.busy(), self.decoder.busy(), self.batches)

    # ---------------------------------------------------------------- frames

    def _arrives(self, i: int) -> None:
        host = self.machine.host
        self.loop.run(host.receive + host.receive_byte * self.endings[i].arrival.nbytes, lambda: self._admit(i))

    def _admit(self, i: int) -> None:
        a, model = self.endings[i].arrival, self.machine.model
        self.engine.admit(
            self.now,
            i,
            _NETWORK,
            shape=model.shape,
            rows=a.rows,
            row_bytes=model.row_bytes,
            deadline=a.at + self.allowed,
            fill_cost=a.decode,
            jpeg=Jpeg(a.nbytes, a.pixels) if self.machine.decoder is not None else None,
            sender=Sender(a.station, live=a.station if self.live else ""),
        )
        self._act()

    def _decode(self, frame: int, coded: bool) -> None:
        a = self.endings[frame].arrival
        self.cores.run(a.nbytes / _COPY if coded else a.decode, lambda: self.hand_over(lambda: self._filled(frame)))

    def _filled(self, frame: int) -> None:
        self.engine.filled(self.now, frame)
        self._act()

    def _ends(self, i: int, end: str) -> None:
        ending = self.endings[i]
        assert not ending.end, f"frame {i} ended twice: {ending.end}, {end}"
        ending.end, ending.at = end, self.now
        self._open -= 1

    # ---------------------------------------------------------------- batches

    def _upload(self, command: c.Dispatch) -> None:
        rows = len(command.offsets)
        self.batches.append(rows)
        if not command.coded:
            began = self.now
            self.up.take(self._seconds[rows][0], lambda: self._compute(command, began))
            return
        new = [self.endings[source.id].arrival for source in command.coded if source.id not in self._on_card]
        self._on_card.update(source.id for source in command.coded)
        decoder = self.machine.decoder
        decoding = sum(decoder.seconds(a.pixels) for a in new) if decoder is not None else 0.0
        ours = {source.id: (source.offset, source.offset + source.nbytes) for source in command.coded}
        whole = sum(not any(start <= o < end for start, end in ours.values()) for o in command.offsets)
        sent = sum(a.nbytes for a in new) + whole * self.machine.model.row_bytes
        crossing = self.machine.link.upload(sent) if sent else 0.0
        self.up.take(crossing, lambda: self.decoder.take(decoding, lambda: self._compute(command, self.now, decoding)))

    def _compute(self, command: c.Dispatch, began: float, decoding: float = 0.0) -> None:
        """Its rows lie on the card. `began`: when it was taken up, or had been decoded."""
        _, compute, download = self._seconds[len(command.offsets)]
        gathered = self.now

        def computed() -> None:
            idle, self._computed = max(0.0, gathered - max(began, self._computed)), self.now
            self.down.take(download, lambda at=self.now: self._batch_done(command, began, decoding, idle, at))

        self.processor.take(compute + self._late(self.machine.wake), computed)

    def _batch_done(self, command: c.Dispatch, began: float, decoding: float, idle: float, computed: float) -> None:
        device, generation, batch = command.device, command.generation, command.batch
        self.engine.decoded(self.now, device, generation, batch, decoding)
        own = self.now - max(began, self._ended)  # as a worker measures it: without the wait for the batch before it
        self._ended = self.now
        self.engine.batch_done(self.now, device, generation, batch, own, idle, computed)
        self._act()

    # ---------------------------------------------------------------- commands

    def _act(self) -> None:
        """Carry out what the engine has decided, in order; what that leads to at once follows in the same loop."""
        if self._acting:
            return
        self._acting = True
        while commands := self.engine.take():
            for command in commands:
                self._carry_out(command)
        self._acting = False

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Fill():
                self.hand_over(lambda: self._decode(command.frame, command.coded))
            case c.Dispatch():
                self.hand_over(lambda: self._upload(command))
            case c.RowDone():
                if command.last:
                    self.loop.run(self.machine.host.respond, lambda: self.hand_over(lambda: self._ends(command.frame, "answered")))
            case c.Refuse():
                self._ends(command.frame, command.slug)
            case c.Start():
                self.engine.hello(self.now, command.device, command.generation, self.machine.link)
            case c.Load():
                m, about = self.machine, (command.device, command.generation, command.network)
                self.engine.loaded(self.now, *about, m.costs(), m.model.fixed_rows, m.decoder)
            case c.CheckGolden():
                self.engine.golden_checked(self.now, command.device, command.generation, command.network, True)
            case c.Ping():
                self.engine.heard(self.now, command.device, command.generation)
            case c.Kill():
                raise RuntimeError(f"at {self.now:.3f} s the engine gave up a device that never fails; this is a bug, please report it")


def play(
    machine: Machine, arrivals: Sequence[Arrival], *, allowed: float = inf, live: bool = True, seed: int = 0, decode: Setting = "auto"
) -> Log:
    """Every arrival to its end. `allowed`: seconds after which an answer is worthless; `live`: of each station the newest frame wins;
    `decode`: as the server's setting."""
    return _Play(machine, arrivals, allowed, live, seed, decode).run()
