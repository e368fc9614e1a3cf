"""Compressed bodies, as clients of the protocol may send and ask for."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence

from outboard.problems import Problem

ENCODINGS = ("gzip", "deflate")


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Raises Problem body_too_large before more than `limit` bytes come out of it, bad_input for what is not of this encoding."""
    bits = zlib.MAX_WBITS | 16 if encoding == "gzip" else zlib.MAX_WBITS
    worker = zlib.decompressobj(bits)
    try:
        plain = worker.decompress(body, limit + 1)
    except zlib.error as e:
        raise Problem("bad_input", f"the body is not {encoding}: {e}") from e
    if len(plain) > limit:
        raise Problem("body_too_large", f"the body has more than {limit} bytes once it is decompressed; set [limits] body to take more")
    if not worker.eof:
        raise Problem("bad_input", f"the {encoding} body ends too early")
    if worker.unused_data:
        more = len(worker.unused_data)
        raise Problem("bad_input", f"{more} bytes follow the {encoding} body's end; expected one member, compressed as a whole")
    return plain


def asked_for(accept: str | None) -> str:
    """The encoding for an answer, "" for none.

    HTTP libraries say by themselves that they understand several; only who names one alone has asked for it. Floats hardly shrink, and
    a core compresses them at some 20 MB/s.
    """
    return accept if accept in ENCODINGS else ""


def compress(pieces: Sequence[bytes | memoryview], encoding: str) -> bytes:
    """One body of them."""
    body = b"".join(pieces)
    return gzip.compress(body, 1) if encoding == "gzip" else zlib.compress(body, 1)
