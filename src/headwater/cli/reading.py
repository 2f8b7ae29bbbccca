"""`headwater read` and `headwater tail`: print what a stream holds, and what is appended."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.output import progress_bar, readers_may_leave, write_messages
from headwater.cli.remote import DEFAULT_URL, CaFile, Name, Token, Url, connected, stream_named
from headwater.cli.resume import ResumeFile
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.client import StreamInfo

_OFFSET: Final = re.compile(r"[0-9a-f]{16}_([0-9a-f]{16})(?:_[0-9a-f]{16})?")

Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Continue where the last run with this file ended."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Bytes as they arrive; JSON as arrays instead of lines.")]
Limit = Annotated[int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Stop after N messages.")]


class Live(StrEnum):
    AUTO = "auto"
    SSE = "sse"
    LONG_POLL = "long-poll"


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
    """Print what a stream holds: JSON as one message per line, anything else unchanged."""
    if resume is not None and limit is not None:
        raise CommandError("--resume and --limit: offsets are known after pages, not after each message", USAGE)
    with readers_may_leave(), connected(url, token, ca_file) as client:
        source = stream_named(client, stream)
        saved = ResumeFile(resume, source.url) if resume is not None else None
        offset = (saved.offset() if saved is not None else None) or start
        info = source.head()
        left = limit
        with progress_bar(stream, progress) as advance:
            advance(0, _bytes_ahead(info, offset))
            for batch in source.read(offset).batches():
                messages = batch.bodies if raw else batch.messages
                chosen = messages if left is None else messages[:left]
                write_messages(chosen, is_json=info.is_json, raw=raw)
                advance(sum(len(body) for body in batch.bodies))
                if saved is not None:
                    saved.save(batch.next_offset)
                if left is not None:
                    left -= len(chosen)
                    if left == 0:
                        return


def _bytes_ahead(info: StreamInfo, offset: str) -> int | None:
    """How many bytes there are to read, where the offsets of the server say so."""
    tail = _OFFSET.fullmatch(info.next_offset)
    start = _OFFSET.fullmatch(offset)
    if tail is None or not info.extensions:
        return None
    return int(tail[1], 16) - (int(start[1], 16) if start is not None else 0)


def tail(
    stream: Name,
    start: Annotated[
        str, typer.Option("--from", metavar="OFFSET", help="now, -1, or an offset that the server returned.")
    ] = "now",
    limit: Limit = None,
    raw: Raw = False,
    live: Annotated[Live, typer.Option("--live", help="How to wait for new messages.")] = Live.AUTO,
    resume: Resume = None,
    retry: Annotated[bool, typer.Option("--retry/--no-retry", help="Try again when the connection breaks.")] = True,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Follow a stream until it is closed or Ctrl-C; with --resume, from where the last run ended."""
    from headwater.client import ENDLESS_RETRY, NO_RETRY, ClientError, Policy, SseUnavailableError

    with readers_may_leave(), connected(url, token, ca_file) as client:
        source = stream_named(client, stream)
        saved = ResumeFile(resume, source.url) if resume is not None else None
        is_json = source.head().is_json
        offset = (saved.offset() if saved is not None else None) or start

        def report(error: ClientError, delay_s: float) -> None:
            typer.echo(f"headwater: {printable(str(error))}; trying again in {delay_s:.1f} s", err=True)

        policy = ENDLESS_RETRY if retry else NO_RETRY
        client.policy = Policy(retry=policy, follow_retry=policy, on_retry=report)
        left = limit
        try:
            for batch in stream_named(client, stream).follow(offset, live=live.value).batches():
                messages = batch.bodies if raw else batch.messages
                chosen = messages if left is None else messages[:left]
                write_messages(chosen, is_json=is_json, raw=raw)
                if saved is not None and len(chosen) == len(messages):
                    saved.save(batch.next_offset)
                if left is not None:
                    left -= len(chosen)
                    if left == 0:
                        return
        except SseUnavailableError as error:
            raise CommandError(f"--live sse: {error}; try --live long-poll") from None
