"""serve_triton.py PORT DIR: writes a Triton model repository into DIR and becomes the `tritonserver` of the nvidia-pytriton wheel.

The model is the Python backend's, an instance for each of $PROCESSES; Triton's stub processes load this file as their model.py.
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
input [{{ name: "image" data_type: TYPE_STRING dims: [1] }}]
output [{{ name: "answer" data_type: TYPE_STRING dims: [1] }}]
instance_group [{{ kind: KIND_CPU count: {processes} }}]
"""


class TritonPythonModel:
    def initialize(self, _args: dict) -> None:
        self.model = work.open_model()

    def execute(self, requests: list) -> list:
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
    backends, model = directory / "backends", directory / "models" / "jpeg"
    shutil.copytree(home / "backends" / "python", backends / "python")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").symlink_to(Path(__file__).resolve())
    (model / "config.pbtxt").write_text(CONFIG.format(processes=os.environ["PROCESSES"]))
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
