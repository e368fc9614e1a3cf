"""The reader of WebSocket messages gives what the library's own gives, however the bytes come."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Opcode
from websockets.server import ServerProtocol
from websockets.streams import StreamReader

from outboard.http.message_reader import MessageReader, read_in_pieces


def read(reader: StreamReader, wanted: list[int], pieces: list[bytes]) -> list[bytes | str]:
    """What reads of `wanted` bytes (0: a line) give while `pieces` come, then the end, and what is left then."""

    def reads() -> Generator[None, None, None]:
        try:
            for n in wanted:
                got.append(bytes((yield from (reader.read_exact(n) if n else reader.read_line(1 << 20)))))
        except EOFError as e:
            got.append(str(e))

    got: list[bytes | str] = []
    going = reads()
    next(going, None)
    for piece in pieces:
        reader.feed_data(piece)
        next(going, None)
    reader.feed_eof()
    next(going, None)
    return [*got, bytes(reader.buffer)]


@given(st.lists(st.integers(0, 40)), st.lists(st.binary(min_size=1, max_size=50).map(lambda b: b.replace(b"a", b"\n"))))
def test_it_reads_what_the_librarys_own_reads(wanted: list[int], pieces: list[bytes]) -> None:
    assert read(MessageReader(), wanted, pieces) == read(StreamReader(), wanted, pieces)


def test_a_message_of_megabytes_in_pieces_is_whole_and_so_is_the_next() -> None:
    protocol = ServerProtocol(max_size=1 << 24)
    read_in_pieces(protocol)
    head = b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    protocol.receive_data(head + b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
    (request,) = protocol.events_received()
    protocol.send_response(protocol.accept(request))
    large = bytes(range(256)) * 12_000
    mask = bytes(4)
    frame = b"\x82\xff" + len(large).to_bytes(8, "big") + mask + large
    sent = frame + b"\x82\x83" + mask + b"end" + frame
    for at in range(0, len(sent), 100_001):
        protocol.receive_data(sent[at : at + 100_001])
    events = protocol.events_received()
    assert [(e.opcode, bytes(e.data)) for e in events] == [(Opcode.BINARY, d) for d in (large, b"end", large)]


def test_the_end_in_the_middle_of_a_message_is_an_error() -> None:
    reader = MessageReader()
    reading = reader.read_exact(10)
    next(reading)
    reader.feed_data(b"123")
    next(reading)
    reader.feed_eof()
    with pytest.raises(EOFError, match="after 3 bytes, expected 10"):
        next(reading)
