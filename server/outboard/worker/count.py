"""`python -m outboard.worker.count DIRECTORY [PART]`: operations and bytes of a network for one row, as JSON (plan/workload.py).

A process of its own, because it imports onnx or torch and `outboard plan` must not. Exit code 2, and one line on standard error, where the
network cannot be counted.
"""

from __future__ import annotations

import argparse
import sys
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from outboard import repository
from outboard.plan.workload import Layer, Workload
from outboard.repository import ModelProblem, Network

#: Work on each element by itself: a runtime does it while the result of the layer before is still at hand.
ELEMENTWISE = frozenset(
    "Abs Add BatchNormalization Cast Ceil Clip Div Dropout Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity LeakyRelu Log Max Min "
    "Mish Mul Neg PRelu Pow Reciprocal Relu Round Selu Sigmoid Sign Softplus Softsign Sqrt Sub Swish Tanh Where".split()
)
#: Nothing is computed: other names for the same memory, or values that are known before the first row.
FREE = frozenset("Constant ConstantOfShape Flatten Gather Range Reshape Shape Size Squeeze Unsqueeze".split())


def count_onnx(network: Network) -> Workload:
    import onnx

    from outboard.worker import onnx_graph

    model, picture = onnx_graph.read(network)
    width, height = network.input.size
    shape = (1, height, width, 3) if picture.channels_last else (1, 3, height, width)
    value = next(i for i in model.graph.input if i.name == picture.name)
    for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
        dim.dim_value = size
    constants = {t.name: tuple(t.dims) for t in model.graph.initializer}
    for value in model.graph.output:  # a free batch axis of the outputs would win over what follows from the input
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    shapes: dict[str, tuple[int, ...]] = dict(constants)
    kinds: dict[str, int] = {}
    for value in (*inferred.graph.value_info, *inferred.graph.input, *inferred.graph.output):
        dims = value.type.tensor_type.shape.dim
        kinds[value.name] = value.type.tensor_type.elem_type
        if value.type.tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dims):
            shapes[value.name] = tuple(d.dim_value for d in dims)

    layers, unknown, peak = [], [], 0
    for node in inferred.graph.node:
        if node.op_type in ELEMENTWISE or node.op_type in FREE:
            continue
        moved = [name for name in (*node.input, *node.output) if name and name not in constants]
        if any(name not in shapes for name in moved):
            unknown.append(f"{node.op_type} {node.name or node.output[0]}")
            continue
        layer = Layer(
            node.op_type,
            _flops(node, shapes),
            sum(prod(constants[name]) for name in node.input if name in constants),
            sum(prod(shapes[name]) for name in moved),
        )
        layers.append(layer)
        peak = max(peak, layer.activations)
    answer = sum(
        prod(shapes[o.name]) * np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kinds[o.name])).itemsize
        for o in inferred.graph.output
        if o.name in shapes and kinds.get(o.name)
    )
    return Workload(layers, answer, sum(prod(dims) for dims in constants.values()), peak, unknown)


def _flops(node: Any, shapes: dict[str, tuple[int, ...]]) -> float:
    first, out = shapes.get(node.input[0], ()), prod(shapes[node.output[0]])
    match node.op_type:
        case "Conv" | "ConvTranspose":
            weight = shapes.get(node.input[1], ())
            return 2.0 * (out if node.op_type == "Conv" else prod(first)) * prod(weight[1:])
        case "Gemm":
            transposed = any(a.name == "transA" and a.i for a in node.attribute)
            return 2.0 * out * first[0 if transposed else -1]
        case "MatMul":
            return 2.0 * out * (first[-1] if first else 0)
        case _:
            return float(out)


def count_torch(network: Network, spec: repository.ModelSpec) -> Workload:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    from outboard.worker.torch_modules import build

    module, axes = build(network, spec)
    held = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    layers: list[Layer] = []

    class Counter(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if (rule := flop_registry.get(function._overloadpacket)) is not None:
                given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                moved = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
                weights = [t for t in given if t.untyped_storage().data_ptr() in held]
                moved += [t for t in given if t.untyped_storage().data_ptr() not in held]
                flops = rule(*args, **(kwargs or {}), out_val=out)
                name = str(function._overloadpacket).rpartition(".")[2]
                layers.append(Layer(name, float(flops), sum(t.numel() for t in weights), sum(t.numel() for t in moved)))
            return out

    rows = axes[0] if isinstance(axes[0], int) else 1
    width, height = network.input.size
    with torch.no_grad(), Counter():
        answers = module(torch.zeros((rows, height, width, 3), dtype=torch.uint8))
    layers = [Layer(x.op, x.flops / rows, x.weights, x.activations // rows) for x in layers]
    return Workload(
        layers,
        sum(t.numel() * t.element_size() for t in answers) // rows,
        sum(t.numel() for t in module.parameters()),
        max((x.activations for x in layers), default=0),
        [],
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m outboard.worker.count", description="Count a network; `outboard plan` starts it.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("part", nargs="?", default="")
    arguments = parser.parse_args()
    try:
        spec = repository.read(arguments.directory)
        network = spec.networks[arguments.part]
        workload = count_onnx(network) if spec.toml.backend == "onnx" else count_torch(network, spec)
    except ModelProblem as e:
        sys.exit(_refused(str(e)))
    except KeyError:
        sys.exit(_refused(f"{arguments.directory.name} has no part {arguments.part!r}; its parts are {', '.join(spec.networks)}"))
    sys.stdout.buffer.write(msgspec.json.encode(workload))


def _refused(why: str) -> int:
    print(why, file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
