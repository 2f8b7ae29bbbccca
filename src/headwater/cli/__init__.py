"""The `headwater` command: a table of the commands, each in its own module, and error reporting.

Invariant: a usage error is one line on stderr and exit code 2, a runtime error one line and exit code 1. The stream
commands also use 3 (not found), 4 (conflict) and 5 (access denied). To add a command, write a module and add a row to
the table. Only the module of the command that runs is imported: importing all of them takes half a second.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any, Final, NamedTuple

import typer

import headwater
from headwater.cli.errors import RUNTIME, USAGE, CommandError
from headwater.core import native
from headwater.printable import printable


class CommandEntry(NamedTuple):
    """The location of a command: `headwater.cli.MODULE.ATTRIBUTE` is a function, or a group of commands."""

    module: str
    attribute: str
    panel: str | None = None
    passes_options: bool = False
    """Whether unknown options are passed to the command, for another program."""


_COMMANDS: Final = {
    "serve": CommandEntry("serve", "serve"),
    "backup": CommandEntry("backup", "backup"),
    "restore": CommandEntry("backup", "restore"),
    "ls": CommandEntry("listing", "ls", "Streams"),
    "create": CommandEntry("writing", "create", "Streams"),
    "append": CommandEntry("writing", "append", "Streams"),
    "read": CommandEntry("reading", "read", "Streams"),
    "tail": CommandEntry("reading", "tail", "Streams"),
    "head": CommandEntry("listing", "head", "Streams"),
    "close": CommandEntry("writing", "close", "Streams"),
    "fork": CommandEntry("writing", "fork", "Streams"),
    "delete": CommandEntry("writing", "delete", "Streams"),
    "ping": CommandEntry("ping_and_bench", "ping", "Streams"),
    "bench": CommandEntry("ping_and_bench", "bench", "Streams"),
    "bucket": CommandEntry("bucket", "buckets", "Streams"),
    "snapshot": CommandEntry("bucket", "snapshots", "Streams"),
    "subscription": CommandEntry("subscription", "app", "Streams"),
    "up": CommandEntry("up", "up", "Stack"),
    "down": CommandEntry("down", "down", "Stack"),
    "status": CommandEntry("status", "status", "Stack"),
    "logs": CommandEntry("logs", "logs", "Stack"),
    "token": CommandEntry("token", "token", "Stack"),
    "psql": CommandEntry("psql", "psql", "Stack", passes_options=True),
    "cluster": CommandEntry("cluster", "app", "Stack"),
    "shapes": CommandEntry("shapes", "shapes", "Pipeline"),
    "fold": CommandEntry("fold", "fold", "Pipeline"),
    "query": CommandEntry("query", "query", "Pipeline"),
    "archive": CommandEntry("archive", "app", "Pipeline"),
    "sync": CommandEntry("sync", "app"),
    "store": CommandEntry("store", "app"),
    "config": CommandEntry("config", "app"),
}


def command_line(only: str | None = None) -> typer.Typer:
    """The command line with all commands, or with at most the named one."""
    app = typer.Typer(
        name="headwater",
        help="Run a Durable Streams server, and work with the streams of any Durable Streams server.",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name, entry in _COMMANDS.items():
        if only is not None and name != only:
            continue
        command: Any = getattr(import_module(f"headwater.cli.{entry.module}"), entry.attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=entry.panel)
            continue
        passing = {"ignore_unknown_options": True, "allow_extra_args": True} if entry.passes_options else None
        app.command(name, rich_help_panel=entry.panel, context_settings=passing)(command)
    return app


_EXTRAS = {
    **dict.fromkeys(("deltalake", "numpy", "pandas", "psycopg", "pyarrow", "pyspark"), "pipeline"),
    "uvicorn": "shapes",
}
"""Modules of optional dependencies, and the extra that installs them."""


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and the build, and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"headwater {headwater.__version__} ({native.BUILD})")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    words = sys.argv[1:] if arguments is None else arguments
    first = words[0] if words and words[0] in {*_COMMANDS, "--version"} else None
    try:
        code = command_line(first)(args=words, prog_name="headwater", standalone_mode=False)
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
        context = getattr(error, "ctx", None)
        message = format_message().replace(" Value error, ", " ")  # Typer quotes pydantic.
        _report(f"{message} (see `{context.command_path if context else 'headwater'} -h`)")
        code = USAGE
    sys.exit(code if isinstance(code, int) else 0)


def _extra_of(error: ImportError) -> str | None:
    """The optional dependencies that a missing module belongs to."""
    return _EXTRAS.get((error.name or "").partition(".")[0])


def _report(message: str) -> None:
    sys.stderr.write(f"headwater: {printable(' '.join(message.split()))}\n")
