"""Measuring wants the machine for itself: who measures waits for those who load, in this process and in the other workers.

A lock on one file of the cache directory, so it ends with its process however that ends. A worker that hangs with it must not keep others
from serving: nobody waits for longer than PATIENCE_S, and a figure that was disturbed is corrected as work flows.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

PATIENCE_S = 20.0


@contextmanager
def loading(cache: Path) -> Iterator[None]:
    """Beside others that load; not beside one that measures."""
    with _locked(cache, fcntl.LOCK_SH):
        yield


@contextmanager
def measuring(cache: Path) -> Iterator[None]:
    """While nobody else measures or loads."""
    with _locked(cache, fcntl.LOCK_EX):
        yield


@contextmanager
def _locked(cache: Path, kind: int) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = (cache / "measuring.lock").open("w")
    except OSError as e:
        log.warning("no lock in the cache directory (%s): measurements may disturb each other", e)
        yield
        return
    with file:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > end:
                    log.warning("another worker has been measuring for %.0f s: going on beside it", PATIENCE_S)
                    break
                time.sleep(0.02)
        yield
