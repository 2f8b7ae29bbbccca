"""`headwater archive`: streams into a lake, and the lake's own care."""

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
from headwater.cli.running import (
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

app = typer.Typer(help="Archive streams to a lake of Parquet files.", no_args_is_help=True)

Lake = Annotated[Path, typer.Argument(metavar="LAKE", help="The lake's directory.", show_default=False)]
LakeOption = Annotated[Path, typer.Option("--lake", metavar="DIR", help="The lake's directory.", show_default=False)]


class Form(StrEnum):
    PARQUET = "parquet"
    DELTA = "delta"


class Gone(StrEnum):
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
    form: Annotated[Form, typer.Option("--format", help="Parquet with a manifest, or a Delta table.")] = Form.PARQUET,
    shards: Annotated[int, typer.Option("--shards", min=1, help="Directories that a day's streams are spread to.")] = 8,
    on_gone: Annotated[
        Gone, typer.Option("--on-gone", help="When messages are gone before they were archived.")
    ] = Gone.FAIL,
    trim: Annotated[
        TrimBy, typer.Option("--trim", help="Let the server forget what the lake has, by a snapshot of this kind.")
    ] = TrimBy.NEVER,
    trim_after: Annotated[
        float, typer.Option("--trim-after", metavar="SECONDS", min=0, help="Only what has been in the lake so long.")
    ] = 0.0,
    once: Once = False,
    name: JobName = "archive",
    tasks: Tasks = 2,
    checkpoints: Annotated[
        str, typer.Option("--checkpoints", metavar="DIR", help="Where the job keeps its place.", show_default="in LAKE")
    ] = "",
    master: Master = "local[2]",
    progress: Progress = None,
    metrics_port: MetricsPort = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Archive streams, and go on until Ctrl-C."""
    from headwater.pipeline.archive.job import Archive
    from headwater.pipeline.job import Surroundings

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
            tasks=tasks,
            once=once,
        )
    )
    places = checkpoints or str(lake.absolute() / "_checkpoints")
    with _told_plainly():
        run_job(
            job,
            Surroundings(stream_root(url), places, token, ca_file=str(ca_file or "")),
            master,
            progress,
            metrics_port,
        )


@app.command()
def compact(
    lake: Lake,
    target_mb: Annotated[int, typer.Option("--target-mb", min=1, help="How large files may become.")] = 256,
    keep: Annotated[
        float, typer.Option("--keep", metavar="SECONDS", min=0, help="Delete replaced files only after so long.")
    ] = 3600.0,
) -> None:
    """Merge small files, and delete those that no reader can still need. May run beside an archive."""
    from headwater.pipeline.archive import compaction
    from headwater.pipeline.archive.reading import is_delta

    with _told_plainly():
        if is_delta(lake):
            from headwater.pipeline.archive.delta import DeltaLake

            table = DeltaLake(lake)
            typer.echo(f"replaced {table.compact(target_mb * 1024 * 1024)} files, deleted {table.vacuum(keep)}")
            return
        _require(lake)
        from headwater.cli.output import progress_bar

        with progress_bar("compacting", None) as advance:
            done = compaction.compact(lake, target_mb * 1024 * 1024, lambda at, of: advance(0 if not at else 1, of))
        swept = compaction.sweep(lake, keep)
        typer.echo(f"{done.files_before} files became {done.files_after} ({done.rows:,} rows), deleted {swept}")


@app.command()
def show(
    lake: Lake, as_json: Annotated[bool, typer.Option("--json", help="As JSON lines, one a stream.")] = False
) -> None:
    """Print what a lake holds, and up to which offset each stream is in it."""
    from headwater.pipeline.archive.manifest import Manifest

    with _told_plainly():
        _require(lake)
        contents = Manifest(lake).contents()
    for stream, place in sorted(contents.streams.items()):
        if as_json:
            typer.echo(json.dumps({"stream": stream, "offset": place.offset, "messages": place.position}))
        else:
            typer.echo(f"{place.offset}  {place.position:>12,}  {printable(stream)}")
    if not as_json:
        typer.echo(
            f"version {contents.version}: {len(contents.streams):,} streams, {contents.rows:,} rows,"
            f" {len(contents.files):,} files, {contents.bytes:,} bytes, {contents.shards} shards"
        )


def _require(lake: Path) -> None:
    from headwater.pipeline.archive.manifest import Manifest

    if not Manifest(lake).exists:
        raise CommandError(f"{lake} is not a lake with a manifest; `headwater archive run --lake DIR` makes one")


@contextmanager
def _told_plainly() -> Iterator[None]:
    from headwater.pipeline.archive.manifest import LakeTrouble

    try:
        yield
    except LakeTrouble as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"{error.filename or 'the lake'}: {error.strerror or error}") from None
