"""`headwater sync`: run the pipeline until a signal; list, create and drop its replication slots."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.pipeline.settings import PipelineSettings
    from headwater.pipeline.status import QueryStatus

app = typer.Typer(help="Run the pipeline between streams, Postgres and archives.", invoke_without_command=True)
slots_app = typer.Typer(help="The replication slots that the pipeline reads changes from.", no_args_is_help=True)
app.add_typer(slots_app, name="slots")

_SHOW_EVERY_S = 1.0

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The pipeline's settings; default: config/pipeline.toml."),
]
Server = Annotated[str | None, typer.Option("--server", metavar="URL", help="The server's address.")]
Postgres = Annotated[str | None, typer.Option("--postgres", metavar="URL", help="The database's address.")]


@app.callback()
def sync(
    context: typer.Context,
    config: Config = None,
    server: Server = None,
    postgres: Postgres = None,
    master: Annotated[str | None, typer.Option("--master", metavar="URL", help="Where Spark runs: local[2], …")] = None,
    checkpoints: Annotated[
        str | None, typer.Option("--checkpoints", metavar="DIR", help="The checkpoint directory.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", metavar="PORT", help="Port of metrics and readiness; 0 picks one.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only print what would run.")] = False,
) -> None:
    """Run every configured job in one Spark application, until SIGTERM or Ctrl-C."""
    if context.invoked_subcommand is not None:
        return
    flags = {
        "server": server,
        "postgres": postgres,
        "master": master,
        "checkpoints": checkpoints,
        "metrics_port": metrics_port,
    }
    settings = _settings(config, flags)
    if check:
        _print_jobs(settings)
        return
    from headwater.pipeline.application import Application
    from headwater.pipeline.endpoint import EndpointError
    from headwater.pipeline.session import SparkMissingError
    from headwater.pipeline.stderr_lines import tidy_stderr

    _set_up_logging()
    show = _progress() if sys.stderr.isatty() else None
    application = Application(settings, **({"show": show} if show else {}))
    try:
        with tidy_stderr():
            code = application.run()
    except (EndpointError, SparkMissingError) as error:
        raise CommandError(str(error)) from None
    if code:
        raise typer.Exit(code)


@slots_app.command("ls")
def list_slots(config: Config = None, postgres: Postgres = None) -> None:
    """List the slots of the database, their positions and how much WAL they keep."""
    from headwater.postgres import slots
    from headwater.postgres.lsn import lsn_to_text

    with _database(config, postgres) as connection:
        for slot in slots.states(connection):
            typer.echo(
                f"{slot.name}\t{lsn_to_text(slot.confirmed_lsn)}\t{slot.lag_bytes} bytes kept\t{slot.wal_status}"
                f"\t{'in use' if slot.active else 'idle'}"
            )


@slots_app.command("drop")
def drop_slot(
    name: Annotated[str, typer.Argument(help="The slot.")], config: Config = None, postgres: Postgres = None
) -> None:
    """Drop a slot and its first copies. A pipeline that used it needs a new checkpoint."""
    from headwater.postgres import slots, snapshots

    with _database(config, postgres) as connection:
        dropped = slots.drop(connection, name)
        snapshots.forget(connection, name)
    if not dropped:
        raise CommandError(f"there is no slot {name} in the database; `headwater sync slots ls` lists them", 3)
    typer.echo(f"dropped {name}")


@slots_app.command("create")
def create_slot(
    name: Annotated[str, typer.Argument(help="The slot.")], config: Config = None, postgres: Postgres = None
) -> None:
    """Create a slot in advance, so that changes are kept from now on."""
    from headwater.postgres import slots
    from headwater.postgres.lsn import lsn_to_text

    with _database(config, postgres) as connection:
        typer.echo(f"{name} at {lsn_to_text(slots.create(connection, name).confirmed_lsn)}")


def _settings(config: Path | None, flags: dict[str, Any]) -> PipelineSettings:
    from headwater.config import ConfigError

    try:
        from headwater.pipeline.settings import load
    except ImportError as error:
        raise CommandError(
            f"the pipeline is not installed ({error}); pip install 'headwater[pipeline]'", USAGE
        ) from None
    try:
        settings = load(config, os.environ, flags)
        settings.jobs()
    except ConfigError as error:
        raise CommandError(str(error), USAGE) from None
    return settings


def _database(config: Path | None, postgres: str | None) -> Any:
    import psycopg

    from headwater.postgres.connections import connect, display_address

    url = _settings(config, {"postgres": postgres}).pipeline.postgres
    try:
        return connect(url)
    except psycopg.Error as error:
        raise CommandError(f"Postgres at {display_address(url)}: {error}") from None


def _print_jobs(settings: PipelineSettings) -> None:
    from headwater.postgres.connections import display_address

    typer.echo(f"server   {settings.pipeline.server}")
    typer.echo(f"postgres {display_address(settings.pipeline.postgres)}")
    typer.echo(f"spark    {settings.pipeline.master}")
    for job in settings.jobs():
        typer.echo(f"{job.name}: {printable(job.source)} -> {printable(job.target)}")


def _set_up_logging() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # py4j logs every call.
    logging.getLogger("py4j").setLevel(logging.ERROR)


def _progress() -> Any:
    """A table of the jobs on the terminal, updated in place."""
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
    live.start()
    # Show the cursor again, however the command ends.
    atexit.register(live.stop)
    shown = 0.0

    def show(queries: list[QueryStatus], slots: dict[str, dict[str, Any]]) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < _SHOW_EVERY_S:
            return
        shown = now
        table = Table("job", "from", "to", "state", "rows", "rows/s", "batch", "lag", "error")
        for one in queries:
            table.add_row(
                one.name,
                one.source,
                one.target,
                one.status,
                f"{one.rows:,}",
                f"{one.processed_rows_per_s:,.0f}",
                "" if one.batch is None else f"{one.batch} in {one.batch_ms or 0:.0f} ms",
                "" if one.lag_messages is None else f"{one.lag_messages:,}",
                (one.error or {}).get("message", ""),
            )
        for name, slot in slots.items():
            table.add_row(
                name,
                "slot",
                slot["database"],
                slot["status"],
                "",
                "",
                slot["confirmed_lsn"],
                f"{slot['lag_bytes']:,} B",
                "",
            )
        live.update(table, refresh=True)

    return show
