"""`headwater status`: what of the stack runs, checked against the processes themselves; and the pipeline's jobs.

Exit code 0 when every part is up, 1 when one is not, 3 when no stack runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.printable import printable, printable_json
from headwater.stack.state import StackDirectory, truth_about

if TYPE_CHECKING:
    from headwater.config import Settings
    from headwater.stack.jobs import JobStatus
    from headwater.stack.state import StackStatus

NOT_RUNNING = 3
_PIPE_WIDTH = 220  # columns; a line cut to a guessed screen is of no use to grep


def status(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Show each part: its state, process, port, restarts and log; and each job of the pipeline, as it tells it."""
    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    found = truth_about(directory)
    jobs, untold = _jobs(found, settings)
    if as_json:
        import msgspec

        whole = None if found is None else {**msgspec.to_builtins(found), "jobs": msgspec.to_builtins(jobs)}
        typer.echo(printable_json(msgspec.json.format(msgspec.json.encode(whole)).decode()))
    elif found is None:
        typer.echo(f"no stack was ever started on {directory.root}")
    else:
        from rich.console import Console

        from headwater.stack.display import jobs_table, table_of

        console = Console()
        if not console.is_terminal:
            console = Console(width=_PIPE_WIDTH)
        console.print(table_of(found))
        if found.detail:
            console.print(printable(found.detail), style="red", markup=False)
        if jobs:
            console.print(jobs_table(jobs))
        if untold:
            console.print(printable(untold), style="yellow", markup=False)
    if found is None or not directory.is_supervised:
        raise typer.Exit(NOT_RUNNING)
    if found.phase != "up" or any(part.state not in {"up", "absent"} for part in found.parts):
        raise typer.Exit(1)


def _jobs(found: StackStatus | None, settings: Settings) -> tuple[list[JobStatus], str]:
    """The pipeline's jobs; or why they are not known."""
    import msgspec

    from headwater.client import ClientError
    from headwater.stack.jobs import jobs_told
    from headwater.stack.server_address import UnsafeSettings, server_address

    parts = [] if found is None else found.parts
    servers = [part.address for part in parts if part.name.startswith("server") and part.state == "up"]
    try:
        listening = settings.server
        address = server_address(settings, listening.host, listening.port, tls=settings.tls.enabled)
        return jobs_told(servers, address.ca_file), ""
    except (
        ClientError,
        msgspec.MsgspecError,
        UnsafeSettings,
    ) as error:  # Anyone may write to the stream that tells of them.
        return [], f"the pipeline's jobs are not known: {error}"
