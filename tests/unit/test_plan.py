"""`outboard plan`: the engine in virtual time, on machines whose truth is known."""

from __future__ import annotations

import dataclasses
import random
from math import inf

import pytest

from outboard.devices.simulated import LINKS
from outboard.imaging.tiles import Tiling
from outboard.plan import arrivals, roofline
from outboard.plan.cards import CARDS, find
from outboard.plan.cure import cures
from outboard.plan.drive import Arrival, play
from outboard.plan.host import DecodeCost, row_bytes
from outboard.plan.machine import Host, link
from outboard.plan.predict import Curve, Demand, Estimate, Setup, plan, predict, quantile
from outboard.plan.workload import Layer, Workload
from outboard.repository import Input

HOST = Host(cores=8, decode_threads=9, receive=0.0005, receive_byte=0.0, respond=0.0005)
SIZE = (1920, 1080)


def demand(stations: int = 3, fps: float = 15, *, seconds: float = 10, decode: float = 0.004, seed: int = 0, **options) -> Demand:
    return Demand(arrivals.steady(stations, fps, seconds, 400_000, *SIZE, seed), {SIZE: DecodeCost(decode, 0.0)}, seed=seed, **options)


def setup(asked: Demand, *, batch: float = 0.0, row: float = 0.002, **changed) -> Setup:
    """A card of `batch` + `row` seconds, and what is `changed`."""
    usual = Setup(
        link="thunderbolt4",
        card=Curve(tuple((n, batch + row * n) for n in (1, 2, 64))),
        host=HOST,
        shape=(416, 416, 3),
        row_bytes=519_168,
        answer_bytes=1000,
        max_rows=16,
        demand=asked,
    )
    return dataclasses.replace(usual, **changed)


def random_setup(seed: int) -> Setup:
    rng = random.Random(seed)
    asked = demand(rng.randint(1, 8), rng.choice([5, 15, 30, 60]), seconds=4, decode=rng.uniform(0.001, 0.04), seed=seed,
                   deadline=rng.choice([inf, 0.05, 0.2, 1.0]), live=rng.random() < 0.7)  # fmt: skip
    return setup(asked, link=rng.choice(["0.05", *LINKS]), batch=rng.uniform(0, 0.02), row=rng.uniform(0.0005, 0.02),
                 row_bytes=rng.choice([150_528, 519_168, 6_220_800, 24_883_200]), max_rows=rng.choice([1, 4, 16]),
                 host=dataclasses.replace(HOST, cores=rng.randint(1, 8), decode_threads=rng.randint(2, 9)))  # fmt: skip


@pytest.mark.parametrize("seed", range(24))
def test_every_frame_has_one_end(seed: int) -> None:
    asked = random_setup(seed)
    found = predict(asked)
    assert found.sent == len(asked.demand.frames)
    assert found.sent == found.answered + found.dropped + found.refused
    assert all(0 <= share <= 1.0001 for share in found.use.values()), found.use
    if found.answered:
        assert 0 < found.age_p50 <= found.age_p99 <= min(asked.demand.deadline, 60) + 0.05  # an answer in time still has to be sent


def test_the_same_seed_gives_the_same_plan_and_another_seed_other_phases() -> None:
    assert predict(random_setup(3)) == predict(random_setup(3))
    assert demand(seed=1).frames != demand(seed=2).frames


@pytest.mark.parametrize("seed", range(8))
def test_a_faster_link_is_never_worse(seed: int) -> None:
    """To within 5 % of the frames and 1 % of the age: which frames meet in a batch changes with every microsecond."""
    asked = random_setup(seed)
    asked = dataclasses.replace(asked, demand=dataclasses.replace(asked.demand.until(2), deadline=inf))
    links = ["0.05", "0.5", *sorted(LINKS, key=lambda name: LINKS[name])]
    found = [predict(dataclasses.replace(asked, link=name)) for name in links]
    for slower, faster in zip(found, found[1:], strict=False):
        assert faster.answered >= slower.answered - 0.05 * slower.sent
    assert found[-1].answered >= found[0].answered - 0.02 * found[0].sent
    if found[0].holds:
        assert found[-1].age_p50 <= found[0].age_p50 * 1.01


