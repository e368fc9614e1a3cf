"""What REST and gRPC have in common besides inference: answers as JSON values, whose names are also the fields of gRPC's messages."""

from __future__ import annotations

from typing import Any

from outboard import __version__
from outboard.oip.infer import Inferer
from outboard.oip.shared_memory import Regions
from outboard.oip.statistics import model_stats
from outboard.problems import Problem
from outboard.registry import Registry
from outboard.repository import ModelProblem
from outboard.runtime import Runtime

#: The registry's state of a model -> the protocol's.
_STATES = {"ready": "READY", "loading": "LOADING", "failed": "UNAVAILABLE", "unloaded": "UNAVAILABLE"}


class Service:
    """The protocol's server. Every method may raise Problem."""

    def __init__(self, runtime: Runtime, registry: Registry):
        self.runtime = runtime
        self.registry = registry
        self.inferer = Inferer(runtime, registry)
        self.regions = Regions(runtime.settings.oip.shared_memory)

    def ready(self) -> bool:
        return self.registry.ready()[0]

    def metadata(self) -> dict[str, Any]:
        extensions = ["binary_tensor_data", "classification", "model_configuration", "model_repository", "parameters", "statistics"]
        if self.regions.enabled:
            extensions.append("system_shared_memory")
        return {"name": "outboard", "version": __version__, "extensions": sorted(extensions)}

    def model_ready(self, model: str, version: str = "") -> bool:
        """False where it exists and does not serve now."""
        try:
            self.inferer.serving(model, version)
        except Problem as e:
            if e.slug in ("model_not_ready", "model_invalid"):
                return False
            raise
        return True

    def model_metadata(self, model: str, version: str = "") -> dict[str, Any]:
        return self.inferer.signature(self.inferer.serving(model, version)).metadata()

    def model_config(self, model: str, version: str = "") -> dict[str, Any]:
        return self.inferer.signature(self.inferer.serving(model, version)).config()

    def statistics(self, model: str = "", version: str = "") -> dict[str, Any]:
        if model:
            return {"model_stats": [model_stats(self.runtime, self.inferer.serving(model, version))]}
        return {"model_stats": [model_stats(self.runtime, m.serving) for _, m in sorted(self.registry.models.items()) if m.serving]}

    def index(self, ready: bool = False) -> list[dict[str, Any]]:
        listed = []
        for name, model in sorted(self.registry.models.items()):
            version = model.serving or model.loading
            reason = "unloaded" if model.state == "unloaded" else ""
            if model.error:
                reason = str(ModelProblem(**model.error))
            if model.serving or not ready:
                listed.append(
                    {"name": name, "version": version.spec.version if version else "", "state": _STATES[model.state], "reason": reason}
                )
        return listed

    async def load(self, model: str, parameters: dict[str, Any]) -> None:
        if parameters:
            raise Problem(
                "bad_option",
                f"load parameter {next(iter(parameters))!r}: a model is what lies in its folder; change the files and load it again",
            )
        await self.registry.load(model)

    def unload(self, model: str) -> None:
        self.registry.unload(model)
