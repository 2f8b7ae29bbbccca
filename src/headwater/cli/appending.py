"""Input to appends: lines into batches, batches into requests, exactly once with a producer.

With a producer, batches are cut by count and size only, never by time. The same input then makes the same batches with
the same sequence numbers, and a run that broke off can be run again: the server answers a batch that it has with 204
and a digest, which shows whether the batch is the same.
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
"""How long a line may wait for others when the input is slow."""
ATTEMPTS_MAX: Final = 8
FIRST_DELAY_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Exactly:
    """The producer id and epoch by which the server recognizes repeats."""

    producer: str
    epoch: int


def bodies_of(
    messages: list[str] | None, stdin: BinaryIO, *, is_json: bool, raw: bool, most: int | None, steady: bool
) -> Iterator[bytes]:
    """The bodies of the appends. Messages of the command line to a stream without JSON are one append each."""
    if messages and not is_json:
        return (message.encode() for message in messages)
    parts = (message.encode() for message in messages) if messages else _lines_of(stdin, is_json=is_json, raw=raw)
    return batches(parts, is_json=is_json and not raw, most=most, steady=steady)


def check_messages(messages: list[str]) -> None:
    """Check messages of the command line before anything is sent."""
    for message in messages:
        _check_json(message.encode(), f"message {message[:80]!r}")


def _lines_of(stdin: BinaryIO, *, is_json: bool, raw: bool) -> Iterator[bytes]:
    """The input piece by piece: lines, or chunks of bytes."""
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
    """Check before sending: the server would name the byte in a batch, not the line."""
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CommandError(
            f"{name} is not valid JSON: {error} (text goes to a stream with --type text/plain)", USAGE
        ) from None


def batches(parts: Iterable[bytes], *, is_json: bool, most: int | None, steady: bool) -> Iterator[bytes]:
    """The bodies of the appends. `steady` cuts by count and size only."""
    most = LINES_MAX if most is None else most
    held: list[bytes] = []
    size = 0
    for part in parts if steady else _as_they_come(parts):
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
    # An array is taken apart by the server: one that is a message goes inside of another.
    if len(parts) == 1:
        return b"[" + parts[0] + b"]" if parts[0].lstrip().startswith(b"[") else parts[0]
    return b"[" + b",".join(parts) + b"]"


def _as_they_come(parts: Iterable[bytes]) -> Iterator[bytes | None]:
    """The parts, with None wherever the input made a pause: time to send what there is."""
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
    """Appends to one stream, one request after the other. With a producer, failed requests are sent again."""

    def __init__(self, stream: Stream, exactly: Exactly | None) -> None:
        self._stream = stream
        self._exactly = exactly
        self._seq = 0

    def append(self, content: bytes) -> str:
        """Append one body; the offset after it, or empty if the server does not send one (for a duplicate)."""
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
        """Say what a refusal means to a producer."""
        from headwater.client import ProducerFencedError, ProducerGapError, ResponseError

        assert self._exactly is not None
        who = f"producer {self._exactly.producer!r}, epoch {self._exactly.epoch}"
        try:
            yield
        except ProducerFencedError as error:
            raise CommandError(
                f"{who}: fenced by epoch {error.current_epoch}; a newer run has taken over (--epoch)", CONFLICT
            ) from None
        except ProducerGapError as error:
            raise CommandError(
                f"{who}: the server expects seq {error.expected_seq}, this is {self._seq}", CONFLICT
            ) from None
        except ResponseError as error:
            if error.status == 400 and self._seq == 0:
                raise CommandError(f"{who}: {error}", USAGE) from None
            raise

    def _check_repeat(self, result: AppendResult, content: bytes) -> None:
        """A duplicate whose digest differs is not a repeat of this input."""
        from headwater.client import digest_of

        if result.digest is not None and result.digest != digest_of(content):
            raise CommandError(
                f"seq {self._seq} of this producer and epoch holds something else: the input or --batch has changed"
                " since; use another --producer or a higher --epoch",
                CONFLICT,
            )
