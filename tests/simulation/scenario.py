"""What happens to the engine in one simulated world: values only, generated from a seed before the world starts.

A scenario can be shortened (`without`) and run again, so a failure can be shrunk to the few happenings that cause it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from outboard.core.decoding import Decoder
from outboard.core.engine import ISOLATION
from outboard.core.state import ANYBODY, Jpeg, Layout, Sender

SHAPES = [(64, 64, 3), (32, 48, 3), (64, 64, 1), (16, 200, 3)]


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    id: str
    kind: str  #: cpu | gpu | sim
    slots: int
    rank: int
    speed: float  #: costs are divided by this
    present: bool = True
    memory: int = 0  #: bytes; 0: it runs out of memory by fault only
    decoder: Decoder | None = None  #: None: it takes pixels only


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model whose versions are the engine's networks. Times in seconds, of a device of speed 1."""

    name: str
    max_rows: int
    per_batch: float
    per_row: float
    max_delay: float
    standby: str
    fixed_rows: int = 0
    fails_on: frozenset[str] = frozenset()  #: devices that cannot load it
    row_memory: int = 0  #: bytes of device memory that a batch needs for each row


@dataclass(frozen=True, slots=True)
class Arrival:
    """One frame. `leaves`: seconds until its client goes away; `digest` names its bytes."""

    frame: int
    model: str
    shape: tuple[int, int, int]
    rows: int
    allowed: float  #: seconds until its deadline
    fill_cost: float
    flaw: str = ""  #: "" | undecodable | bad_input | poison
    leaves: float | None = None
    digest: bytes = b""

    @property
    def layout(self) -> Layout | None:
        """Of every other frame of several rows: all but the last are cut out of one picture that is twice as wide as they are."""
        if self.rows == 1 or self.frame % 2:
            return None
        h, w, channels = self.shape
        pitch = 2 * w * channels
        picture = (h + self.rows - 2) * pitch
        starts = [i * pitch + (i % 2) * w * channels for i in range(self.rows - 1)]
        return Layout(picture + h * w * channels, picture, pitch, (*starts, picture))

    @property
    def jpeg(self) -> Jpeg | None:
        """Two of three frames are JPEGs that a device could decode."""
        return Jpeg(100 + self.frame % 700, 1_000_000 * (1 + self.frame % 4)) if self.frame % 3 else None

    @property
    def row_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.shape[2]

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes if self.layout else self.rows * self.row_bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """What the world does to a device, for `seconds`. `argument`: rows for oom, per cent of its memory for another program's `memory`."""

    kind: str  #: unplug | hang | kill | sticky | broken | oom | slow | wrong | silent-start | dies-loading | unkillable
    device: str
    seconds: float
    argument: int = 0


@dataclass(frozen=True, slots=True)
class Operator:
    kind: str  #: eject | reset | reload
    target: str  #: a device, or a model for reload


@dataclass(frozen=True, slots=True)
class Happening:
    at: float
    what: Arrival | Fault | Operator


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    devices: tuple[DeviceSpec, ...]
    models: tuple[ModelSpec, ...]
    happenings: tuple[Happening, ...]
    slab_bytes: int
    fill_slots: int
    grid: float  #: times are rounded up to multiples of this, so that things happen at the same time; 0: not rounded
    lateness: float  #: the driver's timers come up to this much late
    horizon: float  #: no faults any more from here on

    def sender(self, arrival: Arrival) -> Sender:
        """In a third of the scenarios frames come from stations, too: one whose newest frame wins, two that wait."""
        if self.seed % 3:
            return ANYBODY
        name = ("", "drone", "drone", "drone", "patient", "modest")[arrival.frame % 6]
        return Sender(name, live=f"drone.{arrival.model}" if name == "drone" else "")

    def without(self, start: int, stop: int) -> Scenario:
        return replace(self, happenings=self.happenings[:start] + self.happenings[stop:])

    def without_device(self, device: str) -> Scenario:
        return replace(
            self,
            devices=tuple(d for d in self.devices if d.id != device),
            happenings=tuple(
                h for h in self.happenings if getattr(h.what, "device", "") != device and getattr(h.what, "target", "") != device
            ),
        )


