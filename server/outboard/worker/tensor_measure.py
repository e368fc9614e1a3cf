"""Proving and measuring a tensor network before it serves: inputs that it takes, what its first axis means, cost of each batch size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from outboard.devices.protocol import Slot
from outboard.devices.rows import BFLOAT16, BYTES, lay_out, pack, room_for
from outboard.repository import ModelProblem
from outboard.worker import measure
from outboard.worker.networks import Port
from outboard.worker.tensors import TensorNetwork

log = logging.getLogger(__name__)

#: Lengths tried for free axes (all of them the same), until the network takes the input.
FREE_AXES = (16, 1, 2, 4, 8, 3, 32, 64, 128, 224, 256, 512)
#: A row's arrays, by input.
Row = dict[str, np.ndarray]
Answers = dict[str, np.ndarray]


def prove(network: TensorNetwork, slots: int, known: measure.Costs | None, budget_s: float) -> tuple[Answers, measure.Costs]:
    """The golden answers (of one row, or of a whole request) and what batches cost. Decides whether the first axis is the batch.
    Raises ModelProblem where golden.npz disagrees or no input is found that the network takes."""
    row, expected = _golden(network)
    answers = _run(network, [row])
    for name, want in expected.items():
        if name not in answers:
            raise _bad_golden(network, f"inputs and outputs named {sorted(answers)}", f"it has {name!r}")
        if difference := disagreement(answers[name], want, network.spec.rtol):
            raise _bad_golden(network, f"output {name!r} as stored", difference)
    shapes, _, _ = _placed(network, [row])

    def batch(n: int) -> Callable[[], object]:
        shape, memory, offsets = _placed(network, [_moved(row, i) for i in range(n)])
        return lambda: network.run(memory, offsets, shape)

    # Exports from scikit-learn and others leave an output's shape out: what its axes are called is unknown, how many there are is not.
    network.backend.outputs = [
        (name, dtype, shape if len(shape) == answers[name].ndim else ["?"] * answers[name].ndim)
        for name, dtype, shape in network.backend.outputs
    ]
    return answers, measure.costs(network, batch, sum(slot.nbytes for slot in shapes), slots, known, budget_s)


def disagreement(got: np.ndarray, want: np.ndarray, relative: float) -> str:
    """As `measure.disagreement`, for strings and bfloat16 too."""
    if got.dtype.kind == "O" or want.dtype.kind in "OSU":
        same = got.shape == want.shape and [_text(x) for x in got.reshape(-1)] == [_text(x) for x in want.reshape(-1)]
        return "" if same else "other strings"
    return measure.disagreement(got, want, relative)


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


# ---------------------------------------------------------------- golden inputs


def _golden(network: TensorNetwork) -> tuple[Row, Answers]:
    """A row that the network takes, from golden.npz or made up, and the stored outputs. Settles `network.whole`."""
    path = network.spec.directory / "golden.npz"
    if path.is_file():
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            inputs = {name: arrays.pop(name) for name, _, _ in network.backend.inputs}
        except (OSError, ValueError, KeyError) as e:
            raise _bad_golden(network, "an .npz with each input and the outputs by name, with the batch axis", str(e)) from e
        for name, dtype, shape in network.backend.inputs:
            wanted = "str or bytes" if dtype == BYTES else dtype
            if inputs[name].ndim != len(shape) or not (
                inputs[name].dtype.kind in "OSU" if dtype == BYTES else inputs[name].dtype.name == dtype
            ):
                got = f"it is {inputs[name].dtype} {list(inputs[name].shape)}"
                raise _bad_golden(network, f"input {name!r} as {wanted} {shape}", got)
        if not network.whole and any(len(array) != 1 for array in inputs.values()):
            network.run_whole("golden.npz holds more than one row")
        row = inputs if network.whole else {name: array[0] for name, array in inputs.items()}
        why = "" if network.whole else _not_a_batch(network, row)
        if why:
            network.run_whole(why)
            row = inputs
        return row, arrays
    why = ""
    if not network.whole:
        row, why = _first_taken(network)
        if row is not None and not (why := _not_a_batch(network, row)):
            return row, {}
        network.run_whole(why)
    row, refused = _first_taken(network)
    if row is None:
        raise ModelProblem(
            str(network.network.file),
            "golden",
            f"a golden.npz in {network.spec.directory} with inputs that the network takes (each under its name)",
            f"made-up inputs were all refused; the last time: {refused or why}",
        )
    return row, {}


def _bad_golden(network: TensorNetwork, expected: str, message: str) -> ModelProblem:
    return ModelProblem(str(network.spec.directory / "golden.npz"), "golden", expected, message)


def _first_taken(network: TensorNetwork) -> tuple[Row | None, str]:
    """The first made-up row that runs, else the reason of the last one that did not."""
    why = ""
    for row in _made_up(network):
        try:
            _run(network, [row])
        except Exception as e:  # a graph that is given the wrong length may fail in any way
            why = str(e)
        else:
            return row, ""
    return None, why


def _made_up(network: TensorNetwork) -> Iterator[Row]:
    ports = network.backend.inputs
    free = any(isinstance(axis, str) for port in ports for axis in network.axes(port))
    for length in FREE_AXES if free else (1,):
        for values in (_seeded, _zeros):
            yield {port[0]: values(port, tuple(a if isinstance(a, int) else length for a in network.axes(port))) for port in ports}


def _seeded(port: Port, shape: tuple[int, ...]) -> np.ndarray:
    """The same on every machine: normal floats, integers 0 and 1 (an index that every table has), one word."""
    name, dtype, _ = port
    rng = np.random.default_rng(len(name))
    if dtype == BYTES:
        return np.full(shape, b"a", object)
    if dtype == BFLOAT16 or dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def _zeros(port: Port, shape: tuple[int, ...]) -> np.ndarray:
    return np.full(shape, b"", object) if port[1] == BYTES else np.zeros(shape, port[1])


def _moved(row: Row, i: int) -> Row:
    """Another row of the same kind: moved by `i` places, floats scaled too."""
    moved = {name: np.roll(array, i) for name, array in row.items()}
    return {n: (a * (1 - i / 16)).astype(a.dtype) if a.dtype.kind == "f" and i else a for n, a in moved.items()}


# ---------------------------------------------------------------- running


def _placed(network: TensorNetwork, rows: Sequence[Row]) -> tuple[tuple[Slot, ...], np.ndarray, list[int]]:
    """Rows as they would lie in the slab: slots, memory, offsets."""
    contents = [[_content(row[name], dtype) for name, dtype, _ in network.backend.inputs] for row in rows]
    sizes = [max(map(len, column)) for column in zip(*contents, strict=True)]
    slots, row_bytes = lay_out(
        [
            (name, dtype, rows[0][name].shape, room_for(size) if dtype == BYTES else size)
            for (name, dtype, _), size in zip(network.backend.inputs, sizes, strict=True)
        ]
    )
    memory = np.zeros(len(rows) * row_bytes, np.uint8)
    for i, arrays in enumerate(contents):
        for slot, content in zip(slots, arrays, strict=True):
            at = i * row_bytes + slot.offset
            memory[at : at + len(content)] = np.frombuffer(content, np.uint8)
    return slots, memory, [i * row_bytes for i in range(len(rows))]


def _content(array: np.ndarray, dtype: str) -> bytes:
    if dtype == BYTES:
        return pack(_text(s).encode() for s in array.reshape(-1))
    return np.ascontiguousarray(array).tobytes()


def _run(network: TensorNetwork, rows: Sequence[Row]) -> Answers:
    slots, memory, offsets = _placed(network, rows)
    return network.run(memory, offsets, slots)


def _not_a_batch(network: TensorNetwork, row: Row) -> str:
    """Empty where a batch answers each of its rows as it answers it alone, else what differs."""
    if network.max_rows == 1 and not network.fixed_rows:
        return ""
    rows = [_moved(row, i) for i in range(min(3, max(network.max_rows, 1)))]
    try:
        together = _run(network, rows)
        alone = [_run(network, [r]) for r in rows]
    except Exception as e:
        return f"a batch of {len(rows)} fails: {e}"
    for name, array in together.items():
        for i, single in enumerate(alone):
            if array.ndim == 0 or len(array) != len(rows) or single[name].shape[:1] != (1,):
                return f"output {name!r} has shape {list(array.shape)} for {len(rows)} rows"
            if why := disagreement(array[i : i + 1], single[name], network.spec.rtol):
                return f"row {i} of output {name!r} depends on its neighbours: {why}"
    return ""
