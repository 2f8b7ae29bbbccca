"""`headwater status`: show the services of the stack, checked against their processes, and the pipeline's jobs.

The exit code is 0 when every service is up, 1 when one is not, 3 when no stack runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.printable import printable, printable_json
from headwater.stack.state import StackDirectory, current_status

if TYPE_CHECKING:
    from headwater.config import Settings
    from headwater.stack.jobs import JobStatus
    from headwater.stack.state import StackStatus

NOT_RUNNING = 3
_PIPE_WIDTH = 220  # columns; without a terminal, lines must not be truncated to a guessed width


def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Show the state, process, port, restarts and log of each service, and the state of each pipeline job."""
    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    found = current_status(directory)
    jobs, unknown = _jobs(found, settings)
    if as_json:
        import msgspec

        whole = None if found is None else {**msgspec.to_builtins(found), "jobs": msgspec.to_builtins(jobs)}
        typer.echo(printable_json(msgspec.json.format(msgspec.json.encode(whole)).decode()))
    elif found is None:
        typer.echo(f"no stack has been started in {directory.root}")
    else:
        from rich.console import Console

        from headwater.stack.display import jobs_table, stack_table

        console = Console()
        if not console.is_terminal:
            console = Console(width=_PIPE_WIDTH)
        console.print(stack_table(found))
        if found.detail:
            console.print(printable(found.detail), style="red", markup=False)
        if jobs:
            console.print(jobs_table(jobs))
        if unknown:
            console.print(printable(unknown), style="yellow", markup=False)
    if found is None or not directory.is_supervised:
        raise typer.Exit(NOT_RUNNING)
    if found.phase != "up" or any(service.state not in {"up", "absent"} for service in found.parts):
        raise typer.Exit(1)


def _jobs(found: StackStatus | None, settings: Settings) -> tuple[list[JobStatus], str]:
    """Return the pipeline's jobs, or the reason why they are unknown."""
    import msgspec

    from headwater.client import ClientError
    from headwater.stack.jobs import pipeline_jobs
    from headwater.stack.server_address import StackSettingsError, server_address

    services = [] if found is None else found.parts
    servers = [service.address for service in services if service.name == "server" and service.state == "up"]
    try:
        return pipeline_jobs(servers, server_address(settings).ca_file), ""
    except (
        ClientError,
        msgspec.MsgspecError,
        StackSettingsError,
    ) as error:  # Any client can write to the status stream, so its content may be invalid.
        return [], f"the state of the pipeline's jobs is unknown: {error}"
