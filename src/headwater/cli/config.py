"""`headwater config show`: print every setting with its value and its origin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.options import ConfigFile, Profile, settings_from
from headwater.config import LoadedSettings
from headwater.config.describe import shown
from headwater.config.errors import SECRETS

app = typer.Typer(help="Show the settings.", no_args_is_help=False)

_PIPE_WIDTH = 200  # columns; without a terminal, lines must not be truncated to a guessed width


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


@app.command()
def show(
    profile: Profile = None,
    config_file: ConfigFile = None,
    style: Annotated[OutputFormat, typer.Option("--format", help="Output format.")] = OutputFormat.TABLE,
) -> None:
    """Print the effective settings, each with its origin (default, file, environment or flag)."""
    loaded = settings_from(profile, config_file)
    if style is OutputFormat.JSON:
        listing = {key: {"value": value, "origin": origin} for key, value, origin in _rows(loaded)}
        typer.echo(json.dumps(listing, indent=2, default=str))
        return
    _print_table(loaded)


def _rows(loaded: LoadedSettings) -> Iterator[tuple[str, object, str]]:
    for key, origin in loaded.origins.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(loaded.settings, section), name)
        if key in SECRETS and value:
            value = "(set)"
        yield key, str(value) if isinstance(value, Path) else value, origin


def _print_table(loaded: LoadedSettings) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    table = Table("setting", "value", "from", box=None, pad_edge=False, header_style="bold")
    for key, value, origin in _rows(loaded):
        given = "dim" if origin == "default" else ""
        table.add_row(Text(key, given), Text(shown(value), given), Text(origin, given))
    console.print(table)
