"""`headwater fold`: keep the current state of streams, as snapshots for bootstrap and as a table."""

from __future__ import annotations

from typing import Annotated

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.remote import DEFAULT_URL, CaFile, Token, Url
from headwater.cli.run_job import (
    Bucket,
    Checkpoints,
    JobName,
    Master,
    MetricsPort,
    Once,
    Prefix,
    Progress,
    Streams,
    Tasks,
    configured,
    run_job,
    stream_root,
)


def fold(
    streams: Streams = None,
    bucket: Bucket = "",
    prefix: Prefix = "",
    snapshots: Annotated[bool, typer.Option("--snapshots/--no-snapshots", help="Publish the state.")] = True,
    every: Annotated[
        int, typer.Option("--every", metavar="N", min=1, help="Publish after every N messages of a stream.")
    ] = 1,
    table: Annotated[str, typer.Option("--table", metavar="NAME", help="Also keep it in this Postgres table.")] = "",
    postgres: Annotated[
        str, typer.Option("--postgres", envvar="POSTGRES_URL", metavar="URL", help="The database.", show_default=False)
    ] = "",
    once: Once = False,
    name: JobName = "fold",
    tasks: Tasks = 2,
    checkpoints: Checkpoints = "data/checkpoints",
    master: Master = "local[2]",
    progress: Progress = None,
    metrics_port: MetricsPort = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Fold change streams to their current state, and keep it current until Ctrl-C."""
    from headwater.pipeline.fold.job import Fold
    from headwater.pipeline.job import JobEnvironment

    if table and not postgres:
        raise CommandError("--table needs a database: set --postgres or POSTGRES_URL", USAGE)
    job = configured(
        lambda: Fold(
            name=name,
            bucket=bucket,
            streams=tuple(streams or ()),
            prefix=prefix,
            snapshots=snapshots,
            every=every,
            table=table,
            tasks=tasks,
            once=once,
        )
    )
    run_job(
        job,
        JobEnvironment(stream_root(url), checkpoints, token, postgres, str(ca_file or "")),
        master,
        progress,
        metrics_port,
    )
