"""An exported network takes batches of any size, or is not exported (M09)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
from torch import nn  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "models" / "export.py"
SIZE = (24, 16)


@pytest.fixture(scope="module")
def export():
    spec = importlib.util.spec_from_file_location("models_export", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Small(nn.Module):
    """A convolution, a norm, a head: [N, 5]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2))
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.rows(self.body(x)))

    def rows(self, x):
        return x.flatten(1)


class TwoRows(Small):
    """Made for batches of two, whatever comes."""

    def rows(self, x):
        return x.reshape(2, -1)[:, :32]


class LoopedRows(Small):
    """Right in torch for any batch; exporters unroll the loop as often as the example has rows."""

    def rows(self, x):
        return torch.stack([row.reshape(-1) for row in x])


class TwoHeads(Small):
    def forward(self, x):
        body = self.body(x)
        return {"logits": self.head(self.rows(body)), "map": body}


def answers_onnx(path: Path, images) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"images": images.numpy()})


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_an_exported_onnx_answers_batches_of_any_size_like_the_module(export, tmp_path, rows):
    path = tmp_path / "new" / "small.onnx"
    export.export_onnx(Small(), SIZE, path)
    images = torch.rand(rows, 3, SIZE[1], SIZE[0])
    with torch.no_grad():
        np.testing.assert_allclose(answers_onnx(path, images)[0], Small().eval()(images).numpy(), rtol=1e-3, atol=1e-5)
    assert [p.name for p in path.parent.iterdir()] == ["small.onnx"]


def test_an_exported_archive_answers_batches_of_any_size_like_the_module(export, tmp_path):
    export.export_pt2(Small(), SIZE, tmp_path / "small.pt2")
    program = torch.export.load(tmp_path / "small.pt2").module()
    for rows in (1, 2, 5):
        images = torch.rand(rows, 3, SIZE[1], SIZE[0])
        with torch.no_grad():
            torch.testing.assert_close(program(images), Small().eval()(images))


def test_outputs_are_called_by_the_modules_keys(export, tmp_path):
    export.export_onnx(TwoHeads(), SIZE, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert [(o.name, o.shape[0]) for o in session.get_outputs()] == [("logits", "batch"), ("map", "batch")]


@pytest.mark.parametrize("kind", ["onnx", "pt2"])
@pytest.mark.parametrize(("module", "why"), [(TwoRows, "module itself fails on a batch of 1"), (LoopedRows, "frozen at 2|batch axis free")])
def test_a_module_that_freezes_the_batch_is_refused_and_the_old_file_stays(export, tmp_path, kind, module, why):
    path = tmp_path / f"m.{kind}"
    path.write_bytes(b"the file of before")
    with pytest.raises(export.ExportError, match=why) as caught:
        (export.export_onnx if kind == "onnx" else export.export_pt2)(module(), SIZE, path)
    assert "x.flatten(1)" in str(caught.value)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"the file of before"]


def test_the_command_exports_or_says_why_not(export, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "exported_here.py").write_text(
        "from torch import nn\n"
        "def build(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())\n"
        "def frozen(): return nn.Flatten(0)\n"
    )
    size = ["--size", "24", "16"]
    assert export.main(["exported_here:build", *size, "--out", "out/mine.onnx"]) == 0
    assert answers_onnx(tmp_path / "out" / "mine.onnx", torch.rand(3, 3, 16, 24))[0].shape == (3, 4)
    assert export.main(["exported_here:frozen", *size, "--out", "frozen.onnx"]) == 1
    assert "the module itself answers a batch of 1 with output 0 of shape [1152]; expected 1 rows" in capsys.readouterr().err
    assert export.main(["exported_here:missing", *size, "--out", "frozen.onnx"]) == 1
    assert "'exported_here:missing' cannot be imported" in capsys.readouterr().err
    assert not (tmp_path / "frozen.onnx").exists()
