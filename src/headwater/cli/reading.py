"""`headwater read` and `headwater tail`: print the messages of a stream, and follow new ones."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.multi_stream_tail import NamedMessagePrinter, offsets_of, print_many
from headwater.cli.output import MessagePrinter, progress_bar, quiet_broken_pipe
from headwater.cli.remote import DEFAULT_URL, CaFile, Name, ShowProgress, Token, Url, connected, stream_named
from headwater.cli.resume import ResumeFile
from headwater.printable import printable

if TYPE_CHECKING:
    from headwater.client import StreamInfo

_OFFSET: Final = re.compile(r"[0-9a-f]{16}_([0-9a-f]{16})(?:_[0-9a-f]{16})?")

Resume = Annotated[
    Path | None,
    typer.Option("--resume", metavar="FILE", help="Continue where the last run with this file ended."),
]
Raw = Annotated[bool, typer.Option("--raw", help="Print the bytes as received; JSON as arrays instead of lines.")]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Start at this time: 2026-01-31T12:00:00Z, 12:30, 10m, 2h, 1d."),
]
Lines = Annotated[
    bool | None,
    typer.Option(
        "--lines/--no-lines",
        help="End each message of text or bytes with a line end, if it has none.",
        show_default="on a terminal",
    ),
]
Pretty = Annotated[bool, typer.Option("--pretty", help="Indent JSON messages.")]


class Live(StrEnum):
    AUTO = "auto"
    SSE = "sse"
    LONG_POLL = "long-poll"


def read(
    stream: Name,
    start: Annotated[
        str, typer.Option("--from", metavar="OFFSET", help="-1, or an offset that the server returned.")
    ] = "-1",
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", min=1, metavar="N", help="Stop after N messages.")
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", min=1, metavar="N", help="Print only the last N messages.")
    ] = None,
    since: Since = None,
    raw: Raw = False,
    lines: Lines = None,
    pretty: Pretty = False,
    resume: Resume = None,
    progress: ShowProgress = None,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Print the messages of a stream: JSON as one message per line, anything else unchanged (see --lines)."""
    if resume is not None and limit is not None:
        raise CommandError(
            "--resume cannot be combined with --limit: offsets are known only after pages, not after each message",
            USAGE,
        )
    at = since_time(since) if since is not None else None
    _check_start(
        {"--from": start != "-1", "--last": last is not None, "--since": at is not None, "--resume": resume is not None}
    )
    _check_style(raw, pretty, lines)
    lines = sys.stdout.isatty() if lines is None else lines
    from headwater.client.reading import batches

    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        source = stream_named(client, stream)
        saved = ResumeFile(resume, source.url) if resume is not None else None
        offset = (saved.offset() if saved is not None else None) or start
        if at is not None:
            offset = client.run(source.operations.offset_at(at))
        info = source.head()
        exact = None if raw or not (lines or limit) else _with_boundaries(info)
        printer = MessagePrinter(is_json=info.is_json, raw=raw, pretty=pretty, limit=limit, lines=lines)
        if last is not None:
            printer.print(client.run(source.operations.last(last)).messages)
            return
        with progress_bar(stream, progress) as advance:
            advance(0, _bytes_ahead(info, offset))
            for batch in client.iterate(batches(source.operations, offset, None, exact=exact)):
                printer.print(batch.bodies if raw else batch.messages)
                advance(sum(len(body) for body in batch.bodies))
                if saved is not None:
                    saved.save(batch.next_offset)
                if printer.is_done:
                    return


def _with_boundaries(info: StreamInfo) -> StreamInfo | None:
    """The stream, if its messages must and can be asked for one by one; those of JSON are in its arrays."""
    return info if not info.is_json and "frames" in info.extensions else None


def _bytes_ahead(info: StreamInfo, offset: str) -> int | None:
    """How many bytes there are to read, if the server's offsets contain that."""
    tail = _OFFSET.fullmatch(info.next_offset)
    start = _OFFSET.fullmatch(offset)
    if tail is None or not info.extensions:
        return None
    return int(tail[1], 16) - (int(start[1], 16) if start is not None else 0)


