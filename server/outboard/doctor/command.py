"""`outboard doctor`. Exit codes: 0 nothing is wrong, 1 something is, 2 wrong usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from outboard.refusal import refuse

EXAMPLE = "Example: outboard doctor"


def doctor(
    spool: Annotated[Path | None, typer.Option(help="The station's spool folder, to look at its disk.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file, instead of ./outboard.toml.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Check enclosure, cable, card and driver: what is wrong, why, what mends it.

    Also the link, power and heat, the kernel log, libraries, limits and disk. Works without a GPU, and without a server.
    """
    from outboard.settings import SettingsError
    from outboard.settings import load as load_settings

    if sys.platform != "linux":
        raise refuse(f"the doctor reads Linux' /sys and /proc; this is {sys.platform}")
    try:
        settings = load_settings({}, file=config)
    except SettingsError as e:
        raise refuse(e) from e
    from outboard.doctor.areas import examine
    from outboard.doctor.machine import Machine
    from outboard.doctor.report import as_json as json_of
    from outboard.doctor.report import as_text, well

    machine = Machine(cache=settings.cache.expanduser(), spool=spool, requests=settings.limits.requests)
    facts, findings = examine(machine)
    print(json.dumps(json_of(facts, findings)) if as_json else as_text(facts, findings))
    if not well(findings):
        raise typer.Exit(1)
