"""The page at `/` of a server that asks for keys: live for who has one, and plain words for who has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import graphs
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving
from outboard.cli import app

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `test`)")
pytestmark = pytest.mark.browser


@dataclass
class Guarded:
    server: Server
    file: Path

    def key(self, name: str) -> str:
        """A new one, that the server knows already."""
        made = CliRunner().invoke(app, ["keys", "add", name, "--file", str(self.file)]).stdout.strip()
        self.server.until(lambda: self.server.client.get("/v1/models", auth=("anybody", made)).status_code == 200, what="the key is known")
        return made

    def revoke(self, name: str) -> None:
        assert CliRunner().invoke(app, ["keys", "revoke", name, "--file", str(self.file)]).exit_code == 0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    models, file = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("keys") / "keys.json"
    graphs.write_model(models, "finder", graphs.block_finder("yolov8"), graphs.toml("detection", graphs.FORMATS["yolov8"], (320, 320)))
    assert CliRunner().invoke(app, ["keys", "add", "first", "--file", str(file)]).exit_code == 0
    with serving(models, "--device", "sim:thunderbolt4,compute=8+4", env={"OUTBOARD_HTTP_KEYS": str(file)}) as running:
        yield Guarded(running, file)


def test_with_a_key_as_password_the_page_is_live(browser, guarded: Guarded) -> None:
    expect = playwright.expect
    context = browser.new_context(http_credentials={"username": "anybody", "password": guarded.key("desk")})
    page = context.new_page()
    page.goto(guarded.server.url)
    card = page.get_by_role("article", name="sim:0", exact=True)
    expect(card.get_by_text("serving", exact=True)).to_be_visible(timeout=30_000)
    page.set_input_files("#file", {"name": "b.png", "mimeType": "image/png", "buffer": encoded(scene(640, 480, 100, 120, 160), "PNG")})
    expect(page.locator("#answer li")).to_have_count(1, timeout=15_000)
    card.get_by_role("button", name="Unplug").click()
    expect(card.get_by_text("unplugged (simulated)").first).to_be_visible(timeout=15_000)
    card.get_by_role("button", name="Replug").click()
    expect(card.get_by_text("serving", exact=True)).to_be_visible(timeout=30_000)
    context.close()


def test_without_a_key_it_says_what_to_do(browser, guarded: Guarded) -> None:
    """Somebody who is asked for a password, and gives none."""
    page = browser.new_page()
    chromium = page.context.new_cdp_session(page)
    asked: list[str] = []

    def cancel(event: dict) -> None:
        asked.append(event["authChallenge"]["realm"])
        chromium.send("Fetch.continueWithAuth", {"requestId": event["requestId"], "authChallengeResponse": {"response": "CancelAuth"}})

    chromium.on("Fetch.requestPaused", lambda event: chromium.send("Fetch.continueRequest", {"requestId": event["requestId"]}))
    chromium.on("Fetch.authRequired", cancel)
    chromium.send("Fetch.enable", {"handleAuthRequests": True})
    answer = page.goto(guarded.server.url)
    assert answer.status == 401 and asked == ["outboard: a key as password"]
    playwright.expect(page.get_by_text("the password is the key")).to_be_visible()
    playwright.expect(page.get_by_text("outboard keys add NAME")).to_be_visible()
    assert page.evaluate("getComputedStyle(document.body).maxWidth") != "none", "its style is its own"
    page.close()


def test_a_page_that_is_cut_off_comes_back_and_one_whose_key_has_ended_says_so(browser, guarded: Guarded) -> None:
    expect = playwright.expect
    context = browser.new_context(http_credentials={"username": "anybody", "password": guarded.key("guest")})

    def cut(route) -> None:
        route.fulfill(status=502, body="Bad Gateway")  # by a proxy, say

    page = context.new_page()
    page.route("**/v1/events", cut)
    page.goto(guarded.server.url)
    status = page.get_by_role("status").first
    expect(status).to_contain_text("does not answer", timeout=15_000)
    page.unroute("**/v1/events")
    expect(status).to_contain_text("serves", timeout=15_000)
    page.route("**/v1/events", cut)
    page.reload()
    expect(status).to_contain_text("does not answer", timeout=15_000)
    guarded.revoke("guest")
    expect(status).to_contain_text("not valid any more", timeout=15_000)
    context.close()
