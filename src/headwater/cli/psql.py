"""`headwater psql`: open psql on the stack's Postgres with the stored password."""

from __future__ import annotations

import os
import shutil
import sys
from enum import StrEnum
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption


class DatabaseRole(StrEnum):
    POSTGRES = "postgres"
    HEADWATER = "headwater"


def psql(
    context: typer.Context,
    role: Annotated[
        DatabaseRole,
        typer.Option("--role", help="postgres: the superuser; headwater: the pipeline's role, which owns its tables."),
    ] = DatabaseRole.POSTGRES,
    print_url: Annotated[
        bool, typer.Option("--print-url", help="Print the connection URL with the password, for other programs.")
    ] = False,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Open psql on the stack's database. Arguments after `--` are passed to psql, for example -- -c "SELECT 1"."""
    from headwater.stack.cluster_services import postgres_ports
    from headwater.stack.database import LocalPostgresError, database_url, find_binaries
    from headwater.stack.profiles import DATABASE
    from headwater.stack.roles import stored_credentials
    from headwater.stack.state import StackDirectory, current_status

    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    credentials = stored_credentials(directory.database_credentials)
    if credentials is None:
        raise CommandError(f"{directory.root} has no database; `headwater up --profile sync` creates one", USAGE)
    password = credentials.password_of(role.value)
    # The port of the running database, even if this shell has other settings than the one that started it.
    running = current_status(directory)
    ports = [part.port for part in running.parts if part.name == "postgres" and part.port] if running else []
    port = ports[0] if ports else settings.stack.postgres_port
    is_cluster = running is not None and any(part.name == "node-0" for part in running.parts)

    def url(secret: str) -> str:
        if not is_cluster:
            return database_url(role.value, secret, port, DATABASE)
        # Another server may have become the primary.
        return database_url(role.value, secret, postgres_ports(port), DATABASE) + "?target_session_attrs=read-write"

    if print_url:
        typer.echo(url(password))
        return
    try:
        beside = find_binaries() / "psql"
    except LocalPostgresError:
        beside = None
    program = str(beside) if beside is not None and beside.exists() else shutil.which("psql")
    if program is None:
        raise CommandError(
            "psql is not installed (on Debian: apt-get install postgresql-client). Other programs can connect with the"
            " URL that --print-url prints."
        )
    environment = {**os.environ, "PGPASSWORD": password}
    sys.stdout.flush()
    # Replace this process, so that Ctrl-C, the terminal and the exit code belong to psql.
    os.execve(program, [program, url(""), *context.args], environment)
