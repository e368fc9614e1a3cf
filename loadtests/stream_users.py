"""Users that are stations: each sends frames at a fixed rate over a stream, and counts the outcome of each.

    .venv/bin/locust -f loadtests/stream_users.py --headless --host http://127.0.0.1:8000 --users 3 --run-time 60s --fps 15 --max-p99-ms 500

The response time of an entry `STREAM frame` is the age of the answer: from the moment at which the frame was due. Closed loop: `--fps 0`
sends the next frame when an outcome has come, `--in-flight` of them at once. A frame that was sent and has no outcome in the end is a
failure. Locust runs greenlets, not asyncio, so this is `FrameStream` with another engine: the client's books over a blocking WebSocket.
"""

from __future__ import annotations

import io
import itertools
import time
from urllib.parse import urlencode

import gevent
from gevent.event import Event
from locust import User, events, task
from locust.env import Environment
from locust.exception import StopUser
from PIL import Image
from websocket import ABNF, WebSocket, WebSocketBadStatusException, WebSocketException, create_connection

import watch
from outboard_client import Backoff, Bundle, Drop, Frame, frames
from outboard_client.ledger import Ledger

#: Seconds that a station waits for its last outcomes.
PATIENCE = 30.0


@events.init_command_line_parser.add_listener
def add_arguments(parser) -> None:
    group = parser.add_argument_group("Streams")
    group.add_argument("--fps", type=float, default=15, help="frames a second of each station; 0: closed loop")
    group.add_argument("--in-flight", type=int, default=64, help="frames of a station without an outcome; in a closed loop, the load")
    group.add_argument("--policy", default="live", choices=["live", "lossless"], help="of the stream")
    group.add_argument("--frame-size", default="", help="WIDTHxHEIGHT: the photographs are made this large before the clock runs")
    group.add_argument("--bundle", type=int, default=0, help="send bundles of so many images (cameras of one tick), in step")


@events.init.add_listener
def prepare(environment: Environment, **_) -> None:
    size = environment.parsed_options.frame_size
    pictures = [data for _, data in watch.photographs(environment)]
    Station.pictures = [enlarged(p, *map(int, size.split("x"))) for p in pictures[:16]] if size else pictures


def enlarged(data: bytes, width: int, height: int) -> bytes:
    with Image.open(io.BytesIO(data)) as picture:
        buffer = io.BytesIO()
        picture.convert("RGB").resize((width, height)).save(buffer, "JPEG", quality=88)
        return buffer.getvalue()


class Closed(Exception):
    """The server closed the link; the text is the close code."""


