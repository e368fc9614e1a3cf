"""Task "tensor": any network's outputs as JSON, in the form of the Open Inference Protocol's `InferTensor`."""

from __future__ import annotations

from typing import Any

import numpy as np

from outboard.problems import Problem
from outboard.repository import ModelSpec
from outboard.tasks.options import Options
from outboard.tasks.results import Tensors

#: numpy's dtype name -> the protocol's (arrays of objects hold bytes).
#: https://github.com/kserve/open-inference-protocol, "Tensor Data Types"
DATATYPES: dict[str, str] = {
    "bool": "BOOL",
    **{f"uint{n}": f"UINT{n}" for n in (8, 16, 32, 64)},
    **{f"int{n}": f"INT{n}" for n in (8, 16, 32, 64)},
    **{f"float{n}": f"FP{n}" for n in (16, 32, 64)},
    "bfloat16": "BF16",
    "object": "BYTES",
}


def tensor(outputs: dict[str, np.ndarray], spec: ModelSpec, options: Options) -> Tensors:
    """One row's outputs, unchanged. Raises Problem `inference_failed` for a dtype that the protocol has no name for."""
    for name, array in outputs.items():
        if array.dtype.name not in DATATYPES:
            known = ", ".join(DATATYPES)
            raise Problem(
                "inference_failed", f"{spec.name}: output {name!r} is {array.dtype.name}; expected one of {known}. Cast it in the model."
            )
    return Tensors(outputs=outputs)


def json_values(array: np.ndarray) -> tuple[list[Any], int]:
    """Flat values in row-major order, and how many are null: JSON has no word for NaN and infinity.

    Numbers are exact: what is shorter than float64 is written as the double of the same value. Raises Problem `not_acceptable` for
    strings that are not UTF-8.
    """
    flat = array.reshape(-1)
    if flat.dtype.kind == "O":
        try:
            return [s.decode() for s in flat], 0
        except UnicodeDecodeError as e:
            raise Problem("not_acceptable", "an output holds bytes that are not UTF-8, which JSON cannot carry; ask for binary data") from e
    if flat.dtype.name == "bfloat16":
        flat = flat.astype(np.float32)
    data = flat.tolist()
    if flat.dtype.kind != "f" or np.isfinite(flat).all():
        return data, 0
    holes = np.flatnonzero(~np.isfinite(flat)).tolist()
    for i in holes:
        data[i] = None
    return data, len(holes)


def tensor_body(outputs: dict[str, np.ndarray]) -> dict[str, Any]:
    """`{"outputs": [{"name", "datatype", "shape", "data"}]}`, and `"non_finite": n` where JSON had to say null for NaN or infinity."""
    listed: list[dict[str, Any]] = []
    total = 0
    for name, array in outputs.items():
        data, holes = json_values(array)
        total += holes
        listed.append({"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape), "data": data})
    return {"outputs": listed, "non_finite": total} if total else {"outputs": listed}
