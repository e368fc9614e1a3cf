"""How the cost of batches is measured: what counts of several runs, and when no larger batch is tried.

Nothing here runs a batch or reads a clock; the caller does, on a device or in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

#: Seconds of a batch above which no larger one is tried.
LONG_BATCH = 0.4
#: Where a larger batch answers fewer rows a second than this share of the best, none larger still is tried.
FALLING = 0.85
#: Where a larger batch answers so many times the rows a second of the best before it, a larger one still is tried, however long measuring
#: has taken: a table that ends there would keep batches small for as long as it is believed.
PAYS = 1.1
#: The two quickest runs of a batch differ by less: what else the machine does never delays two runs equally.
ALIKE = 1.03
#: So often a batch is run to see two alike.
MOST_RUNS = 6
#: Where a batch of a size that was not measured could take so much less than the line between its neighbours says, it is measured, too.
UNSURE = 0.04
#: So often for one network: each new size costs a runtime a warm-up, and a compiler a program.
MOST_BETWEEN = 3


def usual(seconds: Iterable[float]) -> float:
    """Of several runs the lower quartile: what else the machine does makes a run longer, never shorter."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 4]


def enough(seconds: Sequence[float], least: int) -> bool:
    """Whether these runs of a batch tell what it takes: two of at least `least` are alike, or more would not help."""
    if len(seconds) < max(least, 2):
        return False
    first, second = sorted(seconds)[:2]
    return second < ALIKE * first or len(seconds) >= MOST_RUNS


def table(sizes: Sequence[int], run: Callable[[int], float | None], out_of_time: Callable[[], bool]) -> list[tuple[int, float]]:
    """(rows, seconds of a batch) of growing sizes, as far as larger batches are of use. `run` gives the seconds of a batch of so many
    rows, None where it cannot be run."""
    found: list[tuple[int, float]] = []
    best = 0.0
    for rows in sizes:
        seconds = run(rows)
        if seconds is not None and rows / seconds < FALLING * best:
            again = run(rows)  # something else may have run in between
            seconds = None if again is None else min(seconds, again)
        if seconds is None:
            break
        found.append((rows, seconds))
        pays = rows / seconds > PAYS * best
        best = max(best, rows / seconds)
        if seconds > LONG_BATCH or rows / seconds < FALLING * best or (out_of_time() and not pays):
            break
    return found


def beside(
    alone: Mapping[int, float], run: Callable[[int], float | None], out_of_time: Callable[[], bool]
) -> Callable[[int], float | None]:
    """`run`, the seconds of a batch among others, as long as there is time; then what it takes `alone` times what the last one, among
    others, took of that. Where several run at once, measuring takes as many times as long."""
    share = 1.0

    def seconds(rows: int) -> float | None:
        nonlocal share
        if rows in alone and rows > min(alone) and out_of_time():
            return share * alone[rows]
        found = run(rows)
        if found is not None and rows in alone:
            share = found / alone[rows]
        return found

    return seconds


def refined(
    found: list[tuple[int, float]], run: Callable[[int], float | None], out_of_time: Callable[[], bool]
) -> list[tuple[int, float]]:
    """`found`, and what was measured where the sizes between say more than the line through their neighbours."""
    for _ in range(MOST_BETWEEN):
        rows = None if out_of_time() else between(found)
        seconds = None if rows is None else run(rows)
        if rows is None or seconds is None:
            break
        found = sorted([*found, (rows, seconds)])
    return found


def between(found: Sequence[tuple[int, float]]) -> int | None:
    """The rows between measured sizes whose seconds the line between its neighbours may overstate most; None where that is no matter.

    A large card takes as long for eight rows as for one, and then longer with each: such a bend lies between two sizes that were measured.
    Where costs only ever rise more steeply, the truth is above what the segments beside it foretell when they are drawn on, so the two
    meet in the bend.
    """
    best: tuple[float, int] | None = None
    for i, ((a, low), (b, high)) in enumerate(zip(found, found[1:], strict=False)):
        beside = [(found[i - 1], found[i])] if i else []
        beside += [(found[i + 1], found[i + 2])] if i + 2 < len(found) else []
        for rows in range(a + 1, b) if beside else ():
            line = low + (high - low) * (rows - a) / (b - a)
            least = max(y + (z - y) * (rows - x) / (w - x) for (x, y), (w, z) in beside)
            if least > 0 and (best is None or line / least > best[0]):
                best = line / least, rows
    return best[1] if best is not None and best[0] > 1 + UNSURE else None
