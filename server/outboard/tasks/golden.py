"""Whether two devices agree on a golden input."""

from __future__ import annotations

import numpy as np

from outboard import tasks
from outboard.repository import DECODERS, ModelSpec


def agree(reference: dict[str, np.ndarray], got: dict[str, np.ndarray], spec: ModelSpec) -> str:
    """Compare outputs (batch of 1) with the CPU's. Returns "" or a sentence that says what differs.

    Values: largest difference at most `rtol` x the reference's largest magnitude. Detectors: the same boxes by class, at
    IoU and score tolerances of `[golden]`; only where their raw outputs differ by more than `rtol` are they decoded.
    """
    rtol = spec.rtol
    why = ""
    for name, want in reference.items():
        have = got.get(name)
        if have is None or have.shape != want.shape:
            return f"output {name!r} has shape {None if have is None else have.shape}, expected {want.shape}"
        if want.dtype.name == "bfloat16":
            want, have = want.astype(np.float32), have.astype(np.float32)
        if not np.issubdtype(want.dtype, np.floating):
            if not np.array_equal(want, have):
                why = why or f"output {name!r} differs in {int((want != have).sum())} of {want.size} values"
            continue
        if not np.array_equal(np.isfinite(want), np.isfinite(have)):
            return f"output {name!r} has other non-finite values"
        scale = float(np.max(np.abs(want), initial=0.0, where=np.isfinite(want))) or 1.0
        worst = float(np.max(np.abs(want.astype(np.float64) - have), initial=0.0, where=np.isfinite(want))) / scale
        if worst > rtol:
            why = why or f"output {name!r} differs by {worst:.2g} relative, at most {rtol:g} allowed"
    if why and DECODERS[spec.toml.output.decoder] == "detection":
        return _same_boxes(reference, got, spec)
    return why


def plausible(got: dict[str, np.ndarray]) -> str:
    """For want of a reference: "", or why the outputs cannot be right, which some numbers that are finite must be."""
    for name, array in got.items():
        if array.size and np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).any():
            return f"output {name!r} has no finite value"
    return ""


def _same_boxes(reference: dict[str, np.ndarray], got: dict[str, np.ndarray], spec: ModelSpec) -> str:
    decoder = spec.toml.output.decoder
    decode = tasks.DECODERS[decoder].decode
    want, have = (decode(tasks.rows(decoder, outputs, 1)[0], spec, tasks.Options()) for outputs in (reference, got))
    tolerance = spec.toml.golden
    if len(want.scores) != len(have.scores):
        return f"{len(have.scores)} boxes, expected {len(want.scores)}"
    left = list(range(len(have.scores)))
    for i in range(len(want.scores)):
        match = next(
            (
                j
                for j in left
                if have.class_ids[j] == want.class_ids[i]
                and abs(float(have.scores[j] - want.scores[i])) <= tolerance.score
                and _iou(want.boxes[i], have.boxes[j]) >= tolerance.iou
            ),
            None,
        )
        if match is None:
            limits = f"IoU {tolerance.iou}, score within {tolerance.score}"
            return f"box {i} of class {want.class_ids[i]} (score {want.scores[i]:.3f}) has no counterpart at {limits}"
        left.remove(match)
    return ""


def _iou(a: np.ndarray, b: np.ndarray) -> float:
    x1, y1, x2, y2 = max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])
    shared = max(0.0, float(x2 - x1)) * max(0.0, float(y2 - y1))
    return shared / (float((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])) - shared + 1e-9)
