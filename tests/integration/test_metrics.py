"""What may become a time series, and what may not."""

from __future__ import annotations

import random

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from integration.serverkit import Server

#: What is asked for, with a name that nobody has.
PATHS = ("/{}", "/v1/{}", "/v1/models/{}", "/v1/devices/{}", "/v1/streams/{}", "/v1/streams/{}/latest.jpg", "/v2/models/{}", "/v2/{}")
POSTED = ("/v1/models/{}/predict", "/v1/models/{}/stream", "/v2/models/{}/infer", "/v1/models/{}/load")


def routes(server: Server) -> dict[tuple[str, str], float]:
    """(route, status) -> requests."""
    text = server.client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = families["outboard_http_requests"].samples
    return {(s.labels["route"], s.labels["status"]): s.value for s in samples if s.name.endswith("_total")}


@pytest.mark.parametrize("names", [100, pytest.param(4_000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_names_that_somebody_makes_up_are_no_labels(server: Server, names: int) -> None:
    """O01, with twelve requests for each name."""
    rng = random.Random(1)
    made_up = [f"{rng.getrandbits(64):016x}" for _ in range(names)]
    before = routes(server)
    for name in made_up:
        for path in PATHS:
            assert server.client.get(path.format(name)).status_code == 404
        for path in POSTED:
            assert server.client.post(path.format(name), content=b"x").status_code in (400, 404)
    text = server.client.get("/metrics").text
    assert len(text) < 200_000 and not any(name in text for name in made_up)
    after = routes(server)
    assert after["unmatched", "404"] - before.get(("unmatched", "404"), 0) == 2 * names
    assert after["/v1/models/{model}", "404"] - before.get(("/v1/models/{model}", "404"), 0) == names
    assert {route for route, _ in after.keys() - before.keys()} <= {"unmatched", "/v2/…", *_templates(server)}


def _templates(server: Server) -> set[str]:
    return set(httpx.get(f"{server.url}/openapi.json").json()["paths"]) | {"/openapi.json"}
