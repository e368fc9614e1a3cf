"""What a card costs, by the word that names it: measured here, given, or estimated from its vendor's rates."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from outboard.devices import simulated
from outboard.plan import cards, workload
from outboard.plan.predict import Curve, Estimate
from outboard.plan.roofline import RANGE
from outboard.plan.usage import Usage, batch_and_row, checked
from outboard.profiles import Profile, Store
from outboard.repository import ModelSpec, Network

#: Seconds by which the threads of a simulated card, which sleep for as long as it computes, are late on average, from one batch's end to
#: the next one's begin and after its own: measured on 2 cores of an EPYC (Zen 4), 0.4 ms where they do nothing else and 1.0 where they are
#: half busy. A real card's batches do not wait for threads.
WAKE = 0.6e-3


@dataclass(frozen=True, slots=True)
class Basis:
    """The card's costs, and a line for people that says where they are from."""

    card: Estimate | Curve
    text: str
    answer_bytes: int
    fixed_rows: int = 0
    decode: float = 0.0  #: seconds of the card's JPEG decoder for a megapixel, where it was given; 0: it has none


def basis(gpu: str, spec: ModelSpec, network: Network, cache: Path) -> Basis:
    """`gpu`: "RTX 3060", "8+4", "sim:…,compute=8+4", part of the name or UUID of a device that was measured here, or "" for any of those.
    A measurement of this very model comes before an estimate. Raises Usage."""
    given, decode, wake = batch_and_row(gpu), 0.0, 0.0
    if gpu.startswith("sim:"):
        sim = checked("--gpu", simulated.parse, gpu)
        given, decode, wake = sim.compute, sim.decode or 0.0, WAKE
        if given is None:
            raise Usage(f"--gpu {gpu}: its compute time is not modelled; add compute=MS_PER_BATCH+MS_PER_ROW")
    elif given is None and (profile := _measured(gpu, spec, network, cache)) is not None:
        # Without the link that it was measured behind.
        points = tuple((c.rows, max(c.alone - c.upload, 1e-6) if c.alone else c.seconds) for c in profile.costs)
        day = time.strftime("%Y-%m-%d", time.localtime(profile.measured_at))
        return Basis(Curve(points), f"{profile.device}, measured here on {day}", 0, profile.fixed_rows)
    elif not gpu:
        names = ", ".join(card.name for card in cards.CARDS[:4])
        raise Usage(
            f"--gpu is missing, and no device behind a link was measured here with {network.key}; name a card, such as {names}, or give "
            "figures of your own: MS_PER_BATCH+MS_PER_ROW"
        )
    card = checked("--gpu", cards.find, gpu) if given is None else None
    counted = workload.count(spec, network.key.partition("/")[2])
    if card is None:
        assert given is not None
        batch, row = given
        points = ((1, batch + row), (2, batch + 2 * row), (network.batching.max + 2, batch + (network.batching.max + 2) * row))
        text = f"{batch * 1e3:g} ms a batch and {row * 1e3:g} ms a row, as given"
        return Basis(Curve(points, wake), text, counted.answer_bytes, decode=decode)
    precision = spec.toml.run.precision
    peak = card.fp32 if precision == "fp32" else card.fp16
    text = (
        f"{card.name}, estimate: {counted.flops / 1e9:.2g} GFLOP a row in {precision} at {RANGE}; peak {peak / 1e12:.1f} TFLOPS and "
        f"{card.bandwidth / 1e9:.0f} GB/s ({card.source}); the range is that of published fp16 measurements"
    )
    if counted.unknown:
        text += f"; not counted, their shapes are not known: {', '.join(counted.unknown[:5])}"
    return Basis(Estimate(counted, card, precision), text, counted.answer_bytes)


def _measured(gpu: str, spec: ModelSpec, network: Network, cache: Path) -> Profile | None:
    """The newest profile of this version of the model on such a device behind a link."""

    if gpu and not re.search(r"[A-Za-z]{2}|\d{3}", gpu):
        return None  # an "8" is in many names, and more likely an unfinished 8+4

    def meant(profile: Profile) -> bool:
        # "RTX 3060" is not "RTX 3060 Ti".
        name = re.escape(gpu) + r"(?!\s+(ti|super)\b)"
        return bool(re.search(name, profile.device, re.IGNORECASE)) or gpu.lower() == profile.key.uuid.lower()

    found = [
        p for p in Store(cache).all() if p.link is not None and (p.key.model, p.key.version) == (network.key, spec.version) and meant(p)
    ]
    return max(found, key=lambda p: p.measured_at, default=None)
