"""An engine with its hands held: devices brought up, frames filled, commands picked out by kind."""

from __future__ import annotations

from typing import Any, TypeVar

from outboard.core import commands as c
from outboard.core.engine import ISOLATION, Engine, EngineConfig
from outboard.core.state import Network

C = TypeVar("C")

SHAPE = (16, 16, 3)
#: A batch costs 10 ms and 1 ms for each row: the knee of at most 8 rows is 8.
COSTS = [(1, 0.011), (2, 0.012), (4, 0.014), (8, 0.018)]


class Kit:
    def __init__(self, *networks: Network, now: float = 100.0, **config: Any):
        self.now = now
        self.engine = Engine(EngineConfig(**{"slab_bytes": 1 << 20, "fill_slots": 64, "spill_beside": (), **config}), seed=1)
        self.seen: list[c.Command] = []
        self.frames = 0
        for network in networks or (Network("m", max_rows=8),):
            self.engine.add_network(self.now, network)

    def take(self) -> list[c.Command]:
        commands = self.engine.take()
        self.seen += commands
        return commands

    def all(self, kind: type[C]) -> list[C]:
        """Every command of this kind so far."""
        self.take()
        return [command for command in self.seen if isinstance(command, kind)]

    def last(self, kind: type[C]) -> C:
        return self.all(kind)[-1]

    def state(self, device: str) -> str:
        return self.engine.devices[device].state

    def generation(self, device: str) -> int:
        return self.engine.devices[device].generation

    def add(self, device: str, *, slots: int = 1, rank: int | None = None, present: bool = True) -> None:
        kind = device.partition(":")[0]
        self.engine.add_device(self.now, device, kind, slots, rank if rank is not None else 100 if kind == "cpu" else 0, present=present)

    def load(self, device: str, costs: list[tuple[int, float]] = COSTS, fixed_rows: int = 0) -> None:
        """Its worker says hello and loads what it is told to."""
        generation = self.generation(device)
        self.engine.hello(self.now, device, generation)
        for load in self.all(c.Load):
            if (load.device, load.generation) == (device, generation):
                self.engine.loaded(self.now, device, generation, load.network, costs, fixed_rows)

    def check(self, device: str, ok: bool = True) -> None:
        """Its golden answers are compared."""
        for check in self.all(c.CheckGolden):
            if (check.device, check.generation) == (device, self.generation(device)):
                self.engine.golden_checked(self.now, device, check.generation, check.network, ok, "" if ok else "off by 0.3")

    def up(self, device: str, **options: Any) -> None:
        self.add(device, **options)
        self.back(device)

    def back(self, device: str) -> None:
        self.load(device)
        self.check(device)

    def wait(self, seconds: float) -> None:
        """Let time pass; every timer comes up when it is due."""
        end = self.now + seconds
        while (at := self.engine.next_timer()) is not None and at <= end:
            self.now = max(self.now, at)
            self.engine.tick(self.now)
        self.now = end

    def admit(
        self, network: str = "m", *, rows: int = 1, allowed: float = 10.0, shape: tuple[int, int, int] = SHAPE, **options: Any
    ) -> int:
        self.frames += 1
        self.engine.admit(self.now, self.frames, network, shape=shape, rows=rows, deadline=self.now + allowed, **options)
        return self.frames

    def frame(self, network: str = "m", **options: Any) -> int:
        """A frame that is admitted and filled at once."""
        frame = self.admit(network, **options)
        assert self.last(c.Fill).frame == frame, "not filled at once"
        self.engine.filled(self.now, frame)
        return frame

    def done(self, batch: c.Dispatch | None = None, seconds: float = 0.01, idle: float = 0.0) -> None:
        batch = batch or self.last(c.Dispatch)
        self.engine.batch_done(self.now, batch.device, batch.generation, batch.batch, seconds, idle)

    def fail(self, kind: str, batch: c.Dispatch | None = None) -> None:
        batch = batch or self.last(c.Dispatch)
        self.engine.batch_failed(self.now, batch.device, batch.generation, batch.batch, kind, f"{kind} on purpose")

    def dies(self, device: str, *, explained: bool = False) -> None:
        """Its worker's process ends."""
        generation = self.generation(device)
        self.engine.device_lost(self.now, device, generation, "it died", explained=explained)
        self.engine.worker_gone(self.now, device, generation)

    def end(self, frame: int) -> str:
        """How the frame ended: "answered by DEVICE", a slug, or "" while it has no end."""
        ends = [f"answered by {d.device}" for d in self.all(c.RowDone) if d.frame == frame and d.last]
        ends += [r.slug for r in self.all(c.Refuse) if r.frame == frame]
        assert len(ends) <= 1, ends
        return ends[0] if ends else ""

    def isolated(self) -> c.Dispatch:
        """Bring the isolation worker up, if need be, and return what it was given last."""
        if not self.engine.devices[ISOLATION].up:
            self.load(ISOLATION)
        batch = self.last(c.Dispatch)
        assert batch.device == ISOLATION, batch
        return batch
