"""Models by name: which version answers, which one is being loaded beside it, and why one cannot be loaded.

The registry watches the repository. A changed model is loaded beside the old version and takes over once each of its networks is
ready on some device; a version that fails leaves the old one where it was, with the error beside it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import watchfiles

from outboard import repository
from outboard.problems import Problem
from outboard.repository import ModelProblem, ModelSpec
from outboard.runtime import Runtime, id_of

log = logging.getLogger(__name__)

LOOK_EVERY_MS = 3000

#: Seconds between looks whether the last request of an unloaded version has been answered.
DRAINING = 0.02
ModelState = Literal["loading", "ready", "failed", "unloaded"]


@dataclass(slots=True)
class Version:
    """A model version whose networks the engine knows. `ids` maps part ("" for the whole model) to the engine's id."""

    spec: ModelSpec
    ids: dict[str, str]
    users: int = 0  #: requests that may still submit frames for it
    retired: bool = False


@dataclass(slots=True)
class Model:
    name: str
    serving: Version | None = None
    loading: Version | None = None
    error: dict[str, str] | None = None
    unloaded: bool = False
    refused: str = ""  #: the version that could not be loaded: not tried again until its files change, or somebody asks
    reading: int = 0  #: so many have asked that its files are read again, and wait for that
    waiting: list[asyncio.Future[None]] = field(default_factory=list)  #: resolved when `loading` has ended, well or badly

    @property
    def state(self) -> ModelState:
        if self.serving is not None:
            return "ready"
        if self.loading is not None:
            return "loading"
        return "unloaded" if self.unloaded else "failed"


