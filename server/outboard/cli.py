"""The `outboard` command. Exit codes: 0 fine, 1 the answer is no, 2 wrong usage."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outboard import remote, resources, tables
from outboard.bench.command import EXAMPLE as BENCH_EXAMPLE
from outboard.bench.command import bench as bench_command
from outboard.doctor.command import EXAMPLE as DOCTOR_EXAMPLE
from outboard.doctor.command import doctor
from outboard.keys.command import keys_app
from outboard.keys.store import Keyring, KeysError
from outboard.plan.command import EXAMPLE as PLAN_EXAMPLE
from outboard.plan.command import plan as plan_command
from outboard.profiling.command import EXAMPLE as PROFILE_EXAMPLE
from outboard.profiling.command import profile as profile_command
from outboard.refusal import refuse
from outboard.settings import Settings, SettingsError
from outboard.settings import load as load_settings
from outboard.telemetry import logs

if TYPE_CHECKING:
    from outboard.registry import Registry
    from outboard.runtime import Runtime

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="An inference server for the GPU outside the box.", rich_markup_mode=None
)
out = Console(width=None if sys.stdout.isatty() else 160)

Url = Annotated[str, typer.Option(envvar="OUTBOARD_URL", help="The running server.")]
ServerKey = Annotated[str, typer.Option("--key", envvar="OUTBOARD_KEY", help="A key, where the server asks for one.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    app()


@app.command(epilog="Example: outboard serve --models models --port 8000 --device auto")
def serve(
    models: Annotated[Path | None, typer.Option(help="The model repository: folders with a model.toml each.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of the Open Inference Protocol over gRPC; without it gRPC is off.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="auto, cpu, cuda:0 or a GPU's UUID; several may be given.")] = None,
    workers: Annotated[int | None, typer.Option(help="Front processes: 1, nothing else.", hidden=True)] = None,
    max_losses: Annotated[
        int | None, typer.Option(help="Losses within 10 minutes that a device may have before it is quarantined.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file, instead of ./outboard.toml.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="text or json: one object a line.")] = None,
    log_requests: Annotated[bool | None, typer.Option("--log-requests", help="A line for each request.")] = None,
    traces: Annotated[
        bool | None, typer.Option("--traces", help="Send OpenTelemetry spans of requests by OTLP, as the OTEL_* variables say.")
    ] = None,
) -> None:
    """Serve a model repository over HTTP."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise refuse(f"the server runs on Linux x86-64; this is {sys.platform} {platform.machine()}. The client and the station run here")
    flags: dict[str, Any] = {
        "models": models,
        "host": host,
        "port": port,
        "oip.grpc_port": grpc_port,
        "device": device,
        "workers": workers,
        "failback.max_losses": max_losses,
        "log_level": log_level,
        "log_format": log_format,
        "log_requests": log_requests,
        "traces": traces,
    }
    try:
        settings = load_settings({k: v for k, v in flags.items() if v is not None}, file=config)
    except SettingsError as e:
        raise refuse(str(e)) from e
    if not settings.models.is_dir():
        raise refuse(f"--models {settings.models}: no such folder; expected a folder of models (see docs/my-own-model.md)")
    if settings.log_level.lower() not in logs.LEVELS:
        raise refuse(f"log_level is {settings.log_level!r}, expected debug, info, warning or error")
    try:
        import uvicorn

        from outboard.devices import discovery
        from outboard.http.app import create
        from outboard.http.connection import limited
        from outboard.http.protocol import Protocol, WebSocketProtocol
    except ModuleNotFoundError as e:
        raise refuse(f"{e.name} is missing: the server needs its extra: pip install 'outboard[server]'") from e

    for wanted in settings.device:
        try:
            discovery.check(wanted)
        except ValueError as e:
            raise refuse(f"--device {e}") from e
    if settings.traces:
        _check_traces()
    if settings.http.keys is not None:
        try:
            Keyring(settings.http.keys)
        except KeysError as e:
            raise refuse(e) from e
    resources.keep_freed_memory()
    logs.configure(settings.log_level, settings.log_format)
    logging.getLogger("watchfiles").setLevel(logging.WARNING)
    try:
        listener = _listen(settings.host, settings.port)
    except OSError as e:
        raise refuse(f"cannot listen on {settings.host}:{settings.port}: {e.strerror}; choose another with --port", 1) from e
    bound = listener.getsockname()[1]
    logging.getLogger("outboard").info("listening on http://%s:%d; loading the models of %s", settings.host, bound, settings.models)
    web = create(settings, on_ready=lambda runtime, registry: _welcome(settings, bound, runtime, registry))
    server = uvicorn.Server(
        uvicorn.Config(
            web,
            loop="uvloop",
            http=limited(Protocol, settings.limits),
            ws=WebSocketProtocol,
            ws_max_size=settings.limits.message,
            ws_ping_interval=settings.streams.ping,
            ws_ping_timeout=settings.streams.pong,
            ws_per_message_deflate=False,  # JPEGs do not deflate
            interface="asgi3",
            log_config=None,  # its lines are formatted as all others are
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=8,  # a client that never sends the rest of its body must not hold up the end
            server_header=False,
        )
    )
    server.run(sockets=[listener])


