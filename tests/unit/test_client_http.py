"""The HTTP client's parts: images to bytes, refusals to exceptions, and when a call is asked again."""

from __future__ import annotations

import io
import pickle
import random

import httpx
import numpy as np
import pytest
from PIL import Image

from outboard_client import JPEG, Encoding, Problem, Unreachable, calls
from outboard_client.answers import Tensor
from outboard_client.backoff import Backoff
from outboard_client.calls import Attempts, Options
from outboard_client.errors import problem_of
from outboard_client.images import encoded, fitted

RAMP = np.tile(np.arange(256, dtype=np.uint8), (16, 1))
COLOURS = np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def test_arrays_and_pillow_images_arrive_value_for_value() -> None:
    for array in (COLOURS, RAMP, RAMP[..., None], RAMP.astype(np.uint16) * 257, np.dstack([COLOURS, COLOURS[..., 0]])):
        data, kind = encoded(array)
        assert kind == "image/png"
        assert np.array_equal(np.asarray(opened(data)), np.squeeze(array))
    data, _ = encoded(Image.fromarray(COLOURS))
    assert np.array_equal(np.asarray(opened(data)), COLOURS)
    assert np.array_equal(np.asarray(opened(encoded(COLOURS[:, ::-1])[0])), COLOURS[:, ::-1])  # not contiguous


def test_a_pillow_image_is_sent_upright() -> None:
    """Pillow's writers drop the EXIF orientation: the server would see it lying on its side."""
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(COLOURS).save(buffer, "PNG", exif=exif)
    stored = opened(buffer.getvalue())
    for encoding in (Encoding("png"), JPEG):
        assert opened(encoded(stored, encoding)[0]).size == (20, 30)


def test_what_is_encoded_is_sent_as_it_is(tmp_path) -> None:
    path = tmp_path / "a.webp"
    Image.fromarray(COLOURS).save(path)
    raw = path.read_bytes()
    assert encoded(path) == encoded(str(path)) == (raw, "image/webp")
    for same in (raw, bytearray(raw), memoryview(raw), io.BytesIO(raw)):
        assert encoded(same) == (raw, "application/octet-stream")
    path.rename(tmp_path / "without_suffix")
    assert encoded(tmp_path / "without_suffix")[1] == "application/octet-stream"


@pytest.mark.parametrize(
    "image",
    [np.zeros((4, 4)), np.zeros((4, 4, 2), np.uint8), np.zeros((0, 4, 3), np.uint8), Image.new("F", (4, 4)), Image.new("I", (4, 4))],
)
def test_what_has_no_meaning_as_an_image_is_refused(image) -> None:
    with pytest.raises(ValueError, match="expected|convert"):
        encoded(image)


def test_what_is_no_image_is_refused(tmp_path) -> None:
    with pytest.raises(TypeError, match="expected a path"):
        encoded(17)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mode 'rb'"):
        encoded(io.StringIO("text"))  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        encoded(tmp_path / "nowhere.jpg")
    with pytest.raises(ValueError, match="expected 1 to 95"):
        Encoding("jpeg", 100)


