"""The Chromium that is installed; without it, tests of the page are skipped and say so."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Name it before the server: what cannot be tested needs none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `test`)")
    if (chromium := shutil.which("chromium")) is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    from screenshots import FLAGS

    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser
        browser.close()
