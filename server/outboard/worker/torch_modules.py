"""What the manifest's torch files become: one module that takes uint8 rows and normalises inside."""

from __future__ import annotations

from typing import Any

import torch
import torchvision
from safetensors.torch import load_file

from outboard.repository import Input, ModelProblem, ModelSpec, Network

Axes = list[int | str]


class Normalised(torch.nn.Module):
    """uint8 [n, h, w, 3] -> the network's outputs as a flat tuple of tensors, floating ones as float32."""

    def __init__(self, network: torch.nn.Module, manifest: Input):
        super().__init__()
        self.network = network
        std, mean = torch.tensor(manifest.std, dtype=torch.float64), torch.tensor(manifest.mean, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * std)).float().view(1, 3, 1, 1))
        self.register_buffer("shift", (-mean / std).float().view(1, 3, 1, 1))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, ...]:
        answer = self.network(pixels.permute(0, 3, 1, 2).float() * self.scale + self.shift)
        return tuple(t.float() if t.is_floating_point() else t for _, t in flat(answer))


def flat(answer: Any) -> list[tuple[str, torch.Tensor]]:
    """A network's answer as named tensors: "output", "output_0" … of a tuple, or a dict's keys. Raises TypeError for anything else."""
    if isinstance(answer, torch.Tensor):
        return [("output", answer)]
    items = list(answer.items()) if isinstance(answer, dict) else [(f"output_{i}", t) for i, t in enumerate(answer)]
    for name, tensor in items:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}: expected a tensor, a tuple or a dict of tensors")
    return items


def build(network: Network, spec: ModelSpec) -> tuple[Normalised, Axes]:
    """The module in evaluation mode on the CPU, and the axes of its input [n, h, w, 3]. Raises ModelProblem."""
    width, height = network.input.size
    if spec.toml.builder:
        free = network.input.dynamic
        return Normalised(_torchvision(network, spec), network.input).eval(), ["n", "h" if free else height, "w" if free else width, 3]
    module, axes = _exported(network)
    for axis, got, want in (("height", axes[1], height), ("width", axes[2], width)):
        if isinstance(got, int) and got != want:
            expected = [axes[2] if isinstance(axes[2], int) else width, axes[1] if isinstance(axes[1], int) else height]
            raise ModelProblem(
                str(network.file), "input.size", str(expected), f"model.toml says {[width, height]}; the export has a fixed {axis}"
            )
    return Normalised(module, network.input), axes


def _exported(network: Network) -> tuple[torch.nn.Module, Axes]:
    """A torch.export archive's module and its input's axes, channels last."""
    where = str(network.file)
    try:
        program = torch.export.load(network.file)
    except Exception as e:
        raise ModelProblem(where, "file", f"an archive of torch.export.save that torch {torch.__version__} reads", str(e)) from e
    names = set(program.graph_signature.user_inputs)
    values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in names]
    if len(values) != 1 or not isinstance(values[0], torch.Tensor):
        raise ModelProblem(where, "export input", "one input, the picture", f"the archive has {len(values)}")
    value = values[0]
    shape: Axes = [d if isinstance(d, int) else str(d) for d in value.shape]
    if len(shape) != 4 or shape[1] != 3 or value.dtype != torch.float32:
        raise ModelProblem(where, "export input", "float32 [batch, 3, height, width]", f"it is {value.dtype} {shape}")
    return program.module(), [shape[0], shape[2], shape[3], 3]


def _torchvision(network: Network, spec: ModelSpec) -> torch.nn.Module:
    """A torchvision builder's module with the safetensors weights, each key in its place."""
    toml, name = str(spec.directory / "model.toml"), spec.toml.builder.removeprefix("torchvision:")
    try:
        module = torchvision.models.get_model(name, weights=None)
    except (ValueError, TypeError) as e:
        raise ModelProblem(toml, "builder", "torchvision: and a name of torchvision.models.list_models()", str(e)) from e
    try:
        weights = load_file(network.file)
    except Exception as e:
        raise ModelProblem(str(network.file), "file", "a whole safetensors file", str(e)) from e
    own = module.state_dict()
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [
        f"{k} {list(weights[k].shape)} for {list(own[k].shape)}" for k in own.keys() & weights.keys() if own[k].shape != weights[k].shape
    ]
    if missing or unexpected or shapes:
        wrong = {"missing": missing, "unexpected": unexpected, "of another shape": sorted(shapes)}
        message = "; ".join(f"{len(keys)} keys {what}: {', '.join(keys[:5])}" for what, keys in wrong.items() if keys)
        raise ModelProblem(str(network.file), "file", f"exactly the {len(own)} weights of {spec.toml.builder}", message)
    module.load_state_dict(weights)
    return module
