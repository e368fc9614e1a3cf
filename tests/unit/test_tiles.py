"""A large picture is cut into tiles of one size, and each object in it comes back once, where it is."""

from __future__ import annotations

import itertools
import random

import cv2
import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphs
from integration.pictures import encoded, turned
from outboard.core.state import Picture
from outboard.http.options import parse
from outboard.imaging import tiles
from outboard.imaging.decode import decode
from outboard.imaging.geometry import Geometry
from outboard.imaging.header import Header, read_header
from outboard.imaging.tiles import Tiling, View, plan
from outboard.problems import Problem
from outboard.repository import Input
from outboard.tasks.merge import CANDIDATES, merge
from outboard.tasks.nms import nms
from outboard.tasks.results import Detections
from outboard.worker import pictures

SQUARE = Input(size=(640, 640))
FRAME = (3850, 2170)


# ---- where a picture is cut


@settings(deadline=None)
@given(
    width=st.integers(1, 6000),
    height=st.integers(1, 6000),
    size=st.one_of(st.just(0), st.integers(32, 4000)),
    overlap=st.floats(0, 0.9),
    input=st.sampled_from([(640, 640), (416, 416), (640, 384), (32, 320)]),
    most=st.integers(1, 200),
)
def test_tiles_of_one_size_cover_the_picture_and_share_what_was_asked_for(width, height, size, overlap, input, most):
    given = Input(size=input)
    tiling = Tiling(size=size, overlap=overlap)
    try:
        cut = plan(width, height, given, tiling, most)
    except Problem as e:
        assert size and e.slug == "bad_option" and e.fields["tiles"] > e.fields["max_tiles"] == most
        enough = int(e.detail.split("ask for tile=")[1].split()[0])
        assert len(plan(width, height, given, Tiling(size=enough, overlap=overlap), most).origins) <= most
        return
    assert len(cut.origins) <= most and len(set(cut.origins)) == len(cut.origins)
    assert cut.rows == len(cut.origins) + 1
    if not cut.origins:
        assert (cut.width, cut.height) == (width, height)
        return
    for starts, tile, length in (
        (sorted({left for left, _ in cut.origins}), cut.width, width),
        (sorted({top for _, top in cut.origins}), cut.height, height),
    ):
        assert starts[0] == 0 and starts[-1] + tile == length
        assert all(b - a <= max(1, tile - int(overlap * tile)) for a, b in itertools.pairwise(starts))


def test_a_frame_of_odd_size_is_cut_into_tiles_that_are_all_of_the_networks_size():
    cut = plan(*FRAME, SQUARE, Tiling(), 128)
    assert (cut.width, cut.height, len(cut.origins), cut.whole) == (640, 640, 32, True)
    assert all(left + 640 <= FRAME[0] and top + 640 <= FRAME[1] for left, top in cut.origins)


def test_auto_looks_at_half_or_a_third_of_a_picture_that_would_take_too_many_tiles():
    small = Input(size=(416, 416))
    assert plan(3840, 2160, small, Tiling(), 128).width == 416
    assert plan(3840, 2160, small, Tiling(), 83).width == 832
    assert plan(8660, 5770, small, Tiling(), 128).width == 832
    assert plan(3840, 2160, small, Tiling(), 1).width == 3840


def test_a_picture_no_larger_than_a_tile_is_looked_at_as_a_whole_even_if_that_was_not_asked_for():
    cut = plan(640, 300, SQUARE, Tiling(whole=False), 128)
    assert (cut.rows, cut.whole, cut.origins) == (1, True, ())


def test_a_tile_has_the_networks_aspect_ratio_and_is_as_low_as_a_low_picture():
    assert (plan(3840, 2160, Input(size=(640, 384)), Tiling(size=1280), 128).height) == 768
    low = plan(3000, 300, SQUARE, Tiling(), 128)
    assert (low.width, low.height, len(low.origins)) == (640, 300, 6)


def test_so_many_tiles_that_nobody_would_list_them_are_counted_and_refused():
    with pytest.raises(Problem) as e:
        plan(50_000, 1000, SQUARE, Tiling(size=32, overlap=0.9), 128)
    assert e.value.fields["tiles"] > 4_000_000
    assert "50000 x 1000 pixels" in e.value.detail and "at most 128" in e.value.detail


# ---- options


def asked(**given: str):
    return parse(given, arrived=0, received=0, default_deadline=1)


def test_tiles_are_asked_for_by_size_or_auto():
    assert asked().tiling is None
    assert asked(tile="auto").tiling == Tiling(size=0, overlap=0.2, merge="nmm", whole=True)
    given = asked(tile="800", overlap="0.1", merge="nms", whole="0").tiling
    assert given == Tiling(size=800, overlap=0.1, merge="nms", whole=False)


