"""The page at `/` in a real Chromium: what somebody sees while the cable is pulled, on a desk, on a phone and by keyboard."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import graphs
from integration.pictures import encoded, scene
from integration.serverkit import Server, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `test`)")
from screenshots import stream  # noqa: E402  (it needs playwright, too)

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = tmp_path_factory.mktemp("models")
    graphs.write_model(models, "finder", graphs.block_finder("yolov8"), graphs.toml("detection", graphs.FORMATS["yolov8"], (320, 320)))
    graphs.write_model(models, "broken", b"no graph", graphs.toml("tensor", "tensor", (32, 32)))
    with serving(models, "--device", "sim:thunderbolt4,vram=8GiB,compute=8+4", ready=False) as running:
        running.until(lambda: "sim:0" in running.model("finder").get("devices", []), 60, "the device serves")
        yield running


@pytest.fixture
def page(browser, server: Server):
    """The page, open. Whatever it asks of another host, and each error of its script, fails the test."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    wrong: list[str] = []
    page.on("request", lambda r: None if r.url.startswith((server.url, "blob:")) else wrong.append(f"asked {r.url}"))
    page.on("pageerror", lambda e: wrong.append(str(e)))
    # Chromium reports each refused picture as an error of its own.
    page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and "415" not in m.text else None)
    page.goto(server.url)
    yield page
    context.close()
    assert not wrong


@contextmanager
def load(server: Server) -> Iterator[list[int]]:
    """Pictures all the time; gives the statuses of their answers."""
    statuses: list[int] = []
    picture = encoded(scene(320, 240, 60, 60, 80))
    end = threading.Event()

    def post() -> None:
        while not end.is_set():
            statuses.append(server.predict("finder", picture).status_code)

    thread = threading.Thread(target=post)
    thread.start()
    try:
        yield statuses
    finally:
        end.set()
        thread.join()


