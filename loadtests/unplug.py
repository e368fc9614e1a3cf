"""Is anything lost when the cable is pulled? Requests whose answers are known, and losses of the device meanwhile.

    .venv/bin/python loadtests/unplug.py --cycles 100                     # 100 times unplug and replug, at random moments
    .venv/bin/python loadtests/unplug.py --cycles 30 --faults all         # and hang, sticky, kill, stop, flap, in random order

It starts a server of its own with a simulated device and a network whose answer is its input's colour. Every request has a colour of
its own, so that a wrong, swapped or repeated answer is seen. It counts at the client. Exit status 1: a request got no answer, was
refused, was answered wrongly or twice; a device answered before it had proved itself; or, for `unplug`, no answer came for longer than
twice the CPU's batch time + 50 ms.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import onnx
import psutil
import typer
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from rich.console import Console
from rich.table import Table

from own_server import DEVICE, own_server

MODEL = "colour"
SIDE = 64  #: pixels of a picture
CHANNELS = 32
FAULTS = ("unplug", "hang", "sticky", "kill", "stop", "flap")
#: Losses that one fault counts for: a flapping plug is out four times.
LOSSES = {"flap": 4}
SETTLE = 0.5  #: seconds after the return in which a gap still belongs to the cycle


def network(layers: int) -> bytes:
    """ONNX: `colour` [N, 3] is each channel's mean, behind `layers` convolutions that change nothing and cost what convolutions cost."""

    def centre(inputs: int, outputs: int) -> np.ndarray:
        kernel = np.zeros((outputs, inputs, 3, 3), np.float32)
        kernel[range(min(inputs, outputs)), range(min(inputs, outputs)), 1, 1] = 1
        return kernel

    kernels = {"first": centre(3, CHANNELS), "middle": centre(CHANNELS, CHANNELS), "last": centre(CHANNELS, 3)}
    names = ["first", *["middle"] * layers, "last"]
    nodes = [helper.make_node("Conv", [f"x{i}", name], [f"x{i + 1}"], pads=[1] * 4) for i, name in enumerate(names)]
    nodes.append(helper.make_node("ReduceMean", [f"x{len(names)}"], ["colour"], axes=[2, 3], keepdims=0))
    graph = helper.make_graph(
        nodes,
        "colour",
        [helper.make_tensor_value_info("x0", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("colour", TensorProto.FLOAT, ["n", 3])],
        [numpy_helper.from_array(kernel, name) for name, kernel in kernels.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def repository(folder: Path, layers: int) -> Path:
    model = folder / MODEL
    model.mkdir(parents=True)
    (model / "model.onnx").write_bytes(network(layers))
    (model / "model.toml").write_text(
        f'task = "tensor"\nbackend = "onnx"\nfile = "model.onnx"\n[input]\nsize = [{SIDE}, {SIDE}]\n[output]\ndecoder = "tensor"\n'
    )
    onnx.checker.check_model(str(model / "model.onnx"))
    return folder


def picture(n: int) -> bytes:
    """A PNG whose colour is the number `n`, 24 bits."""
    pixels = np.full((SIDE, SIDE, 3), (n >> 16 & 255, n >> 8 & 255, n & 255), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def number(answer: dict[str, Any]) -> int:
    """The colour that an answer names, as a number again; -1 where it is none."""
    channels = [round(255 * x) for x in np.ravel(answer["outputs"][0]["data"])]
    return int.from_bytes(bytes(channels), "big") if all(0 <= c <= 255 for c in channels) else -1


@dataclass(slots=True)
class Answer:
    """Times are seconds of the same clock as everything here."""

    sent: float
    received: float
    device: str
    degraded: bool


@dataclass(slots=True)
class Cycle:
    """One loss and return. Times in seconds from the start of the load."""

    fault: str
    lost: float  #: the fault was played
    noticed: float = 0.0  #: the server says that it is suspect or lost
    plugged: float = 0.0  #: it was plugged in again, or nothing had to be
    back: float = 0.0  #: it serves again
    cpu_batch: float = 0.0  #: what a batch takes on the CPU, as the server believed when it happened
    device_batch: float = 0.0
    blackout: float = 0.0  #: longest time without any answer, from a moment before the loss until the first second is over
    gap: float = 0.0  #: the same until the device was back
    return_gap: float = 0.0  #: and around its return
    unproven: list[tuple[float, float]] = field(default_factory=list)  #: when it was known not to have proved itself
    slowest: float = 0.0  #: of the requests that were sent before the device was back

    @property
    def target(self) -> float:
        return 2 * self.cpu_batch + 0.05


@dataclass
class Books:
    """What the clients count."""

    began: float
    sent: int = 0
    answers: list[Answer] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    doubled: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)  #: errors of the connection: requests without any answer
    early: int = 0  #: answers of the device, to requests that were sent after its loss, before it had proved itself
    seen: set[str] = field(default_factory=set)

    def now(self) -> float:
        return time.perf_counter() - self.began

    @property
    def lost(self) -> int:
        return self.sent - len(self.answers) - len(self.wrong) - sum(self.refused.values())

    def gap(self, start: float, end: float) -> float:
        """The longest time between two answers that touches [start, end]."""
        times = sorted(a.received for a in self.answers)
        return max((b - a for a, b in itertools.pairwise(times) if b > start and a < end), default=0.0)


async def client(url: str, books: Books, numbers: Iterator[int], stop: asyncio.Event) -> None:
    """One connection: the next request follows the answer."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        while not stop.is_set():
            n = next(numbers)
            body = picture(n)
            books.sent += 1
            sent = books.now()
            try:
                response = await http.post(f"/v1/models/{MODEL}/predict", content=body)
            except httpx.TransportError as e:
                books.broken[type(e).__name__] += 1
                await asyncio.sleep(0.1)
                continue
            answer = response.json()
            if response.status_code != 200:
                books.refused[answer["type"]] += 1
                continue
            books.doubled += answer["id"] in books.seen
            books.seen.add(answer["id"])
            if (got := number(answer)) == n:
                books.answers.append(Answer(sent, books.now(), answer["device"], answer["degraded"]))
            else:
                books.wrong.append(f"{n:06x} was answered as {got:06x} by {answer['device']}")


class Operator:
    """Plays the losses, and looks at the device meanwhile."""

    def __init__(self, url: str, server: psutil.Process, books: Books, rng: random.Random):
        self._http = httpx.AsyncClient(base_url=url, timeout=30)
        self._server = server
        self._books = books
        self._rng = rng

    async def device(self, device: str = DEVICE) -> dict[str, Any]:
        return (await self._http.get(f"/v1/devices/{device}")).json()

    async def batch_seconds(self, device: str) -> float:
        """What the server believes that its usual batch takes there."""
        batches = (await self.device(device))["batches"].get(MODEL)
        return next((s for rows, s in batches["seconds"] if rows == batches["most_rows"]), 0.0) if batches else 0.0

    async def _fault(self, fault: str) -> None:
        (await self._http.post(f"/v1/devices/{DEVICE}/fault", json={"fault": fault})).raise_for_status()

    def _worker(self) -> psutil.Process:
        return next(p for p in self._server.children() if DEVICE in p.cmdline())

    async def cycle(self, fault: str) -> Cycle:
        before = (await self.device())["losses"]
        cycle = Cycle(fault, 0.0, cpu_batch=await self.batch_seconds("cpu"), device_batch=await self.batch_seconds(DEVICE))
        await asyncio.sleep(self._rng.uniform(0.3, 1.2))  # any moment of a batch
        cycle.lost = self._books.now()
        if fault == "kill":
            self._worker().send_signal(signal.SIGKILL)
        elif fault == "stop":
            self._worker().send_signal(signal.SIGSTOP)
        else:
            await self._fault(fault)
        watching = asyncio.create_task(self._watch(cycle, before + LOSSES.get(fault, 1)))
        if fault == "unplug":
            await asyncio.sleep(self._rng.uniform(0.3, 1.5))
            cycle.plugged = self._books.now()
            await self._fault("replug")
        await watching
        await asyncio.sleep(SETTLE)
        return cycle

    async def _watch(self, cycle: Cycle, losses: int, patience: float = 60.0) -> None:
        """Until the device has been lost that often and serves again."""
        seen = 0
        while True:
            asked = self._books.now()
            now = await self.device()
            if not cycle.noticed and (now["state"] != "serving" or now["losses"] >= losses):
                cycle.noticed = self._books.now()
            if now["state"] in ("lost", "starting", "warming"):
                # Known not to have proved itself from this answer on, until the next question at least.
                if cycle.unproven and seen == now["losses"]:
                    cycle.unproven[-1] = (cycle.unproven[-1][0], asked)
                else:
                    cycle.unproven.append((self._books.now(), asked))
                seen = now["losses"]
            elif now["state"] == "serving" and now["losses"] >= losses:
                cycle.back = self._books.now()
                return
            if self._books.now() - cycle.lost > patience:
                raise RuntimeError(f"{DEVICE} is not back {patience:.0f} s after {cycle.fault}: {now['state']}, {now['why']}")
            await asyncio.sleep(0.02)


async def drive(url: str, server: psutil.Process, faults: list[str], connections: int, rest: float, seed: int) -> tuple[Books, list[Cycle]]:
    """Load from `connections` clients; the losses one after the other, with `rest` seconds of peace between them."""
    books = Books(time.perf_counter())
    stop = asyncio.Event()
    numbers = itertools.count(1)
    clients = [asyncio.create_task(client(url, books, numbers, stop)) for _ in range(connections)]
    operator = Operator(url, server, books, random.Random(seed))
    cycles: list[Cycle] = []
    await asyncio.sleep(2.0)
    for fault in faults:
        cycles.append(await operator.cycle(fault))
        await asyncio.sleep(rest)
    stop.set()
    await asyncio.gather(*clients)
    for c in cycles:
        c.blackout = books.gap(c.lost, min(c.lost + 1.0, c.back))
        c.gap = books.gap(c.lost, c.back)
        c.return_gap = books.gap(c.back - SETTLE, c.back + SETTLE)
        for start, end in c.unproven:
            books.early += sum(a.device == DEVICE and start < a.sent and a.received < end for a in books.answers)
        c.slowest = max((a.received - a.sent for a in books.answers if a.sent < c.back and a.received > c.lost), default=0.0)
    return books, cycles


def plot(file: Path, books: Books, cycle: Cycle) -> None:
    """Answers a second by device, in bins of 100 ms, through one loss and return."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    start, end = cycle.lost - 1.5, cycle.back + 1.5
    edges = np.arange(start, end, 0.1)
    figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
    bottom = np.zeros(len(edges) - 1)
    for device, colour, label in ((DEVICE, "#1f77b4", "simulated eGPU"), ("cpu", "#ff9f40", "CPU"), ("isolation", "#888888", "alone")):
        rate = np.histogram([a.received for a in books.answers if a.device == device], edges)[0] / 0.1
        if rate.any():
            axes.bar(edges[:-1] - cycle.lost, rate, 0.1, bottom, align="edge", color=colour, label=label)
            bottom += rate
    moments = [(cycle.lost, "unplugged"), (cycle.plugged, "plugged in"), (cycle.back, "has proved itself")]
    for at, text in moments:
        if at:
            axes.axvline(at - cycle.lost, color="black", linewidth=1)
            axes.annotate(text, (at - cycle.lost, 1), (3, -2), xycoords=("data", "axes fraction"), textcoords="offset points", va="top")
    axes.set(xlabel="seconds", ylabel="answers a second", xlim=(start - cycle.lost, edges[-1] - cycle.lost), ylim=(0, 1.2 * bottom.max()))
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def spread(values: list[float]) -> str:
    """Median and worst, in milliseconds."""
    return f"{np.median(values) * 1e3:.0f} / {max(values) * 1e3:.0f}"


def report(books: Books, cycles: list[Cycle]) -> list[str]:
    """Print the tables; what was missed."""
    out = Console(width=None if sys.stdout.isatty() else 140)
    table = Table("loss", title=f"{len(cycles)} losses and returns: median / worst, ms", title_justify="left")
    headings = ["times", "noticed after", "no answer for", "target", "until back", "around return", "slowest answer", "back after"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for fault in dict.fromkeys(c.fault for c in cycles):
        mine = [c for c in cycles if c.fault == fault]
        table.add_row(
            fault,
            str(len(mine)),
            spread([c.noticed - c.lost for c in mine]),
            spread([c.blackout for c in mine]),
            spread([c.target for c in mine]) if fault == "unplug" else "",
            spread([c.gap for c in mine]),
            spread([c.return_gap for c in mine]),
            spread([c.slowest for c in mine]),
            spread([c.back - (c.plugged or c.lost) for c in mine]),
        )
    out.print(table)
    by_device = Counter(a.device for a in books.answers)
    out.print(
        f"sent {books.sent}, answered {len(books.answers)} ({', '.join(f'{d} {n}' for d, n in by_device.most_common())}), "
        f"lost {books.lost}, wrong {len(books.wrong)}, doubled {books.doubled}, refused {dict(books.refused) or 0}, "
        f"errors of the connection {dict(books.broken) or 0}, answers of an unproven device {books.early}",
        highlight=False,
    )
    missed = []
    if books.lost:
        missed.append(f"{books.lost} of {books.sent} requests got no answer: {dict(books.broken)}")
    if books.refused:
        missed.append(f"{sum(books.refused.values())} requests were refused: {dict(books.refused)}")
    if books.wrong:
        missed.append(f"{len(books.wrong)} answers were wrong, the first: {books.wrong[0]}")
    if books.doubled:
        missed.append(f"{books.doubled} answers came twice")
    if books.early:
        missed.append(f"{books.early} answers came from a device that had not proved itself")
    late = [c for c in cycles if c.fault == "unplug" and c.blackout > c.target]
    missed += [f"no answer for {c.blackout * 1e3:.0f} ms after an unplug, wanted at most {c.target * 1e3:.0f}" for c in late]
    return missed


def main(
    cycles: Annotated[int, typer.Option(min=1, help="losses and returns")] = 10,
    faults: Annotated[str, typer.Option(help=f"which, with commas between: {', '.join(FAULTS)}; or all")] = "unplug",
    connections: Annotated[int, typer.Option(min=1, help="clients that each send the next request when they have their answer")] = 8,
    rest: Annotated[float, typer.Option(min=0, help="seconds of peace between two losses")] = 0.5,
    device: Annotated[str, typer.Option(help="the simulated device")] = "sim:thunderbolt4,vram=8GiB,compute=8+4",
    layers: Annotated[int, typer.Option(min=1, help="convolutions of the network: how long a picture takes")] = 8,
    max_losses: Annotated[int, typer.Option(help="losses before the quarantine; 0: so many that there is none")] = 0,
    seed: Annotated[int, typer.Option(help="of the order of faults and of their moments")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="write every cycle and every second here")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="draw an unplug and replug as PNG")] = None,
) -> None:
    chosen = list(FAULTS) if faults == "all" else faults.split(",")
    if unknown := set(chosen) - set(FAULTS):
        raise typer.BadParameter(f"--faults {','.join(sorted(unknown))}: expected {', '.join(FAULTS)} or all")
    # Each kind as often as the others, in random order.
    order = [chosen[i % len(chosen)] for i in range(cycles)]
    random.Random(seed).shuffle(order)
    losses = sum(LOSSES.get(f, 1) for f in order)
    if not max_losses:
        max_losses = 2 * losses
        print(f"the limit of losses is raised to {max_losses}: with the default, more than 3 losses in 10 minutes mean quarantine")
    with tempfile.TemporaryDirectory() as folder:
        with own_server(repository(Path(folder), layers), device, "--max-losses", str(max_losses)) as (url, server, log):
            try:
                books, done = asyncio.run(drive(url, server, order, connections, rest, seed))
            except (httpx.TransportError, RuntimeError) as e:
                time.sleep(2)  # a server that ends takes a moment; `own_server` says with what
                sys.exit(f"{log.read_text()[-5000:]}\nthe test was broken off: {type(e).__name__}: {e}")
        missed = report(books, done)
        if missed:
            print("the server's last lines:\n" + "".join(log.read_text().splitlines(keepends=True)[-30:]))
    if json_file:
        seconds = Counter((int(a.received), a.device) for a in books.answers)
        counts = {"sent": books.sent, "answered": len(books.answers), "lost": books.lost, "wrong": books.wrong, "doubled": books.doubled}
        more = {"refused": books.refused, "broken": books.broken, "early": books.early, "missed": missed, "cores": os.cpu_count()}
        by_second = [{"second": s, "device": d, "answers": n} for (s, d), n in sorted(seconds.items())]
        cycle_list = [asdict(c) | {"target": c.target} for c in done]
        json_file.write_text(json.dumps(counts | more | {"cycles": cycle_list, "seconds": by_second}, indent=1))
    if plot_file:
        plot(plot_file, books, next(c for c in done if c.fault == "unplug"))
    for line in missed:
        print(f"missed: {line}")
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