@pytest.mark.parametrize(
    "given",
    [
        {"tile": "31"}, {"tile": "0"}, {"tile": "640x640"}, {"tile": "-1"}, {"tile": ""}, {"tile": "nan"}, {"tile": "20000"},
        {"tile": "auto", "overlap": "0.95"}, {"tile": "auto", "overlap": "nan"}, {"tile": "auto", "merge": "best"},
        {"tile": "auto", "whole": "yes"}, {"overlap": "0.1"}, {"merge": "nms"}, {"whole": "1"},
    ],
)  # fmt: skip
def test_an_option_about_tiles_that_makes_no_sense_is_refused(given):
    with pytest.raises(Problem) as e:
        asked(**given)
    assert e.value.slug == "bad_option"


# ---- what the rows show


def rows_of(data: bytes, input: Input, tiling: Tiling) -> tuple[np.ndarray, list[View], Header]:
    """What the server does with a body."""
    header = read_header(data, max_pixels=50_000_000)
    cut = plan(header.width, header.height, input, tiling, 200)
    pixels = decode(data, header, min_size=tiles.decode_size(cut, header, input))
    out = np.full((cut.rows, input.size[1], input.size[0], 3), 77, np.uint8)
    return out, tiles.cut(cut, pixels, header, input, out), header


def test_a_tile_is_the_pictures_own_pixels():
    pixels = np.random.default_rng(0).integers(0, 256, (500, 700, 3), np.uint8)
    rows, views, _ = rows_of(encoded(pixels, "PNG"), Input(size=(320, 320), color="BGR"), Tiling())
    for row, view in zip(rows[:-1], views[:-1], strict=True):
        x1, y1, x2, y2 = view.rectangle
        np.testing.assert_array_equal(row[..., ::-1], pixels[y1:y2, x1:x2])


@pytest.mark.parametrize("orientation", [1, 6, 7])
@pytest.mark.parametrize(("tile", "fit"), [(320, "letterbox"), (640, "stretch"), (1000, "crop"), (1280, "letterbox"), (2000, "letterbox")])
def test_a_block_lies_where_each_row_says_also_in_a_turned_picture_that_the_decoder_shrinks(tile, fit, orientation):
    pixels = np.full((2168, 3848, 3), 90, np.uint8)
    block = (1900, 1000, 2100, 1160)
    pixels[block[1] : block[3], block[0] : block[2]] = (255, 0, 0)
    rows, views, header = rows_of(turned(pixels, orientation), Input(size=(320, 320), fit=fit), Tiling(size=tile))
    assert (header.width, header.height) == (3848, 2168)
    seen = 0
    for row, view in zip(rows, views, strict=True):
        ys, xs = np.nonzero((row[..., 0] > 172) & (row[..., 1] < 100))
        if xs.size:
            seen += 1
            x1, y1, x2, y2 = view.to_image(np.array([[xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]], np.float32))[0]
            r = view.rectangle
            want = (max(block[0], r[0]), max(block[1], r[1]), min(block[2], r[2]), min(block[3], r[3]))
            pixel = 1 / view.geometry.scale_x
            assert np.abs(np.array([x1, y1, x2, y2]) - want).max() <= 0.6 * pixel + 1, (view, want)
    assert seen > 1


def test_only_the_pixels_that_tiles_need_are_decoded():
    header = Header("jpeg", 3840, 2160)
    assert tiles.decode_size(plan(3840, 2160, SQUARE, Tiling(), 128), header, SQUARE) is None
    assert tiles.decode_size(plan(3840, 2160, SQUARE, Tiling(size=1280), 128), header, SQUARE) == (1920, 1080)
    assert tiles.decode_size(plan(3840, 2160, SQUARE, Tiling(size=4000), 128), header, SQUARE) == (640, 360)


def test_the_rest_of_a_row_is_background_where_the_picture_is_lower_than_a_tile():
    pixels = np.full((100, 900, 3), 200, np.uint8)
    rows, views, _ = rows_of(encoded(pixels, "PNG"), Input(size=(320, 320), background=(1, 2, 3)), Tiling(whole=False))
    assert len(rows) == 4 and all(view.geometry.pad_y == 110 for view in views)
    assert (rows[:, :110] == (1, 2, 3)).all() and (rows[:, 110:210] == 200).all() and (rows[:, 210:] == (1, 2, 3)).all()


# ---- cut on the device


