"""gRPC's messages to requests and results back (oip/request.py)."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from outboard.devices.rows import pack
from outboard.oip import open_inference_pb2 as pb
from outboard.oip.binary import wanted_output
from outboard.oip.outputs import packed_output
from outboard.oip.request import InferRequest, InferResult, InputTensor, checked_shape, refuse_sequences, seconds
from outboard.oip.shared_memory import Regions
from outboard.oip.signature import DTYPES, Signature
from outboard.problems import Problem
from outboard.tasks.tensor import DATATYPES

#: Datatype -> the field of InferTensorContents that holds it.
_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
#: Clients of decoupled models ask with this parameter which response is the last; here each request has one.
FINAL_RESPONSE = "triton_final_response"


def plain(parameters: Any) -> dict[str, Any]:
    """A map of InferParameter as Python values."""
    return {key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in parameters.items()}


def request_of(message: pb.ModelInferRequest, regions: Regions, peer: str) -> InferRequest:
    """Raises Problem."""
    raw = message.raw_input_contents
    at = 0
    inputs = []
    for given in message.inputs:
        shape = checked_shape(given.name, given.shape)
        parameters = plain(given.parameters)
        data: Any
        if "shared_memory_region" in parameters:
            data = regions.span(parameters, peer)
        elif given.HasField("contents"):
            data = _contents(given, shape)
        elif at < len(raw):
            data = memoryview(raw[at])
            at += 1
        else:
            raise Problem("bad_input", f"input {given.name!r} has neither contents nor raw_input_contents")
        inputs.append(InputTensor(given.name, given.datatype, shape, data))
    if at < len(raw):
        raise Problem("bad_input", f"{len(raw)} raw_input_contents, {at} inputs that take one")
    parameters = plain(message.parameters) if message.parameters else {}
    refuse_sequences(parameters)
    outputs = []
    for wanted in message.outputs:
        outputs.append(wanted_output(wanted.name, plain(wanted.parameters), True, regions, peer))
    body = memoryview(raw[0]) if len(raw) == 1 else None
    return InferRequest(inputs, outputs or None, message.id, True, seconds(parameters), body)


def _contents(given: Any, shape: tuple[int, ...]) -> memoryview:
    field = _CONTENTS.get(given.datatype)
    if field is None:
        raise Problem("bad_input", f"input {given.name!r}: {given.datatype[:20]} has no contents field; send it as raw_input_contents")
    values = getattr(given.contents, field)
    if len(values) != prod(shape):
        raise Problem(
            "bad_input", f"input {given.name!r} has {len(values)} values in {field}, expected {prod(shape)} for shape {list(shape)}"
        )
    if given.datatype == "BYTES":
        return memoryview(pack(values))
    dtype = np.dtype(DTYPES[given.datatype])
    wide = np.array(values, np.uint64 if dtype.kind == "u" else np.int64) if dtype.kind in "iu" else np.array(values, dtype)
    array = wide.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(array, wide):
        raise Problem("bad_input", f"input {given.name!r} holds a number that does not fit {given.datatype}")
    return memoryview(array.view(np.uint8)).cast("B") if array.size else memoryview(b"")


def response_of(known: Signature, request: InferRequest, result: InferResult) -> pb.ModelInferResponse:
    """Outputs raw, or in shared memory where that was asked for. Raises Problem."""
    response = pb.ModelInferResponse(model_name=known.model, model_version=known.version, id=request.id)
    response.parameters["device"].string_param = result.device
    response.parameters["degraded"].bool_param = result.degraded
    for wanted, array in result.outputs:
        output = response.outputs.add(name=wanted.name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
        data = packed_output(array)
        if wanted.target is None:
            response.raw_output_contents.append(bytes(data))
            continue
        wanted.target.write(data)
        for key, value in wanted.target.parameters(len(data)).items():
            setattr(output.parameters[key], "string_param" if isinstance(value, str) else "int64_param", value)
        # Clients find an output's bytes by its place among the outputs, so each has one.
        response.raw_output_contents.append(b"")
    return response
