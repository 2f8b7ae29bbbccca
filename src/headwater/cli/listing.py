"""`headwater ls` and `headwater head`: list streams, and describe a stream."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headwater.cli.errors import CommandError
from headwater.cli.output import quiet_broken_pipe
from headwater.cli.remote import DEFAULT_URL, MISSING, CaFile, Name, Token, Url, connected, stream_named
from headwater.printable import printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headwater.client import Client, StreamEntry

INTERNAL = "__"
"""How the names of streams begin that the server or the pipeline writes."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]


def ls(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="[PREFIX]", help="Only names with this prefix; /ds lists buckets, /ds/ID the streams of one."
        ),
    ] = "",
    long: Annotated[bool, typer.Option("--long", "-l", help="Also print type and creation time.")] = False,
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Also list the streams of the server itself, such as __registry__.")
    ] = False,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """List the streams, the buckets, or the streams of a bucket."""
    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        for entry in _entries(client, prefix):
            if entry["name"].startswith(INTERNAL) and not show_all and not prefix.startswith("_"):
                continue
            if as_json:
                typer.echo(printable_json(json.dumps(entry, ensure_ascii=False)))
            elif long:
                made = entry.get("created_at_ms")
                when = datetime.fromtimestamp(made / 1000, UTC).isoformat(timespec="seconds") if made else "-"
                kind = printable(entry.get("content_type", "-"))
                typer.echo(f"{when}  {kind:<24}  {printable(entry['name'])}")
            else:
                typer.echo(printable(entry["name"]))


def head(
    stream: Name, as_json: AsJson = False, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None
) -> None:
    """Describe a stream: its content type, its end, whether it is closed, its lifetime."""
    with connected(url, token, ca_file) as client:
        headers = {
            name: value
            for name, value in stream_named(client, stream).head().headers.items()
            if name == "content-type" or name.startswith("stream-")
        }
        if as_json:
            typer.echo(json.dumps(headers))
            return
        width = max(len(name) for name in headers)
        for name, value in sorted(headers.items()):
            typer.echo(f"{name:<{width}}  {printable(value)}")


def _entries(client: Client, prefix: str) -> Iterator[dict[str, Any]]:
    if prefix in {"/ds", "/ds/"}:
        for bucket in client.buckets():
            yield {"name": f"/ds/{bucket.bucket_id}", **bucket.attributes}
    elif prefix.startswith("/ds/"):
        bucket_id, _, begins = prefix.removeprefix("/ds/").partition("/")
        for stream in client.bucket(bucket_id).streams(begins):
            yield {"name": f"/ds/{bucket_id}/{stream.name}", **stream.attributes}
    else:
        for stream in _registered(client, prefix):
            yield {"name": stream.name, "content_type": stream.content_type, "created_at_ms": stream.created_at_ms}


def _registered(client: Client, prefix: str) -> list[StreamEntry]:
    """The streams from the server's listing, or from its registry."""
    from headwater.client import StreamNotFoundError

    try:
        return client.streams(prefix)
    except StreamNotFoundError:
        raise CommandError(
            f"{client.base_url} has neither a stream listing nor a registry; this server cannot list streams", MISSING
        ) from None
