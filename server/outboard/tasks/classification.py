"""Decoders for classifiers: one row of scores [classes] -> the best `Classes`."""

from __future__ import annotations

import math

import numpy as np

from outboard.problems import Problem
from outboard.repository import ModelSpec
from outboard.tasks.options import Options
from outboard.tasks.results import Classes


def logits(outputs: dict[str, np.ndarray], spec: ModelSpec, options: Options) -> Classes:
    """The first output, of one value for each class, any shape: its softmax. A NaN or infinite logit has no share in it."""
    values = _first(outputs, spec).astype(np.float32, copy=True)
    best, worst = values.max(), values.min()
    if options.min_score is None and math.isfinite(float(best) - float(worst)):
        # The usual case, in as few passes as it takes: this runs on the event loop for every small picture.
        count = min(options.top_k or spec.toml.output.top_k, values.size)
        order = _largest(values, count)
        values -= best
        np.exp(values, out=values)
        return Classes(class_ids=order, scores=values[order] / values.sum())
    broken = ~np.isfinite(values)
    values[broken] = -np.inf
    best = values.max()
    if np.isfinite(best):
        with np.errstate(over="ignore"):  # a difference beyond float32 is minus infinity, and its share rightly 0
            values -= best
        np.exp(values, out=values)
        values /= values.sum()
    return _best(values, broken, spec, options)


def probabilities(outputs: dict[str, np.ndarray], spec: ModelSpec, options: Options) -> Classes:
    """The first output, of one value for each class, any shape, as it is: a softmax or sigmoids are in the network."""
    values = _first(outputs, spec).astype(np.float32, copy=False)
    return _best(values, ~np.isfinite(values), spec, options)


def _first(outputs: dict[str, np.ndarray], spec: ModelSpec) -> np.ndarray:
    values = next(iter(outputs.values())).reshape(-1)
    if not values.size:
        raise Problem("inference_failed", f"{spec.name}: the classifier gave no values; expected one for each class")
    return values


def _best(values: np.ndarray, broken: np.ndarray, spec: ModelSpec, options: Options) -> Classes:
    """At most `top_k` (model.toml's if the request has none), only those that reach the request's `min_score`; equal ones by class id."""
    non_finite = int(np.count_nonzero(broken))
    if non_finite:
        values = np.where(broken, -np.inf, values)
    count = min(options.top_k or spec.toml.output.top_k, values.size - non_finite)
    order = _largest(values, count)
    if options.min_score is not None:  # a classifier always has an answer, so `[output] min_score` is for detectors
        order = order[values[order] >= options.min_score]
    return Classes(class_ids=order, scores=values[order], non_finite=non_finite)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` largest, largest first, equal ones by index."""
    if 0 < count < values.size:  # argpartition is free to choose among equals: all that reach the last one's value are candidates
        at = values.size - count
        candidates = (values >= np.partition(values, at)[at]).nonzero()[0]
    else:
        candidates = np.arange(values.size)
    return candidates[(-values[candidates]).argsort(kind="stable")][:count]