@contextmanager
def elsewhere(document: bytes) -> Iterator[str]:
    """The URL of another server's page."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(document)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()


def card(page, device: str):
    return page.get_by_role("article", name=device, exact=True)


def test_an_unplug_and_a_replug_are_seen_as_they_happen(page, server: Server):
    expect = playwright.expect
    with load(server) as statuses:
        expect(card(page, "sim:0").get_by_text("serving", exact=True)).to_be_visible(timeout=15_000)
        expect(card(page, "sim:0").locator("dd").first).not_to_have_text("0", timeout=15_000)
        button = card(page, "sim:0").get_by_role("button", name="Unplug")
        button.focus()
        page.keyboard.press("Enter")
        expect(card(page, "sim:0").get_by_text("unplugged (simulated)").first).to_be_visible(timeout=15_000)
        expect(page.get_by_role("status").first).to_contain_text("Degraded", timeout=15_000)
        expect(card(page, "cpu").locator("dd").first).not_to_have_text("0", timeout=15_000)
        card(page, "sim:0").get_by_role("button", name="Replug").click()
        expect(card(page, "sim:0").get_by_text("serving", exact=True)).to_be_visible(timeout=30_000)
        expect(page.get_by_role("status").first).not_to_contain_text("Degraded", timeout=15_000)
    assert set(statuses) == {200}


def test_a_model_that_cannot_be_served_says_why(page):
    row = page.get_by_role("row", name="broken")
    playwright.expect(row).to_contain_text("failed", timeout=15_000)
    playwright.expect(row).to_contain_text("model.onnx")


def test_a_photograph_is_tried_with_its_boxes_drawn_over_it(page, tmp_path: Path):
    picture = tmp_path / "block.png"
    picture.write_bytes(encoded(scene(640, 480, 100, 120, 160), "PNG"))
    page.get_by_role("combobox", name="Model").select_option("finder")
    page.set_input_files("#file", picture)
    playwright.expect(page.locator("#answer")).to_contain_text("ms", timeout=15_000)
    assert page.locator("#marks").get_attribute("viewBox") == "0 0 640 480"
    assert page.locator("#answer li").count() == 1
    corners = [[float(v) for v in p.split(",")] for p in page.locator("#marks polygon").get_attribute("points").split()]
    assert corners[0] == pytest.approx([100, 120], abs=6) and corners[2] == pytest.approx([260, 280], abs=6)


def test_what_is_no_picture_is_told_in_words(page, tmp_path: Path):
    text = tmp_path / "notes.jpg"
    text.write_text("not a picture")
    page.get_by_role("combobox", name="Model").select_option("finder")
    page.set_input_files("#file", text)
    playwright.expect(page.locator("#answer")).to_contain_text("image", timeout=15_000)


@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1200, "light")])
def test_nothing_lies_outside_the_screen_and_text_can_be_read(browser, server: Server, width: int, scheme: str):
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    page.goto(server.url)
    playwright.expect(card(page, "sim:0")).to_be_visible(timeout=15_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    colours = page.evaluate("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    text, ground = (sum(map(int, c.removeprefix("rgb(").removesuffix(")").split(","))) for c in colours)
    assert abs(text - ground) > 450, f"text {colours[0]} on {colours[1]}"
    assert (ground < text) == (scheme == "dark")
    context.close()


def test_a_streams_newest_frame_and_its_figures_appear_and_go_on(page, server: Server):
    expect = playwright.expect
    with stream(server.url, "finder", "roof", [encoded(scene(320, 240, 60, 60, 80))], 10):
        shown = card(page, "roof")
        expect(shown.get_by_text("receiving", exact=True)).to_be_visible(timeout=15_000)
        frame = shown.get_by_role("img", name="newest frame of roof")
        page.wait_for_function("(img) => img.naturalWidth === 320 && img.naturalHeight === 240", arg=frame.element_handle(), timeout=15_000)
        figures = shown.locator("dl")
        expect(figures).to_contain_text("finder")
        expect(figures).to_contain_text(" ms", timeout=15_000)
        first = int(frame.get_attribute("data-frame"))
        page.wait_for_function("([img, n]) => Number(img.dataset.frame) > n", arg=[frame.element_handle(), first], timeout=15_000)
    expect(card(page, "roof").get_by_text("receiving", exact=True)).to_have_count(0, timeout=15_000)


def test_a_device_is_ejected_and_taken_back_with_nothing_but_the_keyboard(page):
    """Tab leads to each button, Enter presses it, and the focus stays in the page when the buttons change under it."""
    expect = playwright.expect
    expect(card(page, "sim:0").get_by_text("serving", exact=True)).to_be_visible(timeout=30_000)

    def press(name: str) -> None:
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.dataset.key") == f"sim:0 {name}":
                break
        else:
            pytest.fail(f"Tab never came to {name!r}")
        page.keyboard.press("Enter")

    press("Eject")
    expect(card(page, "sim:0").get_by_text("ejected", exact=True)).to_be_visible(timeout=15_000)
    expect(page.get_by_role("alert")).not_to_be_empty()
    page.evaluate("document.activeElement.blur()")
    press("Try again now")
    expect(card(page, "sim:0").get_by_text("serving", exact=True)).to_be_visible(timeout=60_000)


def test_a_page_of_another_site_reaches_nothing(browser, server: Server):
    """In the browser itself: what it sends across origins is refused, also what it would send without asking first."""
    script = f"""<script>
      const simple = fetch("{server.url}/v1/devices/sim:0/eject", {{ method: "POST", mode: "no-cors" }});
      const read = fetch("{server.url}/v1/models").then(() => "read", () => "refused");
      const socket = new Promise((done) => {{
        const ws = new WebSocket("{server.url.replace("http", "ws")}/v1/models/finder/stream");
        ws.onopen = () => done("open"); ws.onerror = () => done("refused");
      }});
      Promise.all([simple.catch(() => null), read, socket]).then(([, a, b]) => {{ document.title = `${{a}} ${{b}}`; }});
    </script>"""
    with elsewhere(script.encode()) as url:
        page = browser.new_page()
        statuses: list[int] = []
        page.on("response", lambda r: statuses.append(r.status) if r.url.startswith(server.url) else None)
        page.goto(url)
        page.wait_for_function("document.title", timeout=15_000)
        assert page.title() == "refused refused"
        assert statuses and set(statuses) == {403}
        page.close()
    assert server.device("sim:0")["state"] != "ejected"


def test_the_api_page_shows_every_route_and_asks_nobody(page, server: Server):
    page.get_by_role("link", name="API").click()
    playwright.expect(page.get_by_role("heading", name="POST /v1/models/{model}/predict")).to_be_visible(timeout=15_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
