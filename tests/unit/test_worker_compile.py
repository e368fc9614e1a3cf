"""Finding what a killed compiler left in the cache."""

from __future__ import annotations

from pathlib import Path

from outboard.worker.compile import damaged_library


def test_the_library_that_cannot_be_loaded_is_found_behind_the_error_that_hides_it(tmp_path: Path) -> None:
    library = tmp_path / "6p" / "c6pj.main.so"
    library.parent.mkdir()
    library.touch()
    error = RuntimeError("backend failed")
    error.__cause__ = ImportError(f"{library}: file too short")
    assert damaged_library(error, tmp_path) == library


def test_no_file_outside_the_cache_and_no_other_error_is_blamed(tmp_path: Path) -> None:
    assert damaged_library(ImportError("/usr/lib/x86_64-linux-gnu/libc.so: file too short"), tmp_path) is None
    assert damaged_library(RuntimeError(f"{tmp_path}/a.so"), tmp_path) is None
