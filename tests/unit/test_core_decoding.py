"""Where a JPEG is decoded: on the host, or on the device."""

from __future__ import annotations

import pytest

from engine_kit import Kit
from outboard.core import commands as c
from outboard.core.decoding import Decoder, Way, on_device, thread_free, together
from outboard.core.link import Link
from outboard.core.state import Jpeg

MS = 1e-3
CABLE = Link(2.75e9, 2.75e9, 20e-6, 20e-6, 2.75e9, 2.75e9)
#: A 4K photograph: 8.3 megapixels in 1.5 MB.
PHOTO = Jpeg(1_500_000, 8_294_400)


def way(decode: float, wait: float = 0.0, link: float = 0.0) -> Way:
    return Way(wait * MS, decode * MS, link * MS)


@pytest.mark.parametrize(
    ("host", "device", "compute", "behind", "decoded_there"),
    [
        pytest.param(way(20, link=0.1), way(4, link=0.5), 4, 0, True, id="a quick decoder of an idle device makes the answer earlier"),
        pytest.param(way(2, link=0.1), way(4, link=0.5), 4, 0, False, id="a small picture is decoded on the host before it would be there"),
        pytest.param(way(20), way(19), 4, 0, False, id="a difference of 5 % is noise"),
        pytest.param(way(20), way(8, wait=16), 4, 0, False, id="a decoder with a queue leaves the frame to a thread that is free"),
        pytest.param(way(20, wait=12), way(8, wait=16), 4, 0, True, id="and takes it where all threads are busy for longer"),
        pytest.param(way(20), way(4), 30, 60, False, id="behind a queue for computing, earlier rows win nothing"),
        pytest.param(way(20, wait=50), way(4), 30, 60, True, id="unless the host would be later than even that"),
        pytest.param(way(20, link=9), way(4, link=0.5), 10, 60, True, id="but fewer bytes do, where the link is what it waits for"),
    ],
)
def test_a_frame_is_decoded_where_its_rows_are_ready_first(host: Way, device: Way, compute: float, behind: float, decoded_there: bool):
    assert on_device("auto", host, device, compute * MS, behind * MS) == decoded_there


def test_a_decoder_that_takes_nothing_of_the_computing_spares_the_host_behind_any_queue() -> None:
    host, device = way(20), way(4)
    assert on_device("auto", host, device, 30 * MS, 60 * MS, slows=0.1)
    assert not on_device("auto", host, device, 30 * MS, 60 * MS, slows=1.0)
    assert not on_device("auto", way(2), device, 30 * MS, 60 * MS, slows=0.0), "the host has it sooner"


def test_the_setting_overrules_what_was_measured() -> None:
    assert on_device("device", way(1), way(50))
    assert not on_device("host", way(50), way(1))


def test_a_decoder_is_known_by_two_pictures_and_corrected_by_what_it_really_takes() -> None:
    decoder = Decoder.fit((1_000_000, 3 * MS), (8_000_000, 17 * MS))
    assert decoder.seconds(4_000_000) == pytest.approx(9 * MS)
    for _ in range(100):
        decoder = decoder.observed([4_000_000, 1_000_000], 2 * 12 * MS)
    assert decoder.seconds(4_000_000) + decoder.seconds(1_000_000) == pytest.approx(24 * MS, rel=0.01)
    once = decoder.observed([4_000_000], 3600.0)
    assert once.seconds(4_000_000) < 1.2 * decoder.seconds(4_000_000), "one hiccup is no trend"
    assert decoder.observed([], 1.0) == decoder.observed([4_000_000], 0.0) == decoder


def test_small_pictures_that_are_slower_than_large_ones_give_costs_all_the_same() -> None:
    decoder = Decoder.fit((300_000, 9 * MS), (4_000_000, 4 * MS))
    assert decoder.per_picture >= 0 and 4 * MS <= decoder.seconds(4_000_000) <= 15 * MS


def test_the_next_thread_is_free_sooner_than_all_of_them() -> None:
    assert thread_free(60 * MS, 3, 4) == 0
    assert 0 < thread_free(80 * MS, 4, 4) < 20 * MS
    assert together(1.0, 2, 20 * MS, 10 * MS) == pytest.approx(0.25), "two threads and a decoder as quick as two more"
    assert together(1.0, 2, 20 * MS, 0) == pytest.approx(0.5)