def test_a_lone_frame_takes_its_steps_one_after_the_other() -> None:
    asked = setup(demand(1, 2, decode=0.02), batch=0.008, row=0.004)
    wire = link("thunderbolt4")
    steps = 0.0005 + 0.02 + wire.upload(519_168) + 0.012 + wire.download(1000) + 0.0005
    assert predict(asked).age_p50 == pytest.approx(steps, rel=1e-3)


def test_a_full_link_carries_its_bandwidth_over_the_bytes_of_a_row() -> None:
    found = predict(setup(demand(4, 60, seconds=5, live=False), row=0.0001, row_bytes=24_883_200))
    assert 4 * found.fps == pytest.approx(2.75e9 / 24_883_200, rel=0.02)
    assert found.bottleneck == "link" and not found.holds


def test_a_full_card_answers_what_its_batches_allow() -> None:
    single = predict(setup(demand(4, 60, seconds=5, live=False), batch=0.008, row=0.004, max_rows=1))
    assert 4 * single.fps == pytest.approx(1 / 0.012, rel=0.02)
    assert single.bottleneck == "compute" and single.rows == 1
    batched = predict(setup(demand(8, 60, seconds=4, live=False), batch=0.008, row=0.004, max_rows=8))
    assert 8 * batched.fps == pytest.approx(8 / 0.040, rel=0.05)
    assert batched.rows > 7


def test_full_cores_decode_what_they_can() -> None:
    host = dataclasses.replace(HOST, cores=2, decode_threads=3)
    found = predict(setup(demand(4, 60, seconds=5, decode=0.030, live=False), host=host))
    assert 4 * found.fps == pytest.approx(2 / (0.0005 + 0.030 + 0.0005), rel=0.03)
    assert found.bottleneck == "decode" and not found.holds


def test_a_deadline_that_one_frame_alone_misses_is_the_bottleneck() -> None:
    found = predict(setup(demand(1, 5, decode=0.02, deadline=0.02)))
    assert found.bottleneck == "deadline" and found.answered == 0 and found.age_p50 == inf


def test_answering_everything_is_not_enough_where_the_answers_fall_behind() -> None:
    late = predict(setup(demand(4, 60, live=False), row=0.006, max_rows=1))  # 1.44 seconds of work arrive each second
    assert late.answered == late.sent and not late.holds and late.bottleneck == "compute"
    assert predict(setup(demand(4, 60, live=False), row=0.003, max_rows=1)).holds


