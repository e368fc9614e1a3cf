"""The binary tensor data extension: a JSON header, and tensors behind it as they lie in memory."""

from __future__ import annotations

from math import prod
from typing import Any

import msgspec
import numpy as np

from outboard.oip import json_tensors
from outboard.oip.outputs import packed_output
from outboard.oip.request import InferRequest, InferResult, InputTensor, WantedOutput, checked_shape, refuse_sequences, seconds
from outboard.oip.shared_memory import Regions
from outboard.oip.signature import DTYPES, Signature
from outboard.problems import Problem
from outboard.tasks.tensor import DATATYPES, json_values

HEADER_LENGTH = "inference-header-content-length"
MAX_CLASSES = 10_000


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Request(msgspec.Struct):
    inputs: list[_Input]
    outputs: list[_Output] = []
    id: str = ""
    parameters: dict[str, Any] = {}


#: Values that are made JSON at once: some 3 ms.
JSON_AT_ONCE = 16_384

#: Of a body.
Piece = bytes | memoryview

_decode = msgspec.json.Decoder(_Request).decode
_encode = msgspec.json.Encoder().encode
_NO_DATA = msgspec.Raw()


def parse(body: bytes, header_length: str | None, regions: Regions, peer: str) -> InferRequest:
    """A request's body. `header_length` is the header's value, None where the whole body is JSON. Raises Problem."""
    view = memoryview(body)
    if header_length is None:
        end = len(body)
    elif not header_length.isascii() or not header_length.isdigit() or len(header_length) > 18 or int(header_length) > len(body):
        raise Problem("bad_input", f"Inference-Header-Content-Length is {header_length[:20]!r}, the body has {len(body)} bytes")
    else:
        end = int(header_length)
    try:
        asked = _decode(view[:end])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise Problem("bad_input", f"the request is not what the protocol describes: {e}") from e
    refuse_sequences(asked.parameters)
    binary = view[end:]
    inputs = []
    at = 0
    for given in asked.inputs:
        shape = checked_shape(given.name, given.shape)
        parameters = given.parameters
        data: Any
        if "binary_data_size" in parameters:
            nbytes = parameters["binary_data_size"]
            if type(nbytes) is not int or nbytes < 0 or at + nbytes > len(binary):
                raise Problem(
                    "bad_input", f"input {given.name!r}: binary_data_size is {nbytes!r}, {len(binary) - at} bytes are left of the body"
                )
            data = binary[at : at + nbytes]
            at += nbytes
        elif "shared_memory_region" in parameters:
            data = regions.span(parameters, peer)
        elif given.data == _NO_DATA:
            raise Problem(
                "bad_input", f"input {given.name!r} has no data: expected `data`, or the parameter binary_data_size or shared_memory_region"
            )
        else:
            data = json_tensors.decode(given.name, given.datatype, shape, given.data)
        inputs.append(InputTensor(given.name, given.datatype, shape, data))
    if at != len(binary):
        raise Problem("bad_input", f"{len(binary) - at} bytes of the body belong to no input")
    everything = asked.parameters.get("binary_data_output", False) is True
    return InferRequest(
        inputs,
        [wanted_output(o.name, o.parameters, everything, regions, peer) for o in asked.outputs] or None,
        asked.id,
        everything,
        seconds(asked.parameters),
        binary or view,
    )


def wanted_output(name: str, parameters: dict[str, Any], binary: bool, regions: Regions, peer: str) -> WantedOutput:
    target = regions.span(parameters, peer) if "shared_memory_region" in parameters else None
    return WantedOutput(name, parameters.get("binary_data", binary) is True, _classes(name, parameters), target)


def _classes(name: str, parameters: dict[str, Any]) -> int:
    """The parameter `classification` of an output; 0 where it is not given. Raises Problem bad_option."""
    value = parameters.get("classification", 0)
    if type(value) is not int or not 0 <= value <= MAX_CLASSES:
        raise Problem("bad_option", f"output {name!r}: classification is {value!r}, expected a number of classes up to {MAX_CLASSES}")
    return value


def raw(body: bytes, known: Signature) -> InferRequest:
    """A body that is one tensor and nothing else (header length 0): its shape follows from its size. Raises Problem bad_input."""
    if len(known.inputs) != 1:
        raise Problem("bad_input", f"a raw body is for models with one input; {known.model} has {len(known.inputs)}")
    spec = next(iter(known.inputs.values()))
    free = [i for i, axis in enumerate(spec.axes) if axis is None]
    fixed = prod(axis for axis in spec.axes if axis is not None)
    lead = (1,) if known.batched else ()
    data = memoryview(body)
    if spec.datatype == "BYTES":
        if free or fixed != 1:
            raise Problem("bad_input", f"a raw body is one string; input {spec.name!r} has shape {spec.shape(known.batched)}")
        data = memoryview(len(body).to_bytes(4, "little") + body)
        shape = lead + tuple(axis or 1 for axis in spec.axes)
    else:
        elements = len(body) // np.dtype(DTYPES[spec.datatype]).itemsize
        if len(free) > 1 or not fixed or elements % fixed or (not free and elements != fixed):
            raise Problem(
                "bad_input",
                f"{len(body)} bytes are no {spec.datatype} of shape {spec.shape(known.batched)} with one row; say the shape in a header",
            )
        shape = lead + tuple(elements // fixed if axis is None else axis for axis in spec.axes)
    return InferRequest([InputTensor(spec.name, spec.datatype, shape, data)], None, binary=True, body=data)


def respond(known: Signature, request: InferRequest, result: InferResult) -> tuple[int | None, list[Piece]]:
    """The length of the JSON header where binary data follow it (else None), and the body's pieces. Raises Problem."""
    header: dict[str, Any] = {"model_name": known.model, "model_version": known.version}
    if request.id:
        header["id"] = request.id
    header["parameters"] = {"device": result.device, "degraded": result.degraded}
    header["outputs"] = []
    pieces: list[Piece] = [_encode(header)[:-2]]
    tail: list[Piece] = []
    for i, (wanted, array) in enumerate(result.outputs):
        entry: dict[str, Any] = {"name": wanted.name, "datatype": DATATYPES[array.dtype.name], "shape": array.shape}
        data: list[Piece] = []
        if wanted.target is not None:
            packed = packed_output(array)
            wanted.target.write(packed)
            entry["parameters"] = wanted.target.parameters(len(packed))
        elif wanted.binary:
            packed = packed_output(array)
            entry["parameters"] = {"binary_data_size": len(packed)}
            tail.append(packed)
        else:
            values, holes = _json_values(array)
            data = [b',"data":[', *values, b"]"]
            if holes:
                entry["parameters"] = {"non_finite": holes}
        pieces += [b"," if i else b"", _encode(entry)[:-1], *data, b"}"]
    pieces.append(b"]}")
    if not any(wanted.binary and wanted.target is None for wanted, _ in result.outputs):
        return None, pieces
    return sum(map(len, pieces)), pieces + tail


def _json_values(array: np.ndarray) -> tuple[list[Piece], int]:
    """The flat values with commas between, and how many are null. Some at a time: the numbers of a large tensor as Python's objects would
    take ten times its memory, and no other thread would run meanwhile."""
    flat = array.reshape(-1)
    pieces: list[Piece] = []
    nulls = 0
    for at in range(0, flat.size, JSON_AT_ONCE):
        values, holes = json_values(flat[at : at + JSON_AT_ONCE])
        pieces += [b",", _encode(values)[1:-1]] if at else [_encode(values)[1:-1]]
        nulls += holes
    return pieces, nulls