class Station(User):
    pictures: list[bytes] = []
    numbers = itertools.count(1)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.options = options
        self.query = {"policy": options.policy, "station": f"locust-{time.time_ns() % 10**9}-{next(self.numbers)}"}
        self.url = f"ws{str(self.environment.host)[4:]}/v1/models/{options.model}/stream"
        self.books = Ledger(live=False)  # what is dropped, the server drops
        self.session = ""
        self.news = Event()
        self.backoff = Backoff(first=0.5, most=10)
        self.due: dict[int, float] = {}
        self.ending = False

    @task
    def stream(self) -> None:
        """One life: links until the test ends."""
        filming = gevent.spawn(self.film)
        try:
            self.keep_linked()
        finally:
            filming.kill()

    def on_stop(self) -> None:
        """The test ends: nothing new is sent, and what was sent gets its outcome."""
        self.ending = True
        with gevent.Timeout(PATIENCE, False):
            if self.books.unsettled:
                self.keep_linked()
        if self.books.unsettled:
            self.fail(f"{self.books.unsettled} frames have no outcome")

    def keep_linked(self) -> None:
        """Links, one after the other; in the end until every frame has its outcome."""
        while not (self.ending and not self.books.unsettled):
            try:
                self.link()
                continue
            except WebSocketBadStatusException as e:
                if 400 <= e.status_code < 500:
                    self.fail(f"the server refuses the stream: {bytes(e.resp_body or b'').decode()[:300]}")
                    raise StopUser from e
                code = str(e.status_code)
            except Closed as e:
                code = str(e)
            except (WebSocketException, OSError) as e:
                code = type(e).__name__
            watch.event(self.environment, "LINK", code)
            gevent.sleep(self.backoff.next())

    def fail(self, why: str) -> None:
        self.environment.events.request.fire(
            request_type="STREAM", name="frame", response_time=0, response_length=0, exception=RuntimeError(why), context={}, response=None
        )

    def film(self) -> None:
        """Frames into the books: at fixed times, or as outcomes come."""
        turn, options = itertools.cycle(self.pictures), self.options
        due = time.perf_counter()
        while True:
            if options.fps:
                due += 1 / options.fps
                gevent.sleep(max(0.0, due - time.perf_counter()))
            while self.books.unsettled >= options.in_flight:
                self.news.clear()
                self.news.wait()
            if not options.fps:
                due = time.perf_counter()
            captured = frames.now_us() - round((time.perf_counter() - due) * 1e6)
            if options.bundle:
                data, parts = frames.encoded_bundle(Bundle({f"camera{i}": next(turn) for i in range(options.bundle)}))
                seq = self.books.register(Frame(data, captured, parts=parts))
            else:
                seq = self.books.register(Frame(next(turn), captured))
            self.due[seq] = due
            self.news.set()

    def link(self) -> None:
        query = dict(self.query)
        if self.session:
            query |= {"session": self.session, "after": str(self.books.acknowledged)}
        address = f"{self.url}?{urlencode(query)}" + (f"&{self.options.options}" if self.options.options else "")
        link = create_connection(address, timeout=20, subprotocols=[frames.SUBPROTOCOL], enable_multithread=True, skip_utf8_validation=True)
        sending = None
        try:
            hello = self.receive(link)
            assert isinstance(hello, frames.Hello), f"expected hello, got {hello}"
            self.session = hello.session
            self.books.link_up(hello.last, resumed=hello.resumed)
            sending = gevent.spawn(self.send, link)
            while not (self.ending and not self.books.unsettled):
                self.hear(link, self.receive(link))
            link.send(frames.STOP)
        finally:
            if sending is not None:
                sending.kill()
            link.close(timeout=1)

    def receive(self, link: WebSocket) -> object:
        """The server's next message. Raises Closed; websocket-client answers pings by itself."""
        kind, data = link.recv_data()
        if kind == ABNF.OPCODE_CLOSE:
            raise Closed(str(int.from_bytes(data[:2], "big")) if data else "1005")
        return frames.decode(data)

    def send(self, link: WebSocket) -> None:
        while True:
            while (taken := self.books.take()) is None:
                self.news.clear()
                self.news.wait()
            seq, frame = taken
            assert isinstance(frame.image, bytes)
            try:
                link.send_binary(frames.pack(seq, frame.captured, frame.image, frame.meta, frame.parts))
            except (WebSocketException, OSError):
                return  # the receiving side hears it too, and goes on from there

    def hear(self, link: WebSocket, said: object) -> None:
        match said:
            case frames.Heartbeat():
                link.send(frames.heartbeat(said.at))
                link.send(frames.ack(self.books.acknowledged))
            case frames.ResultMessage() | frames.DropMessage():
                self.backoff.worked()
                age = time.perf_counter() - self.due.pop(said.seq, time.perf_counter())
                outcome = frames.outcome(said, age)
                if not self.books.settle(outcome):
                    return
                while (held := self.books.pop()) is not None:
                    self.books.keep(held.seq)
                if isinstance(outcome, Drop):
                    watch.event(self.environment, "DROP", outcome.reason, age * 1e3)
                else:
                    watch.event(self.environment, "STREAM", "frame", age * 1e3)
                    device = said.device or next((p.get("device", "") for p in (said.parts or {}).values()), "")
                    watch.seen(self, device)
                self.news.set()