def tail(
    streams: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STREAM…", help="A name, a path such as /ds/bucket/stream, or a URL.", show_default=False
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            "--prefix", metavar="PREFIX", help="Follow all streams with this prefix, including those created later."
        ),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="OFFSET", help="now, -1, or an offset that the server returned.")
    ] = "now",
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=0, metavar="N", help="Start with the last N messages, then follow."),
    ] = None,
    since: Since = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Exit after N messages in total.")
    ] = None,
    raw: Raw = False,
    lines: Lines = None,
    pretty: Pretty = False,
    live: Annotated[Live, typer.Option("--live", help="How to wait for new messages.")] = Live.AUTO,
    resume: Resume = None,
    retry: Annotated[bool, typer.Option("--retry/--no-retry", help="Reconnect when the connection breaks.")] = True,
    url: Url = DEFAULT_URL,
    token: Token = "",
    ca_file: CaFile = None,
) -> None:
    """Follow a stream until it is closed or Ctrl-C: print new messages, and with -n the last ones before them.

    Several streams, or all with --prefix, are followed over one connection; each message is printed as a JSON object
    with "stream".
    """
    from headwater.client import ENDLESS_RETRY, NO_RETRY, ClientError, Policy, SseUnavailableError
    from headwater.client.reading import batches

    names = streams or []
    if not names and prefix is None:
        raise CommandError("name a stream, or use --prefix", USAGE)

    def report(error: ClientError, delay_s: float) -> None:
        typer.echo(f"headwater: {printable(str(error))}; retrying in {delay_s:.1f} s", err=True)

    retrying = ENDLESS_RETRY if retry else NO_RETRY
    patient = Policy(retry=retrying, follow_retry=retrying, on_retry=report)
    if len(names) > 1 or prefix is not None:
        _check_many(
            {
                "--last": last is not None,
                "--since": since is not None,
                "--resume": resume is not None,
                "--raw": raw,
                "--lines": bool(lines),
                "--live": live is not Live.AUTO,
            }
        )
        with quiet_broken_pipe(), connected(url, token, ca_file) as client:
            offsets = offsets_of(client, names, start)
            client.policy = patient
            print_many(client, prefix, offsets, start, NamedMessagePrinter(pretty=pretty, limit=limit))
        return
    [stream] = names
    at = since_time(since) if since is not None else None
    _check_start(
        {
            "--from": start != "now",
            "--last": last is not None,
            "--since": at is not None,
            "--resume": resume is not None,
        }
    )
    _check_style(raw, pretty, lines)
    lines = sys.stdout.isatty() if lines is None else lines
    with quiet_broken_pipe(), connected(url, token, ca_file) as client:
        source = stream_named(client, stream)
        saved = ResumeFile(resume, source.url) if resume is not None else None
        info = source.head()
        exact = None if raw or not (lines or limit) else _with_boundaries(info)
        printer = MessagePrinter(is_json=info.is_json, raw=raw, pretty=pretty, limit=limit, lines=lines)
        offset = (saved.offset() if saved is not None else None) or start
        if at is not None:
            offset = client.run(source.operations.offset_at(at))
        if last is not None:
            before = client.run(source.operations.last(last))
            printer.print(before.messages)
            offset = before.next_offset
        client.policy = patient
        try:
            followed = stream_named(client, stream).operations
            for batch in client.iterate(batches(followed, offset, live.value, exact=exact)):
                all_printed = printer.print(batch.bodies if raw else batch.messages)
                if saved is not None and all_printed:
                    saved.save(batch.next_offset)
                if printer.is_done:
                    return
        except SseUnavailableError as error:
            raise CommandError(f"--live sse: {error}; try --live long-poll") from None


def _check_start(given: dict[str, bool]) -> None:
    """Reject several start options. --resume may be combined with --from, which applies if the file is new."""
    names = [option for option, is_given in given.items() if is_given]
    if {"--last", "--since"} & set(names) and len(names) > 1:
        raise CommandError(f"{' and '.join(names)}: use only one of them, each sets where to start", USAGE)


def _check_many(given: dict[str, bool]) -> None:
    names = [option for option, is_given in given.items() if is_given]
    if names:
        raise CommandError(f"{', '.join(names)}: only with a single stream", USAGE)


_AGO: Final = re.compile(r"([0-9]+)([smhd])")
_AGO_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def since_time(text: str, now: datetime | None = None) -> str:
    """Convert a time from the command line to the server's format: absolute, a time of today, or relative to now."""
    now = now or datetime.now().astimezone()
    if (ago := _AGO.fullmatch(text)) is not None:
        at = now - timedelta(seconds=int(ago[1]) * _AGO_S[ago[2]])
    else:
        try:
            at = datetime.combine(now.date(), time.fromisoformat(text)) if ":" in text[:3] else _date_time(text)
        except (ValueError, OverflowError):
            raise CommandError(
                f"--since: {text!r} is not a time; use 2026-01-31T12:00:00Z, 2026-01-31, 12:30, 90s, 10m, 2h or 1d",
                USAGE,
            ) from None
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _date_time(text: str) -> datetime:
    """Parse a date, or a date with a time; without a time zone, the local one is used."""
    return datetime.fromisoformat(text)


def _check_style(raw: bool, pretty: bool, lines: bool | None) -> None:
    if raw and (pretty or lines):
        raise CommandError(f"--raw cannot be combined with {'--pretty' if pretty else '--lines'}", USAGE)