def photograph(width: int, height: int) -> np.ndarray:
    small = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    return cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize(("kind", "tile", "color"), [("PNG", 320, "RGB"), ("JPEG", 0, "BGR"), ("JPEG", 640, "RGB"), ("JPEG", 1280, "BGR")])
@pytest.mark.parametrize("whole", [True, False])
def test_rows_that_the_device_cuts_are_byte_for_byte_those_that_the_host_would(kind, tile, color, whole, orientation):
    """Also of a JPEG that the decoder shrinks by 2 and 4 for tiles twice and four times as wide as the network's input."""
    data = turned(photograph(2560, 1920), orientation, kind)
    input, tiling = Input(size=(320, 320), color=color), Tiling(size=tile, whole=whole)
    rows, views, header = rows_of(data, input, tiling)
    cut = plan(header.width, header.height, input, tiling, 200)
    layout = tiles.layout(cut, header, input)
    memory = np.full(layout.nbytes, 99, np.uint8)
    laid = tiles.lay(cut, layout, decode(data, header, min_size=tiles.decode_size(cut, header, input)), header, input, memory)
    assert laid == views
    picture = [Picture(1, 0, layout.picture, layout.pitch)]
    for row, start in zip(rows, layout.starts, strict=True):
        np.testing.assert_array_equal(pictures.cut(memory, start, row.shape, picture), row)


def test_a_4k_frame_takes_two_thirds_of_the_memory_that_its_tiles_would():
    cut = plan(3840, 2160, SQUARE, Tiling(), 128)
    layout = tiles.layout(cut, Header("jpeg", 3840, 2160), SQUARE)
    assert layout.nbytes == 3840 * 2160 * 3 + 640 * 640 * 3
    assert layout.nbytes < 0.65 * cut.rows * 640 * 640 * 3


@pytest.mark.parametrize(
    ("header", "tiling"),
    [
        (Header("png", 3840, 2160), Tiling(size=1280)),  # a PNG is decoded whole
        (Header("jpeg", 3840, 2160), Tiling(size=500)),
        (Header("jpeg", 3840, 2160), Tiling(size=1000)),
        (Header("jpeg", 3840, 300), Tiling()),  # lower than a tile
        (Header("jpeg", 640, 640), Tiling()),  # not cut at all
    ],
)
def test_the_host_cuts_where_tiles_are_resized(header, tiling):
    assert tiles.layout(plan(header.width, header.height, SQUARE, tiling, 128), header, SQUARE) is None


@settings(deadline=None, max_examples=200)
@given(
    width=st.integers(641, 5000),
    height=st.integers(641, 5000),
    orientation=st.integers(1, 8),
    format=st.sampled_from(["jpeg", "png"]),
    scale=st.integers(1, 9),
    overlap=st.floats(0, 0.9),
)
def test_every_row_of_a_layout_lies_inside_its_picture_and_takes_no_more_memory_than_apart(
    width, height, orientation, format, scale, overlap
):
    header = Header(format, width, height, orientation)
    tiling = Tiling(size=640 * scale, overlap=overlap)
    try:
        cut = plan(header.width, header.height, SQUARE, tiling, 200)
    except Problem:
        return
    layout = tiles.layout(cut, header, SQUARE)
    if layout is None:
        return
    assert layout.nbytes <= cut.rows * 640 * 640 * 3
    for start in layout.starts[: len(cut.origins)]:
        line, at = divmod(start, layout.pitch)
        assert at + 3 * 640 <= layout.pitch and (line + 640) * layout.pitch <= layout.picture


# ---- objects on borders


@pytest.fixture(scope="module")
def every_block():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    return onnxruntime.InferenceSession(graphs.every_block((640, 640)), options, providers=["CPUExecutionProvider"])


def looked(session, pixels: np.ndarray, tiling: Tiling) -> tuple[list[Detections], list[View]]:
    """The detections of every row of a picture, and what the rows show."""
    rows, views, _ = rows_of(cv2.imencode(".png", pixels[..., ::-1], [cv2.IMWRITE_PNG_COMPRESSION, 1])[1].tobytes(), SQUARE, tiling)
    found = []
    for row in rows:
        output = session.run(None, {"images": row[None].transpose(0, 3, 1, 2).astype(np.float32) / 255})[0]
        output = output[nms(output[:, 1:5], output[:, 6], None, 0.45)]  # a coarse row's blobs have more corners than one
        found.append(Detections(boxes=output[:, 1:5], scores=output[:, 6], class_ids=np.zeros(len(output), np.int64)))
    return found, views


