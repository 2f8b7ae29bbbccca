"""`headwater create`, `append`, `close`, `fork` and `delete`: commands that change a stream."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headwater.cli.append_input import ATTEMPTS_MAX, FIRST_DELAY_S, Appender, Exactly, bodies_of, check_messages
from headwater.cli.errors import USAGE, CommandError
from headwater.cli.output import progress_bar
from headwater.cli.remote import DEFAULT_URL, MISSING, CaFile, Name, ShowProgress, Token, Url, connected, stream_named
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.client import Stream, StreamInfo

JSON: Final = "application/json"

Ttl = Annotated[int | None, typer.Option("--ttl", min=0, metavar="SECS", help="Time to live; each use restarts it.")]
ExpiresAt = Annotated[str | None, typer.Option("--expires-at", metavar="TIME", help="2030-01-01T00:00:00Z")]


def create(
    stream: Name,
    content_type: Annotated[str, typer.Option("--type", "-t", metavar="TYPE")] = JSON,
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    closed: Annotated[bool, typer.Option("--closed", help="Create the stream closed.")] = False,
    data: Annotated[str | None, typer.Option("--data", "-d", help="Initial messages; - reads stdin.")] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Create a stream, or confirm that it exists with the same configuration."""
    _check_lifetime(ttl, expires_at)
    content = sys.stdin.buffer.read() if data == "-" else (data or "").encode()
    with connected(url, token, ca_file) as client:
        target = stream_named(client, stream)
        result = target.create(content_type, ttl_s=ttl, expires_at=expires_at, closed=closed, body=content)
        typer.echo(f"{'created' if result.created else 'exists'} {printable(target.url)}")


def append(
    stream: Name,
    messages: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MESSAGE]...", help="Messages to append; by default the lines of stdin."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Append stdin as bytes, not as lines.")] = False,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, metavar="N", help="The most lines in one append.", show_default="500, or 1 MB"),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option("--producer", metavar="ID", help="Append exactly once: repeating the same input has no effect."),
    ] = None,
    epoch: Annotated[int, typer.Option("--epoch", min=0, metavar="N", help="With --producer: fences older runs.")] = 0,
    create_it: Annotated[bool, typer.Option("--create", help="Create the stream if it does not exist.")] = False,
    content_type: Annotated[
        str | None,
        typer.Option(
            "--type", "-t", metavar="TYPE", help="With --create: the content type.", show_default="application/json"
        ),
    ] = None,
    close_after: Annotated[bool, typer.Option("--close", help="Close the stream after the last message.")] = False,
    progress: ShowProgress = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Append messages, or the lines of stdin: JSON lines to a JSON stream, text to others.

    Each argument after the stream is one message.
    """
    from headwater.client import Policy, Retry

    if content_type is not None and not create_it:
        raise CommandError("--type needs --create: an existing stream keeps its type", USAGE)
    with connected(url, token, ca_file) as client:
        exactly = Exactly(producer, epoch) if producer is not None else None
        if exactly is not None:
            client.policy = Policy(retry=Retry(timeout_s=None, attempts=ATTEMPTS_MAX, first_delay_s=FIRST_DELAY_S))
        target = stream_named(client, stream)
        info = _created_if_missing(target, messages, content_type or JSON) if create_it else _existing(target)
        if messages and info.is_json:
            check_messages(messages)
        appender = Appender(target, exactly)
        offset = info.next_offset
        steady = exactly is not None
        bodies = bodies_of(messages, sys.stdin.buffer, is_json=info.is_json, raw=raw, most=batch, steady=steady)
        with progress_bar(stream, progress) as advance:
            for content in bodies:
                offset = appender.append(content)
                advance(len(content))
        if close_after:
            offset = appender.close()
        typer.echo(offset or target.head().next_offset)


def _existing(target: Stream) -> StreamInfo:
    from headwater.client import StreamNotFoundError

    try:
        return target.head()
    except StreamNotFoundError as error:
        raise CommandError(f"{error} (--create creates it)", MISSING) from None


def _created_if_missing(target: Stream, messages: list[str] | None, content_type: str) -> StreamInfo:
    """Create the stream unless it exists (with any type). Messages are checked before the stream is created."""
    from headwater.client import StreamNotFoundError
    from headwater.client.results import is_json

    try:
        return target.head()
    except StreamNotFoundError:
        if messages and is_json(content_type):
            check_messages(messages)
        target.create(content_type)
        return target.head()


def close(stream: Name, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None) -> None:
    """Close a stream: nothing more can be appended, and readers are notified of the end."""
    with connected(url, token, ca_file) as client:
        typer.echo(stream_named(client, stream).close().next_offset)


def fork(
    source: Name,
    stream: Annotated[str, typer.Argument(metavar="FORK", help="The new stream.", show_default=False)],
    offset: Annotated[
        str | None, typer.Option("--offset", help="Where the fork branches off; by default the end of the source.")
    ] = None,
    sub_offset: Annotated[
        int | None, typer.Option("--sub-offset", min=0, help="Messages or bytes after --offset.")
    ] = None,
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Create a stream that starts with the data of another one."""
    _check_lifetime(ttl, expires_at)
    with connected(url, token, ca_file) as client:
        origin, target = stream_named(client, source), stream_named(client, stream)
        result = target.fork_from(origin, offset=offset, sub_offset=sub_offset, ttl_s=ttl, expires_at=expires_at)
        typer.echo(f"{'created' if result.created else 'exists'} {printable(target.url)}")


def delete(
    stream: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Delete a stream and its messages."""
    with connected(url, token, ca_file) as client:
        target = stream_named(client, stream)
        if not yes:
            if not sys.stdin.isatty():
                raise CommandError(
                    f"deleting {target.url} cannot be undone; pass --yes to delete without a prompt", USAGE
                )
            if not typer.confirm(f"Delete {target.url} and its messages?"):
                raise CommandError("nothing was deleted")
        target.delete()
        typer.echo(f"deleted {printable(target.url)}")


def _check_lifetime(ttl: int | None, expires_at: str | None) -> None:
    if ttl is not None and expires_at is not None:
        raise CommandError("--ttl cannot be combined with --expires-at", USAGE)
