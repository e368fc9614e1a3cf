"""Tensors as JSON: large ones are read some at a time, and give what they give as a whole."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from outboard.oip.json_tensors import AT_ONCE, decode
from outboard.problems import Problem


def read(values: object, shape: tuple[int, ...], datatype: str = "FP32", **how: object) -> memoryview:
    text = json.dumps(values, **how).encode()
    assert len(text) > AT_ONCE, "too short to be read in parts"
    return decode("x", datatype, shape, msgspec.Raw(text))


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("shape", [(90_000,), (3, 224, 224), (40_000, 5, 1), (1, 1, 60_000)])
def test_numbers_flat_and_nested(shape: tuple[int, ...], separators: tuple[str, str]) -> None:
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    for values in (x.tolist(), x.reshape(-1).tolist()):
        np.testing.assert_array_equal(np.frombuffer(read(values, shape, separators=separators), np.float32).reshape(shape), x)


def test_other_types() -> None:
    rng = np.random.default_rng(2)
    whole = rng.integers(-(2**63), 2**63 - 1, 100_000)
    np.testing.assert_array_equal(np.frombuffer(read(whole.tolist(), whole.shape, "INT64"), np.int64), whole)
    yes = rng.integers(0, 2, 100_000).astype(bool)
    np.testing.assert_array_equal(np.frombuffer(read(yes.tolist(), yes.shape, "BOOL"), bool), yes)
    assert np.isnan(np.frombuffer(read([None] * 100_000, (100_000,)), np.float32)).all()
    words = [f"word {i}, [{i}]" for i in range(30_000)]
    packed = read(words, (30_000,), "BYTES")
    assert bytes(packed[-len(words[-1]) :]).decode() == words[-1] and len(packed) == sum(4 + len(w) for w in words)


@pytest.mark.parametrize(
    ("values", "shape", "said"),
    [
        ([1.5] * 99_999, (100_000,), "99999 values, expected 100000"),
        ([1.5] * 100_001, (100_000,), "100001 values, expected 100000"),
        ([1.5] * 99_999 + [True], (100_000,), "holds True"),
        ([1.5] * 99_999 + ["1"], (100_000,), "holds '1'"),
        ([1.5] * 99_999 + [{"a": 1}], (100_000,), "holds {'a': 1}"),
        ([[1.5, 2.5]] * 49_999 + [1.5, 2.5], (50_000, 2), "a list where another element is none"),
    ],
)
def test_what_is_wrong_is_named(values: object, shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(Problem) as e:
        read(values, shape)
    assert e.value.slug == "bad_input" and said in e.value.detail