class Registry:
    """The models of one repository folder, on one event loop."""

    def __init__(self, runtime: Runtime, root: Path):
        self.runtime = runtime
        self.root = root
        self.models: dict[str, Model] = {}
        self.scanned = False
        self.settled = asyncio.Event()  #: every model was served or refused at least once
        runtime.on_network.append(self._network_changed)

    async def scan(self) -> None:
        """Read every model of the folder: new ones are loaded, changed ones beside their old version, removed ones retired."""
        found = await asyncio.to_thread(repository.names, self.root)
        for name in [n for n in self.models if n not in found]:
            self._remove(name)
        for name in found:
            model = self.models.get(name)
            if model is None or not model.unloaded:
                await self._read(name)
        self.scanned = True
        self._settle()

    async def watch(self) -> None:
        """Follow changes for ever. Half-written files are seen again when they are whole; what no event tells (a change while the
        watch was set up, a network file system) is seen by a look every few seconds, which costs a `stat` for each file."""
        changes = watchfiles.awatch(self.root, step=200, rust_timeout=LOOK_EVERY_MS, yield_on_timeout=True, ignore_permission_denied=True)
        async for _ in changes:
            await self.scan()

    async def _read(self, name: str) -> None:
        model = self.models.setdefault(name, Model(name))
        try:
            spec = await asyncio.to_thread(repository.read, self.root / name)
        except ModelProblem as e:
            self._failed(model, e.as_dict())
            return
        while not self._known(model, spec):
            if not any(id_of(spec, network) in self.runtime.networks for network in spec.networks.values()):
                self._begin(model, spec)
                return
            await asyncio.sleep(DRAINING)  # this very version was unloaded a moment ago, and still answers its last requests
            if self.models.get(name) is not model:
                return

    def _known(self, model: Model, spec: ModelSpec) -> bool:
        """The version serves, is being loaded, or was refused."""
        for version in (model.serving, model.loading):
            if version is not None and version.spec.version == spec.version:
                if version is model.serving:
                    if model.loading is not None:  # the change was taken back
                        self._retire(model.loading)
                        model.loading = None
                    model.error = None
                return True
        return spec.version == model.refused

    def _begin(self, model: Model, spec: ModelSpec) -> None:
        if model.loading is not None:
            self._retire(model.loading)
        model.error, model.refused = None, ""
        version = model.loading = Version(spec, {})
        ids = self.runtime.add_model(spec)
        version.ids = dict(zip(spec.networks, ids, strict=True))
        self._network_changed("")

    def _network_changed(self, network: str) -> None:
        """A device has loaded a network, or refused it."""
        for model in self.models.values():
            version = model.loading
            if version is None or not version.ids:
                continue
            if all(self.runtime.engine.ready_on(i) for i in version.ids.values()):
                old, model.serving, model.loading = model.serving, version, None
                model.unloaded = False
                if old is not None:
                    self._retire(old)
                replaced = f" in place of {old.spec.version}" if old else ""
                log.info("model %s %s serves%s", model.name, version.spec.version, replaced, extra={"model": model.name})
                self._wake(model)
                continue
            for network_id in version.ids.values():
                if self._refused_everywhere(network_id):
                    member = self.runtime.networks[network_id]
                    assert member.failure is not None
                    failure = member.failure
                    self._retire(version)
                    model.loading = None
                    model.refused = version.spec.version
                    self._failed(
                        model, {"file": failure.file, "key": failure.key, "expected": failure.expected, "message": failure.message}
                    )
                    break

    def _refused_everywhere(self, network_id: str) -> bool:
        member = self.runtime.networks.get(network_id)
        if member is None or member.failure is None:
            return False
        devices = [d for d in self.runtime.engine.devices.values() if network_id in d.networks]
        return bool(devices) and all(d.networks[network_id].state == "failed" for d in devices)

    def _failed(self, model: Model, error: dict[str, str]) -> None:
        if model.error != error:
            kept = f"; version {model.serving.spec.version} goes on serving" if model.serving else ""
            log.error("model %s: %s%s", model.name, ModelProblem(**error), kept, extra={"model": model.name})
        model.error = error
        self._wake(model)

    def _retire(self, version: Version) -> None:
        """Unload it once nobody uses it any more."""
        version.retired = True
        if version.users:
            return
        for network_id in version.ids.values():
            self.runtime.retire(network_id)

    def _remove(self, name: str) -> None:
        model = self.models.pop(name)
        for version in (model.serving, model.loading):
            if version is not None:
                self._retire(version)
        log.info("model %s was removed", name, extra={"model": name})

    def _settle(self) -> None:
        if self.ready()[0]:
            self.settled.set()

    def _wake(self, model: Model) -> None:
        self._settle()
        for future in model.waiting:
            if not future.done():
                future.set_result(None)
        model.waiting.clear()

    # ---------------------------------------------------------------- for the routes

    def get(self, name: str) -> Model:
        """Raises Problem model_not_found."""
        model = self.models.get(name)
        if model is None:
            known = ", ".join(sorted(self.models)) or "none yet"
            raise Problem("model_not_found", f"there is no model {name[:80]!r}; the repository has: {known}")
        return model

    def serving(self, name: str) -> Version:
        """The version that answers now. Raises Problem model_not_found, model_not_ready or model_invalid."""
        model = self.get(name)
        if model.serving is not None:
            return self._lighter(model.serving)
        if model.loading is not None or model.reading or not self.scanned:
            raise Problem("model_not_ready", f"{name} is being loaded; try again in a moment", retry_after=1.0)
        if model.unloaded:
            again = f"POST /v1/models/{name}/load, or /v2/repository/models/{name}/load, brings it back"
            raise Problem("model_not_ready", f"{name} was unloaded; {again}")
        raise Problem("model_invalid", f"{name} cannot be loaded; see GET /v1/models/{name}", **(model.error or {}))

    def _lighter(self, version: Version) -> Version:
        """The model's fallback, while the accelerator that should serve it does not: what the CPU can answer in time."""
        fallback = self.models.get(version.spec.toml.run.fallback)
        engine = self.runtime.engine
        if fallback is None or fallback.serving is None or not engine.degraded():
            return version
        home = {d for i in version.ids.values() for d in engine.ready_on(i)}
        return version if any(self.runtime.devices[d].kind != "cpu" for d in home) else fallback.serving

    @contextmanager
    def use(self, name: str) -> Iterator[Version]:
        """`serving`, kept loaded while the block runs: a pipeline submits frames for it more than once."""
        version = self.serving(name)
        version.users += 1
        try:
            yield version
        finally:
            version.users -= 1
            if version.retired:
                self._retire(version)

    async def load(self, name: str) -> Model:
        """Read it again and wait until it serves or has failed. Raises Problem model_not_found, model_invalid."""
        if name not in self.models:
            await self.scan()  # a folder that was copied a moment ago
        model = self.get(name)
        model.refused, model.reading = "", model.reading + 1
        try:
            await self._read(name)
        finally:
            model.reading -= 1
        model.unloaded = False
        if model.loading is not None:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            model.waiting.append(future)
            await future
        if model.error is not None:
            raise Problem("model_invalid", f"{name} cannot be loaded: {model.error['message'] or model.error['key']}", **model.error)
        return model

    def unload(self, name: str) -> Model:
        model = self.get(name)
        for version in (model.serving, model.loading):
            if version is not None:
                self._retire(version)
        model.serving = model.loading = None
        model.unloaded = True
        self._wake(model)
        return model

    def not_served(self) -> dict[str, str]:
        """Why, for each model that no worker serves."""
        why = {}
        for name, model in sorted(self.models.items()):
            if model.serving is None:
                why[name] = "it was unloaded" if model.unloaded else "it is being loaded"
                if model.state == "failed" and (error := model.error):
                    why[name] = str(ModelProblem(**error))
        return why

    def ready(self) -> tuple[bool, str]:
        """Whether every model is served by some worker, and why not."""
        if not self.scanned:
            return False, "the repository is being read"
        waiting = [m.name for m in self.models.values() if m.state == "loading"]
        if waiting:
            return False, "loading: " + ", ".join(waiting)
        return True, ""
