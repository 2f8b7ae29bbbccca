"""`headwater cluster status`: show the nodes of a cluster, and who owns its shards.

Nodes and shards are those that Postgres has, so they are shown whatever has failed. A node adds what each shard has in
the object store and in its cache, which only the processes of the shards know.

The exit code is 0 when every shard is served and Postgres replicates, else 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.options import ConfigFile, settings_from
from headwater.cli.remote import CaFile, Token, check_url
from headwater.cli.token import StackDirectory as DirectoryOption
from headwater.core.plurals import counted
from headwater.printable import printable, printable_json

if TYPE_CHECKING:
    from headwater.cli.cluster_figures import ShardFigures
    from headwater.cluster.nodes.status import ClusterStatus

app = typer.Typer(help="Show the state of a cluster.", no_args_is_help=True)


@app.callback()
def cluster() -> None:
    """Show the state of a cluster."""


@app.command()
def status(
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="The node to ask for the figures of the shards.")
    ] = "",
    token: Token = "",
    ca_file: CaFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    data_dir: DirectoryOption = None,
    config_file: ConfigFile = None,
) -> None:
    """Show nodes, shards, and what is where: of cluster.postgres_url, or else of `headwater up --nodes`.

    Any node is asked for what the shards have in the object store and in their caches. Without --url these are the
    nodes at the addresses that Postgres has, with auth.token.
    """
    import msgspec
    import psycopg

    from headwater.cli.cluster_figures import figures_of
    from headwater.cluster.nodes.schema import connect
    from headwater.cluster.nodes.status import cluster_status

    if url:
        check_url(url)
    settings = settings_from(None, config_file).settings
    postgres_url = settings.cluster.postgres_url or _stack_url(data_dir or settings.stack.data_dir)
    try:
        with connect(postgres_url, "status") as connection:
            found = cluster_status(connection, require_standby=settings.cluster.require_standby)
    except psycopg.Error as error:
        raise CommandError(f"the state of the cluster is unknown: {error}") from None
    scheme = "https" if settings.tls.cert_path else "http"
    urls = [url] if url else [f"{scheme}://{node.address}" for node in found.nodes if node.responds]
    try:
        figures = figures_of(found.id, urls, token if url else settings.auth.token, ca_file)
    except OSError as error:
        raise CommandError(f"--ca-file: {ca_file} cannot be read: {error}", USAGE) from None
    if as_json:
        state = msgspec.to_builtins(found)
        for shard in state["shards"]:
            shard["figures"] = figures.by_shard.get(shard["id"])
        typer.echo(printable_json(msgspec.json.format(msgspec.json.encode(state)).decode()))
    else:
        for line in _lines(found, figures):
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


def _lines(found: ClusterStatus, figures: ShardFigures) -> list[str]:
    silent = sum(not node.responds for node in found.nodes)
    lines = [
        f"cluster {found.name}: {counted(len(found.nodes), 'node')}{f' ({silent} not responding)' if silent else ''},"
        f" {counted(len(found.shards), 'shard')}"
    ]
    if found.problem is not None:
        lines.append(f"Postgres: {found.problem}")
    lines += [
        f"node {node.name} at {node.address}: {counted(node.shards, 'shard')}"
        + (f", standbys of {', '.join(map(str, node.warm))}" if node.warm else "")
        + ("" if node.responds else f", has not responded for {node.silent_s:g} s")
        + (", drains" if node.leaves else "")
        + (f", clock {abs(node.clock_ahead_s):g} s {_direction(node.clock_ahead_s)}" if node.clock_ahead_s else "")
        for node in found.nodes
    ]
    lines += [
        f"shard {shard.id}: {shard.owner or 'no owner'}{'' if shard.is_serving else ' (not served)'}, epoch"
        f" {shard.epoch}, record {shard.seq}, journal {shard.journal_batches} batches, {shard.journal_bytes} bytes"
        + _stored(figures.by_shard.get(shard.id))
        for shard in found.shards
    ]
    if figures.problem is not None:
        lines.append(f"object store and cache: unknown ({figures.problem})")
    return lines


def _stored(figures: Mapping[str, int] | None) -> str:
    """What a shard has in the object store and in its cache; nothing if its process did not answer."""
    if figures is None:
        return ""
    return (
        f", object store {figures.get('cold_objects', 0)} objects, {figures.get('cold_bytes', 0)} bytes, waiting for it"
        f" {figures.get('cold_waiting_bytes', 0)} bytes, cached {figures.get('cold_cached_bytes', 0)} bytes"
    )
