"""What is refused from a model's files alone: file, key and what was expected, and nothing hangs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import graphs
from outboard import repository
from outboard.repository import ModelProblem

MEANS = graphs.toml("tensor", "tensor", (32, 32))
LABELLED = 'labels = "labels.txt"\n' + MEANS

pytestmark = pytest.mark.timeout(20)


def folder(root: Path, name: str = "m", text: str = LABELLED) -> Path:
    directory = graphs.write_model(root, name, b"not read here", text)
    (directory / "labels.txt").write_text("red\ngreen\nblue\n")
    return directory


def refused(directory: Path) -> ModelProblem:
    with pytest.raises(ModelProblem) as caught:
        repository.read(directory)
    assert caught.value.file.startswith(str(directory)), caught.value.file
    return caught.value


def test_the_folder_that_the_others_are_made_from_is_read(tmp_path: Path) -> None:
    assert repository.read(folder(tmp_path)).labels == ("red", "green", "blue")


def bind(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's address has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path.name)
    finally:
        os.chdir(here)


def null_device(path: Path) -> None:
    try:
        os.mknod(path, 0o20666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes device nodes")


KINDS: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a socket": bind,
    "a folder": os.mkdir,
    "a character device": null_device,
}


@pytest.mark.parametrize("file, key", [("model.toml", "file"), ("model.onnx", "file"), ("labels.txt", "labels"), ("golden.npz", "golden")])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_without_being_opened(tmp_path: Path, kind: str, file: str, key: str) -> None:
    directory = folder(tmp_path)
    (directory / file).unlink(missing_ok=True)
    KINDS[kind](directory / file)
    problem = refused(directory)
    assert (problem.key, problem.message) == (key, f"it is {kind}") and problem.file.endswith(file)


@pytest.mark.parametrize("file, key", [("model.toml", "file"), ("model.onnx", "file"), ("labels.txt", "labels"), ("golden.npz", "golden")])
def test_a_link_out_of_the_models_folder_is_refused(tmp_path: Path, file: str, key: str) -> None:
    directory = folder(tmp_path)
    (directory / file).unlink(missing_ok=True)
    (tmp_path / "outside").write_text("a secret")
    (directory / file).symlink_to("../outside")
    problem = refused(directory)
    assert (problem.key, problem.expected) == (key, "a path inside the model's folder") and "secret" not in str(problem)


def test_a_link_within_the_models_folder_is_followed(tmp_path: Path) -> None:
    directory = folder(tmp_path)
    (directory / "model.toml").rename(directory / "of-today.toml")
    (directory / "model.toml").symlink_to("of-today.toml")
    assert repository.read(directory).labels == ("red", "green", "blue")


@pytest.mark.parametrize("file, key, most", [("model.toml", "file", "1 MiB"), ("labels.txt", "labels", "16 MiB")])
def test_a_text_file_of_100_megabytes_is_refused_with_its_size(tmp_path: Path, file: str, key: str, most: str) -> None:
    directory = folder(tmp_path)
    os.truncate(directory / file, 100 << 20)
    problem = refused(directory)
    assert problem.key == key and f"of at most {most}" in problem.expected and "104,857,600 bytes" in problem.message


def test_a_task_that_is_not_served_yet_says_so(tmp_path: Path) -> None:
    problem = refused(folder(tmp_path, text=graphs.toml("segmentation", "tensor", (32, 32))))
    assert problem.key == "task" and "not served yet" in problem.message and "detection" in problem.expected


def test_an_unknown_decoder_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    problem = refused(folder(tmp_path, text=graphs.toml("detection", "yolov9000", (32, 32))))
    assert problem.key == "output.decoder" and "'yolov9000' is unknown" in problem.message and "yolov8" in problem.expected


def test_a_decoder_of_another_task_is_refused(tmp_path: Path) -> None:
    problem = refused(folder(tmp_path, text=graphs.toml("detection", "logits", (32, 32))))
    assert problem.key == "output.decoder" and problem.expected == "a decoder of task 'detection'"


@pytest.mark.parametrize(
    "fallback, said", [("nobody", "there is no model 'nobody'"), ("m", "itself"), ("words", "task 'text'"), ("../m", "no model")]
)
def test_a_fallback_that_cannot_stand_in_is_refused(tmp_path: Path, fallback: str, said: str) -> None:
    graphs.write_model(tmp_path, "words", b"", graphs.toml("text", "ocr", (32, 32)))
    problem = refused(folder(tmp_path, text=MEANS + f'[run]\nfallback = "{fallback}"'))
    assert problem.key == "run.fallback" and said in problem.message and "task 'tensor'" in problem.expected


def test_a_fallback_of_the_same_task_is_taken_and_a_broken_one_is_its_own_affair(tmp_path: Path) -> None:
    folder(tmp_path, "lighter", MEANS)
    folder(tmp_path, "broken", "[[[")
    for name in ("lighter", "broken"):
        assert repository.read(folder(tmp_path, text=MEANS + f'[run]\nfallback = "{name}"')).toml.run.fallback == name


def test_a_pipeline_without_its_three_parts_is_refused(tmp_path: Path) -> None:
    problem = refused(folder(tmp_path, text=graphs.toml("text", "ocr", (32, 32))))
    assert problem.key == "parts" and "[parts.det]" in problem.expected
