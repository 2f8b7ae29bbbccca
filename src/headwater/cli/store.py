"""`headwater store …`: check, inspect and convert a data directory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.config import OutputFormat
from headwater.cli.data_directory import (
    StoreLocation,
    copying,
    locate_store,
    paused_server,
    readable,
    require_no_server,
    running_server,
    storage_errors,
    wait_for_server,
)
from headwater.cli.errors import RUNTIME, USAGE, CommandError
from headwater.cli.options import ConfigFile, DataDirectory, Mode, Profile, StoreMode, settings_from
from headwater.cli.token import StackDirectory as StackOption
from headwater.core.plurals import counted
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.config import Settings
    from headwater.storage.offline.division import CopiedStore
    from headwater.storage.offline.stats import StoreStats

app = typer.Typer(help="Check, inspect and convert a data directory.", no_args_is_help=False)

_WORDS = {
    "streams": "streams",
    "forks": "of these, forks",
    "deleted_streams": "of these, deleted but read by forks",
    "payload_bytes": "message bytes",
    "snapshots": "snapshots",
    "snapshot_bytes": "snapshot bytes",
    "documents": "documents",
    "segments": "journal segments",
    "log_bytes": "journal bytes",
    "packs": "packs",
    "pack_bytes": "pack bytes",
    "live_bytes": "in packs, bytes in use",
    "dead_bytes": "in packs, bytes to be reclaimed",
    "cold_objects": "objects in the object store",
    "cold_bytes": "bytes in the object store",
    "cold_cached_bytes": "of these, also on this disk",
    "cold_waiting_bytes": "bytes not in the object store yet",
    "cold_fetched_bytes": "bytes fetched from it since the start",
    "shards": "shards",
    "shard_bytes": "shard file bytes",
    "used_bytes": "in shards, bytes in use",
    "journal_entries": "journal records not yet in shards",
    "journal_bytes": "journal bytes",
    "memory_bytes": "message bytes held in memory",
    "disk_bytes": "bytes on disk, all files",
    "free_bytes": "bytes free on the disk",
}


@app.command()
def check(
    profile: Profile = None, config_file: ConfigFile = None, mode: Mode = None, directory: DataDirectory = None
) -> None:
    """Verify every checksum and index of a directory that no server has open, or of a cluster; exit code 1 if anything
    is wrong."""
    store = locate_store(profile, config_file, mode, directory, takes_cluster=True)

    from headwater.storage.offline.check import check as find

    count = 0
    with storage_errors(), readable(store) as found:
        for problem in find(found.directory, found.mode):
            count += 1
            typer.echo(printable(str(problem)))
    if count:
        raise CommandError(f"{store.name}: {count} finding{'s' if count > 1 else ''}", RUNTIME)
    typer.echo(f"{store.name}: all checksums and indexes are correct")


@app.command()
def stats(
    profile: Profile = None,
    config_file: ConfigFile = None,
    mode: Mode = None,
    directory: DataDirectory = None,
    style: Annotated[OutputFormat, typer.Option("--format", help="Output format.")] = OutputFormat.TABLE,
) -> None:
    """Print the numbers of streams, bytes, segments, packs or shards, and free space. The server may be running."""
    store = locate_store(profile, config_file, mode, directory, takes_cluster=True)

    from headwater.storage.offline.families import family_of
    from headwater.storage.offline.stats import live_stats, offline_stats

    if store.cluster is not None:
        with storage_errors(), readable(store) as fetched:
            found = offline_stats(fetched.directory)
        # Its own files are gone with this command.
        numbers = {key: value for key, value in _numbers(found) if key not in ("disk_bytes", "free_bytes")}
        _report({"directory": store.name, "family": found.family, "running": False, **numbers}, style)
        return
    with storage_errors():
        family_of(store.directory, store.mode)
        answers = _request_all(store.directory, "stats")
        if not answers:
            found = offline_stats(store.directory)
            who: dict[str, Any] = {"running": False}
        else:
            contents: Counter[str] = Counter()
            parts: Counter[str] = Counter()
            for reported in answers:
                contents.update(reported["contents"])
                parts.update(reported["parts"])
            found = live_stats(store.directory, contents, parts)
            who = {
                "running": True,
                "pid": answers[0]["pid"],
                "mode": answers[0]["mode"],
                "memory_bytes": sum(reported["memory_bytes"] for reported in answers),
            }
    _report({"directory": str(store.directory), "family": found.family, **who, **dict(_numbers(found))}, style)


@app.command("rotate-key")
def rotate_key(
    profile: Profile = None, config_file: ConfigFile = None, mode: Mode = None, directory: DataDirectory = None
) -> None:
    """Create a new webhook signing key in the running server; old signatures stay valid."""
    store = locate_store(profile, config_file, mode, directory)
    with storage_errors():
        # The first worker has the keys.
        answers = _request_all(store.directory, "rotate", first_only=True)
    if not answers:
        raise CommandError(f"no server has {store.directory} open; the running server creates its own keys")
    made = answers[0]
    moment = datetime.fromtimestamp(made["signs_from_ms"] / 1000, UTC)
    typer.echo(f"key {made['kid']} is published and will sign from {moment:%Y-%m-%dT%H:%M:%SZ}")


@app.command("confirm-expiry")
def confirm_expiry(
    profile: Profile = None, config_file: ConfigFile = None, mode: Mode = None, directory: DataDirectory = None
) -> None:
    """Confirm the time after a clock jump: the running server deletes the expired streams that it has kept."""
    store = locate_store(profile, config_file, mode, directory)
    with storage_errors():
        answers = _request_all(store.directory, "confirm-expiry")
    if not answers:
        raise CommandError(f"no server has {store.directory} open; only a running server deletes expired streams")
    count = sum(answer["released"] for answer in answers)
    typer.echo(f"the time is confirmed; the server is deleting expired streams: {count}")


@app.command()
def copy(
    to_mode: Annotated[StoreMode, typer.Option("--to-mode", help="The mode of the copy.")],
    to_directory: Annotated[
        Path | None,
        typer.Option(
            "--to-dir", metavar="DIR", help="A new or empty directory; none for a cluster.", show_default=False
        ),
    ] = None,
    from_mode: Annotated[
        StoreMode | None,
        typer.Option("--from-mode", help="The mode to copy from; by default from the settings.", show_default=False),
    ] = None,
    from_directory: Annotated[
        Path | None,
        typer.Option(
            "--from-dir",
            metavar="DIR",
            help="The directory to copy from; by default storage.data_dir.",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(
            "--shards", help="Number of shards in mode acid; by default from the settings.", show_default=False
        ),
    ] = None,
    worker_shards: Annotated[
        int | None,
        typer.Option(
            "--worker-shards",
            min=1,
            max=4096,
            help="Shards that workers can divide among them; by default as many as the source has.",
            show_default=False,
        ),
    ] = None,
    profile: Profile = None,
    config_file: ConfigFile = None,
) -> None:
    """Copy a data directory to another mode and verify the copy. No server may have it open.

    Also from a cluster into a directory, while its nodes run, and from a directory into a new cluster.
    """
    store = locate_store(profile, config_file, from_mode, from_directory, takes_cluster=True)

    from headwater.storage.offline.store_copy import copy_between

    if store.mode is None:
        raise CommandError("the mode of the directory is unknown; set it with --from-mode", USAGE)
    if to_mode is StoreMode.CLUSTER:
        _copy_into_cluster(store, to_directory, settings_from(profile, config_file).settings)
        return
    if to_directory is None:
        raise CommandError(f"--to-mode {to_mode.value} needs --to-dir", USAGE)
    with storage_errors(), readable(store) as found:
        assert found.mode is not None
        copied = copy_between(
            found.directory,
            found.mode,
            to_directory,
            to_mode.canonical,
            shard_count=shards if shards is not None else store.settings.acid_shard_count,
            map_bytes=store.settings.acid_map_bytes,
            shards=worker_shards,
        )
    typer.echo(f"copied {_contents(copied)} from {store.name} to {to_directory}, and compared them")


def _contents(copied: CopiedStore) -> str:
    """What was copied, in words."""
    return (
        f"{counted(copied.streams, 'stream')} ({counted(copied.payload_bytes, 'byte')}),"
        f" {counted(copied.documents, 'document')} and {counted(copied.snapshots, 'snapshot')}"
    )


def _copy_into_cluster(store: StoreLocation, to_directory: Path | None, settings: Settings) -> None:
    if to_directory is not None:
        raise CommandError("a cluster has no data directory; leave out --to-dir", USAGE)
    if store.cluster is not None:
        raise CommandError(
            "a cluster cannot be copied into a cluster; copy it into a directory first, and that into the other"
            " cluster",
            USAGE,
        )
    assert store.mode is not None
    with storage_errors():
        require_no_server(store.directory)
        copied = copying().copy_into_cluster(store.directory, store.mode, settings)
    typer.echo(f"copied {_contents(copied)} from {store.name} into cluster {settings.cluster.name}, and compared them")


@app.command("join-shards")
def join_shards(data_dir: StackOption = None, config_file: ConfigFile = None) -> None:
    """Join the shard-NN directories of a stack of an earlier release into one and verify it. The stack must be down."""
    from headwater.stack.state import StackDirectory, StackRunningError
    from headwater.storage.offline.store_copy import join

    settings = settings_from(None, config_file).settings
    directory = StackDirectory(data_dir or settings.stack.data_dir)
    sources = directory.sharded_streams()
    if not sources:
        raise CommandError(
            f"{directory.root} has no shards to join; name the directory of the stack with --data-dir", USAGE
        )
    try:
        directory.acquire()
    except StackRunningError as error:
        raise CommandError(str(error)) from None
    try:
        with storage_errors():
            copied = join(
                sources,
                directory.streams,
                shard_count=settings.storage.acid_shard_count,
                map_bytes=settings.storage.acid_map_bytes,
            )
        directory.forget_shards()
    finally:
        directory.release()
    typer.echo(
        f"joined {counted(len(sources), 'shard')} with {counted(copied.streams, 'stream')}"
        f" ({counted(copied.payload_bytes, 'byte')}) in {directory.streams}, compared them, and removed the shards"
    )


@app.command()
def purge(
    profile: Profile = None, config_file: ConfigFile = None, mode: Mode = None, directory: DataDirectory = None
) -> None:
    """Remove the bytes of deleted streams and dropped messages now. A running server is paused while it runs."""
    store = locate_store(profile, config_file, mode, directory)

    from headwater.storage.offline import purge as purging

    if store.mode is None:
        raise CommandError(
            "storage.mode is memory, which has no directory; set the mode of the directory with --mode", USAGE
        )
    with storage_errors(), paused_server(store.directory) as is_running:
        purged = purging.purge(
            store.directory,
            store.mode,
            shard_count=store.settings.acid_shard_count,
            map_bytes=store.settings.acid_map_bytes,
        )
    typer.echo(
        f"{store.directory} now contains only readable data: {counted(purged.kept.streams, 'stream')},"
        f" {purged.bytes_after} bytes on disk (before: {purged.bytes_before})"
    )
    if is_running and not wait_for_server(store.directory):
        raise CommandError(f"the server has not opened {store.directory} again; see its log")


def _request_all(directory: Path, question: str, *, first_only: bool = False) -> list[dict[str, Any]]:
    """Send a request to all processes that have a store of the directory open; return the responses."""
    from headwater.storage.worker_stores import store_directories

    answers = []
    for store in store_directories(directory)[: 1 if first_only else None]:
        with running_server(store) as server:
            if server is not None:
                answers.append(server.request(question))
    return answers


def _report(report: dict[str, Any], style: OutputFormat) -> None:
    if style is OutputFormat.JSON:
        typer.echo(json.dumps(report, indent=2))
    else:
        _print_report(report)


def _numbers(found: StoreStats) -> Iterator[tuple[str, int]]:
    yield from asdict(found.contents).items()
    yield from found.parts.items()
    yield "disk_bytes", found.disk_bytes
    yield "free_bytes", found.free_bytes


def _print_report(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    state = f"open in process {report['pid']} ({report['mode']})" if report["running"] else "not open"
    console = Console(soft_wrap=True)
    console.print(Text(f"{report['directory']}: {report['family']}, {state}"))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="right")
    table.add_column()
    for key, words in _WORDS.items():
        if key in report:
            table.add_row(f"{report[key]:,}", words)
    console.print(table)