def test_a_picture_too_large_for_a_message_keeps_its_pixels_and_orientation() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (300, 400, 3), np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 8
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "JPEG", quality=95, exif=exif)
    big = buffer.getvalue()
    small = fitted(big, len(big) // 2)
    assert small is not None and len(small) <= len(big) // 2
    assert opened(small).size == (400, 300) and opened(small).getexif()[0x0112] == 8
    assert fitted(big, len(big)) is big
    assert fitted(big, 1000) is None
    assert fitted(b"no image at all" * 100, 1000) is None
    assert fitted(encoded(np.dstack([noise, noise[..., 0]]))[0], 1000) is None, "a JPEG has no alpha channel"


def test_a_refusal_carries_what_the_server_said() -> None:
    body = b'{"type": "overloaded", "title": "T", "status": 503, "detail": "too much", "queue": 7}'
    problem = problem_of(503, {"retry-after": "2"}, body)
    assert (problem.slug, problem.title, problem.detail, problem.status) == ("overloaded", "T", "too much", 503)
    assert problem.retry_after == 2.0 and problem.fields == {"queue": 7}
    assert "too much" in str(problem)
    again = pickle.loads(pickle.dumps(problem))
    assert (again.slug, again.fields, again.retry_after) == ("overloaded", {"queue": 7}, 2.0)


@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b"[1]", b'"text"', b"\xff\xfe"])
def test_what_a_proxy_says_is_a_problem_too(body: bytes) -> None:
    problem = problem_of(502, {"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, body)
    assert problem.slug == "http_502" and problem.status == 502 and problem.retry_after is None


def busy(retry_after: float | None = 1.0, status: int = 503) -> Problem:
    return Problem("overloaded", "busy", status=status, retry_after=retry_after)


def test_members_that_a_newer_server_adds_are_no_concern() -> None:
    model = {"name": "m", "task": "detection", "backend": "onnx", "version": "sha256:0", "state": "ready", "new": 1}
    response = httpx.Response(200, json={"models": [model], "next": None, "total": 1})
    assert [m.name for m in calls.models().read(response)] == ["m"]
    assert calls.devices().read(httpx.Response(200, json={"devices": [], "driver": "580.1"})) == []


def test_retry_after_is_kept_to_and_spread() -> None:
    call = calls.models()
    pauses = [Attempts(60, random.Random(i)).pause(call, busy(2.0), 0) for i in range(200)]
    assert min(pauses) >= 2.0 and max(pauses) <= 2.5
    assert max(pauses) - min(pauses) > 0.3, "the refused would come back together"


def test_a_call_is_never_asked_again_beyond_its_patience() -> None:
    with pytest.raises(Problem, match="busy"):
        Attempts(30).pause(calls.models(), busy(60.0), 0)
    with pytest.raises(Problem, match="busy"):
        Attempts(0).pause(calls.models(), busy(0.0), 0.001)
    with pytest.raises(Unreachable):
        Attempts(5).pause(calls.models(), httpx.ReadError("cut"), 4.9)


def test_only_what_may_pass_is_asked_again() -> None:
    attempts = Attempts(30)
    for status in (400, 404, 413, 422, 500, 504):
        with pytest.raises(Problem):
            attempts.pause(calls.models(), busy(1.0, status), 0)
    assert attempts.pause(calls.models(), busy(1.0, 429), 0) >= 1.0


def test_a_broken_link_is_tried_again_only_where_twice_does_no_harm() -> None:
    assert Attempts(30).pause(calls.models(), httpx.ReadError("cut"), 0) < 1
    assert Attempts(30).pause(calls.load("m"), httpx.ConnectError("refused"), 0) < 1, "it had not begun"
    with pytest.raises(Unreachable, match="ReadError"):
        Attempts(30).pause(calls.load("m"), httpx.ReadError("cut"), 0)
    with pytest.raises(Unreachable, match="ReadTimeout"):
        Attempts(30).pause(calls.models(), httpx.ReadTimeout("slow"), 0)


def test_pauses_grow_from_1_to_30_seconds_with_20_percent_of_jitter_for_ever() -> None:
    backoff = Backoff(rng=random.Random(3))
    pauses = [backoff.next() for _ in range(3000)]
    for pause, middle in zip(pauses, [1, 2, 4, 8, 16, 30, 30, 30], strict=False):
        assert 0.8 * middle <= pause <= 1.2 * middle
    assert max(pauses) <= 36 and min(pauses[10:]) >= 24
    backoff.worked()
    assert backoff.next() <= 1.2


def test_options_are_written_as_the_server_reads_them() -> None:
    assert Options(min_score=0.5, strict_device=True, tile="auto", top_k=3).query() == {
        "min_score": "0.5",
        "strict_device": "true",
        "tile": "auto",
        "top_k": "3",
    }
    with pytest.raises(TypeError):
        Options(min_scores=0.5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="expected http"):
        calls.server_url("localhost:8000")


def test_names_cannot_leave_their_place_in_the_address() -> None:
    assert calls.model("a/../b?x").path == "/v1/models/a%2F..%2Fb%3Fx"


def test_tensors_become_arrays() -> None:
    array = Tensor("y", "FP16", [2, 2], [1.5, None, 2, 3]).array()
    assert array.dtype == np.float16 and array.shape == (2, 2) and np.isnan(array[0, 1]) and array[1, 1] == 3
    assert Tensor("y", "BOOL", [2], [True, False]).array().dtype == bool
