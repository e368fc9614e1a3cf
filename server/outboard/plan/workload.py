"""What a network asks of a device for one row: operations and bytes, layer by layer."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from outboard.repository import ModelSpec


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """A convolution, a matrix product, or a step that only moves data. Elementwise steps are part of the layer before them."""

    op: str
    flops: float  #: of one row; a multiplication and an addition are two
    weights: int  #: elements that are read once for a batch
    activations: int  #: elements that are read and written for each row


class Workload(msgspec.Struct, frozen=True):
    """A network, counted. The row is what crosses the link: uint8 pixels."""

    layers: list[Layer]
    answer_bytes: int  #: of one row's outputs
    parameters: int  #: elements that the device holds
    peak: int  #: elements of the largest layer's input and output, for one row
    unknown: list[str]  #: steps whose shapes the graph does not tell: not counted

    @property
    def flops(self) -> float:
        return sum(layer.flops for layer in self.layers)


class CountError(ValueError):
    """The network cannot be counted; the text says why."""


def count(spec: ModelSpec, part: str = "") -> Workload:
    """Count a network, in a process of its own: reading a graph takes a library that this process does without. Raises CountError."""
    command = [sys.executable, "-m", "outboard.worker.count", str(spec.directory.absolute()), part]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise CountError(lines[-1] if lines else f"counting {spec.name} ended with status {done.returncode}")
    return msgspec.json.decode(done.stdout, type=Workload)