def generate(seed: int) -> Scenario:
    rng = random.Random(seed)
    devices = [DeviceSpec("cpu", "cpu", rng.choice([1, 2, 4]), 100, 1.0)]
    for i in range(rng.choice([0, 1, 1, 1, 2, 3])):
        kind = rng.choice(["gpu", "sim"])
        devices.append(
            DeviceSpec(f"{kind}:{i}", kind, rng.choice([1, 2, 3]), rng.choice([i, 0]), rng.choice([1.5, 5.0, 20.0]), rng.random() < 0.9)
        )
    models = tuple(_model(rng, i, devices) for i in range(rng.choice([1, 1, 2, 3])))
    horizon = rng.choice([5.0, 15.0, 40.0])
    happenings = _arrivals(rng, models, horizon) + _faults(rng, devices, horizon) + _operators(rng, devices, models, horizon)
    if rng.random() < 0.3:  # suspects cannot be tried for a while
        happenings.append(Happening(rng.uniform(0, horizon / 2), Fault("dies-loading", ISOLATION, rng.choice([2.0, 10.0, 40.0]))))
    devices = _decoders(random.Random(f"decoders {seed}"), devices)
    devices, models, others = _memory(random.Random(f"memory {seed}"), devices, models, horizon)
    happenings += others
    happenings.sort(key=lambda h: h.at)
    return Scenario(
        seed=seed,
        devices=tuple(devices),
        models=models,
        happenings=tuple(happenings),
        slab_bytes=rng.choice([1 << 16, 1 << 18, 1 << 22]),
        fill_slots=rng.choice([1, 2, 4]),
        grid=rng.choice([0.0, 0.0, 0.001, 0.01]),
        lateness=rng.choice([0.0, 0.0, 0.003]),
        horizon=horizon,
    )


def _model(rng: random.Random, i: int, devices: list[DeviceSpec]) -> ModelSpec:
    max_rows = rng.choice([1, 4, 8, 16, 32])
    fails_on = frozenset(d.id for d in devices if rng.random() < 0.06)
    return ModelSpec(
        name=f"m{i}",
        max_rows=max_rows,
        per_batch=rng.choice([0.0005, 0.005, 0.03]),
        per_row=rng.choice([0.0005, 0.005, 0.02]),
        max_delay=rng.choice([0.0, 0.0, 0.0, 0.02]),
        standby=rng.choice(["hot", "hot", "hot", "cold", "none"]),
        fixed_rows=rng.choice([0, 0, 0, 0, 1, 4]),
        fails_on=fails_on,
    )


