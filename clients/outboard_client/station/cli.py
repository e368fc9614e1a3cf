"""The `outboard-station` command. Exit codes: 0 fine, 1 the answer is no, 2 wrong usage."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import re
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from outboard_client.calls import Options
from outboard_client.errors import OutboardError, Problem, SourceFailed
from outboard_client.station import screen
from outboard_client.station.journal import Journal
from outboard_client.station.run import Station
from outboard_client.station.sources import FolderSource, Reading, Source, open_source
from outboard_client.station.spool import OVERHEAD, Spool, SpoolError
from outboard_client.stream import FrameStream
from outboard_client.uplink import Uplink

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="The field station: frames from a folder, a video, a camera or RTSP to an Outboard server, over a link that fails.",
    epilog="Example: outboard-station run flight/ --model yolov2_tiny --policy lossless --spool spool/",
)
err = Console(stderr=True)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

SourceText = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder of images, an image, a video, rtsp://…, http://… (MJPEG, HLS), camera:0, or a test picture: lavfi:testsrc2=rate=15.",
    ),
]


def main() -> None:
    app()


def _refuse(message: str, code: int = 2) -> typer.Exit:
    _say(f"outboard-station: {message}", "red")
    return typer.Exit(code)


def _say(message: str, style: str = "") -> None:
    err.print(message, style=style, markup=False, highlight=False, soft_wrap=True)


@app.command(
    epilog="""Examples:\n
    outboard-station run rtsp://192.168.1.20/stream1 --model yolov2_tiny --fps 15\n
    outboard-station run flight/ --model yolov2_tiny --policy lossless --spool spool --out flight.ndjson --sidecar flight/"""
)
def run(
    source: SourceText,
    model: Annotated[str, typer.Option(help="The model that gets the frames.")],
    url: Annotated[str | None, typer.Option(envvar="OUTBOARD_URL", help="The server; default http://127.0.0.1:8000.")] = None,
    key: Annotated[str | None, typer.Option(envvar="OUTBOARD_KEY", help="API key.")] = None,
    policy: Annotated[str, typer.Option(help="live: the newest frame wins; lossless: every frame is answered.")] = "live",
    station: Annotated[str | None, typer.Option(help="This station's name.")] = None,
    spool: Annotated[Path | None, typer.Option(help="Folder that keeps lossless frames until they are answered, over crashes.")] = None,
    spool_limit: Annotated[str, typer.Option(help="Bytes that the spool may use.")] = "10GiB",
    out: Annotated[Path | None, typer.Option(help="Append the outcomes here, one JSON a line; default with --spool: in it.")] = None,
    sidecar: Annotated[Path | None, typer.Option(help="Write photo.jpg.json for each photo.jpg of the source below this folder.")] = None,
    fps: Annotated[float, typer.Option(min=0, help="Frames a second at most; 0: as many as there are.")] = 0.0,
    quality: Annotated[int, typer.Option(min=1, max=95, help="JPEG quality of video frames; in live the highest.")] = 88,
    lowest_quality: Annotated[int, typer.Option(min=1, max=95, help="How far it may fall in live when the uplink is slow.")] = 40,
    longest: Annotated[int, typer.Option(min=0, help="Shrink video frames to so many pixels at most; 0: no.")] = 0,
    max_age_ms: Annotated[float | None, typer.Option(help="Live: drop what is older when it could be answered.")] = None,
    in_flight: Annotated[int | None, typer.Option(min=1, help="Frames on their way at once; default 32 live, 64 lossless.")] = None,
    min_score: Annotated[float | None, typer.Option(help="As predict takes it.")] = None,
    tile: Annotated[str | None, typer.Option(help="As predict takes it: auto, or the side of a tile in pixels.")] = None,
    transport: Annotated[str, typer.Option(help="RTSP over tcp or udp.")] = "tcp",
    stall: Annotated[float, typer.Option(min=1, help="Seconds without a frame after which the source is opened anew.")] = 20.0,
    keep_trying: Annotated[bool, typer.Option(help="Also when the first frame does not come within 10 s.")] = False,
    watch: Annotated[bool, typer.Option(help="A folder: wait for more files. Otherwise end when all are answered.")] = False,
    give_up: Annotated[float | None, typer.Option(help="End after so many seconds without a link; default: never.")] = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two lines of figures.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON, one object a line.")] = False,
) -> None:
    """Send the source's frames and collect the outcomes."""
    if policy not in ("live", "lossless"):
        raise _refuse(f"--policy is {policy!r}, expected live or lossless")
    if transport not in ("tcp", "udp"):
        raise _refuse(f"--transport is {transport!r}, expected tcp or udp")
    if spool is not None and policy != "lossless":
        raise _refuse("--spool keeps every frame: it needs --policy lossless")
    live = policy == "live"
    uplink = Uplink(fps=fps or 15.0, lowest=min(lowest_quality, quality) if live else quality, highest=quality)
    reading = Reading(
        live=live,
        fps=fps,
        longest=longest,
        transport=transport,
        stall=stall,
        keep_trying=keep_trying,
        watch=watch,
        quality=lambda: uplink.quality,
    )
    opened = _open(source, reading)
    store = journal = None
    try:
        store = Spool(spool, _size(spool_limit)) if spool is not None else None
        if store is not None and out is None:
            out = store.path.with_name("results.ndjson")
        journal = Journal(out, store.id if store else "") if out is not None else None
        after = journal.last if journal else 0
        if store is not None:
            store.settle(after)  # their lines are in the file: only their frames were not cleared away before the crash
            after = store.held
        stream = FrameStream(
            model,
            url,
            key=key,
            policy="live" if live else "lossless",
            station=station,
            max_age_ms=max_age_ms,
            session=store.session if store else None,
            after=after,
            in_flight=in_flight,
            eager=not live,
            uplink=uplink,
            give_up=give_up,
            durable=store is not None,
            **msgspec.structs.asdict(Options(min_score=min_score, tile=tile)),
        )
    except (ValueError, SpoolError, OSError) as e:
        raise _refuse(str(e)) from e
    work = Station(opened, stream, store, journal, sidecar)
    raise typer.Exit(asyncio.run(_run(work, every, as_json)))


