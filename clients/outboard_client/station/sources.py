"""Where a station's frames come from: a folder of images, or a video, a camera or a network stream read by a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import msgspec

from outboard_client.backoff import Backoff
from outboard_client.errors import SourceFailed
from outboard_client.frames import now_us
from outboard_client.station.metadata import photo_meta
from outboard_client.station.reader import LENGTHS, Reply, Task

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".heic", ".heif", ".avif"})
_NETWORK = frozenset({"rtsp", "rtsps", "rtmp", "http", "https", "srt", "udp", "rtp"})
#: Without a frame for so long, a live source is shown as offline.
OFFLINE = 3.0
#: A file that was changed this recently may still be being written.
_SETTLED = 1.0
_LOOK = 0.5


@dataclass(frozen=True, slots=True)
class Captured:
    """A frame of a source. `key` names it there, so that it is not taken twice; "": it comes once, by itself."""

    image: bytes
    captured: int
    meta: dict[str, Any]
    key: str = ""


@dataclass(slots=True)
class SourceFigures:
    """`skipped`: frames that a live source had and that were never asked for, since a newer one was there."""

    frames: int = 0
    skipped: int = 0
    corrupted: int = 0
    unreadable: int = 0
    restarts: int = 0
    width: int = 0
    height: int = 0
    why: str = ""  #: what ended the last attempt to read
    asked_at: float | None = None  #: time.monotonic() of the request that waits for a frame
    last: float | None = None

    @property
    def state(self) -> str:
        """opening, online or offline."""
        if self.last is None:
            return "opening"
        silent = self.asked_at is not None and time.monotonic() - max(self.asked_at, self.last) > OFFLINE
        return "offline" if silent else "online"


class Source(Protocol):
    """`live`: it goes on whether or not anyone takes its frames (a camera). Otherwise it waits, and ends."""

    name: str
    live: bool
    figures: SourceFigures

    def frames(self, taken: set[str]) -> AsyncGenerator[Captured]:
        """Every frame whose key is not in `taken`. Raises SourceFailed."""
        ...


@dataclass
class Reading:
    """How a source is read; what does not concern it is ignored."""

    live: bool = True  #: the newest frame counts, and a video file plays at its own speed; else every frame does
    fps: float = 0.0
    longest: int = 0
    transport: str = "tcp"
    first_frame: float = 10.0  #: seconds in which the first frame must be there
    stall: float = 20.0  #: seconds without a frame after which the reading process is started anew
    keep_trying: bool = False  #: also when the first frame does not come
    watch: bool = False  #: a folder: go on looking for new files
    quality: Callable[[], int] = field(default=lambda: 88)
    backoff: Callable[[], Backoff] = Backoff


def open_source(text: str, reading: Reading) -> Source:
    """The source that `text` names. Raises ValueError where it names none."""
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in _NETWORK:
        options = {"rtsp_transport": reading.transport} if scheme in ("rtsp", "rtsps") else {}
        return VideoSource(redacted(text), Task(url=text, options=options), reading, endless=True)
    if text.startswith(("camera:", "/dev/video")):
        return VideoSource(text, _camera(text.removeprefix("camera:")), reading, endless=True)
    if text.startswith("lavfi:"):
        return VideoSource(text, Task(url=text.removeprefix("lavfi:"), format="lavfi", pace=reading.live), reading, endless=False)
    path = Path(text)
    if path.is_dir():
        return FolderSource(path, reading)
    if path.is_file():
        if path.suffix.lower() in IMAGES:
            return FolderSource(path, reading)
        return VideoSource(str(path), Task(url=str(path), pace=reading.live), reading, endless=False)
    raise ValueError(f"{redacted(text)}: no such folder or file, and no address such as rtsp://…, camera:0 or lavfi:testsrc2=rate=15")


def redacted(url: str) -> str:
    """Without the password: this is shown and written down."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username}:***@{host}"))


def _camera(name: str) -> Task:
    if sys.platform == "darwin":
        return Task(url=name or "0", format="avfoundation", options={"framerate": "30"})
    if sys.platform == "win32":
        return Task(url=f"video={name}", format="dshow")
    return Task(url=f"/dev/video{name}" if name.isdigit() else name, format="v4l2", options={"input_format": "mjpeg"})


