"""Does `outboard plan` say what really happens? The same frames through a live server with a simulated device, and through the plan.

    .venv/bin/python loadtests/plan_vs_live.py

It starts a server of its own, sends each case's frames over live streams on their schedule, writes down when they left, and has `outboard
plan --replay` predict that very record. Run it on a machine that does nothing else. Exit status 1: frames a second or age p50 are off
by more than --tolerance, or a frame has no ending. What other programs use of the cores is shown: it is what such a miss is mostly about.
"""

from __future__ import annotations

import asyncio
import csv
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import onnx
import psutil
import simplejpeg
import typer
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table
from websockets.asyncio.client import connect

from outboard.plan.arrivals import Recorded, steady
from outboard.plan.host import photograph
from outboard.plan.predict import quantile
from outboard.plan.usage import size, usual_bytes
from own_server import own_server

MODEL = "mean"
SIDE = 416  #: pixels of the network's input


@dataclass(frozen=True, slots=True)
class Case:
    """What is sent."""

    name: str
    stations: int
    fps: float


#: With compute=8+4 a card answers 83 rows a second one by one, and 220 in batches of 16: one case with air, one near that, one beyond.
CASES = (Case("light", 3, 5), Case("steady", 3, 15), Case("overload", 6, 30))


@dataclass(slots=True)
class Live:
    """What the clients saw. Times in seconds from the start."""

    sent: list[Recorded]
    ages: list[float]
    drops: int
    seconds: float
    others: float = 0.0  #: share of the cores that other programs used meanwhile

    @property
    def stations(self) -> int:
        return len({frame.station for frame in self.sent})


def repository(folder: Path) -> Path:
    """A network that costs the processor next to nothing, so that the card's modelled time is what counts."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["mean"]),
    ]
    graph = helper.make_graph(
        nodes,
        MODEL,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["n", 3])],
    )
    model = folder / MODEL
    model.mkdir(parents=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), model / "model.onnx")
    (model / "model.toml").write_text(
        f'task = "tensor"\nbackend = "onnx"\nfile = "model.onnx"\n[input]\nsize = [{SIDE}, {SIDE}]\n[output]\ndecoder = "tensor"\n'
    )
    return folder


def picture(width: int, height: int, nbytes: int) -> bytes:
    """A JPEG of about so many bytes."""
    pixels = photograph(width, height)
    bodies = (simplejpeg.encode_jpeg(pixels, quality, "RGB", "420") for quality in range(40, 98, 3))
    return min(bodies, key=lambda body: abs(len(body) - nbytes))


async def station(url: str, name: str, frames: list[Recorded], body: bytes, began: float, live: Live) -> None:
    """Sends each frame when it is due, whatever became of the others."""
    address = f"{url.replace('http', 'ws', 1)}/v1/models/{MODEL}/stream?policy=live&station={name}"
    sent: dict[int, float] = {}
    async with connect(address, max_size=None, compression=None) as socket:

        async def listen() -> None:
            left = len(frames)
            async for text in socket:
                message: dict[str, Any] = json.loads(text)
                if message["type"] == "result":
                    live.ages.append(time.perf_counter() - sent[message["seq"]])
                elif message["type"] == "drop":
                    live.drops += 1
                else:
                    continue
                left -= 1
                if not left:
                    return

        listening = asyncio.create_task(listen())
        for seq, frame in enumerate(frames, 1):
            await asyncio.sleep(began + frame.t - time.perf_counter())
            sent[seq] = time.perf_counter()
            live.sent.append(Recorded(t=sent[seq] - began, station=name, bytes=len(body), width=frame.width, height=frame.height))
            await socket.send(body)
        await asyncio.wait_for(listening, 30)


def used(processes: list[psutil.Process]) -> float:
    """Seconds of cores that these have used so far."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))


def all_used() -> float:
    t = psutil.cpu_times()
    return t.user + t.nice + t.system + t.irq + t.softirq + t.steal