@app.command(epilog="Example: outboard-station check rtsp://192.168.1.20/stream1")
def check(
    source: SourceText,
    transport: Annotated[str, typer.Option(help="RTSP over tcp or udp.")] = "tcp",
    seconds: Annotated[float, typer.Option(min=0, help="How long to watch it after the first frame.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Whether frames come from the source: the first one, or the error, within 10 seconds."""
    opened = _open(source, Reading(live=True, transport=transport))
    try:
        found = asyncio.run(_check(opened, seconds))
    except SourceFailed as e:
        if as_json:
            print(msgspec.json.encode({"ok": False, "why": str(e)}).decode())
        raise _refuse(str(e), 1) from e
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        size = f"{found['width']}x{found['height']}, " if found["width"] else ""
        print(f"{opened.name}: {size}{found['frames']} frames, {found['fps']:.1f} a second, {found['corrupted']} corrupted")


@app.command("spool", epilog="Example: outboard-station spool /var/spool/outboard")
def show_spool(
    folder: Annotated[Path, typer.Argument(help="The folder given with --spool.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """What waits in a spool that no station is using."""
    if not (folder / "spool.sqlite").is_file():
        raise _refuse(f"{folder}: there is no spool in it")
    try:
        store = Spool(folder, OVERHEAD + 1)
    except SpoolError as e:
        raise _refuse(str(e), 1) from e
    found = {"frames": store.frames, "bytes": store.nbytes, "held": store.held, "session": store.session}
    store.close()
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print(f"{found['frames']} frames of {store.nbytes / 1e6:.1f} MB wait; outcomes up to frame {found['held']} are held")


def _open(text: str, reading: Reading) -> Source:
    try:
        source = open_source(text, reading)
    except ValueError as e:
        raise _refuse(str(e)) from e
    if not isinstance(source, FolderSource) and importlib.util.find_spec("av") is None:
        raise _refuse("videos, cameras and RTSP need the extra `video`: pip install 'outboard[video]'")
    return source


async def _check(source: Source, seconds: float) -> dict[str, object]:
    figures, first, ended = source.figures, 0.0, 0.0
    async with contextlib.aclosing(source.frames(set())) as frames:
        async for _ in frames:
            ended = time.monotonic()
            first = first or ended
            if ended - first >= seconds:
                break
    if not figures.frames:
        raise SourceFailed(f"{source.name}: there are no images in it")
    counted = figures.frames + figures.skipped
    fps = (counted - 1) / (ended - first) if ended > first else 0.0
    names = ("width", "height", "frames", "corrupted", "unreadable")
    return {"ok": True, "fps": round(fps, 2)} | {name: getattr(figures, name) for name in names}


async def _run(work: Station, every: float, as_json: bool) -> int:
    running = asyncio.create_task(work.run())
    showing = asyncio.create_task(screen.show(work, every=every, as_json=as_json))
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        running.cancel()

    with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C cancels asyncio.run itself
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
    failure = ""
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
    except (OutboardError, OSError) as e:
        failure = f"the server refuses the stream: {e}" if isinstance(e, Problem) else str(e)
    finally:
        showing.cancel()
        await asyncio.gather(showing, return_exceptions=True)
    figures = work.stream.figures
    if work.taken_before and not work.spooled:
        _say(f"all {work.taken_before} frames of {work.source.name} were taken before")
    if failure:
        _say(f"outboard-station: {failure}", "red")
        return 1
    if stopped:
        return 0
    # Whoever asked for every frame wants to know that one has no answer.
    return 1 if work.stream.policy == "lossless" and figures.dropped else 0


def _size(text: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].lower() not in _UNITS:
        raise ValueError(f"--spool-limit is {text!r}, expected a size such as 500MB or 10GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


if __name__ == "__main__":
    sys.exit(main())
