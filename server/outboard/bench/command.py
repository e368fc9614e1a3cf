"""`outboard bench`: from words on the command line to a table. Heavy imports wait until they are needed: every command passes here."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outboard.refusal import refuse

EXAMPLE = "Example: outboard bench yolov2_tiny photo.jpg --device sim:thunderbolt4,compute=8+4 --connections 16 --seconds 10"


def bench(
    model: Annotated[str, typer.Argument(help="A model that the server has.")],
    images: Annotated[list[Path] | None, typer.Argument(help="Photographs, sent in turn. Default: one that is drawn.")] = None,
    url: Annotated[
        str, typer.Option(envvar="OUTBOARD_URL", help="A running server. Without it one is started for the benchmark.", show_default=False)
    ] = "",
    key: Annotated[str, typer.Option(envvar="OUTBOARD_KEY", help="Sent as `Authorization: Bearer KEY`.", show_default=False)] = "",
    connections: Annotated[int, typer.Option(min=1, max=512, help="Each sends when it has its answer.")] = 8,
    rate: Annotated[
        float, typer.Option(min=0.0, help="Send so many a second instead, whatever the answers do; times count from when each was due.")
    ] = 0.0,
    seconds: Annotated[str, typer.Option(help="How long to measure, such as 10s or 2min.")] = "10s",
    warm_up: Annotated[str, typer.Option(help="How long to send before that.")] = "2s",
    size: Annotated[str, typer.Option(help="Of the drawn picture: 4k, 1080p, 720p or such as 2560x1440.")] = "720p",
    options: Annotated[str, typer.Option(help="Query of the requests, such as tile=auto&min_score=0.5.", show_default=False)] = "",
    min_fps: Annotated[float, typer.Option(help="Exit code 1 below it.", show_default=False)] = 0.0,
    max_p99: Annotated[str, typer.Option(help="Exit code 1 above it, such as 200ms.", show_default=False)] = "",
    models: Annotated[Path | None, typer.Option(help="The model repository of a server that is started.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="Its device: auto, cpu, cuda:0, a UUID, sim:…; several may be given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure frames a second and latency over HTTP, as clients see them: of a running server, or of one started for it.

    Exit code 1: nothing was answered, some requests were not, or a target was missed; 2: wrong usage.
    """
    from outboard.bench import payload
    from outboard.bench.load import Load, summary
    from outboard.bench.own_server import NotStarted, own_server
    from outboard.plan import usage

    if url and (models or device):
        raise refuse("--models and --device are for a server that is started here; with --url there is one already")
    try:
        length = usage.seconds("--seconds", seconds)
        before = 0.0 if warm_up in ("0", "0s") else usage.seconds("--warm-up", warm_up)
        limit = usage.seconds("--max-p99", max_p99) if max_p99 else 0.0
        drawn = usage.size(size)
    except usage.Usage as e:
        raise refuse(str(e).replace("--source", "--size")) from e  # `outboard plan` calls it that
    headers = {"authorization": f"Bearer {key}"} if key else {}
    err = Console(stderr=True)
    if not url and not as_json:
        err.print("starting a server", style="dim")
    try:
        with nullcontext(url.rstrip("/")) if url else own_server(models, device or []) as target:
            inputs = _inputs(target, model, headers)
            if inputs is None:
                requests = payload.photographs(target, model, images or [], drawn, options, headers)
            elif images or options:
                raise refuse(f"{model} takes tensors: images and --options are for models that take images")
            else:
                requests = payload.tensors(target, model, inputs, headers)
            load = Load(requests, before, length)
            seen = asyncio.run(load.open(rate) if rate else load.closed(connections))
            listed = _get(target, "/v1/devices", headers)
    except NotStarted as e:
        raise refuse(f"the server for the benchmark did not start: {e}", 1) from e
    except payload.NoPayload as e:
        raise refuse(e) from e
    found = {"model": model, **summary(seen)}
    found["load"] = {"rate": rate} if rate else {"connections": connections}
    found["hardware"] = [_hardware(d, model) for d in listed["devices"] if d["id"] in (seen.devices or {d["id"]: 0})]
    found["host"] = listed.get("host")
    missed = _missed(found, min_fps, limit)
    if as_json:
        print(json.dumps({**found, "missed": missed}))
    else:
        _print(Console(width=None if sys.stdout.isatty() else 120), found, seen.example, missed)
    if missed:
        raise typer.Exit(1)


