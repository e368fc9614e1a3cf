"""The manual's tables say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
assert _spec is not None and _spec.loader is not None
make_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_docs)


@pytest.mark.parametrize("name", make_docs.PAGES)
def test_the_table_is_up_to_date(name: str) -> None:
    assert (ROOT / "docs" / name).read_text("utf-8") == make_docs.PAGES[name](), "run: python scripts/make_docs.py"
