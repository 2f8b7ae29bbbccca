"""`headwater cluster status`: show the nodes of a cluster, and who owns its shards.

The exit code is 0 when every shard is served and Postgres replicates, else 1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.printable import printable, printable_json

if TYPE_CHECKING:
    from headwater.cluster.nodes.status import ClusterStatus

app = typer.Typer(help="Show the state of a cluster.", no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """Show the state of a cluster."""


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Show nodes, shards and their journals: of cluster.postgres_url, or else of `headwater up --nodes`."""
    import msgspec
    import psycopg

    from headwater.cluster.nodes.schema import connect
    from headwater.cluster.nodes.status import cluster_status

    settings = settings_from(None, config_file).settings
    url = settings.cluster.postgres_url or _stack_url(data_dir or settings.stack.data_dir)
    try:
        with connect(url, "status") as connection:
            found = cluster_status(connection, require_standby=settings.cluster.require_standby)
    except psycopg.Error as error:
        raise CommandError(f"the state of the cluster is unknown: {error}") from None
    if as_json:
        typer.echo(printable_json(msgspec.json.format(msgspec.json.encode(found)).decode()))
    else:
        for line in _lines(found):
            typer.echo(printable(line))
    if not found.is_whole:
        raise typer.Exit(1)


def _stack_url(directory: Path) -> str:
    from headwater.stack.cluster_services import ACCESS_NAME

    try:
        return str(json.loads((directory / ACCESS_NAME).read_text())["postgres_url"])
    except (OSError, ValueError, KeyError):
        raise CommandError(
            f"cluster.postgres_url is not set, and {directory} has no cluster; set it, or name the directory of a stack"
            " with --data-dir",
            USAGE,
        ) from None


def _direction(ahead_s: float) -> str:
    return "ahead of Postgres" if ahead_s > 0 else "behind Postgres"


def _lines(found: ClusterStatus) -> list[str]:
    silent = sum(not node.responds for node in found.nodes)
    lines = [
        f"cluster {found.name}: {len(found.nodes)} nodes{f' ({silent} not responding)' if silent else ''},"
        f" {len(found.shards)} shards"
    ]
    if found.problem is not None:
        lines.append(f"Postgres: {found.problem}")
    lines += [
        f"node {node.name} at {node.address}: {node.shards} shards"
        + (f", standbys of {', '.join(map(str, node.warm))}" if node.warm else "")
        + ("" if node.responds else f", has not responded for {node.silent_s:g} s")
        + (", drains" if node.leaves else "")
        + (f", clock {abs(node.clock_ahead_s):g} s {_direction(node.clock_ahead_s)}" if node.clock_ahead_s else "")
        for node in found.nodes
    ]
    lines += [
        f"shard {shard.id}: {shard.owner or 'no owner'}{'' if shard.is_serving else ' (not served)'}, epoch"
        f" {shard.epoch}, record {shard.seq}, journal {shard.journal_batches} batches, {shard.journal_bytes} bytes"
        for shard in found.shards
    ]
    return lines
