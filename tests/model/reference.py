"""A model of the protocol: a dict of lists, written from the protocol's text alone.

It is slow, keeps everything, copies a fork's data, and knows nothing about storage. `Answer` holds the answer to a
request and the change that it would make; nothing changes until `Answer.change` is called. Times are milliseconds and
change only when a test sets `now_ms`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.offsets import offset_text

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Fork:
    """The Stream-Fork headers of a PUT."""

    source: str
    offset: str | None = None
    sub_offset: int = 0


@dataclass(eq=False)
class Incarnation:
    """One incarnation of a stream, from its creation to its removal. A message is the bytes that were sent."""

    name: str
    content_type: str
    ttl_secs: int | None
    expires_at_ms: int | None
    used_ms: int
    log: list[bytes]
    closed: bool
    fork: Fork | None = None
    source: Incarnation | None = None
    inherited: int = 0
    """Bytes of the log that are stored in the source."""
    number: int = 0
    """Distinguishes the incarnations of one name."""
    forks: int = 0
    deleted: bool = False
    readers: int = 0
    """Live readers, which keep the TTL from expiring while they are connected."""
    closer: tuple[str, int, int] | None = None
    stream_seq: str | None = None
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def json(self) -> bool:
        return kind_of(self.content_type) == "application/json"

    def size(self, count: int) -> int:
        """Stored bytes of the first messages: a JSON message is stored with a comma after it."""
        return sum(len(message) + self.json for message in self.log[:count])

    def token(self, count: int) -> str:
        return offset_text(count, self.size(count))

    def over(self, now_ms: int) -> bool:
        if self.expires_at_ms is not None:
            return now_ms >= self.expires_at_ms
        return self.ttl_secs is not None and not self.readers and now_ms >= self.used_ms + self.ttl_secs * 1000


@dataclass
class Answer:
    status: int
    facts: dict[str, object] = field(default_factory=dict)
    change: Callable[[], None] | None = None


class Reference:
    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.names: dict[str, Incarnation] = {}
        self.count = 0

    # -- what a durable server overrides: readers may be behind writers

    def seen(self, incarnation: Incarnation) -> tuple[int, bool] | None:
        """The number of messages that readers see and whether they see the end; None if they do not see the stream."""
        return len(incarnation.log), incarnation.closed

    def shown(self, name: str) -> Incarnation | None:
        """Return the incarnation that readers find under a name."""
        return self.names.get(name)

    def ended(self, incarnation: Incarnation) -> bool:
        """Whether readers see that an incarnation kept by forks has ended."""
        return incarnation.deleted

    # -- operations

    def put(
        self,
        name: str,
        content_type: str | None,
        ttl_secs: int | None,
        expires_at_ms: int | None,
        closed: bool,
        body: bytes,
        fork: Fork | None = None,
    ) -> Answer:
        self.expire()
        incarnation = self.names.get(name)
        if incarnation is not None:
            same = not incarnation.deleted and self._same(
                incarnation, content_type, ttl_secs, expires_at_ms, closed, fork
            )
            return self._created(incarnation, 200) if same else Answer(409)
        made = Incarnation(
            name, content_type or "application/octet-stream", ttl_secs, expires_at_ms, self.now_ms, [], closed, fork
        )
        if fork is not None:
            status = self._inherit(made, fork, content_type)
            if status is not None:
                return Answer(status)
        messages = split(made, body)
        if messages is None:
            return Answer(400)
        made.log += messages

        def change() -> None:
            self.count += 1
            made.number = self.count
            self.names[name] = made
            if made.source is not None:
                made.source.forks += 1

        answer = self._created(made, 201)
        answer.change = change
        return answer

    def post(
        self,
        name: str,
        content_type: str | None,
        body: bytes,
        producer: tuple[str, int, int] | None = None,
        stream_seq: str | None = None,
        close: bool = False,
    ) -> Answer:
        self.expire()
        incarnation = self.names.get(name)
        if incarnation is None or incarnation.deleted:
            return Answer(404 if incarnation is None else 410)
        if not body and not close:
            return Answer(400)
        if incarnation.closed:
            return self._post_closed(incarnation, body, producer)
        if body and content_type is None:
            return Answer(400)
        if body and content_type is not None and kind_of(content_type) != kind_of(incarnation.content_type):
            return Answer(409)
        if producer is not None:
            judged = self._judge(incarnation, producer)
            if judged is not None and judged.status == 204 and not body:
                return self._close_only(incarnation, judged)
            if judged is not None:
                return judged
        last = incarnation.stream_seq
        if stream_seq is not None and last is not None and stream_seq.encode("latin-1") <= last.encode("latin-1"):
            return Answer(409)
        messages = split(incarnation, body)
        if messages is None or (body and not messages):
            return Answer(400)
        added = messages

        def change() -> None:
            incarnation.log += added
            incarnation.used_ms = self.now_ms
            incarnation.closed = close
            incarnation.stream_seq = stream_seq if stream_seq is not None else incarnation.stream_seq
            if producer is not None:
                incarnation.producers[producer[0]] = producer[1:]
                incarnation.closer = producer if close else None

        facts = {
            "next": offset_text(len(incarnation.log) + len(added), stored_after(incarnation, added)),
            "closed": close,
        }
        if producer is not None:
            facts["producer"] = producer[1:]
        return Answer(200 if producer is not None and body else 204, facts, change)

    def delete(self, name: str) -> Answer:
        self.expire()
        incarnation = self.names.get(name)
        if incarnation is None or incarnation.deleted:
            return Answer(404 if incarnation is None else 410)
        gone = incarnation
        return Answer(204, {}, lambda: self.remove(gone))

    def head(self, name: str) -> Answer:
        incarnation, refused = self._find(name)
        if refused is not None:
            return refused
        assert incarnation is not None
        count, closed = self._seen(incarnation)
        facts = {"next": incarnation.token(count), "closed": closed, "type": incarnation.content_type}
        return Answer(200, {**facts, "ttl": incarnation.ttl_secs, "expires": incarnation.expires_at_ms})

    def get(self, name: str, offset: str | None, limit: int) -> Answer:
        incarnation, refused = self._find(name)
        if refused is not None:
            return refused
        assert incarnation is not None
        incarnation.used_ms = self.now_ms
        count, closed = self._seen(incarnation)
        start = place(incarnation, offset, count)
        if start is None:
            return Answer(400)
        end = start
        while end < count and (end == start or incarnation.size(end + 1) - incarnation.size(start) <= limit):
            end += 1
        body = incarnation.log[start:end]
        at_end = end == count
        facts = {"next": incarnation.token(end), "up_to_date": at_end, "closed": closed and at_end}
        return Answer(200, {**facts, "body": b"[" + b",".join(body) + b"]" if incarnation.json else b"".join(body)})

    # -- time and removal

    def expire(self) -> None:
        """Remove every expired stream."""
        while due := [
            incarnation
            for incarnation in self.names.values()
            if not incarnation.deleted and incarnation.over(self.now_ms)
        ]:
            self.remove(due[0])

    def remove(self, incarnation: Incarnation) -> None:
        """Remove a stream; one with forks is kept, invisible, until the last fork is removed."""
        incarnation.deleted = True
        while incarnation.deleted and not incarnation.forks:
            del self.names[incarnation.name]
            if incarnation.source is None:
                return
            incarnation.source.forks -= 1
            incarnation = incarnation.source

    # -- helpers

    def _find(self, name: str) -> tuple[Incarnation | None, Answer | None]:
        self.expire()
        incarnation = self.shown(name)
        if incarnation is None or self.seen(incarnation) is None:
            return None, Answer(404)
        return incarnation, Answer(410) if self.ended(incarnation) else None

    def _seen(self, incarnation: Incarnation) -> tuple[int, bool]:
        seen = self.seen(incarnation)
        assert seen is not None
        return seen

    def _created(self, incarnation: Incarnation, status: int) -> Answer:
        facts = {
            "next": incarnation.token(len(incarnation.log)),
            "closed": incarnation.closed,
            "type": incarnation.content_type,
        }
        return Answer(status, facts)

    def _same(
        self,
        incarnation: Incarnation,
        content_type: str | None,
        ttl_secs: int | None,
        expires_at_ms: int | None,
        closed: bool,
        fork: Fork | None,
    ) -> bool:
        if fork != incarnation.fork or closed != incarnation.closed:
            return False
        asked = content_type or (incarnation.content_type if fork is not None else "application/octet-stream")
        if kind_of(asked) != kind_of(incarnation.content_type):
            return False
        if fork is not None and ttl_secs is None and expires_at_ms is None:
            return True
        return (ttl_secs, expires_at_ms) == (incarnation.ttl_secs, incarnation.expires_at_ms)

    def _inherit(self, made: Incarnation, fork: Fork, content_type: str | None) -> int | None:
        """Copy what a fork inherits from its source; return a status if the fork is refused."""
        source = self.names.get(fork.source)
        seen = self.seen(source) if source is not None else None
        if source is None or (seen is None and not source.deleted):
            return 404
        if source.deleted or seen is None:
            return 409
        start = place(source, fork.offset if fork.offset is not None else "now", seen[0])
        if start is None:
            return 400
        log = source.log[:start]
        if fork.sub_offset and source.json:
            if start + fork.sub_offset > seen[0]:
                return 400
            log = source.log[: start + fork.sub_offset]
        elif fork.sub_offset:
            if start == seen[0] or fork.sub_offset > len(source.log[start]):
                return 400
            log = [*log, source.log[start][: fork.sub_offset]]
        if content_type is not None and kind_of(content_type) != kind_of(source.content_type):
            return 409
        made.content_type, made.source, made.log = source.content_type, source, list(log)
        made.inherited = made.size(len(log))
        if made.ttl_secs is None and made.expires_at_ms is None:
            made.ttl_secs, made.expires_at_ms = source.ttl_secs, source.expires_at_ms
        return None

    def _judge(self, incarnation: Incarnation, producer: tuple[str, int, int]) -> Answer | None:
        """Apply the table of §5.2.1; None when the append is new."""
        name, epoch, seq = producer
        known = incarnation.producers.get(name)
        if known is None:
            return None if seq == 0 else Answer(409, {"expected": 0, "received": seq})
        if epoch < known[0]:
            return Answer(403, {"epoch": known[0]})
        if epoch > known[0]:
            return None if seq == 0 else Answer(400)
        if seq <= known[1]:
            return Answer(
                204, {"next": incarnation.token(len(incarnation.log)), "closed": incarnation.closed, "producer": known}
            )
        return None if seq == known[1] + 1 else Answer(409, {"expected": known[1] + 1, "received": seq})

    def _post_closed(self, incarnation: Incarnation, body: bytes, producer: tuple[str, int, int] | None) -> Answer:
        facts: dict[str, object] = {"next": incarnation.token(len(incarnation.log)), "closed": True}
        if producer is not None and producer == incarnation.closer:
            return Answer(204, {**facts, "producer": producer[1:]})
        if body:
            return Answer(409, facts)
        known = incarnation.producers.get(producer[0]) if producer is not None else None
        if producer is not None and known is not None and known[0] == producer[1]:
            facts["producer"] = known
        return Answer(204, facts)

    def _close_only(self, incarnation: Incarnation, judged: Answer) -> Answer:
        """Close an open stream for a repeated sequence number without a body, and change nothing else."""

        def change() -> None:
            incarnation.closed = True
            incarnation.used_ms = self.now_ms

        return Answer(204, {**judged.facts, "closed": True}, change)


def kind_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def place(incarnation: Incarnation, offset: str | None, count: int) -> int | None:
    """The number of messages before an offset; None if it is not a boundary of the first `count` messages."""
    if offset in (None, "-1"):
        return 0
    if offset == "now":
        return count
    return next((at for at in range(count + 1) if incarnation.token(at) == offset), None)


def split(incarnation: Incarnation, body: bytes) -> list[bytes] | None:
    """Split a body into messages; None if it is invalid for the stream's content type."""
    if not body or not incarnation.json:
        return [body] if body else []
    try:
        text = body.decode()
        decoder = json.JSONDecoder(parse_constant=_refuse)
        json.dumps(decoder.decode(text), ensure_ascii=False).encode()  # Lone surrogates do not encode.
    except (ValueError, RecursionError):
        return None
    at = _skip(text, 0)
    if text[at] != "[":
        return [text.strip(_SPACE).encode()]
    messages = []
    at = _skip(text, at + 1)
    while text[at] != "]":
        _, end = decoder.raw_decode(text, at)
        messages.append(text[at:end].encode())
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return messages


def stored_after(incarnation: Incarnation, added: list[bytes]) -> int:
    return incarnation.size(len(incarnation.log)) + sum(len(message) + incarnation.json for message in added)


def _skip(text: str, at: int) -> int:
    found = re.compile(f"[{_SPACE}]*").match(text, at)
    assert found is not None
    return found.end()


def _refuse(constant: str) -> None:
    raise ValueError(constant)
