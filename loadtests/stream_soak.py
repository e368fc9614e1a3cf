"""Minutes of 4K video over a link that stalls and is cut, with an unplug in the middle: are the books right to the frame?

    .venv/bin/python loadtests/stream_soak.py                 # 10 minutes, 15 fps
    .venv/bin/python loadtests/stream_soak.py --seconds 60 --every 10

It starts a server of its own with a simulated device and a small network that finds a magenta disc; the frames are cut into tiles. Each
frame carries the true place as `meta`, so that a swapped, repeated or wrong answer is seen. It counts at the client, and asks the server
for its own count. Exit status 1: a frame has no outcome or two, the two counts differ, a link was lost to 1011, the disc was found within
4 pixels in fewer than 99 % of the answers, too few frames were answered, or a process grew.

How many are enough depends on the machine: the same work is done first in a bare loop on all of its cores, without server, link and
camera. The target is a share of what that loop, or the camera where it is slower, would have done while the link was up.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
import numpy as np
import onnx
import psutil
import typer
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from bare_tiles import frames_per_second
from failing_link import linked
from outboard.imaging.tiles import Tiling
from outboard_client import Drop, Figures, Frame, FrameStream, Outcome
from outboard_client.ledger import LINK_LOST, NEWER
from own_server import DEVICE, own_server

MODEL = "disc"
SIZE = 3840, 2160  #: of the frames
INPUT = 640, 360  #: of the network
RADIUS = 27  #: of the disc, pixels of the frame
OVERLAP = 0.1  #: of tiles: 192 pixels and more, three times the disc
NEAR = 4.0  #: pixels of the frame
LOOP = 60  #: different frames
LONG = 300.0  #: seconds of a run that says something about memory: allocators need minutes to settle
#: Memory is looked at behind this share of a run: half way the CPU's worker takes the work over, for which it needs more than before.
SETTLED = 2 / 3


Film = list[tuple[bytes, dict[str, int]]]  #: JPEGs, and where the disc is
Samples = list[tuple[float, dict[str, float]]]  #: seconds since the start, process -> private MB


def network() -> bytes:
    """ONNX: how magenta a pixel is, R + B - 2 G - 1; its centre of mass is the disc's.

    `output0` [N, 1, 6]: x1, y1, x2, y2, score, class.
    """
    width, height = INPUT
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def constant(value: Any, dtype: type = np.float32) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value, dtype), f"c{len(constants)}"))
        return constants[-1].name

    def op(kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [out or f"t{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    kernel = np.array([1, -2, 1], np.float32).reshape(1, 3, 1, 1)
    heat = op("Relu", op("Conv", "images", constant(kernel), constant([-1.0])))  # [N, 1, H, W]
    columns = op("ReduceSum", heat, constant([1, 2], np.int64), keepdims=0)  # [N, W]
    rows = op("ReduceSum", heat, constant([1, 3], np.int64), keepdims=0)  # [N, H]
    total = op("Add", op("ReduceSum", columns, constant([1], np.int64), keepdims=1), constant(1e-6))  # [N, 1]
    x = op("Div", op("MatMul", columns, constant(np.arange(width)[:, None] + 0.5)), total)
    y = op("Div", op("MatMul", rows, constant(np.arange(height)[:, None] + 0.5)), total)
    # A tile shows the disc three times smaller; one that shows a part of it scores less.
    radius = RADIUS / 3
    score = op("Clip", op("Div", total, constant(math.pi * radius**2)), constant(0.0), constant(0.999))
    corners = [op(kind, place, constant(radius)) for kind in ("Sub", "Add") for place in (x, y)]
    op("Unsqueeze", op("Concat", *corners, score, op("Mul", score, constant(0.0)), axis=1), constant([1], np.int64), out="output0")
    graph = helper.make_graph(
        nodes,
        MODEL,
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["n", 3, height, width])],
        [helper.make_tensor_value_info("output0", TensorProto.FLOAT, ["n", 1, 6])],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model.SerializeToString()


def repository(folder: Path) -> Path:
    model = folder / MODEL
    model.mkdir(parents=True)
    (model / "model.onnx").write_bytes(network())
    (model / "labels.txt").write_text("disc\n")
    (model / "model.toml").write_text(
        f'task = "detection"\nbackend = "onnx"\nfile = "model.onnx"\nlabels = "labels.txt"\n'
        f'[input]\nsize = [{INPUT[0]}, {INPUT[1]}]\n[output]\ndecoder = "end2end"\n'
    )
    return folder


def film(numbers: Iterable[int] = range(LOOP)) -> Film:
    """(JPEG, where the disc is) of 4K frames: a photograph with a little noise, and the disc on a closed path over all of it."""
    from skimage import data

    rng = np.random.default_rng(0)
    photo = np.asarray(Image.fromarray(data.chelsea()).resize(SIZE)).astype(np.int16)
    background = np.clip(photo + rng.normal(0, 6, photo.shape), 0, 255).astype(np.uint8)
    frames = []
    for n in numbers:
        turn = 2 * math.pi * n / LOOP
        x = round(SIZE[0] / 2 + (SIZE[0] / 2 - 60) * math.sin(turn))
        y = round(SIZE[1] / 2 + (SIZE[1] / 2 - 60) * math.sin(3 * turn + 0.4))
        picture = Image.fromarray(background)
        ImageDraw.Draw(picture).ellipse([x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS], fill=(255, 0, 255))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=88)
        frames.append((buffer.getvalue(), {"x": x, "y": y}))
    return frames


@dataclass
class Books:
    """What the client counts."""

    sent: int = 0
    answered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    found: int = 0
    wrong: list[str] = field(default_factory=list)
    out_of_order: int = 0
    devices: Counter[str] = field(default_factory=Counter)
    ages: list[float] = field(default_factory=list)
    last: int = 0

    def enter(self, outcome: Outcome) -> None:
        self.out_of_order += outcome.seq != self.last + 1
        self.last = outcome.seq
        if isinstance(outcome, Drop):
            self.dropped[outcome.reason] += 1
            return
        self.answered += 1
        answer = outcome.answer
        self.ages.append(outcome.age)
        self.devices[answer.device] += 1
        best = max(answer.detections, key=lambda d: d.score, default=None)
        if best is None:
            self.wrong.append(f"frame {outcome.seq}: nothing found")
            return
        x1, y1, x2, y2 = best.box
        distance = math.dist(((x1 + x2) / 2, (y1 + y2) / 2), (answer.meta["x"], answer.meta["y"]))
        if distance <= NEAR and answer.meta["n"] == outcome.seq:
            self.found += 1
        else:
            self.wrong.append(f"frame {outcome.seq} (sent as {answer.meta['n']}): {distance:.1f} pixels off")


def memory(server: psutil.Process) -> dict[str, float]:
    """Process -> private MB: the front and each worker. The frame memory, which all of them share, is bounded and not counted."""
    sizes = {}
    for process in [server, *server.children()]:
        with contextlib.suppress(psutil.NoSuchProcess):
            sizes["front" if process == server else f"worker {process.pid}"] = (
                process.memory_info().rss - process.memory_info().shared
            ) / 1e6
    return sizes


def growth(samples: Samples, process: str, after: float) -> float:
    """MB a minute, by a line through the samples after `after` seconds; NaN where there are too few to say.

    A worker that replaced a lost one comes to what that one had come to, in steps, whenever the link's next burst makes its first large
    batches: only what it takes beyond that is growth.
    """
    reached = reached_by_the_lost(samples) if process not in samples[0][1] else 0.0
    points = [(at / 60, max(sizes[process], reached)) for at, sizes in samples if at >= after and process in sizes]
    return float(np.polyfit(*np.array(points).T, 1)[0]) if len(points) >= 10 else math.nan


def reached_by_the_lost(samples: Samples) -> float:
    """MB of the largest worker that was there at first and is not at the end: the median of its last ten samples, 0 where none is gone."""
    lost = samples[0][1].keys() - samples[-1][1].keys()
    return max((float(np.median([sizes[p] for _, sizes in samples if p in sizes][-10:])) for p in lost), default=0.0)


async def drive(
    url: str, server: psutil.Process, frames: Film, seconds: float, fps: float, every: float, stall: float, tile: int, policy: str
) -> Run:
    books = Books()
    samples: Samples = []
    began = time.monotonic()
    cpu_before = sum(psutil.Process().cpu_times()[:2])

    async def camera() -> AsyncIterator[Frame]:
        for n in itertools.count():
            due = began + n / fps
            if due - began > seconds:
                return
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            image, place = frames[n % LOOP]
            books.sent += 1
            yield Frame(image, meta=place | {"n": n + 1})

    async with linked(url) as (link, near), httpx.AsyncClient(base_url=url, timeout=30) as http:
        stream = FrameStream(MODEL, near, policy=policy, station="soak", durable=True, tile=tile, overlap=OVERLAP, whole=False)

        async def trouble() -> None:
            while True:
                await asyncio.sleep(every / 2)
                await link.stall(stall)
                await asyncio.sleep(max(0.0, every / 2 - stall))
                link.cut()

        async def unplug() -> None:
            await asyncio.sleep(seconds / 2)
            await http.post(f"/v1/devices/{DEVICE}/fault", json={"fault": "unplug"})
            await asyncio.sleep(min(30.0, seconds / 6))
            await http.post(f"/v1/devices/{DEVICE}/fault", json={"fault": "replug"})

        async def watch() -> None:
            while True:
                samples.append((time.monotonic() - began, memory(server)))
                await asyncio.sleep(min(2.0, seconds / 60))

        others = [asyncio.create_task(work()) for work in (trouble, unplug, watch)]
        async for outcome in stream.run(camera()):
            books.enter(outcome)
            stream.ack(outcome.seq)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        took = time.monotonic() - began
        generator = (sum(psutil.Process().cpu_times()[:2]) - cpu_before) / took
        (listed,) = [s for s in (await http.get("/v1/streams")).json()["streams"] if s["id"] == f"soak.{MODEL}"]
        device = (await http.get(f"/v1/devices/{DEVICE}")).json()
    return Run(books, stream.figures, listed, device, samples, took, generator, link.cuts)


@dataclass
class Run:
    books: Books
    figures: Figures
    server: dict[str, Any]  #: the server's entry of /v1/streams
    device: dict[str, Any]
    samples: Samples
    seconds: float
    generator: float  #: share of a core that this process used
    cuts: int
    loop_fps: float = 0.0  #: of the bare loop
    possible: float = 0.0  #: frames: what it, or the camera, would have done while the link was up


def missed(run: Run, wanted: dict[str, float]) -> list[str]:
    """The targets that were not met."""
    books, figures = run.books, run.figures
    dropped = books.dropped.total()
    out = []
    if books.sent != books.answered + dropped or books.out_of_order:
        out.append(f"{books.sent} sent, {books.answered} answered + {dropped} dropped; {books.out_of_order} out of order")
    here = sum(books.dropped[reason] for reason in (NEWER, LINK_LOST))
    server = run.server["received"], run.server["processed"], sum(run.server["dropped"].values())
    if server != (client := (books.sent - here, books.answered, dropped - here)):
        out.append(f"the server counts {server} received, answered and dropped, the client {client}")
    if pings := figures.closed.get("1011", 0):
        out.append(f"{pings} links lost to 1011")
    if books.found < wanted["found"] * books.answered or not books.answered:
        first = "; ".join(books.wrong[:5])
        out.append(f"the disc was found in {books.found} of {books.answered} answers, wanted {wanted['found']:.0%}: {first}")
    if books.answered < wanted["answered"] * run.possible:
        out.append(f"{books.answered} frames answered, wanted {wanted['answered']:.0%} of the {run.possible:.0f} that were possible")
    if run.device["losses"] < 1 or run.device["state"] != "serving":
        out.append(f"{DEVICE} was lost {run.device['losses']} times and is {run.device['state']}, expected to be back")
    for process in run.samples[-1][1] if run.seconds >= LONG else ():
        if (grown := growth(run.samples, process, run.seconds * SETTLED)) > wanted["growth"]:
            out.append(f"{process} grew by {grown:.2f} MB a minute, wanted at most {wanted['growth']:g}")
    return out


def report(run: Run) -> None:
    books, figures = run.books, run.figures
    table = Table(
        "", "", title=f"{books.sent} frames of {SIZE[0]}x{SIZE[1]} in {run.seconds:.0f} s", title_justify="left", show_header=False
    )
    ages = np.array(books.ages) * 1e3
    drops = ", ".join(f"{n} {reason}" for reason, n in books.dropped.most_common()) or "none"
    table.add_row("answered", f"{books.answered} ({books.answered / run.seconds:.1f} a second), by {dict(books.devices)}")
    table.add_row("the bare loop, without a server", f"{run.loop_fps:.1f} frames a second on every core")
    table.add_row("answered of what was possible", f"{books.answered / run.possible:.0%} of {run.possible:.0f}")
    table.add_row("dropped", f"{books.dropped.total()}: {drops}")
    table.add_row("disc found within 4 pixels", f"{books.found} of {books.answered}")
    if len(ages):
        table.add_row("age of answers, ms", ", ".join(f"p{p:g} {np.percentile(ages, p):.0f}" for p in (50, 95, 99, 99.9)))
    table.add_row("links", f"{run.cuts} cut; {figures.links} made, {figures.resumed} resumed, ended by {figures.closed}")
    table.add_row("outcomes that came again", str(figures.doubles))
    table.add_row(DEVICE, f"{run.device['state']}, lost {run.device['losses']} times")
    for process, size in run.samples[-1][1].items():
        first = next(sizes[process] for _, sizes in run.samples if process in sizes)
        table.add_row(
            f"memory of {process}", f"{first:.0f} -> {size:.0f} MB, {growth(run.samples, process, run.seconds * SETTLED):+.2f} MB a minute"
        )
    table.add_row("load generator and proxy", f"{run.generator:.0%} of a core; {os.cpu_count()} cores here")
    Console(width=None if sys.stdout.isatty() else 160).print(table, highlight=False, markup=False)


def main(
    seconds: Annotated[float, typer.Option(min=10)] = 600.0,
    fps: Annotated[float, typer.Option(min=1)] = 15.0,
    every: Annotated[float, typer.Option(help="seconds between two cuts; half way between them the link stalls")] = 30.0,
    stall: Annotated[float, typer.Option(help="seconds of it")] = 5.0,
    device: Annotated[str, typer.Option(help="the simulated one")] = "sim:thunderbolt4,vram=8GiB,compute=4+0.5",
    tile: Annotated[int, typer.Option(help="pixels of a tile's width")] = 1920,
    policy: Annotated[str, typer.Option(help="live or lossless")] = "live",
    min_found: Annotated[float, typer.Option(help="share of the answers")] = 0.99,
    min_answered: Annotated[float, typer.Option(help="share of what a bare loop, or the camera, does while the link is up")] = 0.5,
    max_growth: Annotated[float, typer.Option(help="MB a minute in the last third of a run of 5 minutes or more")] = 2.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="write everything here")] = None,
) -> None:
    frames = film()
    with tempfile.TemporaryDirectory() as folder:
        models = repository(Path(folder))
        tiling = Tiling(size=tile, overlap=OVERLAP, whole=False)
        loop_fps = frames_per_second(models / MODEL, [jpeg for jpeg, _ in frames], tiling, min(10.0, seconds / 6))
        print(f"the bare loop: {loop_fps:.1f} frames a second", flush=True)
        with own_server(models, device) as (url, server, _):
            run = asyncio.run(drive(url, server, frames, seconds, fps, every, stall, tile, policy))
    run.loop_fps = loop_fps
    run.possible = min(fps, loop_fps) * seconds * (1 - stall / every)
    report(run)
    failures = missed(run, {"found": min_found, "answered": min_answered, "growth": max_growth})
    if json_file:
        json_file.write_text(json.dumps(msgspec.to_builtins(run) | {"missed": failures}, indent=1))
    for failure in failures:
        print(f"missed: {failure}")
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