class FolderSource:
    """Images of a folder (and what is below it), by name; sent as they are, with place and time from EXIF and XMP."""

    live = False

    def __init__(self, path: Path, reading: Reading):
        self.name = str(path.resolve())
        self.figures = SourceFigures()
        self._path = path
        self._reading = reading

    async def frames(self, taken: set[str]) -> AsyncGenerator[Captured]:
        figures, reading = self.figures, self._reading
        seen = set(taken)
        due = time.monotonic()
        while True:
            for path in await asyncio.to_thread(self._files):
                key = path.name if self._path.is_file() else path.relative_to(self._path).as_posix()
                if key in seen:
                    continue
                seen.add(key)
                try:
                    data = await asyncio.to_thread(path.read_bytes)
                except OSError as e:
                    figures.unreadable += 1
                    figures.why = f"{path}: {e.strerror}"
                    continue
                if reading.fps:
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    due = max(due, time.monotonic() - 1 / reading.fps) + 1 / reading.fps
                figures.frames += 1
                figures.last = time.monotonic()
                yield Captured(data, now_us(), {"file": key} | await asyncio.to_thread(photo_meta, data), key)
            if not reading.watch:
                return
            await asyncio.sleep(_LOOK)

    def _files(self) -> list[Path]:
        if self._path.is_file():
            return [self._path]
        found = sorted(p for p in self._path.rglob("*") if p.suffix.lower() in IMAGES)
        if not self._reading.watch:
            return found
        return [p for p in found if _unchanged(p) > _SETTLED]


def _unchanged(path: Path) -> float:
    """Seconds since the file was written to; 0 for one that went away meanwhile."""
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


class VideoSource:
    """Frames from a reading process, with a watchdog: without a frame for `stall` seconds it is ended and started anew.

    A file ends (`endless` is false); what has no end is opened again, after 1 to 30 s ±20 %.
    """

    def __init__(self, name: str, task: Task, reading: Reading, *, endless: bool):
        self.name = name
        self.live = endless
        self.figures = SourceFigures()
        self._reading = reading
        task.newest = reading.live
        task.fps, task.longest, task.patience = reading.fps, reading.longest, reading.stall
        self._task = task

    async def frames(self, taken: set[str]) -> AsyncGenerator[Captured]:
        figures, reading, backoff = self.figures, self._reading, self._reading.backoff()
        task = msgspec.structs.replace(self._task, start=max(map(int, taken), default=-1) + 1)
        while True:
            ended = False
            skipped, corrupted = figures.skipped, figures.corrupted
            async with _reader(task) as ask:
                came = False
                while True:
                    patience = reading.stall if came else reading.first_frame
                    figures.asked_at = time.monotonic()
                    try:
                        async with asyncio.timeout(patience):
                            reply, image = await ask(reading.quality())
                    except TimeoutError:
                        figures.why = f"no frame for {patience:g} s"
                        break
                    except (asyncio.IncompleteReadError, ConnectionError):
                        figures.why = "the reading process ended"
                        break
                    figures.skipped, figures.corrupted = skipped + reply.skipped, corrupted + reply.corrupted
                    if reply.kind != "frame":
                        ended, figures.why = reply.kind == "end", reply.why or "it ended"
                        break
                    came = True
                    backoff.worked()
                    figures.asked_at, figures.last = None, time.monotonic()
                    figures.frames += 1
                    figures.width, figures.height = reply.width, reply.height
                    key = "" if self.live else str(reply.index)
                    yield Captured(image, reply.captured, {"source": self.name, "index": reply.index, "time": reply.time}, key)
            if ended and not self.live:
                return
            if not self.live or (figures.last is None and not reading.keep_trying):
                raise SourceFailed(f"{self.name}: {figures.why}")
            figures.restarts += 1
            figures.asked_at = figures.asked_at or time.monotonic()
            await asyncio.sleep(backoff.next())


@contextlib.asynccontextmanager
async def _reader(task: Task) -> AsyncIterator[Callable[[int], Any]]:
    """A reading process: call it with a JPEG quality for (Reply, JPEG)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "outboard_client.station.reader",
        msgspec.json.encode(task).decode(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        limit=1 << 20,
    )
    assert process.stdin is not None and process.stdout is not None
    requests, replies = process.stdin, process.stdout

    async def ask(quality: int) -> tuple[Reply, bytes]:
        requests.write(b"%d\n" % quality)
        body, image = LENGTHS.unpack(await replies.readexactly(LENGTHS.size))
        reply = msgspec.json.decode(await replies.readexactly(body), type=Reply)
        return reply, await replies.readexactly(image)

    try:
        yield ask
    finally:
        if process.returncode is None:
            process.kill()
        with contextlib.suppress(TimeoutError):  # stuck in the kernel: killed as soon as it leaves it, and nobody waits for that
            async with asyncio.timeout(5):
                await process.wait()
