"""From a failing seed to the shortest story that still fails: happenings and devices are left out as long as it goes on failing."""

from __future__ import annotations

import time
from dataclasses import replace

from outboard.core.engine import Engine
from simulation.scenario import Scenario
from simulation.world import World


def failure(scenario: Scenario, engine: type[Engine] = Engine) -> tuple[str, World] | None:
    """What goes wrong in this scenario, or None. Any exception counts: the engine's own assertions are invariants, too."""
    world = World(scenario, engine)
    try:
        world.run()
    except Exception as e:
        return f"{type(e).__name__}: {e}", world
    return None


def shrink(scenario: Scenario, engine: type[Engine] = Engine, seconds: float = 20.0) -> Scenario:
    """A shorter scenario that still fails, in some way, after at most `seconds`."""
    stop = time.monotonic() + seconds
    found = failure(scenario, engine)
    assert found is not None, "a scenario that does not fail cannot be shrunk"
    # Nothing that comes after the failure has caused it.
    scenario = _if_fails(scenario, replace(scenario, happenings=tuple(h for h in scenario.happenings if h.at <= found[1].now)), engine)
    for device in [d.id for d in scenario.devices if d.kind != "cpu"]:
        scenario = _if_fails(scenario, scenario.without_device(device), engine)
    size = max(1, len(scenario.happenings) // 2)
    while time.monotonic() < stop:
        before, start = len(scenario.happenings), 0
        while start < len(scenario.happenings) and time.monotonic() < stop:
            shorter = _if_fails(scenario, scenario.without(start, start + size), engine)
            start += size if shorter is scenario else 0
            scenario = shorter
        if size == 1 and len(scenario.happenings) == before:
            break
        size = max(1, size // 2)
    return scenario


def _if_fails(scenario: Scenario, shorter: Scenario, engine: type[Engine]) -> Scenario:
    return shorter if failure(shorter, engine) else scenario


def report(scenario: Scenario, engine: type[Engine] = Engine) -> str:
    """For a test's failure: what went wrong, the shortest scenario, its story, and how to see it again."""
    short = shrink(scenario, engine)
    found = failure(short, engine)
    assert found is not None
    happenings = len(short.happenings)
    return (
        f"seed {scenario.seed} fails; {happenings} of {len(scenario.happenings)} happenings on {[d.id for d in short.devices]} suffice:\n\n"
        f"{found[1].story()}\n\n{found[0]}\n\nAgain: make simulate SEED={scenario.seed}"
    )
