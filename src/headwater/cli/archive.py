"""`headwater archive`: archive streams as a Delta table, and inspect, compact and migrate archives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headwater.cli.errors import CommandError
from headwater.cli.remote import DEFAULT_URL, CaFile, Token, Url
from headwater.cli.run_job import (
    Bucket,
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
from headwater.printable import printable

app = typer.Typer(help="Archive streams as a Delta table.", no_args_is_help=True)

Lake = Annotated[Path, typer.Argument(metavar="LAKE", help="The archive's directory.", show_default=False)]
LakeOption = Annotated[Path, typer.Option("--lake", metavar="DIR", help="The archive's directory.", show_default=False)]


class ArchiveFormat(StrEnum):
    DELTA = "delta"
    PARQUET = "parquet"


class OnGone(StrEnum):
    FAIL = "fail"
    RESTART = "restart"
    BOOTSTRAP = "bootstrap"
    SKIP = "skip"


class TrimBy(StrEnum):
    NEVER = "never"
    POINTER = "pointer"
    FOLD = "fold"


@app.command()
def run(
    lake: LakeOption,
    streams: Streams = None,
    bucket: Bucket = "",
    prefix: Prefix = "",
    form: Annotated[
        ArchiveFormat, typer.Option("--format", hidden=True, help="Ignored: an archive is always a Delta table.")
    ] = ArchiveFormat.DELTA,
    shards: Annotated[
        int, typer.Option("--shards", min=1, help="Directories that a day's streams are spread over.")
    ] = 8,
    on_gone: Annotated[
        OnGone, typer.Option("--on-gone", help="What to do when messages were deleted before they were archived.")
    ] = OnGone.FAIL,
    trim: Annotated[
        TrimBy, typer.Option("--trim", help="Let the server delete archived messages, with this kind of snapshot.")
    ] = TrimBy.NEVER,
    trim_after: Annotated[
        float,
        typer.Option(
            "--trim-after", metavar="SECONDS", min=0, help="Trim only what was archived at least this long ago."
        ),
    ] = 0.0,
    compact_every: Annotated[
        float,
        typer.Option(
            "--compact-every", metavar="SECONDS", min=0, help="Interval of compaction and vacuum; 0 disables them."
        ),
    ] = 3600.0,
    keep: Annotated[
        float,
        typer.Option("--keep", metavar="SECONDS", min=0, help="How long to keep files that a compaction replaced."),
    ] = 7 * 86400.0,
    once: Once = False,
    name: JobName = "archive",
    tasks: Tasks = 2,
    checkpoints: Annotated[
        str,
        typer.Option("--checkpoints", metavar="DIR", help="The checkpoint directory.", show_default="in LAKE"),
    ] = "",
    master: Master = "local[2]",
    progress: Progress = None,
    metrics_port: MetricsPort = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Archive streams until Ctrl-C."""
    from headwater.pipeline.archive.job import Archive
    from headwater.pipeline.job import JobEnvironment

    job = configured(
        lambda: Archive(
            name=name,
            lake=lake.absolute(),
            bucket=bucket,
            streams=tuple(streams or ()),
            prefix=prefix,
            format=form.value,
            shards=shards,
            on_gone=on_gone.value,
            trim=trim.value,
            trim_after_s=trim_after,
            compact_every_s=compact_every,
            keep_s=keep,
            tasks=tasks,
            once=once,
        )
    )
    places = checkpoints or str(lake.absolute() / "_checkpoints")
    with _archive_errors():
        run_job(
            job,
            JobEnvironment(stream_root(url), places, token, ca_file=str(ca_file or "")),
            master,
            progress,
            metrics_port,
        )


@app.command()
def compact(
    lake: Lake,
    target_mb: Annotated[int, typer.Option("--target-mb", min=1, help="Target size of merged files.")] = 256,
    keep: Annotated[
        float,
        typer.Option("--keep", metavar="SECONDS", min=0, help="How long to keep replaced files; rounded up to hours."),
    ] = 3600.0,
) -> None:
    """Merge small files and delete replaced ones. May run while an archive is being written."""
    from headwater.pipeline.archive.table import ArchiveTable

    with _archive_errors():
        table = ArchiveTable(lake)
        replaced, by = table.compact(target_mb * 1024 * 1024)
        typer.echo(f"compacted {replaced} files into {by}, deleted {table.vacuum(keep)}")


@app.command()
def show(
    lake: Lake, as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, one per stream.")] = False
) -> None:
    """Print the contents of an archive, and the offset up to which each stream is archived."""
    from headwater.pipeline.archive.table import ArchiveTable

    with _archive_errors():
        table = ArchiveTable(lake)
        stats, positions, shards = table.stats(), table.positions(), table.shards()
    for stream, end in sorted(positions.items()):
        if as_json:
            typer.echo(json.dumps({"stream": stream, "offset": end.offset, "messages": end.position}))
        else:
            typer.echo(f"{end.offset}  {end.position:>12,}  {printable(stream)}")
    if not as_json:
        typer.echo(
            f"version {stats.version}: {len(positions):,} streams, {stats.rows:,} rows,"
            f" {stats.files:,} files, {stats.bytes:,} bytes, {shards} shards"
        )


@app.command()
def migrate(lake: Lake) -> None:
    """Convert an archive of an earlier release to a Delta table, without copying data. Stop its archive job first."""
    from headwater.pipeline.archive.migration import migrate as migrate_archive

    with _archive_errors():
        typer.echo(migrate_archive(lake))


@contextmanager
def _archive_errors() -> Iterator[None]:
    from headwater.pipeline.archive.errors import ArchiveError

    try:
        yield
    except ArchiveError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename or 'the archive'}: {error.strerror or error}") from None
