"""The engine: every decision about frames, batches, devices and memory.

Rules of this file. Everything that the server remembers about work in flight lives here, and nothing here reads a clock, a
socket, a thread or a tensor: events come in as method calls with the time `now` in seconds, decisions leave as `commands`.
The same code runs in the server, in the simulation tests and under `outboard plan`.

Theory of operation. A frame is *admitted* when it can be done in time; it waits for a decode thread and for memory (`Fill`);
its rows then wait in the `ReadyQueue` of their network and shape. A device with a free slot takes rows at once: up to its cap
(the knee of the measured costs, bounded by the model's maximum, by what memory taught and by the earliest deadline). While the
device is busy rows accumulate, so batches grow with load and nobody waits for company. `RowDone` and `Refuse` are the two ends
of a frame; each frame has exactly one of them (with `last` set for the former).

Devices. A device's worker belongs to a *generation*; whatever an older generation still says is ignored. A worker is started,
says hello (warming), loads every network, and a network is *ready* there once its golden answer agrees with the CPU's. Rows
go to the lowest rank on which their network is ready: accelerators first, the CPU when there is none. When a batch is overdue
its device is *suspect*: its rows are queued again and the first answer wins. When a device is lost its batches' rows are
queued again, the worker is killed and nobody waits for it.

Decoding. A JPEG is decoded by a thread, or by a device that can (`core/decoding.py`): then `Fill` only copies its bytes, its rows wait in a
`ReadyQueue` of their own, and only devices with a decoder take them. It has one try there: whatever becomes of that batch but an answer,
and where no decoder is left, its frame goes back to the decode threads (`_recode`), in memory that it has had for that all along.

Memory. A frame's rows are slab bytes from `Fill` until the frame is finished *and* no process that may still read them lives:
batches of a lost generation hold them until `worker_gone`. Rows lie side by side, or are cut out of one picture (`Layout`) by the device.

Turns. Within a network stations take turns (`core/fair.py`), for a decode thread and for a device. Of a live stream the newest frame wins:
it takes the place of one that has not begun to be decoded, and is decoded when a device is about to be free (`core/live.py`).

Poison. Only an unexplained death of a worker makes suspects of the frames it held. They run one row at a time in the isolation
worker; the one that kills it is refused and its digest remembered; the others get their answers.

Warning. A frame may be finished while rows of it are still queued, running or being filled (its client left, its deadline came).
Every path that touches a frame later must look at `finished` first, and memory is released in `_release` and nowhere else.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any

from outboard.core import commands as c
from outboard.core import decoding, in_time, pipeline, placement
from outboard.core.costs import BatchCost, Costs
from outboard.core.decoding import Decoder, Way
from outboard.core.device_memory import DeviceMemory, MemoryNeed
from outboard.core.failback import FailbackPolicy, LossHistory
from outboard.core.fair import FairQueue, Turn
from outboard.core.isolation import Poison, Suspects
from outboard.core.link import Link
from outboard.core.live import LiveStreams, most_rows, room
from outboard.core.memory import Allocator, OutOfSlab
from outboard.core.pipeline import Pipeline
from outboard.core.ready import ReadyQueue
from outboard.core.state import ANYBODY, LIVE, PATIENCE, Batch, Device, Frame, Jpeg, Layout, Network, OnDevice, Sender, Shape
from outboard.core.timers import Timers

ISOLATION = "isolation"
_TOO_LATE = "it could only have been answered too late, or at the cost of others; send less, or allow more time"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Bounds and times in bytes and seconds."""

    slab_bytes: int
    fill_slots: int = 2  #: decode threads
    overdue_factor: float = 3.0  #: a batch is overdue after `overdue_factor` x its expected time + `overdue_grace`
    overdue_grace: float = 0.2
    overdue_loading: float = 2.0  #: but not sooner than this while the device loads a network: it measures that one beside the batch
    failures: int = 3  #: an accelerator that fails so many rows in succession, each alone, is lost: it must not win traffic by failing fast
    silence: float = 3.0  #: a suspect device that stays silent this long is lost
    cpu_hang: float = 30.0  #: the CPU has nobody to hand over to: its worker is replaced after this much more patience
    start_limit: float = 60.0  #: from start to hello
    load_limit: float = 600.0  #: from hello until the first network is ready; compiling counts
    load_tries: int = 3  #: so many workers of a device die in succession while they load a network until it is given up there
    ping_every: float = 1.0
    hold: float = 0.5  #: of a row's expected time: how long a busy CPU waits for a batch to grow
    pipeline_lead: float = 0.05  #: of the running batch's time (and the lead that was learned): how much too early the next one is sent
    live_moment: float = 0.1  #: batches that are decoded ahead for live streams take no longer
    live_lead: float = 2.0  #: of its expected time (and 5 ms): how long before a device can take it a live frame begins to be decoded
    isolation_idle: float = 20.0  #: the disposable worker is ended after this time without suspects
    isolation_tries: int = 5  #: of the disposable worker, to get a network loaded; then that network's suspects are refused
    isolation_retry: float = 0.5  #: from its first death without a row to the next try; it doubles with each
    poison_memory: float = 600.0  #: a poison frame's digest is refused at once for this long
    poison_kept: int = 1024
    spill_beside: tuple[str, ...] = ("gpu",)  #: kinds of accelerators beside which the CPU takes rows that it answers earlier
    decode: decoding.Setting = "auto"  #: where JPEGs are decoded
    headroom: int = 0  #: bytes of a device's memory that are left to other programs
    oom_patience: float = 10.0  #: from running out of memory to the next larger batch; it doubles with each time, up to
    oom_patience_max: float = 600.0
    failback: FailbackPolicy = field(default_factory=FailbackPolicy)