def _get(url: str, path: str, headers: dict[str, str]) -> Any:
    import httpx

    try:
        response = httpx.get(url + path, headers=headers, timeout=30.0, trust_env=False)
        if response.is_error:
            raise refuse(response.json().get("detail") or response.json().get("error") or f"{response.status_code} to GET {path}", 1)
        return response.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
        raise refuse(f"no Outboard server answers at {url} ({' '.join(str(e).split()) or type(e).__name__}); name one with --url", 1) from e


def _inputs(url: str, model: str, headers: dict[str, str]) -> list[dict[str, Any]] | None:
    """The tensors that the model takes; None: it takes images."""
    from urllib.parse import quote

    entry = _get(url, f"/v1/models/{quote(model, safe='')}", headers)
    if entry["state"] != "ready":
        why = entry["error"] or {}
        raise refuse(f"{model} is {entry['state']}{': ' if why else ''}{why.get('message') or why.get('expected') or ''}", 1)
    inputs = _get(url, f"/v2/models/{quote(model, safe='')}", headers)["inputs"]
    return None if entry["input"] or [i["datatype"] for i in inputs] == ["BYTES"] else inputs


def _hardware(device: dict[str, Any], model: str) -> dict[str, Any]:
    """What a figure is worth nothing without."""
    keys = ("id", "kind", "name", "simulated", "external", "concurrency", "power_limit_w", "link")
    return {key: device.get(key) for key in keys} | {"most_rows": device.get("batches", {}).get(model, {}).get("most_rows")}


def _missed(found: dict[str, Any], min_fps: float, max_p99: float) -> list[str]:
    missed = []
    if not found["answered"]:
        return ["nothing was answered"]
    if found["refused"] or found["not_sent"]:
        missed.append(f"{sum(found['refused'].values()) + found['not_sent']} requests were not answered")
    if found["fps"] < min_fps:
        missed.append(f"{found['fps']} answers a second, at least {min_fps} were wanted")
    if max_p99 and found["latency_ms"]["p99"] > max_p99 * 1e3:
        missed.append(f"p99 is {found['latency_ms']['p99']} ms, at most {max_p99 * 1e3:.0f} were wanted")
    return missed


def _print(out: Console, found: dict[str, Any], example: str, missed: list[str]) -> None:
    def say(text: str, style: str = "") -> None:
        out.print(text, style=style or None, highlight=False, markup=False, soft_wrap=True)

    load = found["load"]
    how = f"{load['rate']:g} requests a second" if "rate" in load else f"{load['connections']} connections"
    say(f"{found['model']}: {found['fps']:g} answers a second ({how}, {found['seconds']:g} s)", "bold")
    table = Table("", *("p50", "p95", "p99", "p99.9", "max"), box=None, header_style="bold", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("ms", *("-" if v is None else f"{v:.1f}" for v in found["latency_ms"].values()))
    out.print(table)
    if found["server_ms"]:
        say("of it in the server, median ms: " + ", ".join(f"{part} {value:g}" for part, value in found["server_ms"].items()))
    for device in found["hardware"]:
        say(_describe(device, found))
    if host := found["host"]:
        driver = f", NVIDIA driver {host['nvidia_driver']}" if host["nvidia_driver"] else ""
        say(f"host: {host['cores']} cores, {host['decode_threads']} decode threads{driver}")
    if found["degraded"]:
        say(f"{found['degraded']} answers were degraded: the device asked for did not give them (outboard devices says why)", "yellow")
    for why, count in found["refused"].items():
        say(f"{count} not answered: {why}", "yellow")
    if example:
        say(f"for example: {example}", "yellow")
    if found["not_sent"]:
        say(f"{found['not_sent']} were not sent: too many were under way", "yellow")
    if found["generator_cpu"] > 0.8:
        busy = f"this generator took {found['generator_cpu']:.0%} of a core"
        say(f"{busy} and may be what was measured; loadtests/ has one for several cores", "yellow")
    for text in missed:
        say(text, "red")


def _describe(device: dict[str, Any], found: dict[str, Any]) -> str:
    share = f": {found['devices'][device['id']] / found['answered']:.0%} of the answers" if device["id"] in found["devices"] else ""
    link = device["link"]
    about = [device["name"] or "", "simulated" if device["simulated"] else "", "external" if device["external"] else ""]
    if link["h2d_bytes_per_s"]:
        about.append(f"link {link['h2d_bytes_per_s'] / 1e9:.2f} GB/s to it, {link['d2h_bytes_per_s'] / 1e9:.2f} back")
    if link["pcie_generation"]:
        about.append(f"PCIe {link['pcie_generation']} x{link['pcie_width']}")
    if device["most_rows"]:
        about.append(f"batches of at most {device['most_rows']}")
    return f"{device['id']} ({', '.join(filter(None, about))}){share}"
