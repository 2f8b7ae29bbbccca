"""The `headwater` command: registers the commands, one module each, and reports their errors.

Invariant: a usage error is one line on stderr and exit code 2, a runtime error one line and exit code 1. The stream
commands also use 3 (not found), 4 (conflict) and 5 (access denied). To add a command, write a module and register it
below.
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
    measuring,
    psql,
    query,
    reading,
    serve,
    shapes,
    status,
    store,
    sync,
    token,
    up,
    writing,
)
from headwater.cli.errors import RUNTIME, USAGE, CommandError
from headwater.printable import printable

app = typer.Typer(
    name="headwater",
    help="Run a Durable Streams server, and work with the streams of any Durable Streams server.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    app.command(rich_help_panel="Streams")(_command)
for _measuring in (measuring.ping, measuring.bench):
    app.command(rich_help_panel="Streams")(_measuring)
for _stack_command in (up.up, down.down, status.status, logs.logs, token.token):
    app.command(rich_help_panel="Stack")(_stack_command)
app.command(rich_help_panel="Stack", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
    psql.psql
)
app.command(rich_help_panel="Pipeline")(shapes.shapes)
app.command(rich_help_panel="Pipeline")(fold.fold)
app.command(rich_help_panel="Pipeline")(query.query)
app.add_typer(archive.app, name="archive", rich_help_panel="Pipeline")
app.add_typer(sync.app, name="sync")
app.add_typer(store.app, name="store")
app.add_typer(config.app, name="config")


_EXTRAS = {
    **dict.fromkeys(("deltalake", "numpy", "pandas", "psycopg", "pyarrow", "pyspark"), "pipeline"),
    "uvicorn": "shapes",
}
"""Modules of optional dependencies, and the extra that installs them."""


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
    except CommandError as error:
        _report(str(error))
        code = error.code
    except KeyboardInterrupt:
        code = 130
    except ImportError as error:
        if (extra := _extra_of(error)) is None:
            raise
        _report(f"this command needs {error.name}, which is not installed: pip install 'headwater[{extra}]'")
        code = USAGE
    except OSError as error:
        _report(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        code = RUNTIME
    except Exception as error:
        # A usage error of Typer. Recognized by its method, because its class has moved between releases of Typer.
        format_message = getattr(error, "format_message", None)
        if format_message is None:
            raise
        _report(format_message())
        code = USAGE
    sys.exit(code if isinstance(code, int) else 0)


def _extra_of(error: ImportError) -> str | None:
    """The optional dependencies that a missing module belongs to."""
    return _EXTRAS.get((error.name or "").partition(".")[0])


def _report(message: str) -> None:
    sys.stderr.write(f"headwater: {printable(' '.join(message.split()))}\n")
