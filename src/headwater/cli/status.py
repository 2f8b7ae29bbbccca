"""`headwater status`: what of the stack runs, checked against the processes themselves.

Exit code 0 when every part is up, 1 when one is not, 3 when no stack runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.stack.state import StackDirectory, truth_about

NOT_RUNNING = 3
_PIPE_WIDTH = 220  # columns; a line cut to a guessed screen is of no use to grep


def status(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Show each part: its state, process, port, restarts and log."""
    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    found = truth_about(directory)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    elif found is None:
        typer.echo(f"no stack was ever started on {directory.root}")
    else:
        from rich.console import Console

        from headwater.stack.display import table_of

        console = Console()
        if not console.is_terminal:
            console = Console(width=_PIPE_WIDTH)
        console.print(table_of(found))
        if found.detail:
            console.print(found.detail, style="red", markup=False)
    if found is None or not directory.is_supervised:
        raise typer.Exit(NOT_RUNNING)
    if found.phase != "up" or any(part.state not in {"up", "absent"} for part in found.parts):
        raise typer.Exit(1)
