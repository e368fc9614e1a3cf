"""An HTTP connection whose client may be slow, wordy or confused.

uvicorn waits for ever for a head or a body that has begun, and reads heads of any length. Here a head has `limits.head_seconds`,
`limits.head` bytes and `limits.headers` headers, and a body has to be complete after `limits.body_seconds` or come with
`limits.body_rate` bytes a second; what breaks that is answered here (408, 431) without asking the application. A request is timed only
when it does not arrive whole in one read, so those that do pay nothing for it. An answer has to be taken at that rate, too: whoever does
not read what he asked for is cut off, or the server would hold it for ever.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios
from collections.abc import Callable
from typing import Any, ClassVar

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from outboard.http.problems import respond_at
from outboard.problems import Problem
from outboard.settings import Limits
from outboard.telemetry import metrics

log = logging.getLogger(__name__)

#: Seconds for which what a refused client still sends is thrown away: closed with bytes unread, the kernel would reset the connection,
#: and the client see no answer.
LINGER = 2.0


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with an end to waiting. The class is made for each server: see `limited`."""

    limits: ClassVar[Limits] = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._head_open = True  #: a head is on its way, or the first one is waited for
        self._head_bytes = 0  #: of the open head, in earlier reads
        self._read = 0  #: bytes of this read
        self._body_open = False
        self._body_began = 0.0
        self.body_bytes = 0  #: of the open body; counted by who overrides `on_body`
        self._answering: RequestResponseCycle | None = None  #: the request that the application is at, or was last
        self._unread: asyncio.TimerHandle | None = None  #: while the client does not take what is sent
        self._plain: bytes | None = None  #: the head of a request that asks for an upgrade which there is not, without asking

    # ---------------------------------------------------------------- reading

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait(self.limits.head_seconds, self._head_due)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_watching()
        if self._answering is not None:  # uvicorn tells the latest of several requests in a row, which need not be the one at work
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        open_before, self._read = self._head_open, len(data)
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as e:
                if self._plain is None:
                    self.handle_websocket_upgrade()
                    return
                data, self._plain = self._plain + data[e.args[0] :], None
                self._new_parser()
            except httptools.HttpParserError as e:
                why = e.__context__
                self._refuse(why if isinstance(why, Problem) else Problem("bad_request", f"this is no HTTP request: {str(e)[:120]}"))
                return
        if self._head_open:
            if open_before:
                self._head_bytes += self._read
            if self._head_bytes > self.limits.head:
                self._refuse(self._too_long())
            elif self._timer is None:
                self._wait(self.limits.head_seconds, self._head_due)
        elif self._body_open and self._timer is None and not self.endless:
            self._body_began = self.loop.time()
            self._wait(self.limits.body_seconds, self._body_due)

    @property
    def endless(self) -> bool:
        """Whether the request's body is a stream: it may pause, and ends when its sender wants."""
        return self.scope.get("path", "").endswith("/stream")

    def _should_upgrade(self) -> bool:
        return self.parser.get_method() == b"GET" and super()._should_upgrade()

    def _new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    # ---------------------------------------------------------------- what the parser has found

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._head_open, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Raises Problem; the parser hands it on as the context of its own error."""
        self._head_open, self._body_open, self.body_bytes = False, True, 0
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if len(self.headers) > self.limits.headers:
            raise Problem(
                "headers_too_large",
                f"the request has {len(self.headers)} headers, at most {self.limits.headers} are taken ([limits] headers)",
            )
        if self._head_bytes + self._read > self.limits.head:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.limits.head:
                raise self._too_long()
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._plain = self._without_upgrade()
        else:
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        cycle.transport = HeadWithBody(self.transport, self.loop)  # type: ignore[assignment]
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._body_open = False
        if self._plain is not None:
            return
        self._stop_waiting()
        super().on_message_complete()

    def _without_upgrade(self) -> bytes:
        """The request's head, rid of its wish. llhttp takes what follows an upgrade for another protocol and throws the body away, while a
        server that does not take an upgrade (h2c, of old curl and Java clients) has to answer as if nobody had asked (RFC 9110, 7.8)."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise Problem("bad_request", "CONNECT is for proxies, and this is none")
        head = [method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(t for t in map(bytes.strip, value.split(b",")) if t.lower() not in (b"upgrade", b"http2-settings"))
            if name not in (b"upgrade", b"http2-settings") and value:
                head.append(name + b": " + value)
        return b"\r\n".join([*head, b"", b""])

    # ---------------------------------------------------------------- what takes too long

    def _wait(self, seconds: float, then: Callable[[], object]) -> None:
        self._timer = self.loop.call_later(seconds, then)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_due(self) -> None:
        self._timer = None
        if self._read == 0:
            self.transport.close()  # a connection opened in advance, and not used
            return
        self._refuse(Problem("request_timeout", f"the request's head is not complete after {self.limits.head_seconds:g} s"))

    def _body_due(self) -> None:
        self._timer = None
        if self.flow.read_paused:  # the server did not read
            self._body_began, self.body_bytes = self.loop.time(), 0
            self._wait(self.limits.body_seconds, self._body_due)
            return
        took = self.loop.time() - self._body_began
        ahead = self.body_bytes / self.limits.body_rate - took
        if ahead > 0:
            self._wait(max(1.0, ahead), self._body_due)
            return
        self._refuse(
            Problem(
                "body_timeout", f"{self.body_bytes} bytes came in {took:.3g} s, and the body is not complete; send it faster, or smaller"
            )
        )

    # ---------------------------------------------------------------- what is not read

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None and not self.endless:  # a stream's outcomes are bounded by its window
            self._watch(self._untaken())

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_watching()

    def _untaken(self) -> int:
        """Bytes that wait here and in the kernel, which takes megabytes and tells of room when a third of them has left."""
        queued = bytearray(4)
        try:
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, queued)
        except OSError:
            pass
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _watch(self, left: int) -> None:
        self._unread = self.loop.call_later(self.limits.body_seconds, self._unread_due, left)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _unread_due(self, before: int) -> None:
        left = self._untaken()
        if before - left >= self.limits.body_rate * self.limits.body_seconds:
            self._watch(left)
            return
        self._unread = None
        metrics.unread.inc()
        log.info(
            "%s took %d bytes of its answer in %g s, and %d wait: cut off",
            self.client[0] if self.client else "a client", before - left, self.limits.body_seconds, left,
        )  # fmt: skip
        self.transport.abort()

    # ---------------------------------------------------------------- refusing

    def _too_long(self) -> Problem:
        return Problem("headers_too_large", f"the request's head is longer than {self.limits.head} bytes ([limits] head)")

    def _refuse(self, problem: Problem) -> None:
        """Answer in the application's place, where it has not begun to, and end the connection, whose next request cannot be found."""
        self._stop_waiting()
        log.info("%s: %s: %s", self.client[0] if self.client else "a client", problem.slug, problem.detail)
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            waiting = cycle.more_body and not cycle.response_started and not self.pipeline
            cycle.disconnected = True
            cycle.message_event.set()
            if not waiting:  # an earlier request's answer is on its way
                self.transport.close()
                return
        elif cycle is not None and self._body_open:  # it was answered before its body was there
            self.transport.close()
            return
        self._refused = True
        path = (self.scope.get("path") or self.url.decode("latin-1")) if self.scope else ""
        answer = respond_at(path, problem)
        lines = [name + b": " + value for name, value in [*self.server_state.default_headers, *answer.raw_headers]]
        self.transport.write(STATUS_LINE[problem.status] + b"\r\n".join([*lines, b"connection: close", b"", b""]) + bytes(answer.body))
        self.transport.write_eof()
        self._wait(LINGER, self.transport.close)


class HeadWithBody:
    """The transport as one answer sees it: its head waits for what usually follows at once. uvicorn writes head and body one by one, and
    two sends cost twice as much and wake the client twice. A head that nothing follows leaves in the loop's next turn."""

    __slots__ = ("_begun", "_head", "_loop", "_soon", "_transport", "is_closing")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        self._transport, self._loop = transport, loop
        self._begun = False
        self._head = b""
        self._soon: asyncio.Handle | None = None
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if not self._begun:
            self._begun, self._head = True, data
            self._soon = self._loop.call_soon(self._send_head)
        elif self._soon is not None:
            self._soon.cancel()
            self._soon = None
            self._transport.writelines([self._head, data])
        else:
            self._transport.write(data)

    def _send_head(self) -> None:
        self._soon = None
        self._transport.write(self._head)

    def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
            self._send_head()
        self._transport.close()


def limited(protocol: type[Connection], limits: Limits) -> type[Connection]:
    """`protocol` with a server's limits, for `uvicorn.Config(http=…)`, which takes a class."""
    return type(protocol.__name__, (protocol,), {"limits": limits})
