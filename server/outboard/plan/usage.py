"""Words of the command line as values: times, sizes, names of models."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from outboard import repository
from outboard.repository import ModelSpec, Network

if TYPE_CHECKING:
    from outboard.imaging.tiles import Tiling

T = TypeVar("T")

SOURCES = {"4k": (3840, 2160), "1080p": (1920, 1080), "720p": (1280, 720)}
#: Bytes of a JPEG for each pixel: a 4K photograph of quality 88 has 1.55 MB.
JPEG_BYTES_PER_PIXEL = 1.55e6 / (3840 * 2160)


class Usage(ValueError):
    """What was asked cannot be planned; the text says what was expected."""


def checked(option: str, convert: Callable[[str], T], text: str) -> T:
    """What `convert` makes of an option's text. Raises Usage."""
    try:
        return convert(text)
    except ValueError as e:
        raise Usage(f"{option}: {e}") from e


def seconds(option: str, text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|min)?\s*", text)
    value = float(match[1]) * {"ms": 1e-3, "s": 1.0, "min": 60.0, None: 1.0}[match[2]] if match else 0.0
    if not 0 < value <= 3600:
        raise Usage(f"{option} is {text!r}, expected a time such as 200ms, 0.2s or 2min, at most an hour")
    return value


def size(source: str) -> tuple[int, int]:
    """(width, height) in pixels."""
    if source.lower() in SOURCES:
        return SOURCES[source.lower()]
    match = re.fullmatch(r"(\d{1,5})[xX](\d{1,5})", source)
    if not match or int(match[1]) < 1 or int(match[2]) < 1:
        raise Usage(f"--source is {source!r}, expected {', '.join(SOURCES)} or a size such as 2560x1440")
    return int(match[1]), int(match[2])


def tiling(tile: str) -> Tiling | None:
    """What `tile` of a request would be: auto, or the width of a tile in pixels; None: the whole picture is one row."""
    if not tile:
        return None
    from outboard.imaging.tiles import LARGEST, SMALLEST, Tiling

    if tile != "auto" and not (tile.isdecimal() and SMALLEST <= int(tile) <= LARGEST):
        raise Usage(f"--tile is {tile!r}, expected auto or the width of a tile in pixels, {SMALLEST} to {LARGEST}")
    return Tiling(size=0 if tile == "auto" else int(tile))


def usual_bytes(width: int, height: int) -> int:
    """Of a JPEG of this size."""
    return max(1, round(width * height * JPEG_BYTES_PER_PIXEL))


def batch_and_row(text: str) -> tuple[float, float] | None:
    """ "8+4": milliseconds a batch and a row -> seconds; None for other texts."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\+(\d+(?:\.\d+)?)\s*", text)
    if not match:
        return None
    batch, row = float(match[1]) / 1e3, float(match[2]) / 1e3
    if batch + row <= 0:
        raise Usage(f"--gpu {text}: expected milliseconds a batch + milliseconds a row, such as 4+2, not both 0")
    return batch, row


def model(root: Path, wanted: str) -> tuple[ModelSpec, Network]:
    """The network that MODEL or MODEL/PART names. Raises Usage, ModelProblem."""
    name, _, part = wanted.partition("/")
    known = repository.names(root) if root.is_dir() else []
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3) or [k for k in known if name and name in k]
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(known) or 'none at all'}; --models names another"
        raise Usage(f"--model: {root} has no model {name!r}; {hint}")
    spec = repository.read(root / name)
    if part not in spec.networks:
        said = f"has no part {part!r}; expected one of " if part else "has several networks, name one: "
        raise Usage(f"--model: {name} {said}" + ", ".join(n.key for n in spec.networks.values()))
    network = spec.networks[part]
    if network.input is None:
        raise Usage(f"--model: {wanted} takes tensors, not images; a plan is for frames that are decoded and fitted")
    return spec, network
