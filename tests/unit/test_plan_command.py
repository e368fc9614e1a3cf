"""`outboard plan` as a command: words in, tables, JSON and exit codes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onnx_graphs import convolution, folder
from outboard import repository
from outboard.cli import app
from outboard.core.costs import BatchCost
from outboard.core.link import Link
from outboard.plan import arrivals
from outboard.plan.arrivals import TraceError
from outboard.plan.host import HANDOVER
from outboard.plan.workload import CountError, count
from outboard.profiles import Key, Profile, Store


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one small convolution, `net`: 3 -> 8 channels, 3 x 3, on 32 x 24 pixels."""
    root = tmp_path_factory.mktemp("models")
    folder(root, convolution(), size=(32, 24))
    return root


def run(models: Path, *words: str, code: int = 0) -> str:
    """What `outboard plan` prints, without the line breaks of a terminal."""
    result = CliRunner().invoke(app, ["plan", "--models", str(models), "--decode-ms", "5", "--cores", "4", *words])
    assert result.exit_code == code, result.output
    return result.stdout if code < 2 else " ".join(result.stderr.split())


def plans(models: Path, *words: str, code: int = 0) -> list[dict]:
    return json.loads(run(models, *words, "--json", code=code))["plans"]


STEADY = ("--model", "net", "--stations", "2", "--fps", "10", "--duration", "5s")


def test_what_holds_exits_with_0_and_what_does_not_with_1(models: Path) -> None:
    (holds,) = plans(models, *STEADY, "--link", "thunderbolt4", "--gpu", "8+4")
    assert holds["holds"] and holds["fps"] == pytest.approx(10, rel=0.02) and holds["dropped"] == 0 and not holds["estimate"]
    assert holds["age_p50_ms"] == pytest.approx(5 + 12 + 0.06 + 4e3 * HANDOVER, abs=2)
    (fails,) = plans(models, *STEADY, "--link", "thunderbolt4", "--gpu", "200+4", code=1)
    assert not fails["holds"] and fails["bottleneck"] == "compute" and fails["cures"]
    assert fails["sent"] == 100 == fails["answered"] + fails["dropped"] + fails["refused"]


def test_links_are_compared_and_the_named_one_decides(models: Path) -> None:
    found = plans(models, *STEADY, "--gpu", "8+4", "--compare", "thunderbolt3,oculink,0.0001", "--link", "0.0001", code=1)
    assert [p["link"] for p in found] == ["0.0001", "thunderbolt3", "oculink"]
    assert [p["holds"] for p in found] == [False, True, True]
    plans(models, *STEADY, "--gpu", "8+4", "--compare", "thunderbolt3,0.0001")


