"""A JPEG decoded by torchvision, on a GPU by nvJPEG, and made into rows there as the host makes them.

nvJPEG decodes whole pictures only. So the picture is shrunk after that by the factor that the host's decoder would have used, the mean of
its pixels standing for what the host leaves out of the transform; all else is the host's arithmetic (imaging/fit.py, imaging/tiles.py), so
boxes lie where they lie there. Everything also runs on the CPU, where tests compare the two.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torchvision.io import ImageReadMode, decode_jpeg

from outboard.imaging import tiles
from outboard.imaging.coded import Job
from outboard.imaging.decode import check_scans
from outboard.imaging.fit import AREA_FROM, HALVE_FROM, placing
from outboard.repository import Input

Tensor = torch.Tensor

# TorchCodec, to which torchvision 0.29 points, is one dependency more, and brings FFmpeg. Where the function is gone the host decodes.
warnings.filterwarnings("ignore", message="The image decoding and encoding capabilities of TorchVision", category=DeprecationWarning)

_TURN: dict[int, Callable[[Tensor], Tensor]] = {
    2: lambda p: p.flip(-1),
    3: lambda p: p.flip(-1, -2),
    4: lambda p: p.flip(-2),
    5: lambda p: p.transpose(-1, -2),
    6: lambda p: p.transpose(-1, -2).flip(-1),
    7: lambda p: p.transpose(-1, -2).flip(-1, -2),
    8: lambda p: p.transpose(-1, -2).flip(-2),
}


def fill(job: Job, jpeg: np.ndarray, input: Input, memory: Tensor) -> None:
    """As `Job.fill`, into `memory`: uint8 [job.shape(input)] of the device that is to decode. Raises Problem, or RuntimeError for what
    cannot be decoded there."""
    picture = _decode(job, jpeg, input, memory.device)
    size = picture.shape[2], picture.shape[1]
    if input.color == "BGR":
        picture = picture.flip(0)
    if job.plan is None:
        _fit(picture, job, input, memory[0])
        return
    if job.layout is None:
        for tile, row in zip(tiles.cuts(job.plan, job.header, input, size), memory, strict=False):
            _cut(picture, tile, input, row)
        if job.plan.whole:
            _fit(picture, job, input, memory[-1])
        return
    memory[: job.layout.picture].view(size[1], size[0], 3).copy_(picture.permute(1, 2, 0))
    if job.plan.whole:
        _fit(picture, job, input, memory[job.layout.picture :].view(input.size[1], input.size[0], 3))


def _decode(job: Job, jpeg: np.ndarray, input: Input, device: torch.device) -> Tensor:
    """The upright picture, uint8 [3, h, w], as large as the host's decoder would leave it."""
    header = job.header
    check_scans(jpeg.data, header)
    data = torch.from_numpy(np.array(jpeg))  # a copy: torch refuses what it may not write to
    picture = decode_jpeg(data, mode=ImageReadMode.RGB, device=device)
    if tuple(picture.shape[1:]) != (header.coded_height, header.coded_width):
        raise RuntimeError(f"the header says {header.coded_width} x {header.coded_height} pixels, the decoder made {list(picture.shape)}")
    width, height = job.decoded_size(input)
    if header.orientation >= 5:
        width, height = height, width
    factor = next(f for f in (1, 2, 4, 8) if (-(-header.coded_width // f), -(-header.coded_height // f)) == (width, height))
    if factor > 1:
        picture = _levels(F.avg_pool2d(picture[None].float(), factor, ceil_mode=True, count_include_pad=False))[0]
    turn = _TURN.get(header.orientation)
    return turn(picture) if turn else picture


def _fit(picture: Tensor, job: Job, input: Input, out: Tensor) -> None:
    """`imaging.fit.fit`, into uint8 [height, width, 3]."""
    width, height = input.size
    p = placing(job.header, input, (picture.shape[2], picture.shape[1]))
    part = _resize(picture[:, p.rows, p.columns], p.width, p.height).permute(1, 2, 0)
    if p.cut:
        out.copy_(part[p.top : p.top + height, p.left : p.left + width])
        return
    _background(input, out)
    out[p.top : p.top + p.height, p.left : p.left + p.width] = part


def _cut(picture: Tensor, tile: tiles.Cut, input: Input, out: Tensor) -> None:
    part = picture[:, tile.top : tile.top + tile.height, tile.left : tile.left + tile.width]
    _background(input, out)
    out[tile.y : tile.y + tile.high, tile.x : tile.x + tile.wide] = _resize(part, tile.wide, tile.high).permute(1, 2, 0)


def _background(input: Input, out: Tensor) -> None:
    """In the channels' final order, which `imaging.fit` turns last."""
    out[:] = torch.tensor(input.background[:: -1 if input.color == "BGR" else 1], dtype=torch.uint8).to(out.device)


def _resize(source: Tensor, width: int, height: int) -> Tensor:
    """`imaging.fit.resize`: uint8 [3, h, w] -> [3, height, width]."""
    if (source.shape[1], source.shape[2]) == (height, width):
        return source
    values = source[None].float()
    while min(values.shape[3] / width, values.shape[2] / height) >= HALVE_FROM and not (values.shape[2] | values.shape[3]) & 1:
        values = torch.floor(F.avg_pool2d(values, 2) + 0.5)
    across, down = values.shape[3] / width, values.shape[2] / height
    if max(across, down) >= AREA_FROM and min(across, down) >= 1:
        values = _means(values.shape[2], height, values.device) @ values @ _means(values.shape[3], width, values.device).T
    else:
        values = F.interpolate(values, (height, width), mode="bilinear", align_corners=False)
    return _levels(values)[0]


def _means(length: int, wanted: int, device: torch.device) -> Tensor:
    """float [wanted, length]: the share of each pixel in the mean of those that a pixel of the result covers (OpenCV's INTER_AREA)."""
    edges = torch.linspace(0, length, wanted + 1, device=device, dtype=torch.float64)
    pixels = torch.arange(length, device=device, dtype=torch.float64)
    covered = torch.minimum(edges[1:, None], pixels + 1) - torch.maximum(edges[:-1, None], pixels)
    return (covered.clamp(min=0) * (wanted / length)).float()


def _levels(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)
