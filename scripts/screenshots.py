"""Take the manual's pictures of the dashboard: a server of its own with a simulated eGPU, a stream, and the Chromium that is installed.

    .venv/bin/python scripts/screenshots.py            # into docs/images/; needs `make models`

Frames of a folder go to a model for as long as it takes; the cable is pulled and put back by the page's own buttons.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from outboard.bench.own_server import own_server
from outboard_client import FrameStream

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "sim:0"
CARD = "sim:thunderbolt4,vram=8GiB,compute=8+4"
#: Chromium would otherwise look for its vendor's hosts at each start.
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()
WIDE, PHONE = {"width": 1200, "height": 900}, {"width": 390, "height": 844}


@contextmanager
def stream(url: str, model: str, station: str, pictures: Sequence[bytes], fps: float) -> Iterator[None]:
    """A station that sends the pictures in turn, as long as the block runs."""
    end = threading.Event()

    async def frames() -> AsyncIterator[bytes]:
        for picture in itertools.cycle(pictures):
            if end.is_set():
                return
            yield picture
            await asyncio.sleep(1 / fps)

    async def send() -> None:
        async for _ in FrameStream(model, url, station=station).run(frames()):
            pass

    thread = threading.Thread(target=lambda: asyncio.run(send()))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def keep(page: Page, name: str, folder: Path, *, whole: bool = True) -> None:
    """The page as it is now, as WebP: a quarter of a PNG."""
    shot = folder / f"{name}.png"
    page.screenshot(path=shot, full_page=whole)
    Image.open(shot).convert("RGB").save(folder / f"{name}.webp", quality=80, method=6)
    shot.unlink()
    print(folder / f"{name}.webp", (folder / f"{name}.webp").stat().st_size, "bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    parser.add_argument("--models", type=Path, default=ROOT / "models", metavar="DIR")
    parser.add_argument("--samples", type=Path, default=ROOT / ".cache" / "samples", metavar="DIR")
    parser.add_argument("--fps", type=float, default=4.0)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or sys.exit("Chromium is not installed (Debian: apt install chromium)")
    with own_server(arguments.models, [CARD]) as url, sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=FLAGS)
        dark = browser.new_page(viewport=WIDE, color_scheme="dark")
        light = browser.new_page(viewport=WIDE, color_scheme="light")
        phone = browser.new_page(viewport=PHONE, color_scheme="light", device_scale_factor=2)
        for page in (dark, light, phone):
            page.goto(url)
        card = dark.get_by_role("article", name=DEVICE, exact=True)
        expect(dark.get_by_role("status").first).not_to_contain_text("not ready", timeout=180_000)
        expect(card.get_by_text("serving", exact=True)).to_be_visible(timeout=60_000)
        for row in dark.locator("#models tr").all():  # each model, on the card too
            expect(row).to_contain_text(DEVICE, timeout=180_000)
        pictures = [photograph.read_bytes() for photograph in sorted(arguments.samples.glob("*.jpg"))]
        with stream(url, "yolov2_tiny", "roof", pictures, arguments.fps):
            light.get_by_role("combobox", name="Model").select_option("yolov2_tiny")
            light.set_input_files("#file", arguments.samples / "chelsea.jpg")
            expect(light.locator("#answer")).to_contain_text("ms", timeout=30_000)
            time.sleep(25)  # something for the chart to show
            keep(dark, "dashboard-serving", arguments.out)
            keep(light, "dashboard-light", arguments.out)
            keep(phone, "dashboard-phone", arguments.out, whole=False)
            card.get_by_role("button", name="Unplug").click()
            expect(dark.get_by_role("status").first).to_contain_text("Degraded", timeout=30_000)
            time.sleep(8)
            keep(dark, "dashboard-unplugged", arguments.out)
            card.get_by_role("button", name="Replug").click()
            expect(card.get_by_text("serving", exact=True)).to_be_visible(timeout=120_000)
            expect(dark.get_by_role("row", name="yolov2_tiny")).to_contain_text(DEVICE, timeout=120_000)
            time.sleep(8)
            keep(dark, "dashboard-replugged", arguments.out)
        browser.close()


if __name__ == "__main__":
    main()