def test_a_burst_that_is_dropped_while_nothing_is_full_is_not_blamed_on_a_resource() -> None:
    frames = [arrivals.Recorded(t=i // 20 + 0.0001 * (i % 20), station="one", bytes=1000, width=1920, height=1080) for i in range(100)]
    found = predict(setup(Demand(frames, {SIZE: DecodeCost(0.004, 0.0)})))
    assert found.bottleneck == "waiting" and found.dropped > 20 and max(found.use.values()) < 0.5


def test_stations_that_ask_for_their_share_get_it_beside_one_that_asks_for_ten_times_as_much() -> None:
    frames = arrivals.steady(3, 15, 10, 400_000, *SIZE, 1)
    frames += [of_station(f, "greedy") for f in arrivals.steady(1, 150, 10, 400_000, *SIZE, 2)]
    asked = setup(Demand(sorted(frames, key=lambda f: f.t), {SIZE: DecodeCost(0.004, 0.0)}), row=0.010, max_rows=1)
    machine = asked.machine(roofline.WORST)
    log = play(machine, asked.demand.arrivals())
    modest = [e for e in log.endings if e.arrival.station != "greedy"]
    assert sum(e.end == "answered" for e in modest) >= 0.97 * len(modest)


def of_station(frame: arrivals.Recorded, station: str) -> arrivals.Recorded:
    return arrivals.Recorded(t=frame.t, station=station, bytes=frame.bytes, width=frame.width, height=frame.height)


def test_cores_are_shared_evenly() -> None:
    """Three decodes of 30 ms on two cores end after 45 ms, all at once."""
    machine = setup(demand(), host=Host(2, 3, 0.0, 0.0, 0.0), row=1e-6, row_bytes=1).machine(roofline.WORST)
    log = play(machine, [Arrival(0.0, f"s{i}", 1, 0.030) for i in range(3)])
    assert [e.at for e in log.endings] == pytest.approx([0.045] * 3, abs=1e-3)


# ---------------------------------------------------------------- cures


def nothing_smaller() -> None:
    return None


def test_a_link_that_limits_is_cured_by_the_slowest_cable_that_holds() -> None:
    asked = setup(demand(4, 30, live=False), link="thunderbolt3", row=0.0001, row_bytes=24_883_200)  # 3 GB/s are asked for
    found = plan(asked)
    assert not found.worst.holds and found.worst.bottleneck == "link"
    texts = cures(found, nothing_smaller, lambda fps: demand(4, fps, live=False))
    assert texts[0] == "thunderbolt5 as the cable"
    assert texts[-1].startswith("or ask for less: 2")  # 2.4e9 / 24883200 / 4 = 24
    assert predict(dataclasses.replace(asked, link="thunderbolt5")).holds
    assert not predict(dataclasses.replace(asked, link="thunderbolt4")).holds


def test_small_batches_that_limit_are_cured_by_larger_ones() -> None:
    asked = setup(demand(4, 30, live=False, deadline=0.5), batch=0.016, row=0.001, max_rows=1)
    texts = cures(plan(asked), nothing_smaller, None)
    assert texts[0].startswith("batches of up to ") and predict(dataclasses.replace(asked, max_rows=int(texts[0].split()[4]))).holds


def test_a_host_that_limits_is_cured_by_cores() -> None:
    options = {"decode": 0.010, "live": False}
    asked = setup(demand(4, 30, **options), host=dataclasses.replace(HOST, cores=1, decode_threads=2))
    texts = cures(plan(asked), lambda: ("720p", demand(4, 30, decode=0.003, live=False)), lambda fps: demand(4, fps, **options))
    assert texts[:2] == ["frames of 720p", "a host of 2 such cores"] and texts[2].startswith("or ask for less: ")


# ---------------------------------------------------------------- cards


@pytest.mark.parametrize(
    ("name", "fp32", "fp16"),
    [
        ("RTX 3080", 29.8, 59.5), ("RTX 3090", 35.6, 71), ("RTX 4080", 48.7, 97.5), ("RTX 4090", 82.6, 165.2), ("RTX 5090", 104.8, 209.5),
        ("RTX A2000", 8.0, 31.9), ("RTX A4000", 19.2, 76.7), ("L4", 30.3, 121), ("T4", 8.1, 65), ("H200", 66.9, 989),
    ],
)  # fmt: skip
def test_rates_are_those_that_the_vendor_publishes(name: str, fp32: float, fp16: float) -> None:
    card = find(name)
    assert card.fp32 / 1e12 == pytest.approx(fp32, rel=0.01)
    assert card.fp16 / 1e12 == pytest.approx(fp16, rel=0.01)
    assert card.source


def test_cards_are_found_by_their_words() -> None:
    assert find("NVIDIA GeForce RTX 3060 Ti").name == "RTX 3060 Ti"
    assert find("4090").name == find("rtx4090").name == "RTX 4090"
    with pytest.raises(ValueError, match="did you mean .*RTX 3060"):
        find("RTX 3065")
    with pytest.raises(ValueError, match=f"known are .*{CARDS[0].name}"):
        find("Voodoo")


#: resnet18's layers at 224 x 224: operations, weights, elements in and out.
RESNET18 = [
    *[Layer("Conv", 2 * 118_013_952, 9_408, 150_528 + 802_816), Layer("MaxPool", 200_704, 0, 802_816 + 200_704)],
    *[Layer("Conv", 2 * 115_605_504, 36_864, 2 * 200_704)] * 4,
    *[Layer("Conv", 2 * 57_802_752, 73_728, 200_704 + 100_352), *[Layer("Conv", 2 * 115_605_504, 147_456, 2 * 100_352)] * 3],
    *[Layer("Conv", 2 * 57_802_752, 294_912, 100_352 + 50_176), *[Layer("Conv", 2 * 115_605_504, 589_824, 2 * 50_176)] * 3],
    *[Layer("Conv", 2 * 57_802_752, 1_179_648, 50_176 + 25_088), *[Layer("Conv", 2 * 115_605_504, 2_359_296, 2 * 25_088)] * 3],
    *[Layer("Conv", 2 * 6_422_528, n, 150_528) for n in (8_192, 32_768, 131_072)],
    Layer("Gemm", 2 * 512_000, 512_000, 1_512),
]


@pytest.mark.parametrize(
    ("card", "images_per_s", "rows"),
    [("RTX 3090", 9260, 1024), ("RTX 5090", 19879, 1024), ("RTX 4090", 25949, 256), ("RTX 5090", 35635, 1024)],
)
def test_what_was_published_of_resnet18_lies_in_the_range(card: str, images_per_s: float, rows: int) -> None:
    """results/benchmark-infer-amp-nchw-*.csv of huggingface/pytorch-image-models, eager and compiled."""
    workload = Workload(RESNET18, 4000, 11_689_512, 953_344, [])
    assert workload.flops == pytest.approx(2 * 1.82e9, rel=0.01)
    worst, best = (rows / roofline.seconds(workload, find(card), "fp16", e, rows) for e in (roofline.WORST, roofline.BEST))
    assert worst <= images_per_s <= best


def test_an_estimate_is_a_range_with_the_worst_first() -> None:
    workload = Workload(RESNET18, 4000, 11_689_512, 953_344, [])
    found = plan(setup(demand(8, 60, seconds=4), card=Estimate(workload, find("RTX 3060"), "fp32")))
    assert found.estimate and found.worst.age_p50 > found.best.age_p50
    assert found.worst.use["compute"] > found.best.use["compute"]
    known = plan(setup(demand()))
    assert not known.estimate and known.worst is known.best


def test_a_model_that_does_not_fit_the_card_says_so() -> None:
    huge = Workload(RESNET18, 4000, 3_000_000_000, 953_344, [])
    found = predict(setup(demand(), card=Estimate(huge, find("RTX 3060"), "fp32")))
    assert found.bottleneck == "memory" and not found.holds and found.refused == found.sent
    halved = setup(demand(), card=Estimate(huge, find("RTX 3060"), "fp16"))
    assert predict(halved).holds
    texts = cures(plan(dataclasses.replace(halved, card=Estimate(huge, find("RTX 3060"), "fp32"))), nothing_smaller, None)
    assert "half precision" in texts[0]


def test_tiles_that_the_device_cuts_take_their_picture_s_bytes_and_others_their_own() -> None:
    network = Input(size=(640, 640))
    assert row_bytes(3840, 2160, network, None, 128) == 640 * 640 * 3
    assert 33 * row_bytes(3840, 2160, network, Tiling(), 128) == 3840 * 2160 * 3 + 640 * 640 * 3
    assert row_bytes(3840, 2160, network, Tiling(size=1000), 128) == 640 * 640 * 3


def test_quantiles_are_values_that_occurred() -> None:
    values = [1.0, 2.0, 3.0, 4.0]
    assert (quantile(values, 0.5), quantile(values, 0.99), quantile([], 0.5)) == (3.0, 4.0, inf)
