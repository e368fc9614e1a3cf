"""What a batch may cost on a card that is not here: for each layer the slower of arithmetic and memory, at a range of efficiency.

The range comes from published measurements: results/benchmark-infer-amp-nchw-*.csv of huggingface/pytorch-image-models (images a second of
hundreds of networks in fp16; RTX 3090 and 4090 with torch 2.4, 5090 with 2.9). Divided by the cards' peak rates they give

| | arithmetic: resnet18, resnet34, vit_small | memory: efficientnet_lite0, mobilenetv2_100 |
|---|---|---|
| eager, RTX 3090 | 0.47, 0.56, 0.59 | 0.23, 0.25 |
| eager, RTX 5090 | 0.35, 0.43, 0.48 | 0.23, 0.25 |
| compiled, RTX 4090 | 0.57, 0.68, 0.54 | 0.48, 0.50 |
| compiled, RTX 5090 | 0.62, 0.72, - | 0.41, 0.41 |

where memory counts each layer's input and output once. ONNX Runtime joins elementwise steps to the layer before them, as compiled torch
does, but not all of them, so it lies between. A network is the mean of its layers and one of them may do better: the upper ends are
rounded up. In fp32 the same share of the fp32 peak is assumed; no comparable measurements were found.
"""

from __future__ import annotations

from dataclasses import dataclass

from outboard.plan.cards import Card
from outboard.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of a card's peak rates, and the host's seconds to start one layer."""

    arithmetic: float
    memory: float
    launch: float


#: A launch takes 6.4 µs (ahrefs/ocannl issue 488, RTX 5070 Ti); with a framework's own work for each layer 45 µs (facebookresearch/sam2
#: issue 768: 1,185 launches in 53.7 ms, of which the GPU was busy for 7.3).
WORST = Efficiency(0.35, 0.20, 45e-6)
BEST = Efficiency(0.75, 0.60, 6.4e-6)

RANGE = (
    f"{WORST.arithmetic:.0%}-{BEST.arithmetic:.0%} of its peak arithmetic, {WORST.memory:.0%}-{BEST.memory:.0%} of its memory bandwidth, "
    f"{BEST.launch * 1e6:.0f}-{WORST.launch * 1e6:.0f} µs to start a layer"
)

#: Bytes of an element, by precision.
_ITEM = {"fp32": 4, "fp16": 2, "bf16": 2}
#: A CUDA context and the libraries' own memory: 320 MB and more stay with an ORT session (microsoft/onnxruntime issues 20548, 17142).
CONTEXT_BYTES = 500 << 20
#: A graph's memory holds more than its largest layer: results that later layers still need, and workspace of convolutions.
PEAK_COPIES = 3
#: Left to the desktop and other programs.
HEADROOM_BYTES = 1 << 30


def seconds(workload: Workload, card: Card, precision: str, efficiency: Efficiency, rows: int) -> float:
    """Of a batch of `rows`, without the link."""
    item = _ITEM[precision]
    peak = (card.fp32 if precision == "fp32" else card.fp16) * efficiency.arithmetic
    bandwidth = card.bandwidth * efficiency.memory
    busy = sum(
        max(layer.flops * rows / peak, (layer.weights + layer.activations * rows) * item / bandwidth) for layer in workload.layers
    )
    return max(busy, len(workload.layers) * efficiency.launch)  # launches run ahead of the GPU until they are what it waits for


def most_rows(workload: Workload, card: Card, precision: str) -> int:
    """The largest batch that fits the card's memory; 0: not even one row does. An estimate."""
    item = _ITEM[precision]
    free = card.vram - CONTEXT_BYTES - HEADROOM_BYTES - workload.parameters * item
    return max(0, int(free // max(1, workload.peak * PEAK_COPIES * item)))
