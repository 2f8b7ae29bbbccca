"""`headwater tail` of several streams, or of all with a prefix, over one connection."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import msgspec

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.remote import STREAM_ROOT, stream_named

if TYPE_CHECKING:
    from headwater.client import Batch, Client

_encode: Final = msgspec.json.Encoder().encode


class NamedMessagePrinter:
    """Prints one JSON object per line: the stream, and the message as JSON, text, or else base64."""

    def __init__(self, *, pretty: bool, limit: int | None) -> None:
        self._indent = 2 if pretty else 0
        self._left = limit

    def print(self, name: str, batch: Batch) -> bool:
        """Print messages up to the limit; return whether more may be printed."""
        messages = batch.messages if self._left is None else batch.messages[: self._left]
        for message in messages:
            sys.stdout.buffer.write(self._line(name, message, batch.is_json))
        sys.stdout.buffer.flush()
        if self._left is not None:
            self._left -= len(messages)
        return self._left != 0

    def _line(self, name: str, message: bytes, is_json: bool) -> bytes:
        line = b'{"stream":%b,%b}' % (_encode(name), _member(message, is_json))
        if self._indent or b"\n" in line or b"\r" in line:
            line = msgspec.json.format(line, indent=self._indent or -1)
        return line + b"\n"


def _member(message: bytes, is_json: bool) -> bytes:
    if is_json:
        return b'"message":%b' % message
    try:
        return b'"message":%b' % _encode(message.decode())
    except UnicodeDecodeError:
        return b'"base64":%b' % _encode(message)


def offsets_of(client: Client, names: list[str], start: str) -> dict[str, str]:
    """The start offsets of the named streams, which must exist."""
    if start not in {"-1", "now"}:
        raise CommandError(f"--from: {start!r} is an offset of a single stream; use now or -1 for several", USAGE)
    found = {}
    for name in names:
        stream = stream_named(client, name)
        path = stream.url.removeprefix(client.base_url)
        if path == stream.url:
            raise CommandError(f"{name!r} is not on the server of --url; all streams must be on one server", USAGE)
        found[unquote(path).removeprefix(STREAM_ROOT)] = stream.head().next_offset if start == "now" else start
    return found


def print_many(
    client: Client, prefix: str | None, offsets: dict[str, str], start: str, printer: NamedMessagePrinter
) -> None:
    """Follow until all named streams are closed; with a prefix, until Ctrl-C."""
    from headwater.client import ResponseError

    try:
        for found in client.follow_many(prefix, offsets=offsets, start=start):
            if not printer.print(found.name, found.batch):
                return
    except ResponseError as error:
        # A server that supports following reports a missing stream with this code.
        if error.code != "stream_not_found" and error.status in {404, 405, 501}:
            raise CommandError(f"this server cannot follow several streams over one connection: {error}") from None
        raise
