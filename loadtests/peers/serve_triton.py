"""serve_triton.py PORT DIR: writes a Triton model repository into DIR and becomes the `tritonserver` of the nvidia-pytriton wheel.

The models are the Python backend's, an instance for each of $PROCESSES: `jpeg` takes a picture, `tensor` what the network takes. Triton's
stub processes load this file as their model.py.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import work

CONFIG = """backend: "python"
max_batch_size: 1
input [{{ {input} }}]
output [{{ {output} }}]
instance_group [{{ kind: KIND_CPU count: {processes} }}]
"""
MODELS = {
    "jpeg": ('name: "image" data_type: TYPE_STRING dims: [1]', 'name: "answer" data_type: TYPE_STRING dims: [1]'),
    "tensor": ('name: "x" data_type: TYPE_FP32 dims: [3, 224, 224]', 'name: "y" data_type: TYPE_FP32 dims: [1000]'),
}


class TritonPythonModel:
    def initialize(self, args: dict) -> None:
        self.model = work.open_model()
        self.execute = self.tensors if args["model_name"] == "tensor" else self.pictures

    def tensors(self, requests: list) -> list:
        import triton_python_backend_utils as triton

        tensors = [triton.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [triton.InferenceResponse([triton.Tensor("y", self.model.run(None, {"x": x})[0])]) for x in tensors]

    def pictures(self, requests: list) -> list:
        import numpy as np
        import triton_python_backend_utils as triton

        responses = []
        for request in requests:
            jpeg = triton.get_input_tensor_by_name(request, "image").as_numpy()[0, 0]
            answer = json.dumps(work.classify(self.model, [jpeg])[0])
            responses.append(triton.InferenceResponse([triton.Tensor("answer", np.array([[answer]], dtype=object))]))
        return responses


def main(port: int, directory: Path) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    home = packages / "pytriton" / "tritonserver"
    shutil.rmtree(directory, ignore_errors=True)
    backends = directory / "backends"
    shutil.copytree(home / "backends" / "python", backends / "python")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    for name, (takes, gives) in MODELS.items():
        model = directory / "models" / name
        (model / "1").mkdir(parents=True)
        (model / "1" / "model.py").symlink_to(Path(__file__).resolve())
        (model / "config.pbtxt").write_text(CONFIG.format(input=takes, output=gives, processes=os.environ["PROCESSES"]))
    os.environ["LD_LIBRARY_PATH"] = f"{packages / 'nvidia_pytriton.libs'}:{home / 'external_libs'}"
    # The stub embeds Python and finds its packages through the `python3` that comes first on PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    server = str(home / "bin" / "tritonserver")
    os.execv(server, [
        server, f"--model-repository={directory / 'models'}", f"--backend-directory={backends}", "--http-address=127.0.0.1",
        f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false",
    ])  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
