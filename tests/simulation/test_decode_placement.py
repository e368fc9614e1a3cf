"""Where JPEGs are decoded, against the two ways of always doing it in one place, on random machines in virtual time."""

from __future__ import annotations

import random
from statistics import mean

from outboard.core.decoding import Decoder, Setting
from outboard.plan.drive import Arrival, play
from outboard.plan.machine import Host, Machine, Model, link

MACHINES = 40
FRAMES = 300
BYTES_PER_PIXEL = 0.19


def machine(seed: int, cores: int) -> tuple[Machine, int, float, int]:
    """With the pixels of its frames, seconds of a core to decode one, and its rows."""
    rng = random.Random(seed)
    pixels = rng.choice([900_000, 2_000_000, 8_300_000])
    decode = rng.uniform(1.5e-9, 4.5e-9) * pixels
    rows, per_row, per_batch = rng.choice([1, 1, 1, 12]), rng.choice([0.2e-3, 1e-3, 3e-3, 8e-3]), rng.choice([0.5e-3, 4e-3])
    decoder = Decoder(rng.choice([0.2e-3, 1e-3]), rng.choice([0.3e-9, 1e-9, 2e-9, 6e-9]), slows=0.0)
    model = Model((416, 416, 3), 416 * 416 * 3, 20_000, 16, [(n, per_batch + n * per_row) for n in (1, 2, 18)])
    cable = link(rng.choice(["0.4", "thunderbolt3", "thunderbolt4", "oculink"]))
    return Machine(Host(cores, cores + 1, 0.2e-3, 0.31e-9, 0.2e-3, 2 << 30, 0.15e-3), cable, model, decoder), pixels, decode, rows


def played(m: Machine, pixels: int, decode: float, rows: int, seed: int, fps: float, where: Setting) -> tuple[float, float]:
    """(frames answered a second, their mean age in seconds)."""
    rng, at, arrivals = random.Random(seed), 0.0, []
    for i in range(FRAMES):
        at += rng.expovariate(fps)
        arrivals.append(Arrival(at, f"station {i % 4}", int(BYTES_PER_PIXEL * pixels), decode, rows, pixels))
    log = play(m, arrivals, live=False, decode=where)
    assert all(e.end == "answered" for e in log.endings)
    return FRAMES / log.duration, mean(e.at - e.arrival.at for e in log.endings)


def test_decoding_where_rows_are_ready_first_is_as_good_as_the_better_of_both_places() -> None:
    rates, ages = [], []
    for seed in range(MACHINES):
        cores = (4, 8)[seed % 2]
        set_up = machine(seed, cores)
        full = max(played(*set_up, seed, 1e5, where)[0] for where in ("host", "device"))
        busy = {where: played(*set_up, seed, 1.5 * full, where)[0] for where in ("host", "device", "auto")}
        light = {where: played(*set_up, seed, 0.4 * full, where)[1] for where in ("host", "device", "auto")}
        rates.append(busy["auto"] / max(busy["host"], busy["device"]))
        ages.append(light["auto"] / min(light["host"], light["device"]))
    print(f"\nframes a second under overload, of the better place's: {mean(rates):.3f}, {min(rates):.3f} to {max(rates):.3f}")
    print(f"age under light load, of the better place's: {mean(ages):.3f}, {min(ages):.3f} to {max(ages):.3f}")
    assert min(rates) > 0.95 and mean(rates) > 1.02, "both together answer more than either alone"
    assert max(ages) < 1.35 and mean(ages) < 1.02