class Station(Kit):
    """A GPU that decodes behind a thin cable, a CPU that stands by, and two decode threads."""

    def __init__(self, **config: object):
        super().__init__(**{"slab_bytes": 64 << 20, "fill_slots": 2, **config})  # type: ignore[arg-type]
        self.up("cpu")
        self.add("gpu:0", slots=3)
        generation = self.generation("gpu:0")
        self.engine.hello(self.now, "gpu:0", generation, CABLE)
        self.engine.loaded(self.now, "gpu:0", generation, "m", [(1, 0.004), (8, 0.016)], decoder=Decoder(1 * MS, 1e-9))
        self.check("gpu:0")

    def photo(self, fill_cost: float = 20 * MS, **options: object) -> c.Fill:
        frame = self.admit(jpeg=PHOTO, fill_cost=fill_cost, **options)  # type: ignore[arg-type]
        fill = self.last(c.Fill)
        assert fill.frame == frame
        return fill

    def sent(self, fill: c.Fill) -> c.Dispatch:
        """Its bytes are in frame memory, so it is dispatched."""
        self.engine.filled(self.now, fill.frame)
        return self.last(c.Dispatch)

    def refilled(self, fill: c.Fill) -> c.Fill:
        """The host is told to decode the frame after all, in the memory that it has."""
        again = self.last(c.Fill)
        assert (again.frame, again.offset, again.coded) == (fill.frame, fill.offset, False) and again is not fill
        return again

    def ends_on(self, device: str, fill: c.Fill) -> None:
        self.engine.filled(self.now, fill.frame)
        batch = self.last(c.Dispatch)
        assert batch.device == device and not batch.coded
        self.done(batch)
        assert self.end(fill.frame) == f"answered by {device}"
        assert self.engine.memory.used == 0


def test_a_jpeg_crosses_the_link_and_is_decoded_on_the_device() -> None:
    station = Station()
    fill = station.photo()
    assert fill.coded
    batch = station.sent(fill)
    (source,) = batch.coded
    assert batch.device == "gpu:0" and batch.offsets == [source.offset] and source.length == PHOTO.nbytes
    assert source.source >= source.offset + source.nbytes, "the JPEG lies beside the place of the host's pixels"
    station.engine.decoded(station.now, "gpu:0", batch.generation, batch.batch, 8 * MS)
    station.done(batch)
    assert station.end(fill.frame) == "answered by gpu:0" and station.engine.memory.used == 0


@pytest.mark.parametrize(
    ("config", "options"),
    [({"decode": "host"}, {}), ({}, {"fill_cost": 1 * MS}), ({"decode": "device", "slab_bytes": 1 << 20}, {})],
    ids=["as it is set", "a picture that the host decodes sooner", "there is no memory for both"],
)
def test_the_host_decodes_what_the_device_is_not_to(config: dict, options: dict) -> None:
    station = Station(**config)
    fill = station.photo(**options)
    assert not fill.coded
    station.ends_on("gpu:0", fill)


def test_more_frames_than_the_decoder_can_take_are_shared_with_the_threads() -> None:
    station = Station()
    for _ in range(6):
        station.admit(jpeg=PHOTO, fill_cost=20 * MS)
    fills = station.all(c.Fill)
    assert {fill.coded for fill in fills} == {True, False}
    assert sum(not fill.coded for fill in fills) == 2, "both threads are busy"


@pytest.mark.parametrize("lost", ["dispatched", "copied", "copying"])
def test_a_frame_whose_decoder_is_lost_is_decoded_by_the_host_for_the_standby(lost: str) -> None:
    station = Station()
    if lost == "copied":  # behind others, so that it waits
        for _ in range(3):
            station.sent(station.photo(fill_cost=1.0))
    fill = station.photo(fill_cost=1.0)
    assert fill.coded
    if lost != "copying":
        station.engine.filled(station.now, fill.frame)
    station.dies("gpu:0", explained=True)
    if lost == "copying":
        station.engine.filled(station.now, fill.frame)
    for again in [f for f in station.all(c.Fill) if not f.coded]:
        station.engine.filled(station.now, again.frame)
    while station.end(fill.frame) == "":
        before = len(station.all(c.RowDone))
        for batch in [b for b in station.all(c.Dispatch) if b.device == "cpu" and b.batch in station.engine.devices["cpu"].running]:
            station.done(batch)
        for again in [f for f in station.all(c.Fill) if station.engine.frames.get(f.frame) and station.engine.frames[f.frame].filling]:
            station.engine.filled(station.now, again.frame)
        assert len(station.all(c.RowDone)) > before
    assert {station.end(f.frame) for f in station.all(c.Fill)} == {"answered by cpu"}
    assert station.engine.memory.used == 0


