"""Export an nn.Module with a free batch axis, and prove that it is free.

    python models/export.py mypackage.mymodel:build --size 640 640 --out models/boats/boats.onnx

MODULE:CALLABLE names a function or class that returns the module when called without arguments, or the module itself. `--out` ends
in .onnx (ONNX) or .pt2 (torch.export). The example is a batch of 2: an example of 1 makes exporters freeze the batch at 1, since a 1
may broadcast. Afterwards batches of 1 and 3 go through the file and through the module; only a file that answers alike is kept.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

EXAMPLE_ROWS = 2
CHECKED_ROWS = (1, 3)
#: Largest difference between file and module, relative to the largest value.
RTOL = 1e-3

HINT = (
    "Let forward() take the number of rows from its input and keep it a tensor's size: x.flatten(1) or x.reshape(x.shape[0], -1), "
    "not x.reshape(2, -1), int(x.shape[0]) or a loop over the rows."
)


class ExportError(Exception):
    """The module cannot be exported so that batches of any size are answered."""


def export_onnx(module: nn.Module, size: tuple[int, int], path: Path) -> None:
    """Write `module` (input float32 [N, 3, height, width], `size` = (width, height)) as ONNX to `path`.

    The input is called `images`; the outputs are called by the keys of a dict, else output0, output1, … Raises ExportError and
    writes nothing where a batch of 1 or 3 is not answered like the module does.
    """
    module = module.eval()
    names = _output_names(module, size)

    def write(file: Path) -> None:
        free = {name: {0: "batch"} for name in ("images", *names)}
        with warnings.catch_warnings():
            # The exporter through TorchScript is called deprecated; the other one needs the package onnxscript.
            warnings.simplefilter("ignore")
            example = (_images(EXAMPLE_ROWS, size),)
            torch.onnx.export(module, example, str(file), input_names=["images"], output_names=names, dynamic_axes=free, dynamo=False)

    def load(file: Path) -> Callable[[torch.Tensor], Sequence[np.ndarray]]:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what fails is told by the exception
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        return lambda images: session.run(None, {"images": images.numpy()})

    _export(module, size, Path(path), write, load)


def export_pt2(module: nn.Module, size: tuple[int, int], path: Path) -> None:
    """The same as a torch.export archive, for `backend = "torch"`."""
    module = module.eval()

    def write(file: Path) -> None:
        program = torch.export.export(
            module, (_images(EXAMPLE_ROWS, size),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1024)},)
        )
        torch.export.save(program, file)

    def load(file: Path) -> Callable[[torch.Tensor], Sequence[np.ndarray]]:
        program = torch.export.load(file).module()
        return lambda images: _arrays(program(images))

    _export(module, size, Path(path), write, load)


def _export(
    module: nn.Module,
    size: tuple[int, int],
    path: Path,
    write: Callable[[Path], None],
    load: Callable[[Path], Callable[[torch.Tensor], Sequence[np.ndarray]]],
) -> None:
    """Write beside `path`, check, and only then move there: a refused export leaves what was there."""
    expected = {rows: _module_answers(module, size, rows) for rows in (*CHECKED_ROWS, EXAMPLE_ROWS)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, torch.no_grad():
        file = Path(folder) / path.name
        try:
            write(file)
        except Exception as e:  # exporters raise what they like
            raise ExportError(f"{path.name}: the exporter failed with the batch axis free: {_first_line(e)}. {HINT}") from e
        run = load(file)
        for rows in CHECKED_ROWS:
            _check(run, size, rows, expected[rows], path.name)
        os.replace(file, path)


def _check(
    run: Callable[[torch.Tensor], Sequence[np.ndarray]], size: tuple[int, int], rows: int, expected: Sequence[np.ndarray], name: str
) -> None:
    frozen = f"{name}: the batch axis is frozen at {EXAMPLE_ROWS}, the example's: a batch of {rows}"
    try:
        got = run(_images(rows, size))
    except Exception as e:
        raise ExportError(f"{frozen} fails: {_first_line(e)}. {HINT}") from e
    for i, (want, have) in enumerate(zip(expected, got, strict=True)):
        if want.shape != have.shape:
            raise ExportError(f"{frozen} answers output {i} with shape {list(have.shape)}, the module with {list(want.shape)}. {HINT}")
        scale = float(np.abs(want).max(initial=0)) or 1.0
        worst = float(np.abs(want - have).max(initial=0)) / scale
        if not worst <= RTOL:  # so written, NaN is refused
            raise ExportError(
                f"{name}: a batch of {rows} differs from the module in output {i} by {worst:.2g} relative; expected at most {RTOL:g}"
            )


def _module_answers(module: nn.Module, size: tuple[int, int], rows: int) -> list[np.ndarray]:
    """The module's own answers, each with `rows` rows."""
    try:
        with torch.no_grad():
            answers = _arrays(module(_images(rows, size)))
    except Exception as e:
        raise ExportError(f"the module itself fails on a batch of {rows}: {_first_line(e)}. {HINT}") from e
    for i, array in enumerate(answers):
        if array.ndim == 0 or len(array) != rows:
            raise ExportError(
                f"the module itself answers a batch of {rows} with output {i} of shape {list(array.shape)}; expected {rows} rows. {HINT}"
            )
    return answers


def _output_names(module: nn.Module, size: tuple[int, int]) -> list[str]:
    with torch.no_grad():
        answer = module(_images(EXAMPLE_ROWS, size))
    if isinstance(answer, dict):
        return [str(key) for key in answer]
    return [f"output{i}" for i in range(len(pytree.tree_leaves(answer)))]


def _arrays(answer: object) -> list[np.ndarray]:
    return [tensor.detach().numpy() for tensor in pytree.tree_leaves(answer)]


def _images(rows: int, size: tuple[int, int]) -> torch.Tensor:
    """float32 [rows, 3, height, width], 0..1, the same in every run."""
    width, height = size
    return torch.rand(rows, 3, height, width, generator=torch.Generator().manual_seed(rows))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def load(target: str) -> nn.Module:
    """The module that "package.module:callable" names."""
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise ExportError(f"{target!r} names no module; expected MODULE:CALLABLE, like torchvision.models:resnet18")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as e:
        raise ExportError(f"{target!r} cannot be imported: {e}") from e
    module = found if isinstance(found, nn.Module) else found()
    if not isinstance(module, nn.Module):
        raise ExportError(f"{target!r} gave a {type(module).__name__}; expected a torch.nn.Module")
    return module


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="MODULE:CALLABLE")
    parser.add_argument("--size", nargs=2, type=int, required=True, metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--out", type=Path, required=True, help="a file that ends in .onnx or .pt2")
    given = parser.parse_args(arguments)
    write = {".onnx": export_onnx, ".pt2": export_pt2}.get(given.out.suffix)
    if write is None:
        parser.error(f"--out {given.out}: expected a file that ends in .onnx or .pt2")
    try:
        write(load(given.target), tuple(given.size), given.out)
    except ExportError as e:
        print(f"export: {e}", file=sys.stderr)
        return 1
    print(f"{given.out}: batches of {', '.join(map(str, CHECKED_ROWS))} answer like the module")
    return 0


if __name__ == "__main__":
    sys.exit(main())
