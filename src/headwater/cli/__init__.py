"""The `headwater` command: one module per command, and here only how they hang together.

Invariant: a mistake of the caller is one line on stderr and exit code 2; one at run time is one line and 1. The
commands on streams tell apart what a script may want to: 3 is missing, 4 a conflict, 5 denied.
To add commands, write a module with a `typer.Typer` and add it below.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import headwater
from headwater.cli import (
    archive,
    backup,
    config,
    down,
    fold,
    listing,
    logs,
    psql,
    query,
    reading,
    serve,
    status,
    store,
    sync,
    token,
    up,
    writing,
)
from headwater.cli.errors import CommandError
from headwater.printable import printable

app = typer.Typer(
    name="headwater",
    help="Headwater: a Durable Streams server, and commands for the streams of any.",
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("backup")(backup.backup)
app.command("restore")(backup.restore)
for _command in (
    listing.ls,
    writing.create,
    writing.append,
    reading.read,
    reading.tail,
    listing.head,
    writing.close,
    writing.fork,
    writing.delete,
):
    app.command(rich_help_panel="Streams of a server")(_command)
for _stack_command in (up.up, down.down, status.status, logs.logs, token.token):
    app.command(rich_help_panel="The stack")(_stack_command)
app.command(rich_help_panel="The stack", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
    psql.psql
)
app.command(rich_help_panel="The pipeline")(fold.fold)
app.command(rich_help_panel="The pipeline")(query.query)
app.add_typer(archive.app, name="archive", rich_help_panel="The pipeline")
app.add_typer(sync.app, name="sync")
app.add_typer(store.app, name="store")
app.add_typer(config.app, name="config")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"headwater {headwater.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    try:
        code = app(args=arguments, prog_name="headwater", standalone_mode=False)
    except CommandError as failure:
        _say(str(failure))
        code = failure.code
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        # Typer's report of a wrong flag, told by its method: its class has moved between typer's releases.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _say(format_message())
        code = 2
    sys.exit(code if isinstance(code, int) else 0)


def _say(message: str) -> None:
    sys.stderr.write(f"headwater: {printable(' '.join(message.split()))}\n")
