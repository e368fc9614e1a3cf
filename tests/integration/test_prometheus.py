"""A real Prometheus scrapes a real server: every figure that the Grafana dashboard and the alerts ask for is there."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server

import graphs
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving
from outboard.devices.figures import Figures
from outboard.telemetry import gpus

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
needs_prometheus = pytest.mark.skipif(not PROMETHEUS or not PROMTOOL, reason="Prometheus is not installed (Debian: prometheus)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    graphs.write_model(models, "means", graphs.channel_means((32, 32)), graphs.toml("tensor", "tensor", (32, 32)))
    with serving(models, "--device", "sim:thunderbolt4,vram=8GiB,compute=8+4") as running:
        running.until(lambda: "sim:0" in running.model("means")["devices"], what="the device serves")
        yield running


@pytest.fixture(scope="module")
def card() -> Iterator[str]:
    """Where the figures of a hot GPU can be scraped: no server here has one. tests/unit/test_gpu_figures.py leads them up to there."""
    registry = CollectorRegistry()
    registry.register(gpus.COLLECTOR)
    hot = Figures("GPU-1", "00000000:52:00.0", "NVIDIA GeForce RTX 3060", 91, 120, 170, 99, 5 << 30, 7 << 30, ["sw_thermal"], 3, 4)
    gpus.show({"cuda:0": hot})
    exporter, thread = start_http_server(0, "127.0.0.1", registry)
    yield f"127.0.0.1:{exporter.server_port}"
    exporter.shutdown()
    thread.join()
    gpus.show({})


@pytest.fixture(scope="module")
def prometheus(server: Server, card: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A Prometheus with the configuration of docker-compose.yml, but for the addresses and how often it looks."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [server.url.removeprefix("http://"), card]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [
            str(PROMETHEUS),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=10)
    try:
        yield client
    finally:
        client.close()
        process.terminate()
        process.wait(20)


def panels() -> list[dict]:
    return json.loads((DEPLOY / "grafana" / "dashboards" / "outboard.json").read_text())["panels"]


def queries() -> dict[str, str]:
    """Every query of the dashboard; what Grafana puts in for its variable is a window of some scrapes."""
    return {f"{p['title']} {t['legendFormat']}": t["expr"].replace("$__rate_interval", "10s") for p in panels() for t in p["targets"]}


@needs_prometheus
def test_promtool_finds_nothing_to_say(server: Server):
    assert server.predict("means", encoded(scene(64, 48, 5, 5, 20))).status_code == 200
    said = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=server.client.get("/metrics").content, capture_output=True, check=False
    )
    assert (said.returncode, said.stdout, said.stderr) == (0, b"", b"")
    for file, what in (("alerts.yml", "rules"), ("prometheus.yml", "config")):
        checked = subprocess.run(
            [str(PROMTOOL), "check", what, str(DEPLOY / "prometheus" / file)], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_prometheus
def test_every_panel_of_the_dashboard_has_data(server: Server, prometheus: httpx.Client):
    missing = dict(queries())
    end = time.monotonic() + 60
    lost = False
    while missing and time.monotonic() < end:
        server.predict("means", encoded(scene(64, 48, 5, 5, 20)))
        server.predict("means", b"\xff\xd8\xff no picture")
        # A frame that is too late already is refused: one of those that a panel counts.
        server.predict("means", encoded(scene(64, 48, 5, 5, 20)), deadline_ms=1)
        if not lost:
            lost = server.client.post("/v1/devices/sim:0/fault", json={"fault": "unplug"}).status_code == 200
        try:
            missing = {name: q for name, q in missing.items() if not _has_data(prometheus, q)}
        except (httpx.TransportError, httpx.HTTPStatusError):
            pass  # it is still starting
        time.sleep(0.1)
    server.client.post("/v1/devices/sim:0/fault", json={"fault": "replug"})
    assert not missing


def _has_data(prometheus: httpx.Client, query: str) -> bool:
    answer = prometheus.get("/query", params={"query": query}).raise_for_status().json()
    assert answer["status"] == "success", f"{query}: {answer}"
    return any(sample["value"][1] != "NaN" for sample in answer["data"]["result"])


@needs_prometheus
def test_a_lost_device_raises_the_alert(server: Server, prometheus: httpx.Client):
    server.client.post("/v1/devices/sim:0/fault", json={"fault": "unplug"})

    def pending() -> bool:
        alerts = prometheus.get("/alerts").raise_for_status().json()["data"]["alerts"]
        return any(a["labels"]["alertname"] == "OutboardDeviceAway" and a["labels"]["device"] == "sim:0" for a in alerts)

    server.until(pending, 30, "the alert is at least pending")
    server.client.post("/v1/devices/sim:0/fault", json={"fault": "replug"})


@needs_prometheus
def test_a_hot_gpu_raises_the_alert(server: Server, prometheus: httpx.Client):
    def pending() -> bool:
        alerts = prometheus.get("/alerts").raise_for_status().json()["data"]["alerts"]
        return any(a["labels"]["alertname"] == "OutboardGpuThrottles" and a["labels"]["reason"] == "sw_thermal" for a in alerts)

    server.until(pending, 30, "the alert is at least pending")


def test_every_panel_says_what_it_shows():
    assert all(p["title"] and p["description"].endswith(".") for p in panels())