def borders(cut: tiles.Plan) -> tuple[list[int], list[int]]:
    """x and y of all borders of tiles that are not the picture's."""
    xs = {x for left, _ in cut.origins for x in (left, left + cut.width)} - {0, FRAME[0]}
    ys = {y for _, top in cut.origins for y in (top, top + cut.height)} - {0, FRAME[1]}
    return sorted(xs), sorted(ys)


def test_an_object_on_every_border_and_every_corner_of_a_tile_is_found_once_and_to_the_pixel(every_block):
    cut = plan(*FRAME, SQUARE, Tiling(), 128)
    xs, ys = borders(cut)
    assert len(xs) == 14 and len(ys) == 6
    shift = random.Random(5)
    truth = []
    for x, y in [*itertools.product(xs, ys), *((x, 830) for x in xs), *((778, y) for y in ys)]:
        left, top = x - shift.randint(2, 40), y - shift.randint(2, 30)
        truth.append((left, top, left + 42, top + 32))
    pixels = np.full((FRAME[1], FRAME[0], 3), 90, np.uint8)
    for x1, y1, x2, y2 in truth:
        pixels[y1:y2, x1:x2] = (255, 0, 0)
    found, views = looked(every_block, pixels, Tiling())
    assert sum(len(row.scores) for row in found[:-1]) > 2.5 * len(truth)
    for how in ("nms", "nmm"):
        for whole in (False, True):
            last = None if whole else -1
            result = merge(found[:last], views[:last], FRAME, how)
            if how == "nms" and whole:  # the best box of a group stays as it is, also a coarse one
                assert len(result.boxes) == len(truth)
                assert all(np.abs(result.boxes - box).max(axis=1).min() <= 9 for box in truth)
            else:
                assert sorted(map(tuple, result.boxes.tolist())) == sorted(truth), (how, whole)


def test_what_is_longer_than_a_tile_comes_out_in_one_piece(every_block):
    pixels = np.full((FRAME[1], FRAME[0], 3), 90, np.uint8)
    truth = [(100, 500, 3700, 560), (1000, 700, 1050, 2100), (3000, 900, 3700, 1700)]
    for x1, y1, x2, y2 in truth:
        pixels[y1:y2, x1:x2] = (255, 0, 0)
    found, views = looked(every_block, pixels, Tiling(whole=False))
    assert sorted(map(tuple, merge(found, views, FRAME, "nmm").boxes.tolist())) == truth
    assert len(merge(found, views, FRAME, "nms").boxes) == 3


# ---- merging by itself

LEFT = View(0, 0, Geometry(640, 640, 1.0, 1.0, 0, 0))
RIGHT = View(512, 0, Geometry(640, 640, 1.0, 1.0, 0, 0))
ALL = View(0, 0, Geometry(1152, 640, 640 / 1152, 640 / 1152, 0, 142))
SIZE = (1152, 640)


def seen(view: View, *boxes: tuple[float, ...]) -> Detections:
    """Detections of a row: (x1, y1, x2, y2, score, class) in the picture's pixels."""
    table = np.array(boxes, np.float64).reshape(-1, 6)
    places = table[:, :4] - np.array([view.left, view.top] * 2)
    g = view.geometry
    places = places * np.array([g.scale_x, g.scale_y] * 2) + np.array([g.pad_x, g.pad_y] * 2)
    return Detections(boxes=places.astype(np.float32), scores=table[:, 4].astype(np.float32), class_ids=table[:, 5].astype(np.int64))


def merged(how: str, *rows: tuple[View, Detections], top_k: int | None = None) -> list[list[float]]:
    result = merge([row for _, row in rows], [view for view, _ in rows], SIZE, how, top_k)
    return [[round(x, 2) for x in (*box, score)] for box, score in zip(result.boxes.tolist(), result.scores.tolist(), strict=True)]


def test_the_whole_object_stays_although_the_part_that_another_tile_saw_scores_more():
    rows = (LEFT, seen(LEFT, (500, 100, 600, 200, 0.5, 0))), (RIGHT, seen(RIGHT, (512, 100, 600, 200, 0.9, 0)))
    assert merged("nms", *rows) == [[500, 100, 600, 200, 0.5]]
    assert merged("nmm", *rows) == [[500, 100, 600, 200, 0.9]]


def test_two_parts_of_one_object_become_one_box():
    rows = (LEFT, seen(LEFT, (300, 100, 640, 200, 0.6, 0))), (RIGHT, seen(RIGHT, (512, 104, 900, 203, 0.8, 0)))
    assert merged("nmm", *rows) == [[300, 100, 900, 203, 0.8]]
    assert merged("nms", *rows) == [[512, 104, 900, 203, 0.8]]


