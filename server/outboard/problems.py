"""Every way in which a request can be refused: one table of slug, HTTP status and title.

The slug is the `type` of the `application/problem+json` answer (RFC 9457), the `reason` label of the metrics and the row
of `docs/errors.md`, so that the three never disagree. `Problem` is the exception that carries one of them to the boundary.
"""

from __future__ import annotations

import math
from typing import Any

#: slug -> (HTTP status, title). Add a row here and nowhere else.
PROBLEMS: dict[str, tuple[int, str]] = {
    "empty_body": (400, "The request has no body"),
    "bad_request": (400, "This is no HTTP request that the server can read"),
    "bad_multipart": (400, "The multipart body cannot be read"),
    "multipart_truncated": (400, "The multipart body ends before its closing boundary"),
    "client_left": (499, "The client closed the connection before the answer"),
    "key_required": (401, "The server asks for a key"),
    "foreign_origin": (403, "A web page elsewhere may not use this server"),
    "shared_memory_refused": (403, "Shared memory is not for this client"),
    "not_found": (404, "There is nothing at this address"),
    "model_not_found": (404, "No model of this name"),
    "device_not_found": (404, "No device of this name"),
    "stream_not_found": (404, "No stream of this name"),
    "method_not_allowed": (405, "The address does not take this method"),
    "not_acceptable": (406, "None of the accepted media types can be produced"),
    "request_timeout": (408, "The request's head did not arrive in time"),
    "body_timeout": (408, "The body did not arrive in time"),
    "conflict": (409, "The thing is in a state that does not allow this"),
    "body_too_large": (413, "The body is larger than the server accepts"),
    "image_too_large": (413, "The image has more pixels than the server accepts"),
    "frame_too_large": (413, "The input needs more frame memory than the server has"),
    "answer_too_large": (413, "The answer would be larger than the server gives"),
    "too_many_images": (413, "More images in one request than the server accepts"),
    "not_an_image": (415, "The body is not an image that the server reads"),
    "unsupported_media_type": (415, "The content type is not one that this route takes"),
    "heic_not_supported": (415, "HEIC/AVIF images need the `heif` extra"),
    "unknown_host": (421, "The server does not go by this name"),
    "image_truncated": (422, "The image data ends too early or is damaged"),
    "image_invalid": (422, "The image cannot be used"),
    "bad_option": (422, "An option has a value that is not allowed"),
    "bad_input": (422, "The model cannot take this input"),
    "bad_frame": (422, "The frame of a stream breaks the protocol"),
    "poison_frame": (422, "This input killed the worker that ran it"),
    "model_invalid": (422, "The model's files cannot be loaded"),
    "headers_too_large": (431, "The request's head is larger than the server accepts"),
    "internal": (500, "The server made a mistake"),
    "inference_failed": (500, "The model failed on this input"),
    "not_supported": (501, "The server does not do this"),
    "device_unavailable": (503, "The requested device does not serve now"),
    "model_not_ready": (503, "The model is not loaded"),
    "memory_full": (503, "No frame memory is free"),
    "overloaded": (503, "The work cannot be done before its deadline"),
    "superseded": (503, "A newer frame of its stream took its place"),
    "too_many_streams": (503, "As many streams as the server takes are open"),
    "shutting_down": (503, "The server is stopping"),
    "deadline_missed": (504, "The answer was not ready before its deadline"),
}


class Problem(Exception):
    """A refusal with its slug, a sentence for people and, where it helps, fields for programs.

    `detail` says what was wrong, what was expected and what to do. `retry_after` is in seconds. `fields` become members of
    the problem+json object (for a model: file, key, expected).
    """

    def __init__(self, slug: str, detail: str, *, retry_after: float | None = None, **fields: Any):
        assert slug in PROBLEMS, f"unknown problem slug {slug!r}"
        super().__init__(f"{slug}: {detail}")
        self.slug = slug
        self.detail = detail
        self.retry_after = retry_after
        self.fields = fields

    @property
    def status(self) -> int:
        return PROBLEMS[self.slug][0]

    @property
    def title(self) -> str:
        return PROBLEMS[self.slug][1]

    @property
    def seconds_to_wait(self) -> str:
        """`retry_after` as the header of that name has it: whole seconds, rounded up, so that nobody comes back too early; "" where there
        is nothing to wait for."""
        return "" if self.retry_after is None else str(max(1, math.ceil(self.retry_after)))

    def body(self) -> dict[str, Any]:
        """The members of the problem+json object."""
        return {"type": self.slug, "title": self.title, "status": self.status, "detail": self.detail, **self.fields}


def mistake(e: Exception) -> Problem:
    """A mistake of ours: told in the log, not to the client."""
    return Problem("internal", f"{type(e).__name__}; the server's log has the trace")
