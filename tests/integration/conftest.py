"""A server over small graphs whose answers are known, shared by the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import graphs
from integration.oipkit import OipServer, oip_serving, repository
from integration.serverkit import Server, serving


def small_models(folder: Path) -> Path:
    """A repository: finders of coloured blocks, channel means in both colour orders, and models that misbehave."""
    for layout in ("yolov8", "end2end_batch_column", "boxes_single"):
        graphs.write_model(
            folder, f"finder_{layout}", graphs.block_finder(layout), graphs.toml("detection", graphs.FORMATS[layout], (320, 320))
        )
    means = graphs.channel_means((32, 32))
    graphs.write_model(folder, "rgb", means, graphs.toml("tensor", "tensor", (32, 32), input='fit = "stretch"'))
    graphs.write_model(folder, "bgr", means, graphs.toml("tensor", "tensor", (32, 32), input='fit = "stretch"\ncolor = "BGR"'))
    graphs.write_model(folder, "one", graphs.fixed_batch(1), graphs.toml("tensor", "tensor", (32, 32)))
    graphs.write_model(folder, "four", graphs.fixed_batch(4), graphs.toml("tensor", "tensor", (32, 32)))
    graphs.write_model(folder, "strange", graphs.nan_model(), graphs.toml("tensor", "tensor", (32, 32)))
    graphs.write_model(folder, "picky", graphs.divides_by_zero_rows(), graphs.toml("tensor", "tensor", (32, 32)))
    graphs.write_model(folder, "slow", graphs.sleeper(150), graphs.toml("tensor", "tensor", (32, 32), rest="[batching]\nmax = 1"))
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(small_models(tmp_path_factory.mktemp("models"))) as running:
        yield running


@pytest.fixture(scope="session")
def oip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OipServer]:
    """A server over tensor models that speaks the Open Inference Protocol by HTTP and gRPC."""
    with oip_serving(repository(tmp_path_factory.mktemp("oip"))) as running:
        yield running
