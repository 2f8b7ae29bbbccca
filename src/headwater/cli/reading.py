"""`headwater read` and `headwater tail`: what a stream holds, and what comes, to stdout."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.output import messages_of, progress_bar, readers_may_leave, write_messages
from headwater.cli.remote import (
    DEFAULT_URL,
    CaFile,
    Name,
    Remote,
    Token,
    Url,
    is_json_type,
    look_at,
    next_offset,
    remote,
)
from headwater.cli.resume import ResumeFile
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.client import Batch, Stream

RETRY_MIN_S: Final = 0.2
RETRY_MAX_S: Final = 5.0
_PASSING: Final = frozenset((408, 429, 500, 502, 503, 504))
_OFFSET: Final = re.compile(r"[0-9a-f]{16}_([0-9a-f]{16})(?:_[0-9a-f]{16})?")

Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Go on where the last run with this file got to."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Bytes as they come; JSON as arrays instead of lines.")]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Stop after N messages.")]


class Live(StrEnum):
    AUTO = "auto"
    SSE = "sse"
    LONG_POLL = "long-poll"


@dataclass(frozen=True, slots=True)
class _Page:
    body: bytes
    next_offset: str
    up_to_date: bool


def read(
    stream: Name,
    start: Annotated[
        str, typer.Option("--from", metavar="OFFSET", help="-1, or an offset that the server returned.")
    ] = "-1",
    limit: Limit = None,
    raw: Raw = False,
    resume: Resume = None,
    progress: Annotated[
        bool | None, typer.Option("--progress/--no-progress", help="Show a progress bar.", show_default="on a terminal")
    ] = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Print what a stream holds: JSON as one message a line, anything else as it is."""
    if resume is not None and limit is not None:
        raise CommandError("--resume and --limit: offsets are known behind pages, not behind each message", USAGE)
    with readers_may_leave(), remote(url, token, ca_file) as server:
        address = server.address(stream)
        saved = ResumeFile(resume, address) if resume is not None else None
        offset = (saved.offset() if saved is not None else None) or start
        is_json, total = _look(server, address, offset)
        left = limit
        with progress_bar(stream, progress) as advance:
            advance(0, total)
            for page in _pages(server, address, offset):
                messages = [page.body] if raw else messages_of(page.body, is_json=is_json)
                chosen = messages if left is None else messages[:left]
                write_messages(chosen, is_json=is_json, raw=raw)
                advance(len(page.body))
                if saved is not None:
                    saved.save(page.next_offset)
                if left is not None:
                    left -= len(chosen)
                    if left == 0:
                        return


def _look(server: Remote, address: str, offset: str) -> tuple[bool, int | None]:
    """Whether it is a JSON stream, and how many bytes lie ahead where offsets tell."""
    headers = look_at(server, address)
    is_json = is_json_type(headers)
    tail = _OFFSET.fullmatch(headers["stream-next-offset"])
    at = _OFFSET.fullmatch(offset)
    if tail is None or "stream-extensions" not in headers:
        return is_json, None
    return is_json, int(tail[1], 16) - (int(at[1], 16) if at is not None else 0)


def _pages(server: Remote, address: str, offset: str) -> Iterator[_Page]:
    """Catch-up reads until the tail as it is then."""
    from headwater.client.errors import check

    while True:
        answer = server.http.get(address, params={"offset": offset})
        check(answer, 200)
        page = _Page(answer.content, next_offset(answer), answer.headers.get("stream-up-to-date") == "true")
        yield page
        if page.up_to_date or page.next_offset == offset:
            return
        offset = page.next_offset


def catch_up(server: Remote, address: str) -> Iterator[bytes]:
    """The bodies of a whole stream."""
    return (page.body for page in _pages(server, address, "-1"))


def tail(
    stream: Name,
    start: Annotated[
        str, typer.Option("--from", metavar="OFFSET", help="now, -1, or an offset that the server returned.")
    ] = "now",
    limit: Limit = None,
    raw: Raw = False,
    live: Annotated[Live, typer.Option("--live", help="How to wait for what comes.")] = Live.AUTO,
    resume: Resume = None,
    retry: Annotated[bool, typer.Option("--retry/--no-retry", help="Try again when the connection breaks.")] = True,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Follow a stream until it is closed or Ctrl-C; with --resume, from where the last run got to."""
    from headwater.client import Stream

    with readers_may_leave(), remote(url, token, ca_file) as server:
        address = server.address(stream)
        saved = ResumeFile(resume, address) if resume is not None else None
        is_json, _ = _look(server, address, "-1")
        following = Stream(address, server.http)
        offset = (saved.offset() if saved is not None else None) or start
        if offset == "now":
            offset = following.tail()
            if saved is not None:
                saved.save(offset)
        left = limit
        for batch in _batches(following, offset, live, retry):
            messages = batch.messages if left is None else tuple(islice(batch.messages, left))
            write_messages(messages, is_json=is_json and not raw, raw=raw)
            if saved is not None and len(messages) == len(batch.messages):
                saved.save(batch.next_offset)
            if left is not None:
                left -= len(messages)
                if left == 0:
                    return


def _batches(stream: Stream, offset: str, live: Live, retry: bool) -> Iterator[Batch]:
    """What comes behind an offset, over any number of connections, until the stream is closed."""
    import httpx

    from headwater.client.errors import MalformedAnswer, NoEvents, Refused

    mode = live
    cursor: str | None = None
    position: int | None = None
    failures = 0
    while True:
        try:
            if mode is Live.LONG_POLL:
                arrived: Iterator[Batch] = iter((stream.long_poll(offset, cursor, position),))
            else:
                arrived = stream.events(offset, cursor)
            for batch in arrived:
                failures = 0
                offset, cursor, position = batch.next_offset, batch.cursor, batch.position
                yield batch
                if batch.closed:
                    return
        except NoEvents as error:
            if live is Live.SSE:
                raise CommandError(f"--live sse: {error}; try --live long-poll") from None
            mode = Live.LONG_POLL
        except (httpx.TransportError, MalformedAnswer, Refused) as error:
            if not retry or (isinstance(error, Refused) and error.status not in _PASSING):
                raise
            failures += 1
            typer.echo(f"headwater: {printable(str(error))}; going on from {offset} in a moment", err=True)
            time.sleep(min(RETRY_MAX_S, RETRY_MIN_S * 2 ** min(failures - 1, 8)))
