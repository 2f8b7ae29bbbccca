"""Append input: split it into lines, lines into batches, and send each batch, exactly once with a producer.

With a producer, batches are split only by count and size, never by time. The same input then gives the same batches
with the same sequence numbers, so an interrupted run can be repeated: for a batch that it already has, the server
returns 204 and a digest, which shows whether the batch is the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.remote import CONFLICT

if TYPE_CHECKING:
    from headwater.client import AppendResult, Stream

LINES_MAX: Final = 500
BYTES_MAX: Final = 1_000_000
LINGER_S: Final = 0.05
"""How long a line waits for others if the input is slow."""
ATTEMPTS_MAX: Final = 8
FIRST_DELAY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Exactly:
    """The producer id and epoch that let the server recognize repeated appends."""

    producer: str
    epoch: int


def bodies_of(
    messages: list[str] | None, stdin: BinaryIO, *, is_json: bool, raw: bool, most: int | None, steady: bool
) -> Iterator[bytes]:
    """The bodies of the appends. Each message from the command line to a stream that is not JSON is one append."""
    if messages and not is_json:
        return (message.encode() for message in messages)
    parts = (message.encode() for message in messages) if messages else _lines_of(stdin, is_json=is_json, raw=raw)
    return batches(parts, is_json=is_json and not raw, most=most, steady=steady)


def check_messages(messages: list[str]) -> None:
    """Check messages from the command line before anything is sent."""
    for message in messages:
        _check_json(message.encode(), f"message {message[:80]!r}")


def _lines_of(stdin: BinaryIO, *, is_json: bool, raw: bool) -> Iterator[bytes]:
    """Read the input as lines, or as chunks of bytes."""
    if raw:
        if is_json:
            content = stdin.read()
            if content.strip():
                yield content
        else:
            while chunk := stdin.read(BYTES_MAX):
                yield chunk
    else:
        for number, line in enumerate(stdin, 1):
            if not is_json:
                yield line
            elif line.strip():
                _check_json(line, f"line {number} of the input")
                yield line.strip()


def _check_json(text: bytes, name: str) -> None:
    """Check before sending, because the server would report the byte in a batch, not the line."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CommandError(
            f"{name} is not valid JSON: {error}; for text, create the stream with --type text/plain", USAGE
        ) from None


def batches(parts: Iterable[bytes], *, is_json: bool, most: int | None, steady: bool) -> Iterator[bytes]:
    """The bodies of the appends. `steady` splits only by count and size."""
    most = LINES_MAX if most is None else most
    held: list[bytes] = []
    size = 0
    for part in parts if steady else _with_pauses(parts):
        if part is not None:
            held.append(part)
            size += len(part)
        if held and (part is None or len(held) >= most or size >= BYTES_MAX):
            yield _joined(held, is_json=is_json)
            held, size = [], 0
    if held:
        yield _joined(held, is_json=is_json)


def _joined(parts: list[bytes], *, is_json: bool) -> bytes:
    if not is_json:
        return b"".join(parts)
    # The server splits an array into messages, so a message that is an array is wrapped in another array.
    if len(parts) == 1:
        return b"[" + parts[0] + b"]" if parts[0].lstrip().startswith(b"[") else parts[0]
    return b"[" + b",".join(parts) + b"]"


def _with_pauses(parts: Iterable[bytes]) -> Iterator[bytes | None]:
    """The parts, with None for each pause of the input, at which the collected parts are sent."""
    arrived: queue.Queue[bytes | BaseException | None] = queue.Queue(maxsize=4 * LINES_MAX)

    def read() -> None:
        try:
            for part in parts:
                arrived.put(part)
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    threading.Thread(target=read, name="stdin", daemon=True).start()
    while True:
        try:
            part = arrived.get(timeout=LINGER_S)
        except queue.Empty:
            yield None
            part = arrived.get()
        if isinstance(part, BaseException):
            raise part
        if part is None:
            return
        yield part


class Appender:
    """Appends to one stream, one request at a time. With a producer, failed requests are retried."""

    def __init__(self, stream: Stream, exactly: Exactly | None) -> None:
        self._stream = stream
        self._exactly = exactly
        self._seq = 0

    def append(self, content: bytes) -> str:
        """Append one body; return the offset after it, or empty if the server sends none (for a duplicate)."""
        from headwater.client import ProducerStamp

        if self._exactly is None:
            return self._stream.append_body(content).next_offset
        with self._errors_explained():
            stamp = ProducerStamp(self._exactly.producer, self._exactly.epoch, self._seq)
            result = self._stream.append_body(content, producer=stamp)
        self._check_repeat(result, content)
        self._seq += 1
        return result.next_offset

    def close(self) -> str:
        return self._stream.close().next_offset

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        """Explain errors in terms of the producer options."""
        from headwater.client import ProducerFencedError, ProducerGapError, ResponseError

        assert self._exactly is not None
        who = f"producer {self._exactly.producer!r}, epoch {self._exactly.epoch}"
        try:
            yield
        except ProducerFencedError as error:
            raise CommandError(
                f"{who}: a newer run with epoch {error.current_epoch} has taken over; pass a higher --epoch", CONFLICT
            ) from None
        except ProducerGapError as error:
            raise CommandError(
                f"{who}: the server expects seq {error.expected_seq}, this is {self._seq}; it lost the"
                " state of the producer, so check the end of the stream, and append the rest with another --producer",
                CONFLICT,
            ) from None
        except ResponseError as error:
            if error.status == 400 and self._seq == 0:
                raise CommandError(f"{who}: {error}", USAGE) from None
            raise

    def _check_repeat(self, result: AppendResult, content: bytes) -> None:
        """Raise an error for a duplicate whose digest differs from that of this input."""
        from headwater.client import digest_of

        if result.digest is not None and result.digest != digest_of(content):
            raise CommandError(
                f"seq {self._seq} of this producer and epoch has other content: the input or --batch has changed;"
                " use another --producer or a higher --epoch",
                CONFLICT,
            )