async def run_live(url: str, process: psutil.Process, frames: list[Recorded], body: bytes) -> Live:
    live = Live([], [], 0, 0.0)
    ours = [psutil.Process(), process, *process.children()]
    before = time.perf_counter(), all_used() - used(ours)
    began = time.perf_counter() + 0.5
    names = sorted({f.station for f in frames})
    await asyncio.gather(*(station(url, n, [f for f in frames if f.station == n], body, began, live) for n in names))
    live.sent.sort(key=lambda f: f.t)
    live.seconds = time.perf_counter() - began - live.sent[0].t
    live.ages.sort()
    live.others = (all_used() - used(ours) - before[1]) / (time.perf_counter() - before[0]) / (psutil.cpu_count() or 1)
    return live


def run_plan(models: Path, device: str, trace: Path) -> dict[str, Any]:
    link = device.removeprefix("sim:").split(",")[0]
    command = [sys.executable, "-m", "outboard", "plan", "--models", models, "--model", MODEL, "--link", link, "--gpu", device]
    done = subprocess.run([*command, "--replay", trace, "--json"], capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(done.stderr)
    return json.loads(done.stdout)["plans"][0]


def write(trace: Path, frames: list[Recorded]) -> None:
    with trace.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(Recorded.__struct_fields__)
        lines.writerows([f.t, f.station, f.bytes, f.width, f.height] for f in frames)


def main(
    seconds: Annotated[float, typer.Option(min=2, help="of each case")] = 20.0,
    device: Annotated[str, typer.Option(help="the simulated device")] = "sim:thunderbolt4,vram=8GiB,compute=8+4",
    source: Annotated[str, typer.Option(help="size of the frames: 4k, 1080p, 720p or WxH")] = "720p",
    tolerance: Annotated[float, typer.Option(help="of frames a second and of age p50, relative")] = 0.10,
    json_file: Annotated[Path | None, typer.Option("--json", help="write what was found here")] = None,
) -> None:
    width, height = size(source)
    body = picture(width, height, usual_bytes(width, height))
    table = Table("case", title=f"{device}, {width}x{height}, {len(body) / 1e3:.0f} kB a frame: live / plan", title_justify="left")
    for heading in ("fps a station", "error", "age p50, ms", "error", "age p99, ms", "dropped", "other programs"):
        table.add_column(heading, justify="right")
    missed, found = [], []
    with tempfile.TemporaryDirectory() as folder:
        models = repository(Path(folder) / "models")
        with own_server(models, device) as (url, process, _):
            learning = steady(1, 10, 3, len(body), width, height, 0)  # the server learns what decoding costs
            asyncio.run(run_live(url, process, learning, body))
            lives = []
            for case in CASES:
                frames = steady(case.stations, case.fps, seconds, len(body), width, height, seed=1)
                lives.append(asyncio.run(run_live(url, process, frames, body)))
        for case, live in zip(CASES, lives, strict=True):
            trace = Path(folder) / f"{case.name}.csv"
            write(trace, live.sent)
            plan = run_plan(models, device, trace)
            fps, p50, p99 = len(live.ages) / live.seconds / live.stations, quantile(live.ages, 0.5), quantile(live.ages, 0.99)
            errors = {"fps": plan["fps"] / fps - 1, "age p50": plan["age_p50_ms"] / 1e3 / p50 - 1}
            table.add_row(
                f"{case.name}: {case.stations} x {case.fps:g} fps",
                f"{fps:.2f} / {plan['fps']:.2f}",
                f"{errors['fps']:+.1%}",
                f"{p50 * 1e3:.1f} / {plan['age_p50_ms']:.1f}",
                f"{errors['age p50']:+.1%}",
                f"{p99 * 1e3:.1f} / {plan['age_p99_ms']:.1f}",
                f"{live.drops} / {plan['dropped'] + plan['refused']}",
                f"{live.others:.0%} of the cores",
            )
            missed += [f"{case.name}: {what} is off by {e:+.1%}" for what, e in errors.items() if abs(e) > tolerance]
            if len(live.ages) + live.drops != len(live.sent):
                missed.append(f"{case.name}: {len(live.sent)} sent, {len(live.ages)} answered, {live.drops} dropped")
            ages = {"age_p50_ms": p50 * 1e3, "age_p99_ms": p99 * 1e3}
            found.append({"case": case.name, "fps": fps, **ages, "dropped": live.drops, "others": live.others, "plan": plan})
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1))
    for line in missed:
        print(f"missed: {line}")
    raise typer.Exit(1 if missed else 0)


if __name__ == "__main__":
    typer.run(main)