def _arrivals(rng: random.Random, models: tuple[ModelSpec, ...], horizon: float) -> list[Happening]:
    count = rng.choice([20, 80, 200])
    pattern = rng.choice(["steady", "bursty", "mixed"])
    flawed = rng.choice([0.0, 0.0, 0.05])
    poison = rng.choice([0.0, 0.0, 0.0, 0.02, 0.05])
    leaving = rng.choice([0.0, 0.05, 0.3])
    burst_at = [rng.uniform(0, horizon) for _ in range(max(1, count // 30))]
    shapes = {m.name: rng.sample(SHAPES, rng.choice([1, 1, 3])) for m in models}
    allowed = rng.choice([(0.05, 0.3), (0.5, 3.0), (30.0, 30.0), (0.02, 30.0)])
    happenings = []
    for frame in range(1, count + 1):
        if pattern == "steady":
            at = horizon * frame / count
        elif pattern == "bursty" or rng.random() < 0.5:
            at = rng.choice(burst_at)
        else:
            at = rng.uniform(0, horizon)
        model = rng.choice(models)
        flaw = "poison" if rng.random() < poison else rng.choice(["undecodable", "bad_input"]) if rng.random() < flawed else ""
        arrival = Arrival(
            frame=frame,
            model=model.name,
            shape=rng.choice(shapes[model.name]),
            rows=rng.choice([1, 1, 1, 1, 2, 5, 12]),
            allowed=rng.uniform(*allowed),
            fill_cost=rng.choice([0.0, 0.001, 0.015]),
            flaw=flaw,
            leaves=rng.expovariate(10.0) if rng.random() < leaving else None,
            digest=b"poison%d" % rng.randrange(3) if flaw == "poison" else b"frame%d" % frame,
        )
        happenings.append(Happening(at, arrival))
    return happenings


def _faults(rng: random.Random, devices: list[DeviceSpec], horizon: float) -> list[Happening]:
    happenings = []
    for device in devices:
        if device.kind == "cpu":
            kinds = rng.choice([[], [], ["kill"], ["kill", "hang", "slow", "oom", "unkillable"]])
        else:
            kinds = rng.choice(
                [
                    [],
                    ["unplug", "kill"],
                    ["unplug", "hang", "kill", "sticky", "broken", "oom", "slow", "wrong", "silent-start", "unkillable", "flap"],
                ]
            )
        for _ in range(rng.choice([1, 3, 8]) if kinds else 0):
            at, kind = rng.uniform(0, horizon), rng.choice(kinds)
            if kind == "flap":
                happenings += [Happening(at + 1.5 * i, Fault("unplug", device.id, 0.7)) for i in range(6)]
            else:
                happenings.append(Happening(at, Fault(kind, device.id, rng.choice([0.3, 2.0, 10.0]), argument=rng.choice([0, 1, 2, 6]))))
    return happenings


def _memory(
    rng: random.Random, devices: list[DeviceSpec], models: tuple[ModelSpec, ...], horizon: float
) -> tuple[list[DeviceSpec], tuple[ModelSpec, ...], list[Happening]]:
    """Memory of the accelerators, what rows need of it, and other programs that take some of it for a while, step by step."""
    devices = [replace(d, memory=rng.choice([0, 16 << 20, 256 << 20]) if d.kind != "cpu" else 0) for d in devices]
    models = tuple(replace(m, row_memory=rng.choice([0, 1 << 20, 6 << 20])) for m in models)
    happenings = []
    for device in devices:
        for _ in range(rng.choice([0, 1, 3]) if device.memory else 0):
            at, seconds, most = rng.uniform(0, horizon), rng.choice([1.0, 5.0]), rng.choice([30, 80, 99])
            steps = rng.choice([1, 4])
            happenings += [Happening(at + seconds * i, Fault("memory", device.id, seconds, most * (i + 1) // steps)) for i in range(steps)]
    return devices, models, happenings


def _decoders(rng: random.Random, devices: list[DeviceSpec]) -> list[DeviceSpec]:
    """Some accelerators decode, quickly or slowly."""
    found = []
    for device in devices:
        decoder = rng.choice([None, Decoder(0.0005, 1e-9), Decoder(0.001, 2e-8)])
        found.append(replace(device, decoder=decoder if device.kind != "cpu" else None))
    return found


def _operators(rng: random.Random, devices: list[DeviceSpec], models: tuple[ModelSpec, ...], horizon: float) -> list[Happening]:
    happenings = []
    if rng.random() < 0.3:
        device = rng.choice(devices)
        at = rng.uniform(0, horizon)
        happenings.append(Happening(at, Operator("eject", device.id)))
        happenings.append(Happening(at + rng.uniform(0, 5), Operator("reset", device.id)))
    if rng.random() < 0.2:
        happenings.append(Happening(rng.uniform(0, horizon), Operator("reset", rng.choice(devices).id)))
    for _ in range(rng.choice([0, 0, 1, 3])):
        happenings.append(Happening(rng.uniform(0, horizon), Operator("reload", rng.choice(models).name)))
    return happenings


def describe(value: Any) -> str:
    """A happening, in one line, without the fields that have their default."""
    fields = {n: getattr(value, n) for n in value.__dataclass_fields__}
    shown = {n: v for n, v in fields.items() if v != value.__dataclass_fields__[n].default}
    return f"{type(value).__name__}({', '.join(f'{n}={v!r}' for n, v in shown.items())})"