def _check_traces() -> None:
    """The libraries are there, and what the environment asks of them can be done."""
    try:
        import outboard.telemetry.spans  # noqa: F401
    except ModuleNotFoundError as e:
        raise refuse(f"{e.name} is missing: --traces needs the extra: pip install 'outboard[otel]'") from e
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if (asked := os.environ.get(variable, "http/protobuf")) != "http/protobuf":
            raise refuse(f"{variable} is {asked!r}, expected http/protobuf: spans are sent by OTLP over HTTP (port 4318 of a collector)")


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)  # clients that come before the application is up wait, instead of being refused
    return listener


def _welcome(settings: Settings, port: int, runtime: Runtime, registry: Registry) -> None:
    """What the terminal shows when every model is served or refused: devices, models, a line to try."""
    from outboard.http.listings import device_entries, model_entries

    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    url = f"http://{host}:{port}"
    if settings.log_format == "json":
        states = {"devices": {d["id"]: d["state"] for d in device_entries(runtime)}}
        states["models"] = {m["name"]: m["state"] for m in model_entries(runtime, registry)}
        logging.getLogger("outboard").info("serving on %s", url, extra={"url": url, **states})
        return
    out.print()
    tables.print_devices(out, device_entries(runtime))
    tables.print_models(out, model_entries(runtime, registry))
    out.print(f"Serving on {url} (documentation: {url}/docs). Try:\n", highlight=False)
    sample = settings.models.resolve().parent / ".cache" / "samples"
    serving = {name: m.serving.spec for name, m in sorted(registry.models.items()) if m.serving is not None}
    served = {name: spec for name, spec in serving.items() if not spec.takes_tensors}
    # A photograph of a cat, for a model that has a word for what it sees where there is one.
    name = next((n for n, spec in served.items() if spec.toml.task == "detection" and len(spec.labels) > 1), next(iter(served), "MODEL"))
    photo = "chelsea.jpg"
    path = sample / photo
    shown = os.path.relpath(path) if path.is_file() else "photo.jpg"
    print(f"  curl --data-binary @{shown} {url}/v1/models/{name}/predict\n", flush=True)


def _ask(method: str, url: str, key: str, path: str, kind: Any, body: Any = None) -> Any:
    """`remote.ask`; exits with 1 where there is no answer."""
    try:
        return remote.ask(method, url, path, kind, body, key)
    except remote.NoAnswer as e:
        raise refuse(str(e), 1) from e


@app.command(epilog="Example: outboard models --url http://127.0.0.1:8000")
def models(
    directory: Annotated[Path | None, typer.Option("--models", help="Check a repository's files without a server.")] = None,
    url: Url = "http://127.0.0.1:8000",
    key: ServerKey = "",
    as_json: Json = False,
) -> None:
    """List the models of a running server, or check those of a folder. Exit code 1 when one of them cannot be served."""
    entries = _check(directory) if directory is not None else _ask("GET", url, key, "/v1/models", remote.Models)["models"]
    if as_json:
        print(json.dumps({"models": entries}))
    else:
        tables.print_models(out, entries)
    if any(m["error"] for m in entries):
        raise typer.Exit(1)


