"""`headwater bucket …` and `headwater snapshot …`: groups of streams, and the snapshots of their streams."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.listing import AsJson
from headwater.cli.output import quiet_broken_pipe
from headwater.cli.remote import DEFAULT_URL, CaFile, Name, Token, Url, connected, stream_named
from headwater.printable import printable, printable_json

if TYPE_CHECKING:
    from headwater.client import Client, Stream

buckets = typer.Typer(help="Create, list and delete buckets: groups of streams that have snapshots.")
snapshots = typer.Typer(help="Publish and read the snapshot of a stream in a bucket.")

Id = Annotated[str, typer.Argument(metavar="BUCKET", help="4 to 64 characters: a-z, 0-9, _ and -.", show_default=False)]


@buckets.command("create")
def create_bucket(
    bucket: Id,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="An existing bucket is not an error.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Create a bucket. Its streams are /ds/BUCKET/NAME."""
    with connected(url, token, ca_file) as client:
        target = client.bucket(bucket)
        typer.echo(f"{'created' if target.create(exist_ok=exist_ok) else 'exists'} {printable(target.url)}")


@buckets.command("ls")
def list_buckets(as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None) -> None:
    """List the buckets with their numbers of streams. `headwater ls /ds/BUCKET` lists the streams of one bucket."""
    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        for entry in client.buckets():
            if as_json:
                typer.echo(printable_json(json.dumps(entry.attributes, ensure_ascii=False)))
            else:
                plural = "" if entry.streams == 1 else "s"
                typer.echo(f"{printable(entry.bucket_id)}  {entry.streams} stream{plural}")


@buckets.command("delete")
def delete_bucket(bucket: Id, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None) -> None:
    """Delete an empty bucket."""
    with connected(url, token, ca_file) as client:
        target = client.bucket(bucket)
        target.delete()
        typer.echo(f"deleted {printable(target.url)}")


@snapshots.command("publish")
def publish_snapshot(
    stream: Name,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The state; - reads stdin.", show_default=False)],
    offset: Annotated[
        str | None,
        typer.Option("--offset", help="The state covers all messages before this offset.", show_default="the end"),
    ] = None,
    content_type: Annotated[str, typer.Option("--type", "-t", metavar="TYPE")] = "application/json",
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Publish a file as the snapshot of a stream. Messages before its offset are no longer readable."""
    content = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    with connected(url, token, ca_file) as client:
        target = _stream_with_snapshots(client, stream)
        at = offset or target.head().next_offset
        target.publish_snapshot(at, content, content_type)
        typer.echo(at)


@snapshots.command("get")
def get_snapshot(
    stream: Name,
    offset: Annotated[
        str | None, typer.Option("--offset", help="The offset of the snapshot.", show_default="the latest")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Print the snapshot of a stream to stdout, and its offset and type to stderr."""
    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        found = _stream_with_snapshots(client, stream).snapshot(offset)
        typer.echo(printable(f"{found.content_type} at {found.offset}"), err=True)
        sys.stdout.buffer.write(found.body)
        sys.stdout.buffer.flush()


def _stream_with_snapshots(client: Client, name: str) -> Stream:
    target = stream_named(client, name)
    if "/ds/" not in urlsplit(target.url).path:
        raise CommandError(f"only a stream of a bucket has snapshots; give /ds/BUCKET/STREAM, not {name!r}", USAGE)
    return target
