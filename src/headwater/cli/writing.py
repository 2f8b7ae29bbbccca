"""`headwater create`, `append`, `close`, `fork` and `delete`: everything that changes a stream."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from headwater.cli.appending import Appender, Exactly, batches, parts_of
from headwater.cli.errors import USAGE, CommandError
from headwater.cli.output import progress_bar
from headwater.cli.remote import DEFAULT_URL, CaFile, Name, Token, Url, is_json_type, look_at, next_offset, remote
from headwater.printable import printable

Ttl = Annotated[int | None, typer.Option("--ttl", min=0, metavar="SECS", help="Lifetime; each use restarts it.")]
ExpiresAt = Annotated[str | None, typer.Option("--expires-at", metavar="TIME", help="2030-01-01T00:00:00Z")]


def create(
    stream: Name,
    content_type: Annotated[str, typer.Option("--type", "-t", metavar="TYPE")] = "application/json",
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    closed: Annotated[bool, typer.Option("--closed", help="Closed from the start.")] = False,
    data: Annotated[str | None, typer.Option("--data", "-d", help="First messages; - reads stdin.")] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Create a stream, or see that it is there as asked for."""
    from headwater.client.errors import check

    headers = {"Content-Type": content_type} | _lifetime(ttl, expires_at)
    if closed:
        headers["Stream-Closed"] = "true"
    content = sys.stdin.buffer.read() if data == "-" else (data or "").encode()
    with remote(url, token, ca_file) as server:
        address = server.address(stream)
        answer = server.http.put(address, headers=headers, content=content)
        check(answer, 200, 201)
        typer.echo(f"{'created' if answer.status_code == 201 else 'exists'} {printable(address)}")


def append(
    stream: Name,
    messages: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]...", help="Without any, stdin is appended.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="stdin as bytes, not as lines.")] = False,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, metavar="N", help="Lines in one append at most.", show_default="500, or 1 MB"),
    ] = None,
    producer: Annotated[
        str | None,
        typer.Option("--producer", metavar="ID", help="Append exactly once: the same input again changes nothing."),
    ] = None,
    epoch: Annotated[int, typer.Option("--epoch", min=0, metavar="N", help="With --producer: fences older runs.")] = 0,
    close_after: Annotated[bool, typer.Option("--close", help="Close the stream behind the last message.")] = False,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar.", show_default="on a terminal")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Append messages, or the lines of stdin: JSON lines to a JSON stream, text to others."""
    with remote(url, token, ca_file) as server:
        address = server.address(stream)
        headers = look_at(server, address)
        content_type = headers.get("content-type", "application/octet-stream")
        is_json = is_json_type(headers)
        exactly = Exactly(producer, epoch) if producer is not None else None
        appender = Appender(server, address, content_type, exactly)
        offset: str | None = headers["stream-next-offset"]
        parts = parts_of(messages, sys.stdin.buffer, is_json=is_json, raw=raw)
        with progress_bar(stream, progress) as advance:
            for content in batches(parts, is_json=is_json and not raw, most=batch, steady=exactly is not None):
                offset = appender.append(content)
                advance(len(content))
        if close_after:
            offset = appender.close()
        typer.echo(offset if offset is not None else look_at(server, address)["stream-next-offset"])


def close(stream: Name, url: Url = DEFAULT_URL, token: Token = "", ca_file: CaFile = None) -> None:
    """Close a stream: nothing more can be appended, and readers learn that they have seen the end."""
    from headwater.client.errors import check

    with remote(url, token, ca_file) as server:
        answer = server.http.post(server.address(stream), headers={"Stream-Closed": "true"})
        check(answer, 200, 204)
        typer.echo(next_offset(answer))


def fork(
    source: Name,
    stream: Annotated[str, typer.Argument(metavar="FORK", help="The new stream.", show_default=False)],
    offset: Annotated[
        str | None, typer.Option("--offset", help="Where they part; the source's tail if not given.")
    ] = None,
    sub_offset: Annotated[int | None, typer.Option("--sub-offset", min=0, help="Messages or bytes further.")] = None,
    ttl: Ttl = None,
    expires_at: ExpiresAt = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Make a stream that begins with another's data and goes its own way."""
    from headwater.client.errors import check

    with remote(url, token, ca_file) as server:
        headers = {"Stream-Forked-From": server.path(source)} | _lifetime(ttl, expires_at)
        if offset is not None:
            headers["Stream-Fork-Offset"] = offset
        if sub_offset is not None:
            headers["Stream-Fork-Sub-Offset"] = str(sub_offset)
        address = server.address(stream)
        answer = server.http.put(address, headers=headers)
        check(answer, 200, 201)
        typer.echo(f"{'created' if answer.status_code == 201 else 'exists'} {printable(address)}")


def delete(
    stream: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Delete a stream and all that it holds."""
    from headwater.client.errors import check

    with remote(url, token, ca_file) as server:
        address = server.address(stream)
        if not yes:
            if not sys.stdin.isatty():
                raise CommandError(f"deleting {address} cannot be undone; say --yes where nobody can be asked", USAGE)
            if not typer.confirm(f"Delete {address} and all that it holds?"):
                raise CommandError("nothing was deleted")
        check(server.http.delete(address), 200, 204)
        typer.echo(f"deleted {printable(address)}")


def _lifetime(ttl: int | None, expires_at: str | None) -> dict[str, str]:
    if ttl is not None and expires_at is not None:
        raise CommandError("--ttl and --expires-at: give one of them", USAGE)
    if ttl is not None:
        return {"Stream-TTL": str(ttl)}
    return {"Stream-Expires-At": expires_at} if expires_at is not None else {}
