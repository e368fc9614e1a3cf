"""Request bodies: raw images or multipart, counted on the wire, held in memory that is bounded, never on disk."""

from __future__ import annotations

from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.datastructures import Headers
from starlette.types import Receive

from outboard.problems import Problem
from outboard.runtime import Runtime
from outboard.telemetry import metrics

#: Form fields of a multipart upload, beside its images.
MAX_FIELDS = 32
ACCEPTED = "image/jpeg, image/png, image/webp (the raw body), application/octet-stream, or multipart/form-data with fields named `image`"


@dataclass(slots=True)
class Submission:
    """The images of a request, in their order, and its form fields."""

    images: list[bytes]
    fields: dict[str, str] = field(default_factory=dict)


class Held:
    """Bytes that a request holds, of its body or of its answer: accounted for until it ends, or gives them back."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """Account for so many more. Raises Problem memory_full."""
        if self._runtime.body_bytes + nbytes > self._runtime.slab.size:
            raise Problem("memory_full", "the bodies and answers of the requests in progress fill the frame memory", retry_after=1.0)
        self._runtime.body_bytes += nbytes
        self._nbytes += nbytes

    def give_back(self) -> None:
        self._runtime.body_bytes -= self._nbytes
        self._nbytes = 0

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()


async def read(headers: Headers, receive: Receive, limit: int, held: Held) -> bytes:
    """The whole body, of at most `limit` bytes. Counted as it comes, whatever Content-Length says (H01); http/connection.py ends those that
    do not come. Raises Problem."""
    declared = headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(int(declared), limit)
    chunks: list[bytes] = []
    total = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            metrics.aborted.inc()
            raise Problem("client_left", f"the connection ended after {total} bytes of the body")
        more = message.get("more_body", False)
        if chunk := message.get("body", b""):
            total += len(chunk)
            if total > limit:
                raise _too_large(total, limit)
            held.take(len(chunk))
            chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _too_large(nbytes: int, limit: int) -> Problem:
    return Problem("body_too_large", f"the body has {nbytes} bytes or more, at most {limit} are taken; set [limits] body to take more")


def submission(content_type: str | None, body: bytes, path: str, max_images: int) -> Submission:
    """Split a body into images by its content type. Raises Problem."""
    kind, options = parse_options_header(content_type or "")
    name = kind.decode("latin-1").lower()
    if name == "multipart/form-data":
        boundary = options.get(b"boundary")
        if not boundary:
            raise Problem("bad_multipart", "the content type names no boundary; let your HTTP library write the header")
        return _multipart(body, boundary, max_images)
    if not body:
        raise Problem(
            "empty_body",
            f"the body is empty, expected an image: curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://…{path}",
        )
    # curl --data-binary without a header says x-www-form-urlencoded: what the bytes are decides.
    if name in ("", "application/octet-stream", "application/x-www-form-urlencoded") or name.startswith("image/"):
        return Submission([body])
    raise Problem(
        "unsupported_media_type",
        f"{name} is not taken here; expected {ACCEPTED}, for example: curl -F image=@photo.jpg http://…{path}",
        accepted=["image/jpeg", "image/png", "image/webp", "application/octet-stream", "multipart/form-data"],
    )


class _Parts:
    """Collects the parts that the parser announces by its callbacks."""

    def __init__(self, max_images: int) -> None:
        self._left = max_images + MAX_FIELDS
        self.done: list[tuple[dict[bytes, bytes], bytes]] = []
        self.ended = False
        self._headers: dict[bytes, bytes] = {}
        self._name = self._value = b""
        self._data: list[bytes] = []

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": lambda data, a, b: self._data.append(data[a:b]),
            "on_part_end": lambda: self.done.append((self._headers, b"".join(self._data))),
            "on_end": self._end,
        }

    def _begin(self) -> None:
        self._left -= 1
        if self._left < 0:  # told while parsing: a million empty parts would hold the event loop for seconds
            raise Problem("too_many_images", f"the upload has too many parts; at most the images allowed and {MAX_FIELDS} fields are read")
        self._headers, self._data, self._name, self._value = {}, [], b"", b""

    def _header_field(self, data: bytes, a: int, b: int) -> None:
        self._name += data[a:b]

    def _header_value(self, data: bytes, a: int, b: int) -> None:
        self._value += data[a:b]

    def _header_end(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _end(self) -> None:
        self.ended = True


def _multipart(body: bytes, boundary: bytes, max_images: int) -> Submission:
    parts = _Parts(max_images)
    try:
        parser = MultipartParser(boundary, parts.callbacks())  # type: ignore[arg-type]
        parser.write(body)
    except FormParserError as e:
        raise Problem("bad_multipart", f"{str(e)[:120]}; expected parts separated by the boundary of the content type") from e
    if not parts.ended:
        raise Problem("multipart_truncated", "the closing boundary is missing: the upload was cut short; send it again")
    found = Submission([])
    for headers, data in parts.done:
        _, options = parse_options_header(headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name == "image":
            found.images.append(data)
        elif b"filename" in options:
            raise Problem("bad_multipart", f"the file is in field {name[:80]!r}, expected field 'image': curl -F image=@photo.jpg …")
        else:
            found.fields[name] = data[:1000].decode("utf-8", "replace")
    if not found.images:
        raise Problem("bad_multipart", "there is no field 'image' with a file: curl -F image=@photo.jpg …")
    if len(found.images) > max_images:
        raise Problem("too_many_images", f"{len(found.images)} images, at most {max_images} in one request")
    return found