def _check(directory: Path) -> list[dict[str, Any]]:
    from outboard import repository

    if not directory.is_dir():
        raise refuse(f"--models {directory}: no such folder")
    entries = []
    for name in repository.names(directory):
        entry: dict[str, Any] = {
            "name": name,
            "task": None,
            "backend": None,
            "state": "unloaded",
            "devices": [],
            "input": None,
            "license": None,
            "source": None,
            "error": None,
        }
        try:
            spec = repository.read(directory / name)
        except repository.ModelProblem as e:
            entry |= {"state": "failed", "error": e.as_dict()}
        else:
            given = next(iter(spec.networks.values())).input
            toml = spec.toml
            entry |= {
                "task": toml.task,
                "backend": toml.backend,
                "version": spec.version,
                "input": {"width": given.size[0], "height": given.size[1]} if given else None,
                "license": toml.license or None,
                "source": toml.source or None,
            }
        entries.append(entry)
    return entries


app.command("plan", epilog=PLAN_EXAMPLE)(plan_command)
app.command("profile", epilog=PROFILE_EXAMPLE)(profile_command)
app.command("bench", epilog=BENCH_EXAMPLE)(bench_command)
app.add_typer(keys_app, name="keys")
app.command("doctor", epilog=DOCTOR_EXAMPLE)(doctor)

Device = Annotated[str, typer.Argument(help="The device's id, such as sim:0 or cuda:0; `outboard devices` lists them.")]


@app.command(epilog="Example: outboard unplug sim:0 --phase computing")
def unplug(
    device: Device,
    url: Url = "http://127.0.0.1:8000",
    key: ServerKey = "",
    phase: Annotated[
        str, typer.Option(help="Wait until the device is starting, warming, idle, uploading, computing or returning.", show_default=False)
    ] = "",
) -> None:
    """Pull a simulated device's cable."""
    _ask("POST", url, key, remote.device_path(device, "fault"), tables.Device, {"fault": "unplug", "phase": phase})
    when = f"will be unplugged when it is {phase}" if phase else "is unplugged"
    out.print(f"{device} {when} (simulated); `outboard replug {device}` plugs it in again", highlight=False)


@app.command(epilog="Example: outboard replug sim:0")
def replug(device: Device, url: Url = "http://127.0.0.1:8000", key: ServerKey = "") -> None:
    """Plug a simulated device in again."""
    state = _ask("POST", url, key, remote.device_path(device, "fault"), tables.Device, {"fault": "replug"})["state"]
    then = "it serves once it has proved itself, see `outboard devices`"
    if state == "ejected":
        then = f"it was ejected, and stays so until `outboard devices reset {device}`"
    elif state == "quarantined":
        then = f"it is tried again when its quarantine ends (`outboard devices` says when), or after `outboard devices reset {device}`"
    out.print(f"{device} is plugged in (simulated); {then}", highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Example: outboard eject cuda:0")
def eject(device: Device, url: Url = "http://127.0.0.1:8000", key: ServerKey = "") -> None:
    """Hand a device's work to the CPU and let go of it, so that its cable can be pulled. Exit code 1 when it is not safe yet."""
    answer = _ask("POST", url, key, remote.device_path(device, "eject"), remote.Ejected)
    for holder in answer["holders"]:
        out.print(f"still held by process {holder['pid']} ({holder['command']})", highlight=False, markup=False)
    for command in answer["commands"]:
        out.print(f"run as root: {command}", highlight=False, markup=False)
    out.print(answer["say"], highlight=False, markup=False)
    if not answer["safe"]:
        raise typer.Exit(1)


devices_app = typer.Typer(help="The devices of a running server.", invoke_without_command=True, rich_markup_mode=None)
app.add_typer(devices_app, name="devices")


@devices_app.command("reset", epilog="Example: outboard devices reset cuda:0")
def reset(device: Device, url: Url = "http://127.0.0.1:8000", key: ServerKey = "") -> None:
    """End a quarantine or an ejection: the device is tried at once."""
    state = _ask("POST", url, key, remote.device_path(device, "reset"), tables.Device)["state"]
    out.print(f"{device} is {state}", highlight=False)


@devices_app.callback(epilog="Example: outboard devices --json")
def devices(context: typer.Context, url: Url = "http://127.0.0.1:8000", key: ServerKey = "", as_json: Json = False) -> None:
    """List the devices of a running server, with their history. Exit code 1 when one of them does not serve."""
    if context.invoked_subcommand is not None:
        return
    entries = _ask("GET", url, key, "/v1/devices", remote.Devices)["devices"]
    if as_json:
        print(json.dumps({"devices": entries}))
    else:
        tables.print_devices(out, entries)
    if any(d["state"] in ("lost", "quarantined", "suspect") for d in entries):
        raise typer.Exit(1)
