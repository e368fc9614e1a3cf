"""The examples of the README and of docs/python-client.md run as they are printed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.serverkit import Server, serving

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / ".cache" / "samples"
MODEL = ROOT / "models" / "yolov2_tiny"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (MODEL / "yolov2_tiny.onnx").is_file() or not (SAMPLES / "chelsea.jpg").is_file():
        pytest.skip("yolov2_tiny and the samples were not fetched; run `make models`")
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(MODEL, models / MODEL.name)
    with serving(models) as server:
        yield server


def run(code: str, server: Server) -> str:
    env = {**os.environ, "OUTBOARD_URL": server.url}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readmes_example_has_at_most_ten_lines_and_finds_the_cat(detector: Server) -> None:
    (code,) = [block for block in blocks("README.md") if "outboard_client" in block]
    assert len(code.splitlines()) <= 10
    printed = run(code, detector)
    assert "cat 0." in printed and ".cache/samples/coffee.jpg Answer(" in printed


def test_the_pages_examples_run(detector: Server) -> None:
    images, streams = blocks("docs/python-client.md")
    assert "cat 0." in run(images, detector)
    printed = run(streams, detector)
    assert "Detection(label='cat'" in printed and "dropped={}" in printed and "unanswered=0" in printed
