"""Engines with one bug each. The simulation is worth as much as it finds of them."""

from __future__ import annotations

from outboard.core.engine import Engine
from outboard.core.state import Batch, Device, Frame, OnDevice


class FreesWhatZombiesRead(Engine):
    """Memory is given back when a worker is given up, not when its process has ended."""

    def device_lost(self, now: float, device: str, generation: int, why: str, *, explained: bool, quarantine: bool = False) -> None:
        super().device_lost(now, device, generation, why, explained=explained, quarantine=quarantine)
        self.worker_gone(now, device, generation)


class ForgetsRows(Engine):
    """The last row of a batch is not queued again when its device is lost."""

    def _take_back(self, b: Batch) -> None:
        if not b.overdue:
            self._requeue(b.rows[:-1])


class BelievesOldGenerations(Engine):
    """The late answer of a worker that was given up counts."""

    def _batch_ended(self, now: float, device: str, generation: int, batch: int) -> tuple[Device | None, Batch | None]:
        d = self.devices[device]
        for old in d.zombies.get(generation, []):
            if old.id == batch:
                d.zombies[generation].remove(old)
                return d, old
        return super()._batch_ended(now, device, generation, batch)


class SkipsGoldenChecks(Engine):
    """What was loaded serves."""

    def _ask_golden(self) -> None:
        for d in self._ranked:
            for entry in d.networks.values():
                if entry.state == "checking":
                    entry.state = "ready"
        self._placement_changed()


class BlamesNeighbours(Engine):
    """Whoever was in a batch whose worker died is the culprit."""

    def _blame(self, now: float, d: Device, taken: list[Batch]) -> None:
        for f in {f.id: f for b in taken for f, _ in b.rows if not f.finished}.values():
            f.deaths.append((d.id, now))
            self._condemn(now, f)


class ForgetsCaps(Engine):
    """Running out of memory teaches nothing."""

    def _cap(self, device: Device, network: str) -> int:
        entry: OnDevice = device.networks[network]
        entry.cap = 0
        return super()._cap(device, network)


class LeaksRefusedFrames(Engine):
    """Memory of a frame that ends while its pixels are being written is never given back."""

    def filled(self, now: float, frame: int) -> None:
        f: Frame = self.frames[frame]
        if f.finished:
            f.filling = False
            self._filling -= 1
            self._unfilled[f.network] -= f.rows
        else:
            super().filled(now, frame)


class ForgetsTheDecoder(Engine):
    """What waits for a decoder that is lost goes on waiting for it."""

    def _recall(self, now: float) -> None:
        pass


class DecodesNothingAgain(Engine):
    """Rows that a device was to decode are queued as if they were pixels when it is lost."""

    def _recode(self, f: Frame) -> None:
        f.coded = False


PLANTED: list[type[Engine]] = [
    FreesWhatZombiesRead,
    ForgetsRows,
    BelievesOldGenerations,
    SkipsGoldenChecks,
    BlamesNeighbours,
    ForgetsCaps,
    LeaksRefusedFrames,
    ForgetsTheDecoder,
    DecodesNothingAgain,
]
