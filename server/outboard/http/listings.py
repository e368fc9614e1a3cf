"""/v1/models, /v1/devices: what is served, by what, and why not."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from outboard.core.engine import ISOLATION
from outboard.devices import driver, ejection
from outboard.devices.simulated import FAULTS, PHASES
from outboard.http import body as bodies
from outboard.http.parameters import DeviceId, ModelName
from outboard.problems import Problem
from outboard.registry import Model, Registry
from outboard.runtime import Runtime


class _Fault(msgspec.Struct, forbid_unknown_fields=True):
    fault: str
    phase: str = ""


_FAULT_DOCS: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"fault": {"enum": list(FAULTS)}, "phase": {"enum": list(PHASES)}},
                    "required": ["fault"],
                }
            }
        },
    }
}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def model_entry(runtime: Runtime, model: Model) -> dict[str, Any]:
    """One entry of `/v1/models` (design.md, section 1)."""
    version = model.serving or model.loading
    entry: dict[str, Any] = {"name": model.name, "state": model.state, "error": model.error}
    if version is None:
        return entry | {"task": None, "backend": None, "version": None, "input": None, "devices": [], "license": None, "source": None}
    toml = version.spec.toml
    first = next(iter(version.spec.networks.values()))
    on = [set(runtime.engine.ready_on(i)) for i in version.ids.values()]
    devices = [d for d in runtime.devices if on and all(d in ready for ready in on)]
    members = [runtime.networks[i] for i in version.ids.values() if i in runtime.networks]
    return entry | {
        "task": toml.task,
        "backend": toml.backend,
        "version": version.spec.version,
        "input": {"width": first.input.size[0], "height": first.input.size[1]} if first.input else None,
        "devices": devices,
        "providers": {d: sorted({m.providers[d] for m in members if d in m.providers}) for d in devices},
        "license": toml.license or None,
        "source": toml.source or None,
    }


def device_entry(runtime: Runtime, device: str) -> dict[str, Any]:
    """One entry of `/v1/devices`. Times are ISO 8601 in UTC."""
    state, known = runtime.engine.devices[device], runtime.devices[device]
    hello = known.hello
    last = state.history.last
    return {
        "id": device,
        "kind": known.kind,
        "name": hello.name if hello else None,
        "uuid": hello.uuid if hello else None,
        "state": state.state,
        "why": state.why or known.notice or None,
        "until": _iso(runtime, state.until) if state.until is not None else None,
        "simulated": known.kind == "sim",
        "external": known.external,
        "power_limit_w": hello.power_limit_w or None if hello else None,
        "concurrency": known.slots,
        "link": {
            "type": None,
            "h2d_bytes_per_s": hello.h2d_bytes_per_s or None if hello else None,
            "d2h_bytes_per_s": hello.d2h_bytes_per_s or None if hello else None,
            "measured": msgspec.to_builtins(hello.link) if hello else None,
            "pcie_generation": known.figures.pcie_generation if known.figures else None,
            "pcie_width": known.figures.pcie_width if known.figures else None,
        },
        "gpu": msgspec.to_builtins(known.figures) if known.figures else None,
        "memory": {
            "total_bytes": hello.memory_total or None if hello else None,
            "free_bytes": state.memory.free or None,
            "headroom_bytes": state.memory.headroom or None,
        },
        "losses": state.history.total,
        "last_loss": {"at": _iso(runtime, last[0]), "why": last[1]} if last else None,
        "batches": {
            n.rpartition("@")[0]: {
                "state": entry.state,
                "why": entry.why or None,
                "most_rows": runtime.engine._cap(state, n) if entry.costs else None,
                "at_once": runtime.engine._depth(state, n) if entry.costs else None,
                "seconds": entry.costs.table() if entry.costs else [],
                "memory_bytes": {"fixed": entry.need.fixed, "per_row": entry.need.per_row} if entry.need else None,
                "measuring": _measuring(runtime, n, device),
                "decoder": _decoder(runtime, n, device),
            }
            for n, entry in state.networks.items()
        },
    }


def _decoder(runtime: Runtime, network: str, device: str) -> dict[str, Any] | None:
    """What decoding a JPEG for the network costs there, as it is believed now; None: the device takes pixels only."""
    state = runtime.engine.devices[device]
    decoder = state.networks[network].decoder
    if decoder is None:
        return None
    return {
        "seconds_per_picture": decoder.per_picture,
        "seconds_per_megapixel": 1e6 * decoder.per_pixel,
        "slows_computing": decoder.slows,
        "used": runtime.settings.devices.decode != "host" and not state.distrusted,
    }


def _measuring(runtime: Runtime, network: str, device: str) -> dict[str, Any] | None:
    """How long the costs were measured when the network was loaded there; from a stored profile they were only looked after."""
    found = runtime.networks[network].measuring.get(device) if network in runtime.networks else None
    return {"seconds": round(found[0], 3), "stored": found[1]} if found else None


def device_entries(runtime: Runtime) -> list[dict[str, Any]]:
    return [device_entry(runtime, d) for d in runtime.engine.devices if d != ISOLATION]


def model_entries(runtime: Runtime, registry: Registry) -> list[dict[str, Any]]:
    return [model_entry(runtime, m) for _, m in sorted(registry.models.items())]


def _iso(runtime: Runtime, at: float) -> str:
    ago = runtime.now() - at
    return datetime.fromtimestamp(datetime.now(UTC).timestamp() - ago, UTC).isoformat(timespec="seconds")


def router(runtime: Runtime, registry: Registry) -> APIRouter:
    routes = APIRouter()

    def visible() -> list[str]:
        return [d for d in runtime.engine.devices if d != ISOLATION]

    @routes.get("/v1/models", tags=["models"], summary="Every model of the repository")
    async def models() -> Response:
        return _json({"models": model_entries(runtime, registry)})

    @routes.get("/v1/models/{model}", tags=["models"], summary="One model")
    async def model(model: ModelName) -> Response:
        return _json(model_entry(runtime, registry.get(model)))

    @routes.post("/v1/models/{model}/load", tags=["models"], summary="Read the model again and load it")
    async def load(model: ModelName) -> Response:
        return _json(model_entry(runtime, await registry.load(model)))

    @routes.post("/v1/models/{model}/unload", tags=["models"], summary="Take the model out of service")
    async def unload(model: ModelName) -> Response:
        return _json(model_entry(runtime, registry.unload(model)))

    @routes.get("/v1/devices", tags=["devices"], summary="Every device, its state and its history, and the host")
    async def devices() -> Response:
        host = {
            "cores": runtime.cores,
            "decode_threads": runtime.decode_threads,
            "nvidia_driver": driver.as_text(driver.version()) or None,
        }
        return _json({"devices": device_entries(runtime), "host": host})

    @routes.get("/v1/devices/{device}", tags=["devices"], summary="One device")
    async def device(device: DeviceId) -> Response:
        return _json(device_entry(runtime, known(device)))

    @routes.post("/v1/devices/{device}/reset", tags=["devices"], summary="End a quarantine or an ejection: try the device now")
    async def reset(device: DeviceId) -> Response:
        runtime.reset(known(device))
        return _json(device_entry(runtime, device))

    @routes.post("/v1/devices/{device}/fault", tags=["devices"], summary="Play a fault on a simulated device", openapi_extra=_FAULT_DOCS)
    async def fault(device: DeviceId, request: Request) -> Response:
        with bodies.Held(runtime) as held:
            body = await bodies.read(request.headers, request.receive, runtime.settings.limits.body, held)
        try:
            asked = msgspec.json.decode(body, type=_Fault)
        except msgspec.MsgspecError as e:
            raise Problem("bad_option", f'{e}; expected {{"fault": F}}, F one of {", ".join(FAULTS)}, and perhaps "phase"') from e
        runtime.fault(known(device), asked.fault, asked.phase)
        return _json(device_entry(runtime, device) | {"fault": asked.fault, "phase": asked.phase or None})

    @routes.post("/v1/devices/{device}/eject", tags=["devices"], summary="Hand the device's work over and let go of it")
    async def eject(device: DeviceId) -> Response:
        kind = runtime.devices[known(device)].kind
        if kind == "cpu":
            raise Problem("conflict", "the CPU cannot be ejected: it is what answers when the others are gone")
        released = await runtime.eject(device)
        body = await asyncio.to_thread(ejection.report, kind, runtime.devices[device].uuid, released)
        return _json({"device": device_entry(runtime, device), **body})

    def known(device: str) -> str:
        if device not in visible():
            raise Problem("device_not_found", f"there is no device {device[:80]!r}; known: {', '.join(visible())}")
        return device

    return routes
