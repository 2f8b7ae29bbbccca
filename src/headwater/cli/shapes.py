"""`headwater shapes`: serve Postgres tables through Electric's Shape API, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, Profile, settings_from

_EXTRA = "pip install 'headwater[shapes]'"


def shapes(
    profile: Profile = None,
    config_file: ConfigFile = None,
    tables: Annotated[
        str | None,
        typer.Option("--tables", metavar="LIST", help="Tables to serve, comma-separated.", show_default=False),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.", show_default=False)
    ] = None,
    port: Annotated[
        str | None,
        typer.Option("--port", metavar="PORT", help="Port to listen on; 0 picks a free one.", show_default=False),
    ] = None,
    postgres: Annotated[
        str, typer.Option("--postgres", envvar="POSTGRES_URL", metavar="URL", help="The database's address.")
    ] = "postgresql://postgres@localhost:54321/durable_streams",
    server: Annotated[
        str, typer.Option("--server", envvar="DS_SERVER_URL", metavar="URL", help="The stream server's address.")
    ] = "http://localhost:4437",
    token: Annotated[
        str,
        typer.Option("--token", envvar="DS_TOKEN", metavar="TOKEN", help="Token for the server.", show_default=False),
    ] = "",
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file", envvar="DS_CA_FILE", metavar="FILE", help="PEM file of CA certificates.", show_default=False
        ),
    ] = None,
) -> None:
    """Serve Postgres tables to clients of Electric: `GET /v1/shape`."""
    flags = {"shapes.tables": tables, "shapes.host": host, "shapes.port": port}
    loaded = settings_from(profile, config_file, {key: value for key, value in flags.items() if value is not None})
    settings = loaded.settings
    chosen = settings.shapes
    if not chosen.table_list:
        raise CommandError("no tables are configured: list the tables to serve in --tables or shapes.tables", USAGE)
    try:
        from headwater.postgres.catalog import table_name
        from headwater.shapes.api import Times
        from headwater.shapes.asgi import Access
        from headwater.shapes.registry import Limits
        from headwater.shapes.server import Configuration, run
    except ModuleNotFoundError as error:
        raise CommandError(f"{error.name} is not installed: {_EXTRA}") from None
    from headwater.http.origins import Hosts, Origins
    from headwater.telemetry import set_up_logging

    set_up_logging(settings.log.filter, settings.log.format)
    is_loopback = chosen.host in {"127.0.0.1", "::1", "localhost"}
    hosts = Hosts(settings.server.hosts, listens_on_loopback=is_loopback, port=chosen.port)
    origins = Origins(settings.http.origins, allow_loopback=settings.http.loopback_origins)
    configuration = Configuration(
        postgres_url=postgres,
        server_url=server,
        server_token=token,
        server_ca_file=ca_file,
        host=chosen.host,
        port=chosen.port,
        slot=chosen.slot,
        publication=chosen.publication,
        limits=Limits(
            tables=frozenset(map(table_name, chosen.table_list)),
            shapes_max=chosen.max_shapes,
            idle_s=chosen.idle_secs,
            evict_after_s=chosen.evict_after_secs,
            log_bytes_max=chosen.max_log_bytes,
            tail_bytes=chosen.tail_bytes,
            chunk_bytes=chosen.chunk_bytes,
        ),
        times=Times(
            chosen.long_poll_timeout_secs,
            chosen.sse_timeout_secs,
            chosen.keep_alive_secs,
            chosen.ready_timeout_secs,
        ),
        access=Access(hosts.allows, origins.allows, chosen.secret, chosen.allow_delete),
        subset_bytes_max=chosen.max_subset_bytes,
        maintenance_s=chosen.check_interval_secs,
        connections_max=chosen.max_connections,
    )
    run(configuration)