class Engine:
    """See the head of this file. Every public method appends to `commands`; the driver takes them with `take()`."""

    def __init__(self, config: EngineConfig, seed: int = 0):
        self.config = config
        self.memory = Allocator(config.slab_bytes)
        self.networks: dict[str, Network] = {}
        self.devices: dict[str, Device] = {}
        self.frames: dict[int, Frame] = {}
        self.poison = Poison(config.poison_memory, config.poison_kept)
        self.commands: list[c.Command] = []
        self._rng = random.Random(seed)
        self._queues: dict[tuple[str, Shape, bool], ReadyQueue] = {}
        self._to_fill: dict[str, FairQueue[Frame]] = {}
        self._live = LiveStreams()
        self._filling = 0  # decode threads
        self._filling_seconds = 0.0  # that these are expected to take, from when they began
        self._fill_backlog = 0.0  # expected decode seconds not yet begun
        self._unfilled: dict[str, int] = {}  # network -> rows admitted and not yet ready
        self._suspects = Suspects(config.isolation_tries, config.isolation_retry)
        self._timers = Timers()
        self._ranked: list[Device] = []  # without isolation, by rank
        self._homes: dict[str, list[Device]] = {}  # network -> `_home`, forgotten by `_placement_changed`
        self._batches = 0
        self._finished = 0  # frames
        self._deferred = False  # some device left rows that others were to take, or has no memory for those whose turn it is
        self._seq = 0
        self._pings = 0

    # ---------------------------------------------------------------- the driver's side

    def take(self) -> list[c.Command]:
        """The commands since the last call, in order."""
        out, self.commands = self.commands, []
        return out

    def next_timer(self) -> float | None:
        """When `tick` wants to be called next, or None."""
        return self._timers.next()

    def tick(self, now: float) -> None:
        """Act on every timer that has come due."""
        while (key := self._timers.due(now)) is not None:
            kind, *args = key  # type: ignore[misc]
            getattr(self, f"_on_{kind}")(now, *args)
        self._pump(now)

    # ---------------------------------------------------------------- networks

    def add_network(self, now: float, network: Network) -> None:
        """Load it on every device that lives; frames may be admitted for it from now on."""
        assert network.id not in self.networks, network.id
        self.networks[network.id] = network
        self._unfilled[network.id] = 0
        self._to_fill[network.id] = FairQueue(lambda frame, _: not frame.finished)
        for device in self.devices.values():
            if device.up and self._wants(device, network):
                self._load(device, network.id)

    def retire_network(self, now: float, network: str) -> None:
        """Admit no more frames for it; unload it everywhere once its last frame is finished."""
        self.networks[network].current = False
        self._drop_if_drained(now, network)

    def _drop_if_drained(self, now: float, network: str) -> None:
        entry = self.networks.get(network)
        if entry is None or entry.current or entry.frames:
            return
        del self.networks[network]
        del self._unfilled[network], self._to_fill[network]
        self._homes.pop(network, None)
        for key in [k for k in self._queues if k[0] == network]:
            del self._queues[key]
        for device in self.devices.values():
            if device.networks.pop(network, None) and device.up:
                self.commands.append(c.Unload(device.id, device.generation, network))
                if device.state == "warming":  # perhaps for this network
                    self._settle(now, device)
        self.commands.append(c.Retired(network))

    def _wants(self, device: Device, network: Network) -> bool:
        """Whether the device loads this network. Accelerators load everything and the isolation worker what it is asked for. The CPU holds
        what stands by hot; what stands by cold, while no accelerator serves it (so also at start, as the reference); "none", never."""
        if device.kind != "cpu":
            return device.kind != ISOLATION
        if network.standby == "cold":
            return not any(self._ready(d, network.id) for d in self._ranked if d.kind != "cpu")
        return network.standby == "hot"

    def _settle_standby(self, now: float) -> None:
        """Load on the CPU what must no longer stand by cold, unload what may."""
        for network in self.networks.values():
            if network.standby != "cold":
                continue
            for cpu in self._ranked:
                if cpu.kind != "cpu" or not cpu.up:
                    continue
                wanted, held = self._wants(cpu, network), network.id in cpu.networks
                if wanted and not held:
                    self._load(cpu, network.id)
                elif held and not wanted and not any(b.network == network.id for b in cpu.running.values()):
                    del cpu.networks[network.id]
                    self._placement_changed()
                    self.commands.append(c.Unload(cpu.id, cpu.generation, network.id))
                    self._settle(now, cpu)

    def ready_on(self, network: str) -> list[str]:
        """Ids of the devices on which the network can run now, in the order in which they are preferred."""
        return [d.id for d in self._ranked if self._ready(d, network) and d.kind != ISOLATION]

    # ---------------------------------------------------------------- frames

    def admit(
        self,
        now: float,
        frame: int,
        network: str,
        *,
        shape: Shape,
        deadline: float,
        rows: int = 1,
        fill_cost: float = 0.0,
        digest: bytes = b"",
        row_bytes: int = 0,
        layout: Layout | None = None,
        jpeg: Jpeg | None = None,
        sender: Sender = ANYBODY,
    ) -> None:
        """Take a frame in, or refuse it before any work is spent on it.

        `shape` is what its rows must share with others of a batch, `row_bytes` their size (0: uint8 pixels of `shape`), `layout` how they
        lie in its memory (None: side by side), `jpeg` what a device would need to decode it (None: it cannot); `deadline` absolute, `inf`:
        none; `fill_cost` the expected seconds of a decode thread; `digest` names the submitted bytes (only needed while `poison` is not
        empty).
        """
        assert frame not in self.frames, frame
        entry = self.networks[network]
        if digest and (left := self.poison.seconds_left(now, digest)):
            self._refuse_new(frame, "poison_frame", "this input killed the worker that ran it a short while ago; it is not run again", left)
            return
        self._seq += 1
        f = Frame(
            id=frame,
            network=network,
            shape=shape,
            rows=rows,
            row_bytes=row_bytes or prod(shape),
            arrived=now,
            deadline=deadline,
            seq=self._seq,
            fill_cost=fill_cost,
            sender=sender,
            layout=layout,
            jpeg=jpeg,
            waiting=set(range(rows)),
        )
        if f.nbytes > self.memory.size:
            need = f"{f.nbytes} bytes of frame memory are needed, the server has {self.memory.size} in all"
            self._refuse_new(frame, "frame_too_large", need + "; raise [limits] frame_memory", None)
            return
        if not self._may_ever_run(network):
            why = (
                "; ".join(f"{d.id}: {d.networks[network].why or d.state}" for d in self.devices.values() if network in d.networks)
                or "no device is up"
            )
            self._refuse_new(frame, "model_not_ready", f"no device can run the model now ({why})", 1.0)
            return
        place = sum(older.rows for older in self._live.undecoded(sender.live)) if sender.live else 0
        # A live frame that takes the place of one that was admitted adds nothing: refused, it would leave the older one to be answered.
        if place < rows and (late := self.late(now, network, rows, deadline, fill_cost, jpeg)):
            self._refuse_new(frame, "overloaded", *late)
            return
        self.frames[frame] = f
        entry.frames += 1
        entry.strict += sender.strict
        self._wait_to_fill(f)
        if deadline < inf:
            self._timers.set(("deadline", frame), deadline)
        if sender.live:
            for older in self._live.enter(f):
                self._refuse(now, older, "superseded", "a newer frame of its stream took its place")
        self._pump(now)

    def _wait_to_fill(self, f: Frame) -> None:
        """For a decode thread, or for a device's decoder."""
        f.to_fill = True
        self._unfilled[f.network] += f.rows
        self._fill_backlog += f.fill_cost
        turn = f.sender.station, bool(f.sender.live)
        self._to_fill[f.network].push(turn, f.due, f.seq, f, cost=max(f.fill_cost, 1e-4 * f.rows))

    def filled(self, now: float, frame: int) -> None:
        """The frame's rows lie in the slab, or what a device decodes them from."""
        f = self._fill_ended(frame)
        f.filled, f.ready = True, now
        if f.finished:
            self._release(now, f)
        else:
            for row in sorted(f.waiting):
                if f.suspect:
                    self._suspects.add(f, row)
                else:
                    self._queue(f).push(f, row)
        self._pump(now)

    def _fill_ended(self, frame: int) -> Frame:
        f = self.frames[frame]
        f.filling = False
        self._unfilled[f.network] -= f.rows
        if f.coded:
            self.networks[f.network].copying -= f.rows
        else:
            self._filling -= 1
            self._filling_seconds = max(0.0, self._filling_seconds - f.fill_cost) if self._filling else 0.0
        return f

    def fill_failed(self, now: float, frame: int, slug: str, detail: str) -> None:
        """Its image cannot be decoded."""
        f = self._fill_ended(frame)
        if f.finished:
            self._release(now, f)
        else:
            self._refuse(now, f, slug, detail)
        self._pump(now)

    def leave(self, now: float, frame: int) -> None:
        """The client is gone: whatever was not started is dropped, what runs is discarded when it ends."""
        f = self.frames.get(frame)
        if f is not None and not f.finished:
            self._refuse(now, f, "client_left", "the client closed the connection")
            self._pump(now)

    def late(
        self, now: float, network: str, rows: int, deadline: float, fill_cost: float = 0.0, jpeg: Jpeg | None = None
    ) -> tuple[str, float] | None:
        """Where so many rows that arrive now would be answered after their deadline: why, and the seconds after which they would not."""
        wait = self.estimate(network, rows, fill_cost, jpeg)
        if now + wait <= deadline:
            return None
        wait = self.estimate(network, rows, fill_cost, jpeg, due=min(deadline, now + PATIENCE))  # looks at each frame, so it comes second
        if now + wait <= deadline:
            return None
        allowed = deadline - now
        when = f"its deadline is in {allowed * 1e3:.0f} ms" if allowed > 0 else f"its deadline was {-allowed * 1e3:.0f} ms ago"
        detail = f"the work before it and its own take about {wait * 1e3:.0f} ms, {when}; send less, or allow more time"
        return detail, max(wait - allowed, 0.1)

    def estimate(self, network: str, rows: int, fill_cost: float = 0.0, jpeg: Jpeg | None = None, due: float = inf) -> float:
        """Expected seconds until a frame that arrives now is answered: the decode and device work before it, then its own. Rows that are
        due after `due` are not before it."""
        own = self._home(network)
        here = self._decoder(network) if jpeg else None
        there = here[1].seconds(jpeg.pixels) if jpeg and here else 0.0
        decode = decoding.together(self._fill_backlog + fill_cost, self.config.fill_slots, fill_cost, there)
        if not own:
            return decode  # nothing is known yet: admitted, and bounded by its deadline
        work = self._work(own, network, rows)
        for other, waiting in self._waiting_rows(due):
            if waiting and (home := self._home(other)) and home[0] is own[0]:
                work += self._work(home, other, waiting)
        if not decode:  # the devices are what limits, and of what waits for them some will have been given up
            work = max(self._work(own, network, rows), work - self._full_batch(own[0], network))
        return decode + work / len(own)

    def rows_within(self, network: str, seconds: float) -> int:
        """Rows that the devices which answer this network run in about so long, at least a full batch of each; 0: it is not known."""
        home = self._home(network)
        if not home:
            return 0
        cap = self._cap(home[0], network)
        each = self._work(home, network, 4 * cap) / (4 * cap)
        return max(cap, int(seconds / each)) * len(home) if each else 0

    def _full_batch(self, device: Device, network: str) -> float:
        """Seconds."""
        costs = device.networks[network].costs
        return costs.expected(self._cap(device, network)) if costs else 0.0

    def _work(self, devices: list[Device], network: str, rows: int) -> float:
        """Seconds that the first of `devices` needs for `rows` rows in batches of its cap."""
        device = devices[0]
        entry = device.networks[network]
        if entry.costs is None:
            return 0.0
        cap = min(self._cap(device, network), rows)
        if not device.parallel:
            return self._interval(device, network, cap) * rows / cap
        return entry.costs.expected(cap) * rows / cap / (device.slots if rows > cap else 1)

    def _waiting_rows(self, due: float = inf) -> Iterable[tuple[str, int]]:
        """Rows that wait, by network, those left out that are due later."""
        unfilled: Mapping[str, int] = self._unfilled
        if due < inf:
            unfilled = counted = Counter[str]()
            for f in self.frames.values():
                if not f.filled and not f.finished and f.due <= due:
                    counted[f.network] += f.rows
        yield from unfilled.items()
        for queue in self._queues.values():
            yield queue.network, len(queue) if due == inf else sum(len(f.queued) for f in queue.frames() if f.due <= due)

    def _may_ever_run(self, network: str) -> bool:
        """Some device has it ready or may have it soon."""
        return any(
            d.networks[network].state != "failed"
            if network in d.networks
            else d.state in ("starting", "lost", "warming") and self._wants(d, self.networks[network])
            for d in self.devices.values()
            if d.kind != ISOLATION and d.state not in ("off", "ejected", "quarantined")
        )

    # ---------------------------------------------------------------- the end of a frame

    def _refuse_new(self, frame: int, slug: str, detail: str, retry_after: float | None) -> None:
        self.commands.append(c.Refuse(frame, slug, detail, retry_after))

    def _refuse(self, now: float, f: Frame, slug: str, detail: str, retry_after: float | None = None) -> None:
        self.commands.append(c.Refuse(f.id, slug, detail, retry_after))
        self._finish(now, f)

    def _give_up(self, now: float, f: Frame) -> None:
        """It would be late, or make more others late. Its client may come again when what waits now is done."""
        self._refuse(now, f, "deadline_missed", _TOO_LATE, max(0.1, self.estimate(f.network, f.rows)))

    def _finish(self, now: float, f: Frame) -> None:
        assert not f.finished, f"frame {f.id} ended twice"
        f.finished = True
        self._finished += 1
        self._timers.cancel(("deadline", f.id))
        for row in list(f.queued):
            self._queue(f).withdraw(f, row)
        if f.to_fill:
            f.to_fill = False
            self._unfilled[f.network] -= f.rows
            self._fill_backlog = max(0.0, self._fill_backlog - f.fill_cost)
        self.networks[f.network].coded.pop(f.id, None)
        f.waiting.clear()
        if f.sender.live:
            self._live.leave(f)
            self.networks[f.network].decoded.pop(f.id, None)
        self._release(now, f)

    def _release(self, now: float, f: Frame) -> None:
        """Give the frame's memory back once nobody can read or write it any more."""
        if not f.finished or f.filling or f.batches:
            return
        if f.offset >= 0:
            self.memory.free(f.offset)
            f.offset = -1
        del self.frames[f.id]
        entry = self.networks[f.network]
        entry.frames -= 1
        entry.strict -= f.sender.strict
        self._drop_if_drained(now, f.network)

    def _queue(self, f: Frame) -> ReadyQueue:
        key = (f.network, f.shape, f.coded)
        queue = self._queues.get(key)
        if queue is None:
            # Pipelines send rows of many widths: queues that are empty and not in use now make room.
            if len(self._queues) > 256:
                for stale in [k for k, q in self._queues.items() if not len(q)]:
                    del self._queues[stale]
            queue = self._queues[key] = ReadyQueue(*key)
        return queue

    def _on_deadline(self, now: float, frame: int) -> None:
        f = self.frames.get(frame)
        if f is None or f.finished:
            return
        at = "running" if f.batches else "waiting for a device" if f.filled else "waiting to be decoded"
        self._refuse(now, f, "deadline_missed", f"not answered {(now - f.arrived) * 1e3:.0f} ms after its arrival; it was {at}")

    # ---------------------------------------------------------------- filling and dispatching

    def _pump(self, now: float) -> None:
        self._recall(now)
        self._fill(now)
        before = self._batches, self._finished
        again = True
        while again:  # what one device leaves to others depends on what they have taken
            batches, self._deferred = self._batches, False
            for device in self._ranked:
                while device.state in LIVE and device.free_slots() > 0 and self._dispatch_one(now, device):
                    pass
            again = self._deferred and self._batches > batches
        if self._suspects:
            self._isolate(now)
        if (self._batches, self._finished) != before:
            finished, filling = self._finished, self._filling
            self._fill(now)  # rows that left, or were given up, make room for others
            if (self._finished, self._filling) != (finished, filling):
                self._pump(now)  # what a CPU held rows back for may now be too little to wait for, or nothing

    def _fill(self, now: float) -> None:
        """Start decoding, as far as threads, memory and the devices' appetite go."""
        while (self._filling < self.config.fill_slots or self._decoders_wait()) and (found := self._next_to_fill(now)) is not None:
            queue, turn, f = found
            if self._hopeless(now, f):
                self._give_up(now, f)
                continue
            entry = self.networks[f.network]
            there = self._decoded_there(now, f)
            if there is None and self._filling >= self.config.fill_slots:
                return
            if f.offset < 0 and not self._allocate(f, there is not None):
                return  # whoever is first gets the next free memory: nobody small may starve it
            queue.pop(turn)
            f.to_fill, f.filling = False, True
            self._fill_backlog = max(0.0, self._fill_backlog - f.fill_cost)
            if f.coded:
                entry.coded[f.id] = there or 0.0
                entry.copying += f.rows
            else:
                self._filling += 1
                self._filling_seconds += f.fill_cost
            if f.sender.live:
                entry.decoded[f.id] = f.rows
            self.commands.append(c.Fill(f.id, f.offset, f.coded))

    def _allocate(self, f: Frame, coded: bool) -> bool:
        """Take memory for it, and with `coded`, where there is enough, for what a device decodes."""
        for f.coded in (True, False) if coded and self._filling < self.config.fill_slots else (coded,):
            try:
                f.offset = self.memory.alloc(f.nbytes)
                return True
            except OutOfSlab:
                f.coded = False
        return False

    # ---------------------------------------------------------------- decoding on a device

    def decodes(self, network: str) -> bool:
        """Whether a device that serves the network could decode for it now."""
        return self._decoder(network) is not None

    def _decoder(self, network: str) -> tuple[Device, Decoder] | None:
        """The first device of those that serve the network which can decode for it."""
        for d in self._home(network):
            if (decoder := self._decodes(d, network)) is not None:
                return d, decoder
        return None

    def _decodes(self, device: Device, network: str) -> Decoder | None:
        """What the device decodes with; None: it takes pixels only, or none while the host is to decode."""
        if device.distrusted or self.config.decode == "host":
            return None
        entry = device.networks.get(network)
        return entry.decoder if entry is not None else None

    def _decoders_wait(self) -> bool:
        """Frames may wait for a decode thread that a device could decode."""
        return any(queue and self._decoder(network) for network, queue in self._to_fill.items())

    def _decoded_there(self, now: float, f: Frame) -> float | None:
        """Expected seconds of a device's decoder where that is to decode the frame; None: a thread of the host is."""
        if f.jpeg is None or f.offset >= 0 or (found := self._decoder(f.network)) is None:  # with memory it has had its try
            return None
        if f.pixel_bytes + f.jpeg.nbytes > self.memory.size:
            return None
        device, decoder = found
        seconds, waiting = decoder.seconds(f.jpeg.pixels), self._ready_rows(f.network)
        pixels, compressed = (device.link.upload(n) if device.link else 0.0 for n in (f.pixel_bytes, f.jpeg.nbytes))
        host = Way(decoding.thread_free(self._filling_seconds, self._filling, self.config.fill_slots), f.fill_cost, pixels)
        there = Way(max(0.0, device.decoder_free - now) + sum(self.networks[f.network].coded.values()), seconds, compressed)
        compute = self._work([device], f.network, self._cap(device, f.network)) / self._cap(device, f.network) * f.rows
        behind = device.ahead(now) + (self._work([device], f.network, waiting) if waiting else 0.0)
        return seconds if decoding.on_device(self.config.decode, host, there, compute, behind, decoder.slows) else None

    def _recall(self, now: float) -> None:
        """What no device is left to decode goes to the decode threads."""
        for queue in [q for q in self._queues.values() if q.coded and len(q) and self._decoder(q.network) is None]:
            for f in queue.frames():
                self._recode(f)

    def _recode(self, f: Frame) -> None:
        """The host decodes the frame after all."""
        for row in list(f.queued):
            self._queue(f).withdraw(f, row)
        self.networks[f.network].coded.pop(f.id, None)
        self.networks[f.network].decoded.pop(f.id, None)
        f.coded = f.filled = False
        self._wait_to_fill(f)

    def decoded(self, now: float, device: str, generation: int, batch: int, seconds: float) -> None:
        """Call before `batch_done`: the device took so many seconds to decode the batch's pictures (0: they were there already)."""
        d = self.devices.get(device)
        b = d.running.get(batch) if d is not None and d.generation == generation else None
        if d is None or b is None:
            return
        entry = d.networks.get(b.network)
        if entry is not None and entry.decoder is not None and b.decodes:
            entry.decoder = entry.decoder.observed(b.decodes, seconds)

    def _hopeless(self, now: float, f: Frame) -> bool:
        """It would be answered too late even if it were next, so decoding it would only make others late. While nothing runs that would
        show costs to be wrong, nothing is hopeless."""
        ready = [d for d in self._ranked if self._ready(d, f.network)]
        if not any(d.running for d in ready):
            return False
        there = self._decoder(f.network) if f.jpeg else None
        decode = min(f.fill_cost, there[1].seconds(f.jpeg.pixels)) if f.jpeg and there else f.fill_cost
        begin = {d.id: max(decode, d.ahead(now)) for d in ready}
        soonest = min(begin[d.id] + costs.latency(1) for d in ready if (costs := d.networks[f.network].costs))
        if f.rows > 1:
            soonest = max(soonest, min(begin.values()) + self._until_answered(ready, f.network, f.rows))
        return now + soonest > f.deadline

    def _until_answered(self, devices: Sequence[Device], network: str, rows: int) -> float:
        """Seconds from when the first of `devices` can begin until they have answered `rows` rows together, at least."""
        known = [d for d in devices if d.networks[network].costs]
        costs = [costs for d in known if (costs := d.networks[network].costs)]
        work = [self._work([d], network, rows) for d in known]
        if not work or min(work) <= 0.0:
            return 0.0
        # A device's last batch is answered later than the next one could begin, by the links' part of it.
        batches = [min(self._cap(d, network), rows) for d in known]
        last = min(max(0.0, each.latency(n) - each.expected(n)) for each, n in zip(costs, batches, strict=True))
        return last + 1 / sum(1 / seconds for seconds in work)

    def _next_to_fill(self, now: float) -> tuple[FairQueue[Frame], Turn[Frame], Frame] | None:
        """Whose turn it is in the network whose turn is due first, of those that want rows: decoded rows only take memory while their
        device is busy, and the many frames of one network must not keep decode threads from another."""
        best: tuple[FairQueue[Frame], Turn[Frame], Frame] | None = None
        for network, queue in self._to_fill.items():
            if not queue:
                continue
            under_way = self._ready_rows(network) + self.networks[network].copying
            hungry = {False: under_way < self._appetite(network)}  # by live; asked once, and only where such rows wait

            def wanted(key: Any, network: str = network, hungry: dict[bool, bool] = hungry) -> bool:
                live = key[1]
                if live not in hungry:
                    hungry[live] = self._live_room(now, network) > 0
                return hungry[live]

            found = queue.first(wanted)
            if found is not None and (best is None or (found[1].due, found[1].seq) < (best[2].due, best[2].seq)):
                best = queue, *found
        return best

    def _live_room(self, now: float, network: str) -> int:
        """Rows of live streams that may begin to be decoded now; where there is none, a timer is set for when there will be."""
        entry = self.networks[network]
        head = self._to_fill[network].urgent()
        lead = self.config.live_lead * (head.fill_cost if head else 0.0) + 0.005
        rows, later = room(now, [(d, *self._live_batch(d, network)) for d in self._home(network)], lead)
        rows -= sum(entry.decoded.values())
        if rows <= 0 and later < inf:
            self._timers.set(("live", network), later)
        return rows

    def _count_decoded(self, f: Frame) -> None:
        """Its rows that wait decoded are others now. A frame in tiles has many: while they wait, its stream's next one is not decoded."""
        if f.sender.live:
            decoded = self.networks[f.network].decoded
            if f.queued:
                decoded[f.id] = len(f.queued)
            else:
                decoded.pop(f.id, None)

    def _live_batch(self, device: Device, network: str) -> tuple[int, float]:
        """Rows and seconds of a batch for live streams."""
        costs = device.networks[network].costs
        if costs is None:
            return 1, 0.0
        rows = most_rows(costs, self._cap(device, network), self.config.live_moment)
        return rows, costs.expected(rows)

    def _on_live(self, now: float, network: str) -> None:
        """A device will soon take rows of a live stream; `tick` pumps."""

    def _drop_surplus(self, now: float) -> None:
        """A device has given back what it held: of a live stream, only what those that are left take next is worth an answer."""
        for f in self._live.surplus(lambda network: max((self._live_batch(d, network)[0] for d in self._home(network)), default=1)):
            self._refuse(now, f, "superseded", "its device was lost, and newer frames of its stream wait")

    def _ready_rows(self, network: str) -> int:
        return sum(len(q) for q in self._queues.values() if q.network == network)

    def _appetite(self, network: str) -> int:
        """Decoded rows worth holding for a network: two rounds of every slot that may take them."""
        home = self._home(network)
        return max(4, sum(2 * self._depth(d, network) * self._cap(d, network) for d in home))

    def _dispatch_one(self, now: float, device: Device) -> bool:
        picked = self._pick(now, device)
        if picked is None:
            return False
        queue, surplus = picked
        if not self._has_place(now, device, queue):
            self._deferred = True  # one batch more at once gains nothing; nobody overtakes it, or it might wait for ever
            return False
        entry = device.networks[queue.network]
        cap = self._cap(device, queue.network)
        other = self._company(device, queue)
        more = self._surplus(now, device, other) if other else 0
        share = -(-len(queue) // device.free_slots()) if device.parallel else len(queue) + more
        most = self._fitting(device, entry, min(cap, share, surplus + more))
        if not most:
            self._deferred = True  # the batches that run hold the memory that it needs; nobody overtakes it, or it might wait for ever
            return False
        head = queue.head()
        assert head is not None and entry.costs is not None
        urgent_first = False
        if queue.frames_of_rows():
            late, urgent_first = self._whole_frames(now, device, queue)
            if late:
                for f in late:
                    self._give_up(now, f)
                return True  # what is left is looked at afresh
        if entry.costs.latency(most) > head.deadline - now - device.ahead(now):
            most = self._in_time(now, device, entry.costs, queue, most)
        if most:
            held = not device.parallel and bool(device.running) and len(queue) + more < cap and head.ready < now
            rows = queue.take(min(most, surplus), urgent_first)
            if other and len(rows) < most:
                rows += other.take(min(most - len(rows), more), urgent_first)
            self._dispatch(now, device, queue.network, queue.shape, rows, held)
        return True

    def _company(self, device: Device, queue: ReadyQueue) -> ReadyQueue | None:
        """Rows that may join the queue's in a batch: where the device decodes, those that the host has decoded, or the other way round."""
        if self._decodes(device, queue.network) is None:
            return None
        other = self._queues.get((queue.network, queue.shape, not queue.coded))
        return other if other is not None and len(other) else None

    def _whole_frames(self, now: float, device: Device, queue: ReadyQueue) -> tuple[list[Frame], bool]:
        """Where frames have several rows: those that cannot all be answered whole and in time, given up before more of their rows are
        run, and whether the others must be answered one after the other: in turns, all would be late."""
        frames = sorted(queue.frames(), key=lambda f: (f.deadline, f.seq))
        home = [d for d in self._home(queue.network) if not queue.coded or self._decodes(d, queue.network) is not None]
        if device not in home or frames[0].deadline == inf:
            return [], False
        begin = now + min(d.ahead(now) for d in home)
        left, rows = [f.deadline - begin for f in frames], [len(f.queued) for f in frames]

        def seconds(n: int) -> float:
            return self._until_answered(home, queue.network, n)

        late = in_time.too_many(left, rows, seconds)
        if len(late) == len(frames) and not any(d.running for d in home):
            late = late[:-1]  # if what is known of the costs is wrong, this one shows it
        kept = [i for i in range(len(frames)) if i not in late]
        urgent_first = bool(kept) and seconds(sum(rows[i] for i in kept)) > left[kept[0]]
        return [frames[i] for i in late], urgent_first

    def _in_time(self, now: float, device: Device, costs: Costs, queue: ReadyQueue, most: int) -> int:
        """Rows of the next batch where its deadlines bound it; those are given up that would be late, or make more others late."""
        begin = now + device.ahead(now)
        # What is late here may be in time elsewhere; and where frames have several rows, `_whole_frames` says which are given up.
        if self._home(queue.network) != [device] or queue.frames_of_rows():
            head = queue.head()
            assert head is not None
            return costs.largest_within(head.deadline - begin, most) or most
        waiting = queue.urgent(in_time.CONSIDERED * most)
        given_up, rows = in_time.choose([f.deadline - begin for f in waiting], costs, most, idle=not device.running)
        for f in waiting[:given_up]:
            if not f.finished:
                self._give_up(now, f)
        return min(rows, len(queue))

    def _pick(self, now: float, device: Device) -> tuple[ReadyQueue, int] | None:
        """Of the queues that this device may serve, the one whose head has the earliest deadline, and how many of its rows are for it.

        Rows that a pipeline will take just in time are not overtaken: before full batches of another network that time would never come.
        """
        best: tuple[ReadyQueue, int] | None = None
        best_due = in_time_due = inf
        for queue in self._queues.values():
            if not len(queue) or not self._ready(device, queue.network):
                continue
            if queue.coded and self._decodes(device, queue.network) is None:
                continue
            if not (surplus := self._surplus(now, device, queue)):
                self._deferred = True
                continue
            head, other = queue.head(), self._company(device, queue)
            assert head is not None
            waiting = len(queue) + (len(other) if other else 0)
            if waiting < self._cap(device, queue.network) and now < (until := self._hold(now, device, queue, head)):
                if until < inf:
                    self._timers.set(("hold", device.id, queue.network, queue.shape, queue.coded), until)
                if device.running and not device.parallel:
                    in_time_due = min(in_time_due, head.due)
                continue
            if best is None or head.due < best_due:
                best, best_due = (queue, surplus), head.due
        if best_due > in_time_due:
            self._deferred = self._deferred or best is not None  # another device may take those that it would overtake
            return None
        return best

    def _surplus(self, now: float, device: Device, queue: ReadyQueue) -> int:
        """Of the rows that wait there, how many this device should take; others answer the rest earlier."""
        network = queue.network
        home = self._home(network)
        if queue.coded:
            home = [d for d in home if self._decodes(d, network) is not None]
        waiting = len(queue)
        if device not in home:  # the CPU, beside accelerators
            if self.networks[network].strict or any(d.kind not in self.config.spill_beside for d in home):
                return 0
        elif len(home) == 1:
            return waiting
        if self._ready_rows(network) >= self._appetite(network):
            waiting += self._unfilled[network]  # decoding is ahead of the devices: what is not decoded waits for them, too
        others = [self._offer(now, d, queue) for d in home if d is not device]
        rows = min(len(queue), placement.surplus(self._offer(now, device, queue), others, waiting))
        if not rows and device.state in LIVE and device.free_slots() > 0:
            # Look again when one of the others should have answered, in case that it has not.
            self._timers.set(("deferred", device.id, network, queue.shape, queue.coded), now + max(1e-3, min(o.first for o in others)))
        return rows

    def _on_deferred(self, now: float, device: str, network: str, shape: Shape, coded: bool) -> None:
        """Another device was to have taken these rows by now; `tick` pumps."""

    def _offer(self, now: float, device: Device, queue: ReadyQueue) -> placement.Offer:
        """What the device can do for the queue's rows, after the batches that run there and after what waits there for it alone."""
        network = queue.network
        costs, rows = device.networks[network].costs, min(self._cap(device, network), len(queue))
        assert costs is not None
        ends = sorted(max(0.0, b.sent + b.expected - now) for b in device.running.values())
        if device.parallel:
            free_in = ends[0] if ends and device.free_slots() <= 0 else 0.0
            return placement.Offer(free_in, costs.latency(rows), costs.expected(rows) / device.slots, rows)
        free_in = ends[-1] if ends else 0.0
        for other in self._queues.values():
            if other is not queue and len(other) and (home := self._home(other.network)) and device in home:
                free_in += self._work([device], other.network, len(other)) / len(home)
        return placement.Offer(free_in, costs.latency(rows), self._interval(device, network, rows), rows)

    def _hold(self, now: float, device: Device, queue: ReadyQueue, head: Frame) -> float:
        """Until when rows may wait for company; `inf`: until something happens to the device.

        An idle device takes what there is, unless the model asks for a delay. A pipeline takes its next batch when that must be on its way
        lest it fall idle: what is sent earlier only waits there, and what comes meanwhile has to follow in another batch. And a CPU shares
        its cores with the decode threads. While it runs a batch and more rows are on their way, a free slot is better left to them, and the
        batch grows towards the knee: for half a batch's time. Where enough frames queue for a decode thread to fill the batch, every core
        is busy anyway, and it waits as long as their decoding takes. Without this most batches under load had one row, and cost half as
        much again.
        """
        network = queue.network
        costs = device.networks[network].costs
        assert costs is not None
        if not device.parallel and device.computing(now):
            upload = costs.latency(len(queue)) - costs.expected(len(queue))  # and download: what a pipeline does beside the batch before
            upload += self._decode_seconds(device, network, queue.urgent(self._cap(device, network))) if queue.coded else 0.0
            lead = self.config.pipeline_lead * sum(b.cost for b in device.running.values()) + device.lead
            until = now + device.ahead(now) - upload - lead
            # Behind a batch that is late this time moves along with `now`: set for it, a timer would come up again and again until the
            # batch ends (seen: each 0.1 us). What ends the wait is that batch's end, or that it is overdue.
            return inf if until > now and device.late(now) else until
        cap = self._cap(device, network)
        until = head.arrived + self.networks[network].max_delay if not device.running else 0.0
        if device.kind == "cpu" and self._unfilled[network]:
            wait = self.config.hold * costs.expected(1) if device.running else 0.0
            if len(self._to_fill[network]) >= cap:
                wait = max(wait, 1.5 * cap * head.fill_cost / self.config.fill_slots)
            until = max(until, head.ready + wait)
        return min(until, head.deadline - 2 * costs.expected(cap))

    def _decode_seconds(self, device: Device, network: str, frames: Iterable[Frame]) -> float:
        """Of the device's decoder, for those that it was not sent yet."""
        decoder, coded = self._decodes(device, network), self.networks[network].coded
        return sum(decoder.seconds(f.jpeg.pixels) for f in frames if f.jpeg and f.id in coded) if decoder else 0.0

    def _on_hold(self, now: float, device: str, network: str, shape: Shape, coded: bool) -> None:
        """Rows have waited long enough for company; `tick` pumps."""

    def _dispatch(
        self, now: float, device: Device, network: str, shape: Shape, rows: list[tuple[Frame, int]], held: bool = False
    ) -> None:
        assert rows and self._ready(device, network) and device.free_slots() > 0, (device.id, device.state, network)
        assert len(rows) <= self._cap(device, network), (len(rows), self._cap(device, network))
        self._batches += 1
        costs = device.networks[network].costs
        alone = not device.running
        expected = 0.0
        if costs:
            expected = costs.latency(len(rows)) if alone else costs.expected(len(rows))
        batch = Batch(self._batches, device.id, device.generation, network, rows, now, alone, expected, expected + device.ahead(now))
        coded = {f.id: f for f, _ in rows if f.coded}
        if coded:
            batch.decode = self._decode_seconds(device, network, coded.values())
            to_decode = self.networks[network].coded
            batch.decodes = tuple(f.jpeg.pixels for f in coded.values() if f.jpeg is not None and to_decode.pop(f.id, None) is not None)
            device.decoder_free = max(now, device.decoder_free) + batch.decode
            batch.expected += device.decoder_free - now
            batch.decoded = device.decoder_free
        batch.held = held
        batch.degraded = self._answers_degraded(device, network)
        device.running[batch.id] = batch
        for f, _ in rows:
            f.batches += 1
            self._count_decoded(f)
        limit = self.config.overdue_factor * batch.expected + self.config.overdue_grace
        if device.kind == "cpu":
            limit = 10 * batch.expected + self.config.cpu_hang
        elif device.kind == ISOLATION:
            limit = 20 * batch.expected + self.config.cpu_hang
        self._timers.set(("overdue", batch.id, device.id), now + limit)
        pictures = tuple({f.id: p for f, _ in rows if (p := f.picture()) is not None}.values())
        offsets = [f.place(row) for f, row in rows]
        sources = tuple(source for f in coded.values() if (source := f.source()) is not None)
        self.commands.append(c.Dispatch(device.id, device.generation, batch.id, network, shape, offsets, pictures, sources))

    def _cap(self, device: Device, network: str) -> int:
        """Rows of one batch: the knee, bounded by the model, by a frozen batch axis and by what memory taught."""
        entry = device.networks[network]
        if device.kind == ISOLATION or entry.costs is None:
            return 1
        if not device.parallel:
            return self._pipeline(device, network).rows
        most = self._most_rows(network, entry)
        return most if entry.fixed_rows > 1 else entry.costs.knee(most)

    def _most_rows(self, network: str, entry: OnDevice) -> int:
        most = self.networks[network].max_rows
        if entry.cap:
            most = min(most, entry.cap)
        return min(most, entry.fixed_rows) if entry.fixed_rows > 1 else most  # padding costs the same however few rows there are

    def _has_place(self, now: float, device: Device, queue: ReadyQueue) -> bool:
        """Whether one more batch at once pays: the pipeline is not full, neither by its batches nor, where they are small, by its rows."""
        costs, head = device.networks[queue.network].costs, queue.head()
        if device.parallel or costs is None or head is None:
            return device.free_slots() > 0
        full = self._pipeline(device, queue.network)
        if len(device.running) < full.depth:
            return True
        under_way = sum(len(b.rows) for b in device.running.values())
        in_time = costs.largest_within(head.deadline - now - device.ahead(now), full.rows) or full.rows
        return device.free_slots() > 0 and under_way + min(len(queue), in_time) <= full.depth * full.rows

    def _depth(self, device: Device, network: str) -> int:
        """Batches of the network that the device holds at once."""
        known = device.networks[network].costs is not None and not device.parallel
        return self._pipeline(device, network).depth if known else device.slots

    def _interval(self, device: Device, network: str, rows: int) -> float:
        """Seconds from one batch's end to the next one's on an accelerator that is busy with the network."""
        costs = device.networks[network].costs
        return pipeline.interval(costs, rows, self._depth(device, network)) if costs else 0.0

    def _pipeline(self, device: Device, network: str) -> Pipeline:
        """How many batches an accelerator holds at once, and of how many rows: kept until anything that it follows from changes."""
        entry = device.networks[network]
        costs, need = entry.costs, entry.need
        assert costs is not None
        most = self._most_rows(network, entry)
        free = device.memory.for_batches() if need is not None and device.memory.total else inf
        follows_from = most, free, costs.observations // pipeline.EVERY, device.slots
        if entry.pipeline is not None and entry.pipeline[0] == follows_from:
            return entry.pipeline[1]
        fits = pipeline.sharing(need, free, most)
        chosen = pipeline.choose(costs, device.slots, device.hand_over, fits, most if entry.fixed_rows > 1 else 0)
        entry.pipeline = follows_from, chosen
        return chosen

    def _fitting(self, device: Device, entry: OnDevice, rows: int) -> int:
        """How many of `rows` rows fit the device's memory beside the batches that run there."""
        if entry.need is None or not device.memory.total or not device.running:
            return rows
        others = 0
        for b in device.running.values():
            other = device.networks.get(b.network)
            others += other.need.of(max(len(b.rows), other.fixed_rows)) if other and other.need else 0
        free = device.memory.for_batches(others)
        if entry.fixed_rows > 1:
            return rows if entry.need.of(entry.fixed_rows) <= free else 0
        return entry.need.rows(free, rows)

    # ---------------------------------------------------------------- memory of devices

    def device_memory(self, now: float, device: str, generation: int, total: int, free: int, held: int = 0) -> None:
        """What a worker reports of its device's memory. Other programs share it, so what fits changes by itself."""
        d = self._current(now, device, generation)
        if d is None or not total:
            return
        d.memory = DeviceMemory.reported(total, free, held, self.config.headroom)
        for network, entry in d.networks.items():
            if entry.state == "ready" and (why := self._lacks(d, entry)):
                self._starve(now, d, network, why)
            elif entry.state == "starved" and not self._lacks(d, entry):
                self._feed(now, d, network)
        self._pump(now)

    def _lacks(self, d: Device, entry: OnDevice) -> str:
        """Why not even the smallest batch fits; "" where it does, or where nobody knows."""
        rows = max(entry.fixed_rows, 1)
        if entry.need is None or not d.memory.total or entry.need.of(rows) <= d.memory.for_batches():
            return ""
        return f"a batch of {rows} rows needs {entry.need.of(rows) >> 20} MiB; {d.memory.describe()}"

    def _starve(self, now: float, d: Device, network: str, why: str) -> None:
        """Others serve the network until there is memory again, or until it is time to try."""
        entry = d.networks[network]
        entry.state, entry.why = "starved", why
        self._wait_for_memory(now, d, network)
        self._placement_changed()
        self._settle_standby(now)
        self._settle(now, d)
        self.commands.append(c.Starved(d.id, network, why))

    def _feed(self, now: float, d: Device, network: str) -> None:
        entry = d.networks[network]
        entry.state, entry.why = "ready", ""
        self._placement_changed()
        self._settle_standby(now)
        self._settle(now, d)

    def _wait_for_memory(self, now: float, d: Device, network: str) -> None:
        entry = d.networks[network]
        entry.patience = min(max(2 * entry.patience, self.config.oom_patience), self.config.oom_patience_max)
        self._timers.set(("memory", d.id, d.generation, network), now + entry.patience)

    def _on_memory(self, now: float, device: str, generation: int, network: str) -> None:
        """Long enough after the last out of memory: try a larger batch, or a batch at all."""
        d = self.devices[device]
        entry = d.networks.get(network)
        if d.generation != generation or entry is None:
            return
        if entry.state == "starved":
            if self._lacks(d, entry):
                self._timers.set(("memory", device, generation, network), now + entry.patience)
            else:
                self._feed(now, d, network)
        elif entry.state == "failed" and entry.patience:
            self._load(d, network, entry.patience)
        elif entry.cap:
            entry.cap *= 2
            if entry.cap >= self.networks[network].max_rows:
                entry.cap = 0
            else:
                self._timers.set(("memory", device, generation, network), now + entry.patience)

    # ---------------------------------------------------------------- placement

    @staticmethod
    def _ready(device: Device, network: str) -> bool:
        entry = device.networks.get(network)
        return entry is not None and entry.state == "ready" and device.state in LIVE

    def _home(self, network: str) -> list[Device]:
        """The devices that serve a network now: every accelerator on which it is ready, else the CPU."""
        home = self._homes.get(network)
        if home is None:
            ready = [d for d in self._ranked if self._ready(d, network)]
            home = self._homes[network] = [d for d in ready if d.kind != "cpu"] or ready
        return home

    def _placement_changed(self) -> None:
        """A device's state, or what is ready on it, has changed."""
        self._homes.clear()

    def degraded(self) -> bool:
        """An accelerator that the user asked for does not serve now."""
        return any(self._away_devices())

    def away(self) -> str:
        """For people: those accelerators, and why; "" where all serve."""
        return "; ".join(f"{d.id} is {d.state}" + (f": {d.why}" if d.why else "") for d in self._away_devices())

    def _away_devices(self) -> Iterator[Device]:
        return (d for d in self.devices.values() if d.kind in ("gpu", "sim") and d.state not in ("serving", "off"))

    def _answers_degraded(self, device: Device, network: str) -> bool:
        """The CPU's answers are degraded when it stands in for an accelerator, not when it helps a busy one."""
        return device.kind in ("cpu", ISOLATION) and (self.degraded() or self._displaced(network))

    def _displaced(self, network: str) -> bool:
        """Accelerators serve, but none of them this network: it does not fit there, or it does not run there."""
        serving = [d for d in self._ranked if d.kind != "cpu" and d.state in LIVE]
        return bool(serving) and not any(self._ready(d, network) for d in serving)

    # ---------------------------------------------------------------- batches

    def batch_done(
        self, now: float, device: str, generation: int, batch: int, seconds: float, idle: float = 0.0, computed: float = 0.0
    ) -> None:
        """The batch's answers lie in the worker's answer region. `seconds`: what the batch took by itself, measured by the worker, as an
        event may come late and two of them at once; in a pipeline, without the wait for the batch before it. `idle`: seconds of them in
        which the pipeline had nothing to compute, as the batch's rows were not there yet; `computed`: when that was done, if known."""
        d, b = self._batch_ended(now, device, generation, batch)
        if b is None or d is None:
            return
        if b.sent < computed < now:
            d.ended = computed
        d.failures = 0
        entry = d.networks.get(b.network)
        if entry is not None and entry.costs is not None:
            if b.held and not b.decode:
                d.lead = pipeline.lead(d.lead, late=idle > 0.0)
                if entry.costs.latency(len(b.rows)) < 2 * b.cost:  # else the link is what the pipeline waits for
                    seconds -= idle
            entry.costs.observe(len(b.rows), seconds, b.alone)
        if b.alone and not b.overdue and not b.decode:
            d.hand_over = pipeline.observed(d.hand_over, now - b.sent - seconds)
        degraded = b.degraded or self._answers_degraded(d, b.network)
        for index, (f, row) in enumerate(b.rows):
            if not f.finished and row in f.waiting:
                f.waiting.discard(row)
                if row in f.queued:
                    self._queue(f).withdraw(f, row)
                last = not f.waiting
                self.commands.append(c.RowDone(f.id, row, index, d.id, degraded, last))
                if last:
                    self._finish(now, f)
        self._release_rows(now, b)
        self._clear(now, d)
        if d.state == "standby" and not d.running:
            self._settle_standby(now)  # what it ran when the accelerator came back
        self._pump(now)

    def _clear(self, now: float, d: Device) -> None:
        """A suspect that owes no answer any more was slow, not dead."""
        if d.state == "suspect" and not any(b.overdue for b in d.running.values()):
            self._settle(now, d)

    def batch_failed(
        self, now: float, device: str, generation: int, batch: int, kind: str, message: str, undecoded: Collection[int] = ()
    ) -> None:
        """The worker could not run the batch. `kind`: input, oom, sticky, decode, unknown (devices/protocol.py); `undecoded`: indexes of
        the rows that it could not decode."""
        d, b = self._batch_ended(now, device, generation, batch)
        if b is None or d is None:
            return
        # Rows of an overdue batch have long been dispatched elsewhere: what becomes of them is decided there.
        rows = [(f, row) for f, row in b.rows if not f.finished and row in f.waiting and not b.overdue]
        if kind == "sticky" and d.kind not in ("cpu", ISOLATION):
            self._requeue(rows)
            self._release_rows(now, b)
            self.device_lost(now, device, generation, f"its context is lost: {message}", explained=True)
            return
        entry = d.networks.get(b.network)
        if entry is None:  # retired meanwhile: nobody waits for these rows
            assert not rows, (b.network, len(rows))
        elif kind == "decode":
            # What is wrong with the picture, if anything, the host says: there is one place that judges files.
            bad = {b.rows[i][0].id for i in undecoded if i < len(b.rows)} or {f.id for f, _ in rows}
            self._requeue([(f, row) for f, row in rows if f.id in bad])
            self._requeue([(f, row) for f, row in rows if f.id not in bad], again=True)
        elif kind == "oom" and len(b.rows) > 1:
            entry.cap = max(1, min(len(b.rows) // 2, entry.cap or len(b.rows)))  # a larger batch that was on its way teaches nothing new
            self._wait_for_memory(now, d, b.network)
            self._requeue(rows)
        elif kind == "oom" and not d.parallel:
            # Not one row fits: nobody is at fault, and others can run it.
            self._requeue(rows)
            if entry.state == "ready":
                self._starve(now, d, b.network, f"{message}; {d.memory.describe()}")
        elif len(b.rows) > 1 and self._ready(d, b.network):
            # One bad row must not fail its neighbours: each runs alone, here, now.
            self._run_singly(now, d, b, rows)
        elif len(b.rows) > 1:
            self._requeue(rows)  # a suspect gets no more work, nor does what has no memory for the network meanwhile
        elif kind != "input" and not d.parallel:
            # The device's fault or the row's? The isolation worker's CPU gives the second opinion, and perhaps the answer.
            for f, row in rows:
                self._suspect(f)
                if f.filled:
                    self._suspects.add(f, row)
                f.failed_on = d.id
            d.failures += 1
        else:
            slug = {"input": "bad_input", "oom": "memory_full"}.get(kind, "inference_failed")
            for f, _ in rows:
                if f.failed_on and kind != "oom":  # the CPU cannot run it either: the device that tried it first is not to blame
                    accused = self.devices[f.failed_on]
                    accused.failures = max(0, accused.failures - 1)
                self._refuse(now, f, slug, message, 1.0 if kind == "oom" else None)
        self._release_rows(now, b)
        if d.failures >= self.config.failures:
            self.device_lost(now, device, generation, f"it failed {d.failures} rows in succession, at last: {message}", explained=True)
            return
        self._clear(now, d)
        self._pump(now)

    def _run_singly(self, now: float, d: Device, b: Batch, rows: list[tuple[Frame, int]]) -> None:
        self._requeue([(f, row) for f, row in rows if f.suspect])  # another worker has died of its other rows
        for f, row in rows:
            if not f.suspect and f.filled and row not in f.queued:  # else the host has it decoded meanwhile
                self._dispatch_over(now, d, b.network, f, row)

    def _dispatch_over(self, now: float, d: Device, network: str, f: Frame, row: int) -> None:
        """Dispatch one row beyond the device's slots: the worker queues it; it replaces a slot that its batch had."""
        slots, d.slots = d.slots, max(d.slots, len(d.running) + 1)
        self._dispatch(now, d, network, f.shape, [(f, row)])
        d.slots = slots

    def _batch_ended(self, now: float, device: str, generation: int, batch: int) -> tuple[Device | None, Batch | None]:
        d = self.devices.get(device)
        if d is None or d.generation != generation or batch not in d.running:
            return None, None  # an older generation, or a batch that was taken back
        d.heard = d.ended = now
        self._timers.cancel(("overdue", batch, device))
        return d, d.running.pop(batch)

    def _release_rows(self, now: float, b: Batch) -> None:
        for f, _ in b.rows:
            f.batches -= 1
            if f.finished:
                self._release(now, f)

    def _take_back(self, b: Batch) -> None:
        """Queue the rows of a batch again that its worker still holds: once, as an overdue batch was already."""
        if not b.overdue:
            self._requeue(b.rows)

    def _requeue(self, rows: list[tuple[Frame, int]], again: bool = False) -> None:
        """`again`: what a device decodes may be decoded there once more."""
        for f, row in rows:
            if not f.finished and row in f.waiting and f.filled:  # else it is being decoded here, and all that wait are queued after that
                if f.coded and not again:
                    self._recode(f)
                elif f.suspect:
                    self._suspects.add(f, row)
                else:
                    self._queue(f).push(f, row)
                    self._count_decoded(f)

    def _on_overdue(self, now: float, batch: int, device: str) -> None:
        d = self.devices[device]
        b = d.running.get(batch)
        if b is None:
            return
        took = f"a batch of {len(b.rows)} rows expected in {b.expected * 1e3:.0f} ms has not come back after {(now - b.sent) * 1e3:.0f} ms"
        if d.parallel:
            self.device_lost(now, device, d.generation, took, explained=False)
            return
        if now < (later := b.sent + self.config.overdue_loading) and any(n.state == "loading" for n in d.networks.values()):
            self._timers.set(("overdue", batch, device), later)
            return
        self._take_back(b)
        b.overdue = True
        if d.state != "suspect":
            self._set_state(now, d, "suspect", took)
            self._timers.set(("silence", device, d.generation), now + self.config.silence)
        self._drop_surplus(now)

    def _on_silence(self, now: float, device: str, generation: int) -> None:
        d = self.devices[device]
        if d.state == "suspect" and d.generation == generation:
            self.device_lost(now, device, generation, f"silent for {self.config.silence:.1f} s: {d.why}", explained=True)

    # ---------------------------------------------------------------- devices

    def add_device(self, now: float, device: str, kind: str, slots: int, rank: int, *, present: bool = True, why: str = "") -> None:
        """Make a device known; start its worker when it is present, else go on looking for it."""
        history = LossHistory(self.config.failback, random.Random(self._rng.random()))
        d = self.devices[device] = Device(device, kind, slots, rank, history, since=now)  # type: ignore[arg-type]
        if kind != ISOLATION:
            self._ranked.append(d)
            self._ranked.sort(key=lambda x: x.rank)
        self._placement_changed()
        if present:
            self._start(now, d)
        else:
            self._set_state(now, d, "lost", why or "not found")
            self._timers.set(("retry", device), now + history.retry())

    def _start(self, now: float, d: Device) -> None:
        d.generation += 1
        d.up = False
        d.failures = 0
        d.networks = {}
        assert not d.running, d.running
        self._set_state(now, d, "starting", "")
        d.heard = now
        self.commands.append(c.Start(d.id, d.generation))
        self._timers.set(("start_limit", d.id, d.generation), now + self.config.start_limit)

    def _on_start_limit(self, now: float, device: str, generation: int) -> None:
        d = self.devices[device]
        if d.generation == generation and d.state == "starting":
            self.device_lost(now, device, generation, f"its worker did not come up within {self.config.start_limit:.0f} s", explained=True)

    def hello(self, now: float, device: str, generation: int, link: Link | None = None) -> None:
        """The worker is up: load everything. `link`: as it measured it."""
        d = self._current(now, device, generation)
        if d is None:
            return
        d.up, d.link = True, link
        self._set_state(now, d, "warming", "")
        # What may have killed the worker before comes last, so that the others get their turn.
        for network in sorted(self.networks.values(), key=lambda n: n.deaths.get(device, 0)):
            if self._wants(d, network):
                self._load(d, network.id)
        self._timers.set(("ping", device, generation), now + self.config.ping_every)
        if d.kind not in ("cpu", ISOLATION):
            self._timers.set(("load_limit", device, generation), now + self.config.load_limit)
        if not d.networks:
            self._settle(now, d)
        self._ask_golden()
        self._pump(now)

    def _on_load_limit(self, now: float, device: str, generation: int) -> None:
        d = self.devices[device]
        if d.generation == generation and d.state == "warming" and not any(n.state == "ready" for n in d.networks.values()):
            self.device_lost(now, device, generation, f"no model was ready within {self.config.load_limit:.0f} s", explained=True)

    def _load(self, d: Device, network: str, patience: float = 0.0) -> None:
        d.networks[network] = OnDevice(patience=patience)
        self._placement_changed()
        deaths = self.networks[network].deaths.get(d.id, 0)
        if deaths < self.config.load_tries or d.kind == ISOLATION:
            self.commands.append(c.Load(d.id, d.generation, network))
        else:
            self.commands.append(c.GiveUp(d.id, d.generation, network, f"the worker died {deaths} times while it loaded this model"))

    def loaded(
        self,
        now: float,
        device: str,
        generation: int,
        network: str,
        costs: Sequence[BatchCost | tuple[int, float]],
        fixed_rows: int = 0,
        decoder: Decoder | None = None,
    ) -> None:
        """The network runs there. On the CPU it is ready; elsewhere its golden answer is checked first. `decoder`: what it decodes JPEGs
        with (None: it takes pixels only)."""
        d = self._current(now, device, generation)
        if d is None or network not in d.networks:
            return
        self.networks[network].deaths.pop(device, None)
        entry = d.networks[network]
        entry.costs = Costs(costs)
        entry.need = MemoryNeed.fit([(m.rows, m.memory) for m in costs if isinstance(m, BatchCost)])
        entry.fixed_rows, entry.decoder = fixed_rows, decoder
        if d.parallel:
            entry.state = "ready"
            self._placement_changed()
            self._settle(now, d)
        elif entry.state != "ready":
            entry.state, entry.asked = "checking", False
        self._ask_golden()
        self._pump(now)

    def _ask_golden(self) -> None:
        """Have those compared that wait for it, where the CPU's answer is there or will not come."""
        for d in self._ranked:
            for network, entry in d.networks.items():
                if entry.state == "checking" and not entry.asked and self._reference(network):
                    entry.asked = True
                    self.commands.append(c.CheckGolden(d.id, d.generation, network))

    def _reference(self, network: str) -> bool:
        """The CPU's golden answer is there to compare with, or will never be."""
        for d in self._ranked:
            if d.kind == "cpu" and d.state not in ("off", "ejected"):
                entry = d.networks.get(network)
                if entry.state == "loading" if entry else not d.up and self._wants(d, self.networks[network]):
                    return False
        return True

    def load_failed(
        self, now: float, device: str, generation: int, network: str, why: str, *, oom: bool = False, sticky: bool = False
    ) -> None:
        """The network does not run there. `oom`: for want of memory, so it is tried again later. `sticky`: nothing will run in its
        worker any more."""
        d = self._current(now, device, generation)
        if d is None or network not in d.networks:
            return
        if sticky and not d.parallel:
            self._count_death(d, network)
            self.device_lost(now, device, generation, f"its context is lost: {why}", explained=True)
            return
        d.networks[network].state = "failed"
        self._placement_changed()
        d.networks[network].why = f"{why}; {d.memory.describe()}" if oom else why
        if oom:
            self._wait_for_memory(now, d, network)
            self.commands.append(c.Starved(device, network, d.networks[network].why))
        self._ask_golden()
        for f in [f for f in self.frames.values() if f.network == network and not f.finished]:
            if not self._may_ever_run(network):
                self._refuse(now, f, "model_not_ready", f"no device can run the model: {why}")
        self._settle(now, d)
        self._pump(now)

    def golden_checked(self, now: float, device: str, generation: int, network: str, ok: bool, why: str = "") -> None:
        """Compared with the CPU's answer: only now may the device serve the network."""
        d = self._current(now, device, generation)
        if d is None or network not in d.networks:
            return
        if not ok:
            self.device_lost(now, device, generation, f"it answers wrongly: {why}", explained=True, quarantine=True)
            return
        entry = d.networks[network]
        entry.state = "ready"
        self._placement_changed()
        if why := self._lacks(d, entry):
            self._starve(now, d, network, why)
        self._settle_standby(now)
        self._ask_golden()
        self._settle(now, d)
        self._pump(now)

    def heard(self, now: float, device: str, generation: int) -> None:
        """Any message of the worker is a sign of life."""
        self._current(now, device, generation)

    def _on_ping(self, now: float, device: str, generation: int) -> None:
        d = self.devices.get(device)
        if d is None or d.generation != generation or not d.up:
            return
        silent = now - d.heard
        if silent > self.config.silence + self.config.ping_every and d.state in ("serving", "warming", "suspect") and not d.parallel:
            self.device_lost(now, device, generation, f"its worker has not answered a ping for {silent:.1f} s", explained=True)
            return
        if silent > self.config.cpu_hang + self.config.ping_every and d.parallel:
            self.device_lost(now, device, generation, f"its worker has not answered a ping for {silent:.1f} s", explained=False)
            return
        self._pings += 1
        self.commands.append(c.Ping(device, generation, self._pings))
        self._timers.set(("ping", device, generation), now + self.config.ping_every)

    def _current(self, now: float, device: str, generation: int) -> Device | None:
        d = self.devices.get(device)
        if d is None or d.generation != generation or d.state in ("lost", "quarantined", "ejected", "off"):
            return None
        d.heard = now
        return d

    def _settle(self, now: float, d: Device) -> None:
        """The state that follows from what is loaded and from the other devices."""
        if d.state in ("lost", "quarantined", "ejected", "off", "starting"):
            return
        states = [n.state for n in d.networks.values()]
        if any(s in ("loading", "checking") for s in states) and "ready" not in states:
            self._set_state(now, d, "warming", "")
        elif d.kind == "cpu":
            others = any(o.state == "serving" for o in self.devices.values() if o.kind in ("gpu", "sim"))
            self._set_state(now, d, "standby" if others else "serving", "")
        else:
            self._set_state(now, d, "serving", "")
        if d.kind != "cpu":
            for cpu in self.devices.values():
                if cpu.kind == "cpu" and cpu.state in ("serving", "standby"):
                    self._settle(now, cpu)

    def device_lost(self, now: float, device: str, generation: int, why: str, *, explained: bool, quarantine: bool = False) -> None:
        """The worker is dead, or as good as dead. `explained`: the device itself is gone or broken, so no frame is to blame."""
        d = self.devices.get(device)
        if d is None or d.generation != generation or d.state in ("lost", "quarantined", "ejected", "off"):
            return
        taken = list(d.running.values())
        loading = [n for n, entry in d.networks.items() if entry.state == "loading"]  # one after the other, in this order
        if loading and not explained:
            self._count_death(d, loading[0])
        d.running, d.networks, d.up = {}, {}, False
        self._placement_changed()
        for b in taken:
            self._timers.cancel(("overdue", b.id, device))
        # Their memory is held until the process has really ended.
        d.zombies.setdefault(generation, []).extend(taken)
        self.commands.append(c.Kill(device, generation))
        if not explained:
            self._blame(now, d, taken)
        for b in taken:
            self._take_back(b)
        if d.kind == ISOLATION:
            self._set_state(now, d, "off", why)
            for f in [] if taken else self._suspects.worker_died(now, loading):
                detail = f"its worker died while running it, and the one that was to try it alone could not be started: {why}"
                self._refuse(now, f, "inference_failed", detail)
        else:
            self._away(now, d, why, quarantine)
        self._settle_standby(now)
        for cpu in self.devices.values():
            if cpu.kind == "cpu" and cpu is not d:
                self._settle(now, cpu)
        self._drop_surplus(now)
        self._pump(now)

    def _count_death(self, d: Device, network: str) -> None:
        """One model that kills whatever loads it must not keep its neighbours from being served."""
        deaths = self.networks[network].deaths
        deaths[d.id] = deaths.get(d.id, 0) + 1

    def _forgive_deaths(self, device: str) -> None:
        for network in self.networks.values():
            network.deaths.pop(device, None)

    def _away(self, now: float, d: Device, why: str, quarantine: bool) -> None:
        d.history.lost(now, why)
        if d.kind == "cpu":  # there is nothing else to fall back to: always again, only slower
            self._set_state(now, d, "lost", why)
            self._timers.set(("retry", d.id), now + (0.0 if d.history.total == 1 else min(d.history.retry(), 2.0)))
        elif quarantine or d.history.quarantine_due():
            seconds = d.history.quarantine()
            reason = (
                why if quarantine else f"lost {len(d.history._recent)} times in {self.config.failback.window / 60:.0f} minutes, last: {why}"
            )
            d.until = now + seconds
            d.quarantined_for = "wrong_answers" if quarantine else "losses"
            self._set_state(now, d, "quarantined", reason)
            self._timers.set(("retry", d.id), d.until)
        else:
            self._set_state(now, d, "lost", why)
            self._timers.set(("retry", d.id), now + d.history.retry())

    def _blame(self, now: float, d: Device, taken: list[Batch]) -> None:
        """An unexplained death: the frames that the worker held are suspects; the one that ran alone is the culprit."""
        alone = d.kind == ISOLATION
        for b in taken:
            for f, _ in b.rows:
                if f.finished:
                    continue
                d.distrusted = d.distrusted or f.coded
                if (d.id, now) not in f.deaths:
                    f.deaths.append((d.id, now))
                self._suspect(f)
                if alone:
                    self._condemn(now, f)

    def _suspect(self, f: Frame) -> None:
        """Its rows run alone from now on."""
        f.suspect = True
        if f.coded:
            if f.filled:
                self._recode(f)
            return
        for row in list(f.queued):
            self._queue(f).withdraw(f, row)
            self._suspects.add(f, row)
        self._count_decoded(f)

    def _condemn(self, now: float, f: Frame) -> None:
        """It killed its worker when it was alone with it. The deaths before that were not the devices' fault either."""
        self._refuse(now, f, "poison_frame", f"the worker died {len(f.deaths)} times while it ran this input, at last alone with it")
        for device, at in f.deaths:
            d = self.devices[device]
            quarantined = d.state == "quarantined" and d.since == at
            d.history.forgive(at, quarantined)
            if quarantined:
                self._timers.set(("retry", device), now)

    def remember_poison(self, now: float, digest: bytes) -> None:
        """Refuse these submitted bytes for a while: the driver hashes them after a `Refuse` with slug poison_frame."""
        self.poison.remember(now, digest)

    def worker_gone(self, now: float, device: str, generation: int) -> None:
        """The process of this generation has ended: nothing reads its frames' memory any more."""
        d = self.devices.get(device)
        if d is None:
            return
        for b in d.zombies.pop(generation, ()):
            self._release_rows(now, b)
        self._pump(now)

    def _on_retry(self, now: float, device: str) -> None:
        d = self.devices[device]
        if d.state in ("lost", "quarantined"):
            if d.state == "quarantined":
                self._forgive_deaths(device)
            d.until = None
            self._start(now, d)

    def not_found(self, now: float, device: str, generation: int, why: str) -> None:
        """The device of the worker that was to start is not there: no loss, look again later."""
        d = self.devices.get(device)
        if d is None or d.generation != generation or d.state != "starting":
            return
        self._set_state(now, d, "lost", why)
        self._timers.set(("retry", device), now + d.history.retry())

    def seen(self, now: float, device: str) -> None:
        """A sign that a lost device is back: try it now."""
        d = self.devices.get(device)
        if d is not None and d.state == "lost":
            self._timers.set(("retry", device), now)
            self.tick(now)

    def reset(self, now: float, device: str) -> None:
        """An operator ends a quarantine or an ejection."""
        d = self.devices[device]
        d.history.reset()
        d.distrusted = False
        self._forgive_deaths(device)
        d.until = None
        if d.state in ("quarantined", "ejected", "lost"):
            self._timers.cancel(("retry", device))
            self._start(now, d)

    def eject(self, now: float, device: str) -> None:
        """Hand its work to the CPU and end its worker; it stays away until `reset`."""
        d = self.devices[device]
        if d.state in ("ejected", "off"):
            return
        generation = d.generation
        if d.state not in ("lost", "quarantined"):
            taken = list(d.running.values())
            d.running, d.networks, d.up = {}, {}, False
            self._placement_changed()
            for b in taken:
                self._timers.cancel(("overdue", b.id, device))
                self._take_back(b)
            d.zombies.setdefault(generation, []).extend(taken)
            self.commands.append(c.Kill(device, generation))
        self._timers.cancel(("retry", device))
        d.until = None
        self._set_state(now, d, "ejected", "ejected by the operator")
        self._settle_standby(now)
        self._ask_golden()
        for cpu in self.devices.values():
            if cpu.kind == "cpu":
                self._settle(now, cpu)
        self._drop_surplus(now)
        self._pump(now)

    def _set_state(self, now: float, d: Device, state: str, why: str) -> None:
        self._placement_changed()
        if d.state != state or d.why != why:
            d.state, d.why, d.since = state, why, now  # type: ignore[assignment]
            self.commands.append(c.StateChanged(d.id, state, why))

    # ---------------------------------------------------------------- isolation

    def _isolate(self, now: float) -> None:
        """Run suspects one row at a time in a disposable worker that is not the standby."""
        while (head := self._suspects.head()) is not None and self._try_alone(now, *head):
            pass

    def _try_alone(self, now: float, f: Frame, row: int) -> bool:
        """Have the isolation worker run this row next. True when that is done with: the worker is free for the next one."""
        self._timers.set(("isolation_idle",), now + self.config.isolation_idle)
        d = self.devices.get(ISOLATION)
        if d is None:
            self.add_device(now, ISOLATION, ISOLATION, 1, 1_000)
            return False
        if d.state == "off":
            if now < self._suspects.not_before:
                self._timers.set(("isolate",), self._suspects.not_before)
            else:
                self._start(now, d)
            return False
        if not d.up or d.running:
            return False
        entry = d.networks.get(f.network)
        if entry is None:
            self._load(d, f.network)
        elif entry.state == "failed":
            self._suspects.take()
            self._refuse(now, f, "inference_failed", f"its worker died while running it, and it could not be tried alone: {entry.why}")
            return True
        elif entry.state == "ready":
            self._suspects.take()
            self._dispatch(now, d, f.network, f.shape, [(f, row)])
        return False

    def _on_isolate(self, now: float) -> None:
        """The disposable worker may be started again; `tick` pumps."""

    def _on_isolation_idle(self, now: float) -> None:
        d = self.devices.get(ISOLATION)
        if d is None or d.state == "off":
            return
        if d.running or self._suspects:
            self._timers.set(("isolation_idle",), now + self.config.isolation_idle)
        else:
            self.commands.append(c.Kill(d.id, d.generation))
            d.networks, d.up = {}, False
            self._set_state(now, d, "off", "no suspects")

    # ---------------------------------------------------------------- the end

    def drain(self, now: float) -> None:
        """The server stops: refuse whatever has no answer."""
        for f in list(self.frames.values()):
            if not f.finished:
                self._refuse(now, f, "shutting_down", "the server is stopping; send it again when it is back", 5.0)
