"""The inputs of the comparison, made once into a cache folder: eight 4K and eight small JPEGs from photographs, and the model."""

from __future__ import annotations

import hashlib
import io
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

#: Workload -> (width, height) and the size of the JPEG that is aimed at, in bytes.
WORKLOADS = {"4k": ((3840, 2160), 1_550_000), "small": ((224, 224), 13_000)}
DESCRIPTION = {"4k": "JPEG 3840x2160, about 1.55 MB", "small": "JPEG 224x224, about 13 kB"}
FILES = 8
PACKAGE = "lomiri-wallpapers-16.04"

MODEL_TOML = """task = "classification"
backend = "onnx"
file = "mobilenet_v3_small.onnx"
sha256 = "{sha256}"
license = "BSD-3-Clause (torchvision); random weights"
[input]
size = [224, 224]
fit = "stretch"
color = "RGB"
mean = [0.485, 0.456, 0.406]
std = [0.229, 0.224, 0.225]
[output]
decoder = "logits"
[batching]
max = 8
"""


def photographs() -> list[Image.Image]:
    """At least three: those of 4K in Debian's lomiri-wallpapers-16.04, or else scikit-image's, which are small and look soft at 4K."""
    listed = subprocess.run(["dpkg", "-L", PACKAGE], capture_output=True, text=True, check=False) if _has_dpkg() else None
    paths = sorted(p for p in listed.stdout.split() if p.endswith((".jpg", ".png"))) if listed else []
    wide = [image for image in map(Image.open, paths) if image.width >= 4000 and image.height >= 2160]
    if len(wide) >= 3:
        return [image.convert("RGB") for image in wide[:FILES]]
    print(f"No {PACKAGE} here (apt-get install it): photographs of scikit-image, enlarged, with a camera's noise, stand in.")
    from skimage import data

    rng = np.random.default_rng(0)
    out = []
    for photo in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket(), data.hubble_deep_field()):
        large = np.asarray(ImageOps.fit(Image.fromarray(photo), (3840, 2160), Image.BICUBIC), np.float32)
        noise = rng.normal(0, 4, large.shape[:2] + (1,)).astype(np.float32)
        out.append(Image.fromarray(np.clip(large + noise, 0, 255).astype(np.uint8)))
    return out


def _has_dpkg() -> bool:
    return Path("/usr/bin/dpkg").exists()


def _jpeg(image: Image.Image, target: int) -> bytes:
    """The picture at the quality whose size comes closest to `target` bytes."""
    best = b""
    for quality in range(40, 98, 3):
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=quality)
        if not best or abs(buffer.tell() - target) < abs(len(best) - target):
            best = buffer.getvalue()
    return best


def images(folder: Path) -> dict[str, list[Path]]:
    """Workload -> its JPEG files in `folder`, made if they are not there."""
    files = {name: [folder / f"{name}_{i}.jpg" for i in range(FILES)] for name in WORKLOADS}
    if all(file.exists() for group in files.values() for file in group):
        return files
    folder.mkdir(parents=True, exist_ok=True)
    photos = photographs()
    for i in range(FILES):
        photo = photos[i % len(photos)]
        photo = ImageOps.mirror(photo) if i >= len(photos) else photo
        for name, (size, target) in WORKLOADS.items():
            files[name][i].write_bytes(_jpeg(ImageOps.fit(photo, size, Image.LANCZOS), target))
    return files


def repository(folder: Path, small: list[Path]) -> Path:
    """An Outboard model repository in `folder` with the one model that all sides serve; returns the ONNX file.

    torchvision's mobilenet_v3_small with the random weights of seed 0, batch dimension free. With its initial batch-norm statistics such a
    network answers the same class for every picture, and a side that mixed up its answers would go unnoticed: so the statistics are taken
    from the pictures themselves.
    """
    directory = folder / "mobilenet_v3_small"
    onnx = directory / "mobilenet_v3_small.onnx"
    if (directory / "model.toml").exists():
        return onnx
    import torch
    import torchvision

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = torchvision.models.mobilenet_v3_small(weights=None)
    mean, std = (np.array(x, np.float32) for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    pictures = np.stack([((np.asarray(Image.open(file), np.float32) / 255 - mean) / std).transpose(2, 0, 1) for file in small])
    with torch.inference_mode():
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None  # the plain mean of what passes
            if isinstance(module, torch.nn.Dropout):
                module.eval()
        for _ in range(4):
            model(torch.from_numpy(pictures))
    model.eval()
    torch.onnx.export(
        model,
        torch.zeros(2, 3, 224, 224),
        str(onnx),
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
        dynamo=False,  # the other exporter wants onnxscript
    )
    (directory / "model.toml").write_text(MODEL_TOML.format(sha256=hashlib.sha256(onnx.read_bytes()).hexdigest()))
    return onnx
