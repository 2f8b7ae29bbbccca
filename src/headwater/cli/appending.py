"""Input to appends: lines into batches, batches into requests, exactly once where a producer is named.

With a producer, batches are cut by count and size alone, never by time: so the same input makes the same batches with
the same sequence numbers, and a run that broke off can simply be run again. What the server has is answered with 204,
and its digest shows whether it is what we would have sent.
"""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

from headwater.cli.errors import USAGE, CommandError
from headwater.cli.remote import CONFLICT, Remote, next_offset

if TYPE_CHECKING:
    import httpx

LINES_MAX: Final = 500
BYTES_MAX: Final = 1_000_000
LINGER_S: Final = 0.05
"""How long a line may wait for others when the input is slow."""
TRIES: Final = 8
RETRY_MIN_S: Final = 0.2
_PASSING: Final = frozenset((408, 429, 500, 502, 503, 504))


@dataclass(frozen=True, slots=True)
class Exactly:
    """Who appends, for the server to tell repeats by."""

    producer: str
    epoch: int


def parts_of(messages: list[str] | None, stdin: BinaryIO, *, is_json: bool, raw: bool) -> Iterator[bytes]:
    """The input piece by piece: what the command line gave, else lines or chunks of stdin."""
    if messages:
        for message in messages:
            yield message.encode()
    elif raw:
        if is_json:
            content = stdin.read()
            if content.strip():
                yield content
        else:
            while chunk := stdin.read(BYTES_MAX):
                yield chunk
    else:
        for line in stdin:
            if not is_json:
                yield line
            elif line.strip():
                yield line.strip()


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
    """Appends to one stream, one request after the other, trying again what may be tried again."""

    def __init__(self, server: Remote, address: str, content_type: str, exactly: Exactly | None) -> None:
        self._server = server
        self._address = address
        self._content_type = content_type
        self._exactly = exactly
        self._seq = 0

    def append(self, content: bytes) -> str | None:
        """Append one body; the offset behind it, unless the server does not tell (of a repeat it need not)."""
        headers = {"Content-Type": self._content_type} | self._producer()
        answer = self._sent(content, headers)
        if self._exactly is not None:
            self._check_repeat(answer, content)
            self._seq += 1
        offset: str | None = answer.headers.get("stream-next-offset")
        return offset

    def close(self) -> str:
        answer = self._sent(b"", {"Stream-Closed": "true"})
        return next_offset(answer)

    def _producer(self) -> dict[str, str]:
        if self._exactly is None:
            return {}
        return {
            "Producer-Id": self._exactly.producer,
            "Producer-Epoch": str(self._exactly.epoch),
            "Producer-Seq": str(self._seq),
        }

    def _sent(self, content: bytes, headers: dict[str, str]) -> httpx.Response:
        """The answer to a request. Only a producer's append may be sent again when it is not known to have arrived."""
        import httpx

        from headwater.client.errors import check

        again = TRIES if self._exactly is not None else 1
        for attempt in range(1, again + 1):
            try:
                answer = self._server.http.post(self._address, content=content, headers=headers)
            except httpx.TransportError:
                if attempt == again:
                    raise
            else:
                if answer.status_code not in _PASSING or attempt == again:
                    self._explain(answer)
                    check(answer, 200, 204)
                    return answer
            time.sleep(min(5.0, RETRY_MIN_S * 2 ** (attempt - 1)))
        raise AssertionError("the last attempt returns or raises")

    def _explain(self, answer: httpx.Response) -> None:
        """What a refusal means to a producer, which a status alone does not tell."""
        if self._exactly is None:
            return
        who = f"producer {self._exactly.producer!r}, epoch {self._exactly.epoch}"
        expected = answer.headers.get("producer-expected-seq")
        if answer.status_code == 403 and "producer-epoch" in answer.headers:
            newer = answer.headers["producer-epoch"]
            raise CommandError(f"{who}: fenced by epoch {newer}; a newer run has taken over (--epoch)", CONFLICT)
        if answer.status_code == 409 and expected is not None:
            raise CommandError(f"{who}: the server expects seq {expected}, this is {self._seq}", CONFLICT)
        if answer.status_code == 400 and self._seq == 0:
            raise CommandError(f"{who}: {answer.text[:300]}", USAGE)

    def _check_repeat(self, answer: httpx.Response, content: bytes) -> None:
        """A repeat whose digest differs is not a repeat of this input."""
        digest = answer.headers.get("producer-digest")
        if digest is not None and digest != f"crc32:{zlib.crc32(content):08x}:{len(content)}":
            raise CommandError(
                f"seq {self._seq} of this producer and epoch holds something else: the input or --batch has changed"
                " since; use another --producer or a higher --epoch",
                CONFLICT,
            )
