"""The real engine in virtual time, with seeded random frames, devices, faults and operators. See docs/simulation.md.

`make test` plays the same seeds each time; `make simulate SEEDS=10000` plays so many new ones, on every core;
`make simulate SEED=123` plays one and tells its story if it fails.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from outboard.core.engine import Engine
from simulation.planted import PLANTED
from simulation.scenario import generate
from simulation.shrink import failure, report, shrink
from simulation.world import World

#: Played by every `make test`.
SEEDS = range(120)
#: A planted bug must be found within so many seeds.
ENOUGH = 200


def play(seed: int) -> tuple[Counter[str], str]:
    """How the frames of one seed ended, and what went wrong; "" when nothing did."""
    world = World(generate(seed))
    try:
        return world.run(), ""
    except Exception as e:
        return Counter(), f"{type(e).__name__}: {e}"


def test_nothing_is_lost_doubled_or_wrong() -> None:
    ends: Counter[str] = Counter()
    for seed in SEEDS:
        outcome, wrong = play(seed)
        if wrong:
            pytest.fail(report(generate(seed)), pytrace=False)
        ends += outcome
    # A simulation in which nothing happens would find nothing.
    refusals = (
        "deadline_missed", "overloaded", "memory_full", "frame_too_large", "model_not_ready", "client_left", "poison_frame", "bad_input",
        "superseded",
    )  # fmt: skip
    for end in ("answered", *refusals):
        assert ends[end] > 0, f"no frame of any world ended as {end}: {ends}"
    assert ends["answered"] > sum(ends.values()) / 2


def test_the_same_seed_tells_the_same_story() -> None:
    for seed in (3, 8, 94):
        one, two = World(generate(seed)), World(generate(seed))
        one.run()
        two.run()
        assert one.trace == two.trace


@pytest.mark.parametrize("engine", PLANTED, ids=lambda engine: engine.__name__)
def test_a_planted_bug_is_found(engine: type[Engine]) -> None:
    assert any(failure(generate(seed), engine) for seed in range(ENOUGH)), f"{engine.__name__} survived {ENOUGH} seeds: {engine.__doc__}"


def test_a_failing_seed_shrinks_to_a_short_story() -> None:
    engine = PLANTED[0]
    seed = next(seed for seed in range(ENOUGH) if failure(generate(seed), engine))
    whole = generate(seed)
    short = shrink(whole, engine, seconds=10.0)
    assert failure(short, engine) is not None
    assert len(short.happenings) <= max(12, len(whole.happenings) // 4)


@pytest.mark.skipif("SEED" not in os.environ, reason="`make simulate SEED=123` plays one seed")
def test_this_seed() -> None:
    seed = int(os.environ["SEED"])
    if failure(generate(seed)):
        pytest.fail(report(generate(seed)), pytrace=False)


@pytest.mark.long
@pytest.mark.timeout(24 * 3600)
def test_many_new_seeds() -> None:
    count = int(os.environ.get("SEEDS", "2000"))
    first = int(os.environ.get("FIRST_SEED") or random.SystemRandom().randrange(10**6, 10**12))
    cores = len(os.sched_getaffinity(0))
    began = time.monotonic()
    ends: Counter[str] = Counter()
    with ProcessPoolExecutor(cores, mp_context=get_context("forkserver")) as pool:
        for i, (outcome, wrong) in enumerate(pool.map(play, range(first, first + count), chunksize=16)):
            if wrong:
                pool.shutdown(wait=False, cancel_futures=True)
                pytest.fail(report(generate(first + i)), pytrace=False)
            ends += outcome
    seconds = time.monotonic() - began
    print(f"\n{count} seeds from {first} on, {sum(ends.values())} frames, {count / seconds:.0f} seeds/s on {cores} cores: {dict(ends)}")
