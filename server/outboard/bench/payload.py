"""What a benchmark sends: photographs given or drawn, and for models of tensors, numbers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from outboard.bench.load import Request

#: The protocol's types that a random number can be made of.
_DTYPES = {
    "BOOL": "?", "INT8": "i1", "INT16": "i2", "INT32": "i4", "INT64": "i8", "UINT8": "u1", "UINT16": "u2", "UINT32": "u4", "UINT64": "u8",
    "FP16": "f2", "FP32": "f4", "FP64": "f8",
}  # fmt: skip


class NoPayload(ValueError):
    """There is nothing that could be sent; the text says why."""


def photographs(url: str, model: str, files: list[Path], size: tuple[int, int], options: str, key: dict[str, str]) -> list[Request]:
    """One request for each file, or one with a drawn picture of `size`. Raises NoPayload."""
    target = f"{url}/v1/models/{quote(model, safe='')}/predict" + (f"?{options}" if options else "")
    try:
        bodies = [file.read_bytes() for file in files] or [drawn(*size)]
    except OSError as e:
        raise NoPayload(f"{e.filename}: {e.strerror}") from e
    return [Request(target, body, {"content-type": "application/octet-stream", **key}) for body in bodies]


def drawn(width: int, height: int) -> bytes:
    """A JPEG with about as many bytes a pixel as a photograph has (0.19): smooth shapes under some noise. The same each time."""
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (max(2, height // 64), max(2, width // 64), 3), np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noise = random.normal(0, 5, (height, width, 1))
    out = io.BytesIO()
    Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def tensors(url: str, model: str, inputs: list[dict[str, Any]], key: dict[str, str]) -> list[Request]:
    """One request with random numbers, by the binary extension; free axes are 1. `inputs` as /v2/models/{model} lists them. Raises
    NoPayload."""
    random = np.random.default_rng(0)
    entries, pieces = [], []
    for tensor in inputs:
        shape = [max(1, int(axis)) for axis in tensor["shape"]]
        if (dtype := _DTYPES.get(tensor["datatype"])) is None:
            raise NoPayload(f"{model} takes {tensor['datatype']} as {tensor['name']!r}: there are no numbers for it; use tritonclient")
        values = random.random(shape) if dtype[0] == "f" else random.integers(0, 2, shape)
        data = values.astype(dtype).tobytes()
        entries.append({**{k: tensor[k] for k in ("name", "datatype")}, "shape": shape, "parameters": {"binary_data_size": len(data)}})
        pieces.append(data)
    header = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    headers = {"inference-header-content-length": str(len(header)), "content-type": "application/octet-stream", **key}
    return [Request(f"{url}/v2/models/{quote(model, safe='')}/infer", header + b"".join(pieces), headers)]