def test_neighbours_and_other_classes_are_not_merged():
    rows = (
        (LEFT, seen(LEFT, (540, 100, 580, 200, 0.9, 0), (540, 100, 580, 200, 0.8, 1))),
        (RIGHT, seen(RIGHT, (575, 100, 620, 200, 0.7, 0))),
    )
    for how in ("nmm", "nms"):
        assert [box[4] for box in merged(how, *rows)] == [0.9, 0.8, 0.7]


def test_the_box_of_a_crowd_does_not_swallow_those_in_it():
    persons = [(x, 100, x + 30, 200, 0.6, 0) for x in range(520, 640, 40)]
    rows = (ALL, seen(ALL, (515, 95, 640, 205, 0.9, 0))), (RIGHT, seen(RIGHT, *persons))
    for how in ("nmm", "nms"):
        assert len(merged(how, *rows)) == 4


def test_boxes_of_one_row_are_the_models_own_affair():
    same = [(100, 100, 200, 200, 0.9, 0), (102, 100, 200, 200, 0.8, 0)]
    assert len(merged("nms", (LEFT, seen(LEFT, *same)))) == 2


def test_two_neighbours_that_the_model_told_apart_are_not_joined_over_a_third_box():
    rows = (
        (LEFT, seen(LEFT, (530, 100, 570, 200, 0.9, 0), (550, 100, 590, 200, 0.8, 0))),
        (RIGHT, seen(RIGHT, (540, 100, 580, 200, 0.7, 0))),
    )
    for how in ("nmm", "nms"):
        assert [box[4] for box in merged(how, *rows)] == [0.9, 0.8]


def test_a_coarse_row_neither_doubles_a_small_object_nor_spoils_its_place():
    rows = (ALL, seen(ALL, (598, 99, 612, 112, 0.9, 0))), (RIGHT, seen(RIGHT, (600, 100, 610, 110, 0.8, 0)))
    assert merged("nmm", *rows) == [[600, 100, 610, 110, 0.9]]
    assert len(merged("nms", *rows)) == 1


def test_equal_scores_fall_to_the_finer_row():
    rows = (ALL, seen(ALL, (598, 99, 612, 112, 0.9, 0))), (RIGHT, seen(RIGHT, (600, 100, 610, 110, 0.9, 0)))
    assert merged("nms", *rows) == [[600, 100, 610, 110, 0.9]]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_order_of_rows_and_boxes_makes_no_difference(data):
    coordinate = st.integers(0, 30)
    boxes = st.tuples(coordinate, coordinate, st.integers(1, 20), st.integers(1, 20), st.sampled_from([0.5, 0.7]), st.integers(0, 1))
    rows = []
    for view in (LEFT, RIGHT, ALL):
        x1, y1, x2, y2 = view.rectangle
        table = [
            (min(x1 + 20 * x, x2 - 20), min(y1 + 20 * y, y2 - 20), min(x1 + 20 * (x + w), x2), min(y1 + 20 * (y + h), y2), score, kind)
            for x, y, w, h, score, kind in data.draw(st.lists(boxes, max_size=12))
        ]
        rows.append((view, table))
    mixed = [(view, data.draw(st.permutations(table))) for view, table in data.draw(st.permutations(rows))]
    for how in ("nmm", "nms"):
        results = [merged(how, *((view, seen(view, *table)) for view, table in version)) for version in (rows, mixed)]
        assert results[0] == results[1]


def test_the_best_are_chosen_after_merging_and_nothing_found_is_nothing_answered():
    rows = (LEFT, seen(LEFT, (540, 100, 580, 200, 0.9, 0))), (RIGHT, seen(RIGHT, (540, 100, 580, 200, 0.8, 0), (700, 0, 720, 30, 0.7, 0)))
    assert [box[4] for box in merged("nms", *rows, top_k=2)] == [0.9, 0.7]
    assert merged("nmm", (LEFT, seen(LEFT)), (RIGHT, seen(RIGHT))) == []


def test_a_flood_of_boxes_is_bounded():
    rng = np.random.default_rng(1)
    corners = rng.uniform(0, 600, (CANDIDATES, 2)).astype(np.float32)
    flood = Detections(
        boxes=np.concatenate([corners, corners + 1], axis=1),
        scores=rng.uniform(0.1, 1, CANDIDATES).astype(np.float32),
        class_ids=np.zeros(CANDIDATES, np.int64),
        non_finite=2,
    )
    result = merge([flood, flood], [LEFT, RIGHT], SIZE, "nmm")
    assert len(result.boxes) <= CANDIDATES and result.non_finite == 4
