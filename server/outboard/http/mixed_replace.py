"""`multipart/x-mixed-replace` read as it comes, as ffmpeg's `-f mpjpeg` and MJPEG cameras send it. Bytes in, parts out, no I/O.

They agree on little: the boundary of the content type has its leading dashes or lacks them, or there is no content type; Content-Length
is there or not; lines end with or without a carriage return. So the delimiter is what the body's first line says, if that is what the
content type could mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from outboard.problems import Problem

#: Bytes in which the first delimiter must have come, and of a part's headers.
_MAX_HEAD = 16 << 10


@dataclass(slots=True)
class Part:
    headers: dict[str, str]  #: names in lower case
    body: bytes


class MixedReplace:
    """`feed` it what comes, `end` it when no more comes."""

    def __init__(self, boundary: str | None, most: int):
        """`boundary` of the content type, None: not given; `most` bytes of a part."""
        self._named = {b"--" + boundary.encode(), boundary.encode()} if boundary else None
        self._most = most
        self._buffer = bytearray()
        self._delimiter = b""
        self._headers: dict[str, str] | None = None  # of the part whose body comes; None: a delimiter is expected
        self._length: int | None = None
        self._searched = 0  # bytes of the buffer without a delimiter
        self.ended = False  #: the closing delimiter has come

    def feed(self, data: bytes) -> list[Part]:
        """The parts that are complete now. Raises Problem: bad_multipart, body_too_large."""
        self._buffer += data
        parts: list[Part] = []
        while not self.ended:
            if self._headers is None:
                if not self._begin():
                    break
            elif (body := self._body()) is None:
                if len(self._buffer) > self._most + _MAX_HEAD:
                    raise Problem("body_too_large", f"a part has more than {self._most} bytes; set [limits] message to take more")
                break
            else:
                parts.append(Part(self._headers, body))
                self._headers = None
        return parts

    def end(self) -> list[Part]:
        """The last part, where it has no Content-Length and no delimiter after it."""
        if self._headers is None or self._length is not None or not self._buffer:
            return []
        last = Part(self._headers, bytes(self._buffer))
        self._headers, self._buffer = None, bytearray()
        return [last]

    def _begin(self) -> bool:
        """Read a delimiter and the headers of a part. False: they are not complete."""
        start = self._after_delimiter()
        if start < 0:
            return False
        head_end, gap = min(
            ((at, len(gap)) for gap in (b"\r\n\r\n", b"\n\n") if (at := self._buffer.find(gap, max(0, start - len(gap) // 2))) >= 0),
            default=(-1, 0),
        )
        if head_end < 0:
            if len(self._buffer) - start > _MAX_HEAD:
                raise Problem("bad_multipart", f"the headers of a part have more than {_MAX_HEAD} bytes")
            return False
        lines = bytes(self._buffer[start:head_end]).decode("latin-1").splitlines()
        self._headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if ":" in line)}
        length = self._headers.get("content-length", "")
        self._length = int(length) if length.isdecimal() else None
        if (self._length or 0) > self._most:
            raise Problem("body_too_large", f"a part has {self._length} bytes, at most {self._most} are taken; set [limits] message")
        del self._buffer[: head_end + gap]
        self._searched = 0
        return True

    def _after_delimiter(self) -> int:
        """Where the line after the delimiter begins; -1: not there yet."""
        at = 0
        while (end := self._buffer.find(b"\n", at)) >= 0:
            line = bytes(self._buffer[at:end]).strip()
            if not self._delimiter and line.startswith(b"--") and (self._named is None or line in self._named):
                self._delimiter = line
            if self._delimiter and line == self._delimiter:
                return end + 1
            if self._delimiter and line == self._delimiter + b"--":
                self.ended = True
                return -1
            at = end + 1
        if len(self._buffer) > _MAX_HEAD:
            named = "" if self._named is None else f" {sorted(self._named)[-1].decode('latin-1')[:80]!r}"
            raise Problem("bad_multipart", f"no boundary line{named} is where a part should begin; expected multipart/x-mixed-replace")
        return -1

    def _body(self) -> bytes | None:
        """The body of the part, if it is complete; what follows it stays in the buffer."""
        if self._length is not None:
            if len(self._buffer) < self._length:
                return None
            end = self._length
        else:
            end = self._buffer.find(b"\n" + self._delimiter, max(0, self._searched - len(self._delimiter)))
            if end < 0:
                self._searched = len(self._buffer)
                return None
            if end and self._buffer[end - 1 : end] == b"\r":
                end -= 1
        body = bytes(memoryview(self._buffer)[:end])
        del self._buffer[:end]
        return body
