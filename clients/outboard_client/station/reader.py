"""The process that reads one video, camera or network stream with PyAV, and gives frames as JPEG when it is asked.

    python -m outboard_client.station.reader '{"url": "rtsp://…", "newest": true}'

A process of its own, because a read from a camera that went away may hang for ever inside FFmpeg, and because FFmpeg's memory goes with it.
One line on stdin, the JPEG quality, asks for the next frame; the answer on stdout is two lengths (u32, big-endian), a JSON object and a
JPEG. A thread reads without pause. With `newest` it keeps the newest frame only, so that what is asked for is never old; else it waits.
When stdin ends, so does the process, whatever the reading thread hangs in: nothing is left of a station that was killed.
"""

from __future__ import annotations

import io
import os
import queue
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

LENGTHS = struct.Struct(">II")


class Task(msgspec.Struct, kw_only=True):
    """What to read, and how. Seconds."""

    url: str
    format: str | None = None  #: FFmpeg's input format, where the URL does not say it: v4l2, lavfi …
    options: dict[str, str] = {}
    newest: bool = True  #: False: every frame, in order
    pace: bool = False  #: give a file's frames at the speed at which they were filmed
    fps: float = 0.0  #: at most so many frames a second; 0: all
    start: int = 0  #: index of the first frame that is wanted
    longest: int = 0  #: pixels of the longer side, if it is larger; 0: as it is
    patience: float = 20.0  #: seconds without a byte after which FFmpeg itself gives up


class Reply(msgspec.Struct, kw_only=True):
    """`kind` is frame, end or failed. `skipped` and `corrupted` count since the start."""

    kind: str
    why: str = ""
    index: int = 0
    time: float | None = None  #: seconds in the video
    captured: int = 0  #: µs since the epoch, when it was read
    width: int = 0
    height: int = 0
    skipped: int = 0
    corrupted: int = 0


class Slot:
    """Where the reading thread leaves frames: one place."""

    def __init__(self, newest: bool):
        self._newest = newest
        self._changed = threading.Condition()
        self._held: tuple[Reply, object] | None = None
        self.skipped = 0

    def put(self, reply: Reply, frame: object = None) -> None:
        with self._changed:
            if self._newest and reply.kind == "frame":
                self.skipped += self._held is not None
            else:
                self._changed.wait_for(lambda: self._held is None)
            self._held = reply, frame
            self._changed.notify_all()

    def get(self) -> tuple[Reply, object]:
        with self._changed:
            self._changed.wait_for(lambda: self._held is not None)
            held = self._held
            assert held is not None
            if held[0].kind == "frame":  # the end stays the end
                self._held = None
                self._changed.notify_all()
            return held


class Reading:
    """The reading thread's work."""

    def __init__(self, task: Task, slot: Slot):
        self._task = task
        self._slot = slot
        self._corrupted = 0

    def run(self) -> None:
        import av

        av.logging.set_level(None)
        try:
            self._read()
            end = Reply(kind="end")
        except (av.FFmpegError, OSError, ValueError) as e:
            # Not str(e): FFmpeg's errors end with the URL, and its password.
            end = Reply(kind="failed", why=f"{type(e).__name__}: {getattr(e, 'strerror', None) or e}")
        end.corrupted = self._corrupted
        self._slot.put(end)

    def _read(self) -> None:
        import av

        task = self._task
        with av.open(task.url, format=task.format, options=task.options, timeout=(task.patience, task.patience)) as container:
            if not container.streams.video:
                raise ValueError("there is no video in it")
            stream = container.streams.video[0]
            # One thread. With slice threads FFmpeg's H.264 decoder makes up what was lost and flags 3 of 25 damaged frames, with frame
            # threads it misses one now and then; with one it flags all of them (PyAV 18.1, 3 % of packets lost), and holds no frame back.
            stream.thread_type = "NONE"
            began, due, index = time.monotonic(), 0.0, -1
            for frame in self._decoded(container, stream):
                index += 1
                at = frame.time if frame.time is not None else time.monotonic() - began
                if task.fps and at + 0.05 / task.fps < due:
                    continue
                due = max(due, at - 1 / task.fps) + 1 / task.fps if task.fps else 0.0
                if index < task.start:
                    began = time.monotonic() - at
                    continue
                if task.pace:
                    time.sleep(max(0.0, began + at - time.monotonic()))
                captured = time.time_ns() // 1000
                reply = Reply(kind="frame", index=index, time=at, captured=captured, width=frame.width, height=frame.height)
                reply.corrupted = self._corrupted
                self._slot.put(reply, frame)

    def _decoded(self, container, stream) -> Iterator:  # type: ignore[no-untyped-def]
        """Whole frames. One with parts made up (a lost packet) is counted and left out: a model would answer for the grey smear."""
        import av

        for packet in container.demux(stream):
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                self._corrupted += 1
                continue
            for frame in frames:
                if frame.is_corrupt:
                    self._corrupted += 1
                else:
                    yield frame


def jpeg(frame, quality: int, longest: int) -> bytes:  # type: ignore[no-untyped-def]
    """The frame upright, as JPEG."""
    picture = frame.to_image()
    if frame.rotation:
        picture = picture.rotate(frame.rotation, expand=True)
    if longest and max(picture.size) > longest:
        picture.thumbnail((longest, longest))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def listen(asked: queue.SimpleQueue[int]) -> None:
    """Requests. The end of them is the end of the process, also while another thread waits for a frame or hangs in a read."""
    for line in sys.stdin.buffer:
        asked.put(int(line))
    os._exit(0)


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the station ends this process
    slot = Slot(task.newest)
    threading.Thread(target=Reading(task, slot).run, daemon=True).start()
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=listen, args=(asked,), daemon=True).start()
    out = sys.stdout.buffer
    while True:
        quality = asked.get()
        reply, frame = slot.get()
        image = jpeg(frame, quality, task.longest) if frame is not None else b""
        reply.skipped = slot.skipped
        body = msgspec.json.encode(reply)
        out.write(LENGTHS.pack(len(body), len(image)) + body + image)
        out.flush()


if __name__ == "__main__":
    main()