def test_estimates_say_so_beside_every_number(models: Path) -> None:
    (found,) = plans(models, *STEADY, "--link", "thunderbolt4", "--gpu", "RTX 3060")
    assert found["estimate"] and found["range"]["age_p50_ms"][0] >= found["range"]["age_p50_ms"][1]
    text = run(models, *STEADY, "--link", "thunderbolt4", "--gpu", "RTX 3060")
    names = ("fps a", "age", "dropped", "rows", "link used", "compute used", "host used")
    figures = [line for line in text.splitlines() if line.startswith(names)]
    assert len(figures) == 8 and all("(estimate)" in line for line in figures)
    assert "35%-75% of its peak arithmetic" in text and "nvidia.com" in text
    assert "estimate" not in run(models, *STEADY, "--link", "thunderbolt4", "--gpu", "8+4")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "net", "--link", "thunderbolt9", "--gpu", "8+4"), "'thunderbolt9' is no link: expected one of thunderbolt3"),
        (("--model", "net", "--link", "oculink", "--gpu", "RTX 3065"), "did you mean RTX 3060"),
        (("--model", "nett", "--link", "oculink", "--gpu", "8+4"), "did you mean net?"),
        (("--model", "net/det", "--link", "oculink", "--gpu", "8+4"), "no part 'det'"),
        (("--model", "net", "--gpu", "8+4"), "--link is missing"),
        (("--model", "net", "--link", "oculink"), "--gpu is missing"),
        (("--model", "net", "--link", "oculink", "--gpu", "0+0"), "not both 0"),
        (("--model", "net", "--link", "oculink", "--gpu", "sim:oculink"), "add compute=MS_PER_BATCH+MS_PER_ROW"),
        (("--model", "net", "--link", "oculink", "--gpu", "8+4", "--deadline", "soon"), "expected a time such as 200ms"),
        (("--model", "net", "--link", "oculink", "--gpu", "8+4", "--source", "8k"), "expected 4k, 1080p, 720p or a size"),
        (("--model", "net", "--link", "oculink", "--gpu", "8+4", "--policy", "best"), "expected live or lossless"),
        (("--model", "net", "--link", "oculink", "--gpu", "8+4", "--plot", "x.png"), "--plot draws what --compare compares"),
        (("--model", "net", "--link", "oculink", "--gpu", "8+4", "--replay", "none.csv"), "none.csv: cannot be read"),
        (("--model", "net", "--link", "oculink", "--gpu", "8+4", "--fps", "0.1", "--duration", "1s"), "give more --duration"),
    ],
)
def test_wrong_usage_says_what_was_expected(models: Path, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOARD_CACHE", str(models / "cache"))
    assert says in run(models, *words, code=2)


def test_a_missing_model_file_is_wrong_usage(models: Path, tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "model.toml").write_text((models / "net" / "model.toml").read_text())
    said = run(tmp_path, *STEADY, "--link", "oculink", "--gpu", "8+4", code=2)
    assert "net.onnx" in said.replace(" ", "").replace("\n", "")  # a long path may be folded anywhere


@pytest.mark.parametrize("decoder", [("--gpu", "4+2", "--device-decode-ms", "0.5"), ("--gpu", "sim:thunderbolt4,compute=4+2,decode=0.5")])
def test_a_card_that_decodes_helps_a_host_that_cannot_keep_up(models: Path, decoder: tuple[str, ...]) -> None:
    busy = ("--model", "net", "--stations", "6", "--fps", "15", "--duration", "5s", "--link", "thunderbolt4", "--cores", "1")
    busy = (*busy, "--decode-ms", "40")
    (alone,) = plans(models, *busy, "--gpu", "4+2", code=1)
    (helped,) = plans(models, *busy, *decoder)
    assert alone["bottleneck"] == "decode" and "decoder" not in alone["use"]
    assert helped["fps"] > 2 * alone["fps"] and helped["use"]["decoder"] > 0.1
    assert "decoder used" in run(models, *busy, *decoder) and "decoder used" not in run(models, *busy, "--gpu", "4+2", code=1)


def test_tiles_are_rows_that_cross_the_link(models: Path) -> None:
    words = ("--model", "net", "--link", "0.01", "--gpu", "8+0.01", "--source", "320x240", "--fps", "5", "--duration", "2s")
    whole, tiled = plans(models, *words)[0], plans(models, *words, "--tile", "auto")[0]
    assert tiled["use"]["link"] > 20 * whole["use"]["link"] and tiled["batch_rows"] > 1.5
    assert "expected auto or the width" in run(models, *words, "--tile", "all", code=2)


# ---------------------------------------------------------------- what was measured


def profile(spec: repository.ModelSpec, device: str, at: float, alone: float) -> Profile:
    key = Key("GPU-1", "net", spec.version, "CUDAExecutionProvider", "", 2, 1)
    link = Link(2e9, 2e9, 0.0, 0.0, 2e9, 2e9)
    costs = [BatchCost(rows, rows * alone, rows * alone, upload=0.001) for rows in (1, 16)]
    return Profile(key=key, device=device, measured_at=at, costs=costs, fixed_rows=0, memory_bytes=0, link=link)


def test_a_measurement_of_this_model_comes_before_an_estimate(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOARD_CACHE", str(tmp_path))
    spec = repository.read(models / "net")
    Store(tmp_path).put(profile(spec, "NVIDIA GeForce RTX 3060", 1e9, 0.021))
    for words in (("--gpu", "RTX 3060"), ("--gpu", "GPU-1"), ()):
        (found,) = plans(models, *STEADY, "--link", "thunderbolt4", *words)
        assert not found["estimate"] and "RTX 3060, measured here on 2001-09-" in found["basis"]["card"]
        assert found["age_p50_ms"] == pytest.approx(5 + 20 + 4e3 * HANDOVER, abs=2)  # without the link that it was measured behind
    assert plans(models, *STEADY, "--link", "thunderbolt4", "--gpu", "RTX 3070")[0]["estimate"]
    Store(tmp_path).put(profile(spec, "NVIDIA GeForce RTX 3060 Ti", 2e9, 0.011))
    assert plans(models, *STEADY, "--link", "thunderbolt4", "--gpu", "RTX 3060")[0]["estimate"]


# ---------------------------------------------------------------- traces

CSV = "t,station,bytes,width,height\n100.0,a,1000,64,48\n100.5,b,2000,32,24\n100.2,a,1500,64,48\n"


def ndjson() -> str:
    rows = [line.split(",") for line in CSV.splitlines()]
    return "\n".join(
        json.dumps({"t": float(t), "station": s, "bytes": int(b), "width": int(w), "height": int(h)}) for t, s, b, w, h in rows[1:]
    )


def test_a_trace_reads_the_same_from_both_formats_in_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    (tmp_path / "a.ndjson").write_text(ndjson())
    (tmp_path / "spreadsheet.csv").write_text(CSV, "utf-8-sig")
    assert arrivals.read(tmp_path / "spreadsheet.csv") == arrivals.read(tmp_path / "a.csv")
    frames = arrivals.read(tmp_path / "a.csv")
    assert frames == arrivals.read(tmp_path / "a.ndjson")
    assert [(round(f.t, 3), f.station, f.bytes) for f in frames] == [(0.0, "a", 1000), (0.2, "a", 1500), (0.5, "b", 2000)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("t,station,bytes,width\n1,a,1,1\n", "column 'height' is missing"),
        ("t,station,bytes,width,height\n1,a,many,1,1\n", "line 2.*bytes"),
        ("t,station,bytes,width,height\n1,a,0,1,1\n", "line 2: bytes, width and height must be at least 1"),
        ('{"t": 1, "station": "a"}\n', "line 1.*expected t"),
        ('{"t": 1, "station": "a", "bytes": 5, "width": 1, "height": 1}\n{"t": 2,\n', "line 2 is no JSON"),
        ("t,station,bytes,width,height\n", "holds no frames"),
        ("", "holds no frames"),
        ("t,station,bytes,width,height\nnan,a,1,1,1\n0,a,1,1,1\n", "line 2: t is nan"),
        ("t,station,bytes,width,height\n0,a,1,1,1\ninf,a,1,1,1\n", "line 3: t is inf"),
        ("t,station,bytes,width,height\n1764720000,a,1,1,1\n-5,a,1,1,1\n", "from -5 to 1764720000 s, at most a day"),
    ],
)
def test_a_trace_that_cannot_be_read_says_where(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError, match=says):
        arrivals.read(tmp_path / "trace")


def test_a_replay_plays_each_recorded_frame(models: Path, tmp_path: Path) -> None:
    trace = tmp_path / "burst.csv"
    frames = [f"{0.001 * i},burst,50000,640,480" for i in range(10)] + ["2.0,calm,50000,640,480"]
    trace.write_text("t,station,bytes,width,height\n" + "\n".join(frames) + "\n")
    (found,) = plans(models, "--model", "net", "--link", "thunderbolt4", "--gpu", "8+4", "--replay", str(trace), code=1)
    assert found["sent"] == 11 and 0 < found["dropped"] < 10 and found["stations"] == 2
    (lossless,) = plans(models, "--model", "net", "--link", "thunderbolt4", "--gpu", "8+4", "--replay", str(trace), "--policy", "lossless")
    assert lossless["answered"] == 11


# ---------------------------------------------------------------- counting


def test_a_convolution_is_counted_to_the_operation(models: Path) -> None:
    workload = count(repository.read(models / "net"))
    pixels = 32 * 24
    (conv,) = (layer for layer in workload.layers if layer.op == "Conv")
    assert conv.flops == 2 * pixels * 8 * 3 * 9
    assert conv.weights == 8 * 3 * 9 and conv.activations == pixels * (3 + 8)
    assert workload.unknown == []


def test_a_network_that_cannot_be_read_is_not_counted(models: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "net"
    damaged.mkdir()
    (damaged / "model.toml").write_text((models / "net" / "model.toml").read_text())
    (damaged / "net.onnx").write_bytes((models / "net" / "net.onnx").read_bytes()[:-40])
    with pytest.raises(CountError, match="net.onnx"):
        count(repository.read(damaged))


def test_a_plot_is_a_png(models: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(models, *STEADY, "--gpu", "RTX 3050", "--compare", "thunderbolt3,oculink", "--plot", str(tmp_path / "plan.png"))
    data = (tmp_path / "plan.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) < 100_000
