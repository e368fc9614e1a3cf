"""What would hold: a set-up, played through the engine, and what its frames would have met."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from outboard.core.costs import batch_sizes
from outboard.core.decoding import Decoder
from outboard.plan import roofline
from outboard.plan.arrivals import Recorded
from outboard.plan.cards import Card
from outboard.plan.drive import Arrival, Log, play
from outboard.plan.host import DecodeCost
from outboard.plan.machine import Host, Machine, Model, link
from outboard.plan.roofline import BEST, WORST, Efficiency
from outboard.plan.workload import Workload

#: A plan holds when this share of every station's frames is answered, in time where there is a deadline, and when answers keep up: the last
#: one comes no later than an unhindered frame's age and this share of the time after the last frame.
ANSWERED = 0.99
BEHIND = 0.03
#: Frames that ended so are drops of a live stream or came too late; all other ends are refusals.
DROPS = ("superseded", "deadline_missed")
#: A resource that is used more than this is what limits; below it, lateness has another cause.
FULL = 0.85


@dataclass(frozen=True, slots=True)
class Estimate:
    """A card that is not here."""

    workload: Workload
    card: Card
    precision: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a batch by its rows, known: measured, or given. `wake`: seconds by which a simulated card's threads are late for each
    batch, on average."""

    points: tuple[tuple[int, float], ...]
    wake: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """The frames that arrive. `decode` by (width, height)."""

    frames: Sequence[Recorded]
    decode: Mapping[tuple[int, int], DecodeCost]
    deadline: float = inf
    live: bool = True
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
        costs = [(f, self.decode[f.width, f.height]) for f in self.frames]
        return [Arrival(f.t, f.station, f.bytes, cost.seconds(f.bytes), cost.rows, f.width * f.height) for f, cost in costs]

    def until(self, seconds: float) -> Demand:
        """Its beginning, to try things out with."""
        return dataclasses.replace(self, frames=[f for f in self.frames if f.t < seconds])


@dataclass(frozen=True, slots=True)
class Setup:
    """All that a prediction follows from. `max_rows` bounds a batch, as `[batching] max` does."""

    link: str
    card: Estimate | Curve
    host: Host
    shape: tuple[int, ...]
    row_bytes: int
    answer_bytes: int
    max_rows: int
    demand: Demand
    fixed_rows: int = 0
    max_delay: float = 0.0
    decoder: Decoder | None = None  #: the card's own, for JPEGs; None: the host decodes

    def machine(self, efficiency: Efficiency) -> Machine:
        """Raises MemoryError where not one row fits the card."""
        most, card = self.max_rows, self.card
        if isinstance(card, Estimate):
            most = min(most, roofline.most_rows(card.workload, card.card, card.precision))
            if most < max(1, self.fixed_rows):
                raise MemoryError(f"the model does not fit into {card.card.vram >> 30} GiB")
            compute = [(n, roofline.seconds(card.workload, card.card, card.precision, efficiency, n)) for n in batch_sizes(most)]
        else:
            compute = list(card.points)
        model = Model(self.shape, self.row_bytes, self.answer_bytes, most, compute, self.fixed_rows, self.max_delay)
        return Machine(self.host, link(self.link), model, self.decoder, card.wake if isinstance(card, Curve) else 0.0)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Times in seconds; `fps` is answered frames a second of a station, on average; `use` are shares of what each resource could do."""

    fps: float
    fps_asked: float
    age_p50: float
    age_p99: float
    sent: int
    answered: int
    dropped: int
    refused: int
    rows: float  #: of a batch, on average
    use: dict[str, float]
    bottleneck: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A set-up's predictions at both ends of the range; the same one twice where nothing is estimated."""

    setup: Setup
    worst: Prediction
    best: Prediction

    @property
    def estimate(self) -> bool:
        return isinstance(self.setup.card, Estimate)


def plan(setup: Setup) -> Plan:
    worst = predict(setup, WORST)
    return Plan(setup, worst, predict(setup, BEST) if isinstance(setup.card, Estimate) else worst)


def predict(setup: Setup, efficiency: Efficiency = WORST) -> Prediction:
    demand = setup.demand
    try:
        machine = setup.machine(efficiency)
    except MemoryError:
        n, use = len(demand.frames), {"link": 0.0, "compute": 0.0, "decode": 0.0}
        return Prediction(0.0, _asked(demand), inf, inf, n, 0, 0, n, 0.0, use, "memory", False)
    return _summary(play(machine, demand.arrivals(), allowed=demand.deadline, live=demand.live, seed=demand.seed), demand, setup.host)


def _span(demand: Demand) -> float:
    """Seconds of the demand: from the first frame to one mean interval after the last."""
    first, last = demand.frames[0].t, demand.frames[-1].t
    stations = len({f.station for f in demand.frames})
    each = len(demand.frames) / stations
    return (last - first) * each / max(each - 1, 1) or 1.0  # one frame: as if it were one a second


def _asked(demand: Demand) -> float:
    return len(demand.frames) / len({f.station for f in demand.frames}) / _span(demand)


def _summary(log: Log, demand: Demand, host: Host) -> Prediction:
    sent = Counter(e.arrival.station for e in log.endings)
    answered = Counter(e.arrival.station for e in log.endings if e.end == "answered")
    dropped = sum(e.end in DROPS for e in log.endings)
    ages = sorted(e.at - e.arrival.at for e in log.endings if e.end == "answered")
    use = {
        "link": log.link / log.duration,
        "compute": log.compute / log.duration,
        "decode": log.cores / log.duration / host.cores,
    }
    behind = log.duration - demand.frames[-1].t - quantile(ages, 0.05)  # where answers fall behind, only the first have their usual age
    if log.decoder:
        use["decoder"] = log.decoder / log.duration
    holds = all(answered[station] >= ANSWERED * n for station, n in sent.items()) and behind <= BEHIND * _span(demand) + 0.1
    fullest = max(use, key=lambda name: use[name])
    idle = not holds and use[fullest] < FULL
    superseded = sum(e.end == "superseded" for e in log.endings)
    total = sum(answered.values())
    return Prediction(
        fps=total / len(sent) / max(_span(demand), log.duration - demand.frames[0].t),  # what was in flight at the end took its time, too
        fps_asked=_asked(demand),
        age_p50=quantile(ages, 0.5),
        age_p99=quantile(ages, 0.99),
        sent=len(log.endings),
        answered=total,
        dropped=dropped,
        refused=len(log.endings) - total - dropped,
        rows=sum(log.batches) / max(1, len(log.batches)),
        use=use,
        bottleneck=fullest if not idle else "deadline" if 2 * superseded < len(log.endings) - total else "waiting",
        holds=holds,
    )


def quantile(values: Sequence[float], q: float) -> float:
    """Of sorted values: the smallest that at least a share `q` of them does not exceed; inf of none."""
    return values[min(len(values) - 1, int(q * len(values)))] if values else inf
