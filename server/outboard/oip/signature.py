"""What a model takes and gives, in the protocol's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outboard.devices.rows import BYTES
from outboard.problems import Problem
from outboard.registry import Version
from outboard.runtime import Runtime
from outboard.tasks.tensor import DATATYPES

#: The protocol's datatype -> numpy's name of the dtype. BYTES is no dtype: each element is a string of bytes.
DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items() if datatype != "BYTES"}
#: Input of a model that takes pictures, and the output that holds its answer as JSON.
IMAGE = "image"
ANSWER = "answer"

_PLATFORMS = {"onnx": "onnxruntime_onnx", "torch": "pytorch_libtorch"}


@dataclass(slots=True, frozen=True)
class TensorSpec:
    """One input or output. `axes` without the batch axis, None where free."""

    name: str
    datatype: str
    axes: tuple[int | None, ...]
    labels: tuple[str, ...] = ()  #: of the last axis, where they are known

    def shape(self, batched: bool) -> list[int]:
        """With the batch axis, -1 where free."""
        return ([-1] if batched else []) + [-1 if axis is None else axis for axis in self.axes]


@dataclass(slots=True)
class Signature:
    """Of one model version. `batched`: the first axis of everything is the batch, and requests may share one."""

    model: str
    version: str
    network: str  #: the engine's id; "" for a pipeline of several
    platform: str
    backend: str
    batched: bool
    pictures: bool  #: takes encoded images as BYTES
    max_rows: int
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    usual: tuple[str, ...]  #: the outputs of a request that names none
    layouts: dict[Any, Any] = field(default_factory=dict)  #: of rows by their shapes, made as they come (oip/infer.py)

    def metadata(self) -> dict[str, Any]:
        """The answer of `GET /v2/models/NAME`, and of gRPC's ModelMetadata."""

        def tensors(specs: dict[str, TensorSpec]) -> list[dict[str, Any]]:
            return [{"name": t.name, "datatype": t.datatype, "shape": t.shape(self.batched)} for t in specs.values()]

        return {
            "name": self.model,
            "versions": [self.version],
            "platform": self.platform,
            "inputs": tensors(self.inputs),
            "outputs": tensors(self.outputs),
        }

    def config(self) -> dict[str, Any]:
        """The model configuration extension's ModelConfig: the fields that say something here."""

        def tensors(specs: dict[str, TensorSpec]) -> list[dict[str, Any]]:
            kinds = {"BYTES": "STRING"}
            return [
                {"name": t.name, "data_type": f"TYPE_{kinds.get(t.datatype, t.datatype)}", "dims": t.shape(False) or [1]}
                for t in specs.values()
            ]

        return {
            "name": self.model,
            "platform": self.platform,
            "backend": self.backend,
            "max_batch_size": self.max_rows if self.batched else 0,
            "input": tensors(self.inputs),
            "output": tensors(self.outputs),
            "model_transaction_policy": {"decoupled": False},
        }


def signature(runtime: Runtime, version: Version) -> Signature:
    """Of a version that serves. Raises Problem model_not_ready while no worker has told its inputs."""
    spec = version.spec
    backend = {"onnx": "onnxruntime", "torch": "pytorch"}[spec.toml.backend]
    common = {"model": spec.name, "version": spec.version, "platform": _PLATFORMS[spec.toml.backend], "backend": backend}
    answer = TensorSpec(ANSWER, "BYTES", ())
    image = {IMAGE: TensorSpec(IMAGE, "BYTES", ())}
    if spec.toml.parts:
        most = runtime.settings.limits.images
        return Signature(
            **common, network="", batched=True, pictures=True, max_rows=most, inputs=image, outputs={ANSWER: answer}, usual=(ANSWER,)
        )
    network = version.ids[""]
    member = runtime.networks.get(network)
    if member is None or member.loaded is None:
        raise Problem("model_not_ready", f"{spec.name} is being loaded; try again in a moment", retry_after=1.0)
    loaded = member.loaded
    batched = not loaded.whole
    skip = 1 if batched else 0

    def tensor(port: tuple[str, str, list[int | str]]) -> TensorSpec:
        name, dtype, axes = port
        labels = tuple(loaded.labels.get(name, ()))
        if not labels and spec.labels and axes and axes[-1] == len(spec.labels):
            labels = spec.labels
        datatype = "BYTES" if dtype == BYTES else DATATYPES[dtype]
        return TensorSpec(name, datatype, tuple(axis if isinstance(axis, int) else None for axis in axes[skip:]), labels)

    outputs = {port[0]: tensor(port) for port in loaded.outputs}
    if spec.takes_tensors:
        inputs = {port[0]: tensor(port) for port in loaded.inputs}
        usual = tuple(outputs)
    else:
        usual = tuple(outputs) if spec.toml.task == "tensor" else (ANSWER,)
        inputs, outputs = image, {ANSWER: answer} | outputs
    return Signature(
        **common,
        network=network,
        batched=batched,
        pictures=not spec.takes_tensors,
        max_rows=spec.networks[""].batching.max,
        inputs=inputs,
        outputs=outputs,
        usual=usual,
    )
