"""What streams read from the wire, however it is cut into pieces; and viewers that are slow."""

from __future__ import annotations

import asyncio
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outboard.http import framing
from outboard.http.mixed_replace import MixedReplace
from outboard.problems import Problem
from outboard.streams import VIEWER_EVENTS, Viewer

#: Images may hold anything but the delimiter; line ends and dashes are what could be mistaken.
IMAGES = st.lists(st.binary(min_size=1, max_size=60) | st.sampled_from([b"\r\n--", b"--cu", b"\r\n\r\n--c", b"\n", b"a\r"]), max_size=5)


def body_of(images: list[bytes], newline: bytes, length: bool, close: bool) -> bytes:
    out = b""
    for image in images:
        head = [b"--cut", b"Content-type: image/jpeg", *([b"Content-length: %d" % len(image)] if length else [])]
        out += newline.join(head) + newline * 2 + image + newline
    return out + (b"--cut--" + newline if close else b"--cut" + newline)


@settings(max_examples=300, deadline=None)
@given(
    images=IMAGES,
    newline=st.sampled_from([b"\r\n", b"\n"]),
    length=st.booleans(),
    close=st.booleans(),
    boundary=st.sampled_from(["cut", "--cut", None]),
    data=st.data(),
)
def test_parts_come_out_as_they_went_in_wherever_the_body_is_cut(images, newline, length, close, boundary, data) -> None:
    if newline == b"\n" and not length:
        images = [image for image in images if not image.endswith(b"\r")]  # belongs to the line end then, as ever with such senders
    body = body_of(images, newline, length, close)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    parts = MixedReplace(boundary, 1000)
    found = [p.body for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True) for p in parts.feed(body[a:b])]
    assert found + [p.body for p in parts.end()] == images


def test_one_byte_at_a_time() -> None:
    body = b"preamble\r\n" + body_of([b"\xff\xd8one", b"two"], b"\r\n", False, True)
    parts = MixedReplace("cut", 1000)
    assert [p.body for i in range(len(body)) for p in parts.feed(body[i : i + 1])] == [b"\xff\xd8one", b"two"] and parts.ended


def test_headers_are_read_and_the_last_part_may_lack_its_delimiter() -> None:
    parts = MixedReplace(None, 1000)
    assert not parts.feed(b"--x\r\nX-Timestamp: 12.5\r\nContent-Type: image/jpeg\r\n\r\nhalf")
    (last,) = parts.end()
    assert last.body == b"half" and last.headers == {"x-timestamp": "12.5", "content-type": "image/jpeg"}


@pytest.mark.parametrize(
    ("data", "slug"),
    [
        (b"--x\r\nContent-Length: 1001\r\n\r\n", "body_too_large"),
        (b"--x\r\n\r\n" + b"z" * 40_000, "body_too_large"),
        (b"z" * 20_000, "bad_multipart"),
        (b"--x\r\nA: " + b"z" * 20_000, "bad_multipart"),
    ],
)
def test_what_never_ends_is_refused(data: bytes, slug: str) -> None:
    parts = MixedReplace(None, 1000)
    with pytest.raises(Problem) as refused:
        for i in range(0, len(data), 1000):
            parts.feed(data[i : i + 1000])
    assert refused.value.slug == slug


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | st.builds(lambda n, b: struct.pack(">QQI", 1, 0, n) + b, st.integers(0, 300), st.binary(max_size=200)))
def test_any_message_is_a_frame_or_breaks_the_protocol(message: bytes) -> None:
    try:
        frame = framing.read(message, 16)
    except framing.ProtocolError:
        return
    assert frame.nbytes == len(message) and (frame.problem is None or frame.problem.slug == "bad_frame")


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda x: st.lists(x, max_size=3) | st.dictionaries(st.sampled_from(["parts", "meta", "name", "type", "length", "shape"]), x),
    )
)
def test_any_json_header_is_read_or_named_a_bad_frame(header) -> None:
    text = json.dumps(header).encode()
    frame = framing.read(struct.pack(">QQI", 5, 0, len(text)) + text + b"image", 16)
    assert frame.seq == 5 and (frame.problem is None or frame.problem.slug == "bad_frame")


async def test_a_slow_viewer_misses_the_oldest_and_is_told() -> None:
    viewer = Viewer()
    for seq in range(1, VIEWER_EVENTS + 11):
        viewer.put("result", seq, b"x")
    missed, *rest = await viewer.get(1.0)
    assert missed == ("missed", 0, b'{"type":"missed","outcomes":10}') and [seq for _, seq, _ in rest] == list(
        range(11, VIEWER_EVENTS + 11)
    )
    assert await viewer.get(0.01) == []
    asyncio.get_running_loop().call_later(0.01, viewer.end)
    assert await viewer.get(10.0) == [] and viewer.ended
