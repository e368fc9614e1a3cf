"""Peak rates of common cards, as their vendor publishes them, and where.

fp32 is 2 x CUDA cores x boost clock. fp16 is the tensor cores' dense rate with fp32 accumulation, which is what cuDNN uses: on GeForce
cards half the rate that advertisements name, and a quarter of it with their sparsity.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

_COMPARE = "NVIDIA, Compare GeForce graphics cards, nvidia.com/en-us/geforce/graphics-cards/compare (cores, boost clock, memory)"
_GA102 = "NVIDIA Ampere GA102 GPU Architecture, whitepaper V2.0"
_ADA = "NVIDIA Ada GPU Architecture, whitepaper V2.01"
_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture, whitepaper V1.0"


@dataclass(frozen=True, slots=True)
class Card:
    """Rates in operations and bytes a second; `vram` in bytes."""

    name: str
    cores: int
    boost: float  #: Hz
    fp16_ratio: float  #: the tensor cores' fp16 rate over fp32's
    bandwidth: float
    vram: int
    source: str

    @property
    def fp32(self) -> float:
        return 2 * self.cores * self.boost

    @property
    def fp16(self) -> float:
        return self.fp16_ratio * self.fp32


def _card(name: str, cores: int, boost_mhz: int, fp16_ratio: float, gb_per_s: float, gib: int, source: str) -> Card:
    return Card(name, cores, boost_mhz * 1e6, fp16_ratio, gb_per_s * 1e9, gib << 30, source)


CARDS: tuple[Card, ...] = (
    _card("RTX 3050", 2560, 1777, 2, 224, 8, _COMPARE),
    _card("RTX 3060", 3584, 1777, 2, 360, 12, _COMPARE),
    _card("RTX 3060 Ti", 4864, 1665, 2, 448, 8, _COMPARE),
    _card("RTX 3070", 5888, 1725, 2, 448, 8, _GA102),
    _card("RTX 3080", 8704, 1710, 2, 760, 10, _GA102),
    _card("RTX 3090", 10496, 1695, 2, 936, 24, _GA102),
    _card("RTX 4060", 3072, 2460, 2, 272, 8, _COMPARE),
    _card("RTX 4060 Ti", 4352, 2535, 2, 288, 8, _COMPARE),
    _card("RTX 4070", 5888, 2475, 2, 504, 12, _COMPARE),
    _card("RTX 4070 Ti", 7680, 2610, 2, 504, 12, _COMPARE),
    _card("RTX 4080", 9728, 2505, 2, 717, 16, _ADA),
    _card("RTX 4090", 16384, 2520, 2, 1008, 24, _ADA),
    _card("RTX 5060 Ti", 4608, 2572, 2, 448, 16, _COMPARE),
    _card("RTX 5070", 6144, 2512, 2, 672, 12, _BLACKWELL),
    _card("RTX 5070 Ti", 8960, 2452, 2, 896, 16, _BLACKWELL),
    _card("RTX 5080", 10752, 2617, 2, 960, 16, _BLACKWELL),
    _card("RTX 5090", 21760, 2407, 2, 1792, 32, _BLACKWELL),
    _card("RTX A2000", 3328, 1200, 4, 288, 6, "NVIDIA RTX A2000 datasheet: 8.0 TFLOPS fp32, 63.9 tensor with sparsity"),
    _card("RTX A4000", 6144, 1560, 4, 448, 16, "NVIDIA RTX A4000 datasheet: 19.2 TFLOPS fp32, 153.4 tensor with sparsity"),
    _card("L4", 7424, 2040, 4, 300, 24, "NVIDIA L4 datasheet: 30.3 TFLOPS fp32, 242 fp16 tensor with sparsity"),
    _card("T4", 2560, 1590, 8, 300, 16, "NVIDIA T4 Tensor Core GPU datasheet: 8.1 TFLOPS fp32, 65 fp16 tensor"),
    _card("H200", 16896, 1980, 14.8, 4800, 141, "NVIDIA H200 datasheet (SXM): 67 TFLOPS fp32, 1,979 fp16 tensor with sparsity"),
)


def _plain(name: str) -> str:
    """ "NVIDIA GeForce RTX 3060" -> "rtx3060"."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return "".join(w for w in words if w not in ("nvidia", "geforce", "quadro", "tesla", "gpu", "sxm"))


def find(name: str) -> Card:
    """The card of that name, with or without the vendor's words. Raises ValueError with the nearest ones."""
    wanted = _plain(name)
    by_name = {_plain(c.name): c for c in CARDS}
    for prefix in ("", "rtx"):
        if card := by_name.get(prefix + wanted):
            return card
    near = difflib.get_close_matches(wanted, by_name, n=3, cutoff=0.6) or [key for key in by_name if wanted and wanted in key]
    hint = f"did you mean {', '.join(by_name[key].name for key in near)}?" if near else "known are " + ", ".join(c.name for c in CARDS)
    raise ValueError(f"{name!r} is no card whose rates are known here; {hint}")
