"""The model repository: `models/NAME/model.toml` beside its weights, read and checked without loading a network.

Everything that can be refused from the files alone is refused here, with the file, the key and what was expected; what only
the runtime can tell (shapes, providers, golden answers) is refused by the worker in the same three words.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec

Task = Literal["classification", "detection", "text", "segmentation", "tensor"]

#: Decoders that `[output] decoder` may name, and the task each serves (the code is in `outboard.tasks`).
DECODERS: dict[str, Task] = {
    "logits": "classification",
    "probabilities": "classification",
    "yolov2": "detection",
    "yolov5": "detection",
    "yolov8": "detection",
    "end2end": "detection",
    "boxes": "detection",
    "detr": "detection",
    "centerface": "detection",
    "ocr": "text",
    "tensor": "tensor",
}


#: Bytes of a model.toml and of a file of labels: far more than anybody writes, and little enough to read at every look.
MAX_TOML = 1 << 20
MAX_LABELS = 16 << 20

#: What is not a file that can be read, by `stat.S_IFMT`. Opening some of these waits for ever, or does something.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class ModelProblem(Exception):
    """A model that cannot be served: `file` and `key` say where, `expected` what should be there."""

    def __init__(self, file: str, key: str, expected: str, message: str = ""):
        super().__init__(f"{file}: {key}: {message + '; ' if message else ''}expected {expected}")
        self.file, self.key, self.expected, self.message = file, key, expected, message

    def as_dict(self) -> dict[str, str]:
        return {"file": self.file, "key": self.key, "expected": self.expected, "message": self.message}


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Input(_Table, kw_only=True):
    """How a picture becomes the network's input. `mean` and `std` are of values scaled to 0..1."""

    size: tuple[int, int]  #: [width, height] in pixels
    fit: Literal["letterbox", "stretch", "crop"] = "letterbox"  #: letterbox, stretch or crop (the centre)
    color: Literal["RGB", "BGR"] = "RGB"  #: RGB or BGR: the order that the network was trained with
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)  #: by channel, in the order of `color`, of values scaled to 0..1
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)  #: a network that takes 0..255 has 1/255 here
    background: tuple[int, int, int] = (114, 114, 114)  #: letterbox pads and what lies behind transparent pixels
    crop: float = 1.0  #: fit = "crop": the share of the short side that is kept
    dynamic: bool = False  #: parts of pipelines: rows of other heights and widths may be sent


class Output(_Table, kw_only=True):
    decoder: str  #: see the list below
    min_score: float = 0.25  #: default of the request's `min_score`
    iou: float = 0.45  #: non-maximum suppression
    top_k: int = 5  #: classification: default of the request's `top_k`
    anchors: tuple[tuple[float, float], ...] = ()  #: decoder yolov2: [[width, height], …] in cells
    background_class: bool = False  #: class 0 is "nothing" and is not answered
    boxes: Literal["pixels", "unit"] = "pixels"  #: decoder "boxes": coordinates in input pixels or 0..1
    first_class: int = 0  #: the class id of the first line of `labels`


class Batching(_Table, kw_only=True):
    max: int = 16  #: an upper bound of rows in a batch; the size is measured
    max_delay_ms: float = 0.0  #: hold an idle device's batch back this long for more rows


class Run(_Table, kw_only=True):
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"  #: fp32, fp16 or bf16, where the device has it
    compile: bool = False  #: torch: torch.compile; eager serves until the compiled model is ready and agrees
    standby: Literal["hot", "cold", "none"] = "hot"  #: hot, cold or none: whether the CPU holds it loaded beside an accelerator
    fallback: str = ""  #: a lighter model that answers on the CPU


class Golden(_Table, kw_only=True):
    """The golden check's tolerances; 0 means the precision's default (fp32 1e-3, fp16 and bf16 2e-2 relative)."""

    rtol: float = 0.0  #: relative to the largest magnitude; 0: by precision, 1e-3 or 2e-2
    iou: float = 0.9  #: detectors: overlap of the same box
    score: float = 0.05  #: detectors: difference of the same box's scores


class Part(_Table, kw_only=True):
    """One network of a pipeline."""

    file: str  #: as above
    input: Input  #: the table [parts.NAME.input]
    sha256: str = ""  #: of `file`, checked at load
    batching: Batching = Batching()


