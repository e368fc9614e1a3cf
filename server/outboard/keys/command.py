"""`outboard keys`: make, list and revoke API keys. The file is edited, no server is asked: what runs reads it again within a second."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from outboard.keys import store
from outboard.refusal import refuse
from outboard.settings import SettingsError
from outboard.settings import load as load_settings

keys_app = typer.Typer(
    help="API keys, for a server that others can reach (docs/security.md).",
    epilog="Example: outboard keys add station1",
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[
    Path | None, typer.Option("--file", help="The file of keys; default: the setting [http] keys, else keys.json.", show_default=False)
]
Name = Annotated[str, typer.Argument(help="Whose key it is, such as station1.")]


def _path(file: Path | None) -> Path:
    if file is not None:
        return file
    try:
        return load_settings({}).http.keys or Path("keys.json")
    except SettingsError as e:
        raise refuse(e) from e


@keys_app.command(epilog="Example: outboard keys add station1")
def add(name: Name, file: File = None) -> None:
    """Make a key. It is printed once, and kept nowhere: only its digest is."""
    path = _path(file)
    try:
        key = store.add(path, name)
    except store.KeysError as e:
        raise refuse(e, 1) from e
    print(key)
    where = f"It is in {path} as a digest; `OUTBOARD_HTTP_KEYS={path} outboard serve` asks for keys."
    Console(stderr=True).print(f"{where} A client gives it as OUTBOARD_KEY.", highlight=False, markup=False, soft_wrap=True)


@keys_app.command("list", epilog="Example: outboard keys list --json")
def list_keys(file: File = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """List the names of the keys and when they were made."""
    try:
        keys = store.read(_path(file))
    except store.KeysError as e:
        raise refuse(e, 1) from e
    if as_json:
        print(json.dumps({"keys": [{"name": key.name, "created": msgspec.to_builtins(key.created)} for key in keys]}))
        return
    table = Table("Name", "Created", box=None, header_style="bold", pad_edge=False)
    for key in keys:
        table.add_row(key.name, key.created.isoformat(" ", "seconds"))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@keys_app.command(epilog="Example: outboard keys revoke station1")
def revoke(name: Name, file: File = None) -> None:
    """End a key's validity. Servers that run refuse it within a second; a stream that is open stays open."""
    try:
        store.revoke(_path(file), name)
    except store.KeysError as e:
        raise refuse(e, 1) from e
    print(f"{name} is revoked")