def test_what_the_device_cannot_decode_is_decoded_by_the_host_which_says_what_is_wrong() -> None:
    station = Station(decode="device")
    damaged = station.photo()
    batch = station.sent(damaged)
    station.engine.batch_failed(station.now, "gpu:0", batch.generation, batch.batch, "decode", "bad Huffman code", [0])
    again = station.refilled(damaged)
    assert station.engine.devices["gpu:0"].failures == 0, "a damaged file is not the device's fault"
    station.engine.fill_failed(station.now, again.frame, "image_truncated", "The JPEG ends too early")
    assert station.end(damaged.frame) == "image_truncated" and station.engine.memory.used == 0


def test_the_neighbours_of_a_damaged_picture_are_decoded_on_the_device_once_more() -> None:
    station = Station(decode="device")
    first = [station.sent(station.photo()) for _ in range(3)]
    fills = [station.photo() for _ in range(3)]
    for fill in fills:
        station.engine.filled(station.now, fill.frame)
    for batch in first:
        station.done(batch)
    batch = station.last(c.Dispatch)
    assert len(batch.coded) > 1
    station.engine.batch_failed(station.now, "gpu:0", batch.generation, batch.batch, "decode", "bad Huffman code", [1])
    bad = batch.coded[1].id
    assert station.last(c.Fill).frame == bad and not station.last(c.Fill).coded
    others = {source.id for b in station.all(c.Dispatch) if b.batch > batch.batch for source in b.coded}
    assert bad not in others and others >= {source.id for source in batch.coded} - {bad}


def test_a_decoder_that_takes_its_worker_with_it_is_not_used_again_until_the_device_is_reset() -> None:
    station = Station(decode="device")
    fill = station.photo()
    station.sent(fill)
    station.dies("gpu:0", explained=False)
    again = station.refilled(fill)
    station.engine.filled(station.now, again.frame)
    station.done(station.isolated())  # alone, like any other suspect, and decoded by the host: it is harmless
    assert station.end(fill.frame).startswith("answered")
    station.wait(2.0)
    station.back("gpu:0")
    station.engine.devices["gpu:0"].networks["m"].decoder = Decoder(1 * MS, 1e-9)
    assert not station.photo().coded
    station.engine.reset(station.now, "gpu:0")
    assert not station.engine.devices["gpu:0"].distrusted


def test_an_overdue_batch_is_decoded_and_answered_elsewhere() -> None:
    station = Station()
    fill = station.photo()
    late = station.sent(fill)
    station.wait(1.0)
    assert station.state("gpu:0") == "suspect"
    again = station.refilled(fill)
    station.engine.filled(station.now, again.frame)
    batch = station.last(c.Dispatch)
    assert batch.device == "cpu"
    station.done(late)
    assert station.end(fill.frame) == "answered by gpu:0", "the first answer wins"
    station.done(batch)
    assert station.engine.memory.used == 0


def test_a_client_that_leaves_before_the_host_decodes_again_leaves_nothing() -> None:
    station = Station(fill_slots=1)
    busy = station.admit(fill_cost=0.5)  # the only thread
    fill = station.photo(fill_cost=1.0)
    station.sent(fill)
    station.dies("gpu:0", explained=True)
    assert station.engine.frames[fill.frame].to_fill
    station.engine.leave(station.now, fill.frame)
    station.engine.filled(station.now, busy)
    station.done()
    assert station.engine.memory.used == 0 and not station.engine.frames
    assert station.engine._fill_backlog == pytest.approx(0) and not any(station.engine._unfilled.values())