class ModelFile(_Table, kw_only=True):
    """model.toml, as written."""

    task: Task  #: classification, detection, text or tensor
    backend: Literal["onnx", "torch"]  #: onnx or torch
    file: str = ""  #: the weights, inside the model's folder: .onnx, .pt2 (torch.export) or .safetensors (with `builder`); never a pickle
    builder: str = ""  #: torch: "torchvision:resnet18", with `file` naming safetensors weights
    sha256: str = ""  #: of `file`, checked at load
    license: str = ""  #: shown by `outboard models`
    source: str = ""  #: where the weights come from; shown, too
    labels: str = ""  #: a text file, one label a line
    input: Input | None = None  #: the table [input]; left out by a model of task "tensor" that takes tensors
    output: Output
    batching: Batching = Batching()
    run: Run = Run()
    golden: Golden = Golden()
    parts: dict[str, Part] = {}  #: a pipeline's networks, in place of `file` and [input]


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """One loadable network: the model itself, or a part of a pipeline. `key` is the engine's name of it."""

    key: str
    file: Path
    input: Input | None  #: None: the network takes tensors, as its graph declares them
    batching: Batching
    sha256: str


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A checked model: its file's content plus what was read beside it."""

    name: str
    directory: Path
    toml: ModelFile
    version: str  #: "sha256:" and 12 hex digits of model.toml, weights and labels
    labels: tuple[str, ...]
    networks: dict[str, Network]  #: "" -> the model, or part name -> network

    @property
    def takes_tensors(self) -> bool:
        """Its input is no picture."""
        return not self.toml.parts and self.toml.input is None

    @property
    def rtol(self) -> float:
        """How far an output may be from the expected one, relative to its largest magnitude (design.md, model repository)."""
        return self.toml.golden.rtol or (1e-3 if self.toml.run.precision == "fp32" else 2e-2)

    def label(self, class_id: int) -> str:
        i = class_id - self.toml.output.first_class
        return self.labels[i] if 0 <= i < len(self.labels) else str(class_id)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*?)`)?$", re.S)
_UNKNOWN = re.compile(r"unknown field `(.+?)`")
_MISSING = re.compile(r"missing required field `(.+?)`")


def names(root: Path) -> list[str]:
    """The models of a repository: every folder with a model.toml."""
    return sorted(p.parent.name for p in root.glob("*/model.toml"))


def read(directory: Path) -> ModelSpec:
    """Read and check `directory`/model.toml and the files that it names. Raises ModelProblem."""
    try:
        return _read(directory)
    except (OSError, RuntimeError, ValueError) as e:  # a link to itself, a name too long or with a NUL, a file that has just vanished
        raise ModelProblem(str(directory / "model.toml"), "files", "files that can be read", str(e)) from e


def _read(directory: Path) -> ModelSpec:
    path = directory / "model.toml"
    name = directory.name
    if not _NAME.match(name):
        raise ModelProblem(
            str(directory), "name", "a folder name of letters, digits, '_', '-' and '.', at most 64", f"{name!r} is not usable"
        )
    raw = _content(_inside(directory, str(path), "file", "model.toml", "a readable model.toml"), "file", "a model.toml", MAX_TOML)
    toml = _parse(path, raw)
    where = str(path)

    if toml.task not in DECODERS.values():
        served = ", ".join(sorted(set(DECODERS.values())))
        raise ModelProblem(where, "task", f"one of {served}", f"task {toml.task!r} is not served yet")
    if toml.output.decoder not in DECODERS:
        raise ModelProblem(where, "output.decoder", "one of " + ", ".join(sorted(DECODERS)), f"{toml.output.decoder!r} is unknown")
    if DECODERS[toml.output.decoder] != toml.task:
        raise ModelProblem(
            where,
            "output.decoder",
            f"a decoder of task {toml.task!r}",
            f"{toml.output.decoder!r} answers {DECODERS[toml.output.decoder]!r}",
        )
    if (toml.output.decoder == "yolov2") != bool(toml.output.anchors):
        raise ModelProblem(where, "output.anchors", "anchors [[width, height], …] in cells for decoder yolov2, and for no other")
    _check_output(where, toml.output)
    _check_parts(where, toml)
    _check_fallback(where, directory, toml)
    networks = _networks(where, directory, name, toml)
    labels = _labels(directory, where, toml)
    digest = hashlib.sha256(raw)
    for network in networks.values():
        content = _sha256(network.file)
        if network.sha256 and content != network.sha256.lower():
            key = "sha256" if "/" not in network.key else f"parts.{network.key.split('/')[1]}.sha256"
            raise ModelProblem(str(network.file), key, network.sha256, f"the file has {content}: it is damaged or another version")
        digest.update(content.encode())
    digest.update("\n".join(labels).encode())
    if os.path.lexists(directory / "golden.npz"):
        golden = _inside(directory, where, "golden", "golden.npz", "an .npz with `input` and the outputs by name")
        digest.update(_sha256(golden).encode())
    return ModelSpec(
        name=name, directory=directory, toml=toml, version=f"sha256:{digest.hexdigest()[:12]}", labels=labels, networks=networks
    )


def _parse(path: Path, raw: bytes) -> ModelFile:
    try:
        return msgspec.toml.decode(raw, type=ModelFile)
    except msgspec.ValidationError as e:
        match = _AT.match(str(e))
        what, at = (match["what"], match["path"] or "") if match else (str(e), "")
        for pattern, expected in ((_UNKNOWN, "no such key (docs/model-toml.md lists the keys)"), (_MISSING, "this key")):
            if found := pattern.search(what):
                key = ".".join(x for x in (at, found[1]) if x)
                raise ModelProblem(str(path), key, expected, "unknown key" if pattern is _UNKNOWN else "missing") from e
        expected = what.removeprefix("Expected ").split(", got")[0]
        raise ModelProblem(str(path), at or "(file)", expected, what) from e
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as e:
        raise ModelProblem(str(path), "(syntax)", "valid TOML in UTF-8", str(e)) from e


def _inside(directory: Path, where: str, key: str, file: str, expected: str) -> Path:
    """`file` as a path below the model's folder that exists."""
    if not file:
        raise ModelProblem(where, key, expected, "missing")
    path = (directory / file).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise ModelProblem(where, key, "a path inside the model's folder", f"{file!r} leaves it")
    if path.exists() and not path.is_file():
        raise ModelProblem(str(directory / file), key, expected, f"it is {_KINDS.get(stat.S_IFMT(path.stat().st_mode), 'no file')}")
    if not path.is_file():
        hint = "; the shipped models are fetched by `make models`" if not any(directory.glob("*.onnx")) else ""
        raise ModelProblem(str(directory / file), key, expected, f"there is no such file{hint}")
    return path


def _content(path: Path, key: str, what: str, most: int) -> bytes:
    """The bytes of a file that `_inside` has looked at. Never waits, should it have become a FIFO since."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise ModelProblem(str(path), key, f"{what} of at most {most >> 20} MiB", f"it has {path.stat().st_size:,} bytes")
    return raw


def _networks(where: str, directory: Path, name: str, toml: ModelFile) -> dict[str, Network]:
    suffixes = (".onnx",) if toml.backend == "onnx" else (".safetensors",) if toml.builder else (".pt2",)
    kinds = " or ".join(suffixes) + " file" + (" (never a pickle)" if toml.backend == "torch" else "")
    if toml.builder and (toml.backend != "torch" or not toml.builder.startswith("torchvision:")):
        raise ModelProblem(where, "builder", 'backend "torch" and "torchvision:NAME"', f"{toml.builder!r} cannot be built")

    def network(key: str, prefix: str, part: Any) -> Network:
        if part.input is not None:
            _check_input(where, prefix, part.input)
        elif toml.task != "tensor" or toml.parts or toml.builder:  # without [input] a tensor model takes what its graph says
            raise ModelProblem(where, f"{prefix}input", "a table [input] with size = [width, height]", "missing")
        if not 0 <= part.batching.max_delay_ms <= 10_000:
            raise ModelProblem(where, f"{prefix}batching.max_delay_ms", "0 to 10000", str(part.batching.max_delay_ms))
        if not 1 <= part.batching.max <= 1024:
            raise ModelProblem(where, f"{prefix}batching.max", "1 to 1024", str(part.batching.max))
        path = _inside(directory, where, f"{prefix}file", part.file, f"a {kinds}")
        if path.suffix not in suffixes:
            raise ModelProblem(where, f"{prefix}file", f"a {kinds}", f"{part.file!r} is none")
        return Network(key=key, file=path, input=part.input, batching=part.batching, sha256=part.sha256)

    if toml.parts:
        if toml.file or toml.input:
            raise ModelProblem(where, "parts", "either [parts.NAME] tables or `file` and [input], not both")
        return {part: network(f"{name}/{part}", f"parts.{part}.", table) for part, table in toml.parts.items()}
    return {"": network(name, "", toml)}


def _check_input(where: str, prefix: str, value: Input) -> None:
    if not all(1 <= n <= 8192 for n in value.size):
        raise ModelProblem(where, f"{prefix}input.size", "[width, height], each 1 to 8192", str(list(value.size)))
    if not all(math.isfinite(m) for m in value.mean):
        raise ModelProblem(where, f"{prefix}input.mean", "three finite numbers", str(list(value.mean)))
    if any(s == 0 or not math.isfinite(s) for s in value.std):
        raise ModelProblem(where, f"{prefix}input.std", "three finite numbers that are not 0", str(list(value.std)))
    if not all(0 <= c <= 255 for c in value.background):
        raise ModelProblem(where, f"{prefix}input.background", "[red, green, blue], each 0 to 255", str(list(value.background)))
    if not 0.1 <= value.crop <= 1.0:
        raise ModelProblem(where, f"{prefix}input.crop", "a share from 0.1 to 1.0", str(value.crop))


def _check_output(where: str, value: Output) -> None:
    for key, number in (("min_score", value.min_score), ("iou", value.iou)):
        if not 0 <= number <= 1:
            raise ModelProblem(where, f"output.{key}", "a number from 0 to 1", str(number))
    if not 1 <= value.top_k <= 10_000:
        raise ModelProblem(where, "output.top_k", "1 to 10000", str(value.top_k))


def _check_parts(where: str, toml: ModelFile) -> None:
    """The pipeline that there is reads text, with three networks of fixed names (`outboard.ocr`)."""
    wanted = {"det", "cls", "rec"} if toml.output.decoder == "ocr" else set()
    if set(toml.parts) != wanted:
        expected = "[parts.det], [parts.cls] and [parts.rec]" if wanted else f"no parts for decoder {toml.output.decoder!r}"
        raise ModelProblem(where, "parts", expected, f"it has {', '.join(sorted(toml.parts)) or 'none'}")


def _check_fallback(where: str, directory: Path, toml: ModelFile) -> None:
    name = toml.run.fallback
    if not name:
        return
    expected = f"the name of another model of this repository with task {toml.task!r}"
    if name == directory.name:
        raise ModelProblem(where, "run.fallback", expected, "a model cannot stand in for itself")
    other = directory.parent / name
    if not _NAME.match(name) or not (other / "model.toml").is_file():
        raise ModelProblem(where, "run.fallback", expected, f"there is no model {name[:80]!r}")
    try:
        task = _parse(other / "model.toml", _content(other / "model.toml", "file", "a model.toml", MAX_TOML)).task
    except ModelProblem:
        return  # it is refused by itself; without it this model answers on the CPU as any other does
    if task != toml.task:
        raise ModelProblem(where, "run.fallback", expected, f"{name!r} has task {task!r}: its answers would have another shape")


def _labels(directory: Path, where: str, toml: ModelFile) -> tuple[str, ...]:
    if not toml.labels:
        return ()
    path = _inside(directory, where, "labels", toml.labels, "a text file, one label a line")
    try:
        text = _content(path, "labels", "a text file", MAX_LABELS).decode("utf-8")
        return tuple(line.strip() for line in text.splitlines() if line.strip())
    except UnicodeDecodeError as e:
        raise ModelProblem(str(path), "labels", "UTF-8 text, one label a line", str(e)) from e


def _sha256(path: Path) -> str:
    """Of the file's content; known for as long as its size, inode and times stay."""
    stat = path.stat()
    return _sha256_of(path, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(1024)
def _sha256_of(path: Path, *identity: int) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
