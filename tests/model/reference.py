"""The protocol as a model: a dict of lists, written from the protocol's text and from nothing else.

It is slow, keeps everything, copies a fork's data, and has no idea of storage. `Answer` says what a request is
answered with, and holds the change that it would make; nothing changes until `Answer.change` is called.
Times are milliseconds and pass only when `now_ms` is moved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.offsets import place_text

_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Fork:
    """What a PUT asks for with the Stream-Fork headers."""

    source: str
    offset: str | None = None
    sub_offset: int = 0


@dataclass(eq=False)
class Life:
    """One life of a stream, from its creation to its removal. A message is its bytes as they were sent."""

    name: str
    content_type: str
    ttl_secs: int | None
    expires_at_ms: int | None
    used_ms: int
    log: list[bytes]
    closed: bool
    fork: Fork | None = None
    source: Life | None = None
    inherited: int = 0
    """Bytes of the log that lie in the source."""
    number: int = 0
    """Tells the lives of one name apart."""
    forks: int = 0
    deleted: bool = False
    readers: int = 0
    """Live readers, which use the stream for as long as they stay."""
    closer: tuple[str, int, int] | None = None
    stream_seq: str | None = None
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def json(self) -> bool:
        return kind_of(self.content_type) == "application/json"

    def size(self, count: int) -> int:
        """Stored bytes of the first messages: a JSON message is kept with the comma that parts it from the next."""
        return sum(len(message) + self.json for message in self.log[:count])

    def token(self, count: int) -> str:
        return place_text(count, self.size(count))

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
        self.names: dict[str, Life] = {}
        self.count = 0

    # -- what a durable server adds: readers may lag behind writers

    def seen(self, life: Life) -> tuple[int, bool] | None:
        """How many messages readers may see, and whether they see the end; None before they see the stream at all."""
        return len(life.log), life.closed

    def shown(self, name: str) -> Life | None:
        """The life that readers find under a name."""
        return self.names.get(name)

    def ended(self, life: Life) -> bool:
        """Whether readers see that a life which forks keep has ended."""
        return life.deleted

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
        life = self.names.get(name)
        if life is not None:
            same = not life.deleted and self._same(life, content_type, ttl_secs, expires_at_ms, closed, fork)
            return self._created(life, 200) if same else Answer(409)
        made = Life(
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
        life = self.names.get(name)
        if life is None or life.deleted:
            return Answer(404 if life is None else 410)
        if not body and not close:
            return Answer(400)
        if life.closed:
            return self._post_closed(life, body, producer)
        if body and content_type is None:
            return Answer(400)
        if body and content_type is not None and kind_of(content_type) != kind_of(life.content_type):
            return Answer(409)
        if producer is not None:
            judged = self._judge(life, producer)
            if judged is not None and judged.status == 204 and not body:
                return self._close_only(life, judged)
            if judged is not None:
                return judged
        last = life.stream_seq
        if stream_seq is not None and last is not None and stream_seq.encode("latin-1") <= last.encode("latin-1"):
            return Answer(409)
        messages = split(life, body)
        if messages is None or (body and not messages):
            return Answer(400)
        added = messages

        def change() -> None:
            life.log += added
            life.used_ms = self.now_ms
            life.closed = close
            life.stream_seq = stream_seq if stream_seq is not None else life.stream_seq
            if producer is not None:
                life.producers[producer[0]] = producer[1:]
                life.closer = producer if close else None

        facts = {"next": place_text(len(life.log) + len(added), stored_after(life, added)), "closed": close}
        if producer is not None:
            facts["producer"] = producer[1:]
        return Answer(200 if producer is not None and body else 204, facts, change)

    def delete(self, name: str) -> Answer:
        self.expire()
        life = self.names.get(name)
        if life is None or life.deleted:
            return Answer(404 if life is None else 410)
        gone = life
        return Answer(204, {}, lambda: self.remove(gone))

    def head(self, name: str) -> Answer:
        life, refused = self._find(name)
        if refused is not None:
            return refused
        assert life is not None
        count, closed = self._seen(life)
        facts = {"next": life.token(count), "closed": closed, "type": life.content_type}
        return Answer(200, {**facts, "ttl": life.ttl_secs, "expires": life.expires_at_ms})

    def get(self, name: str, offset: str | None, limit: int) -> Answer:
        life, refused = self._find(name)
        if refused is not None:
            return refused
        assert life is not None
        if self.names.get(name) is life:
            life.used_ms = self.now_ms
        count, closed = self._seen(life)
        start = place(life, offset, count)
        if start is None:
            return Answer(400)
        end = start
        while end < count and (end == start or life.size(end + 1) - life.size(start) <= limit):
            end += 1
        body = life.log[start:end]
        at_end = end == count
        facts = {"next": life.token(end), "up_to_date": at_end, "closed": closed and at_end}
        return Answer(200, {**facts, "body": b"[" + b",".join(body) + b"]" if life.json else b"".join(body)})

    # -- time and removal

    def expire(self) -> None:
        """Whatever is over is gone, whether or not anybody asks for it."""
        while due := [life for life in self.names.values() if not life.deleted and life.over(self.now_ms)]:
            self.remove(due[0])

    def remove(self, life: Life) -> None:
        """A stream with forks lives on unseen until the last of them is gone."""
        life.deleted = True
        while life.deleted and not life.forks:
            del self.names[life.name]
            if life.source is None:
                return
            life.source.forks -= 1
            life = life.source

    # -- inside

    def _find(self, name: str) -> tuple[Life | None, Answer | None]:
        self.expire()
        life = self.shown(name)
        if life is None or self.seen(life) is None:
            return None, Answer(404)
        return life, Answer(410) if self.ended(life) else None

    def _seen(self, life: Life) -> tuple[int, bool]:
        seen = self.seen(life)
        assert seen is not None
        return seen

    def _created(self, life: Life, status: int) -> Answer:
        facts = {"next": life.token(len(life.log)), "closed": life.closed, "type": life.content_type}
        return Answer(status, facts)

    def _same(
        self,
        life: Life,
        content_type: str | None,
        ttl_secs: int | None,
        expires_at_ms: int | None,
        closed: bool,
        fork: Fork | None,
    ) -> bool:
        if fork != life.fork or closed != life.closed:
            return False
        asked = content_type or (life.content_type if fork is not None else "application/octet-stream")
        if kind_of(asked) != kind_of(life.content_type):
            return False
        if fork is not None and ttl_secs is None and expires_at_ms is None:
            return True
        return (ttl_secs, expires_at_ms) == (life.ttl_secs, life.expires_at_ms)

    def _inherit(self, made: Life, fork: Fork, content_type: str | None) -> int | None:
        """Give a fork what it shares with its source; a status when it cannot be."""
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

    def _judge(self, life: Life, producer: tuple[str, int, int]) -> Answer | None:
        """The table of §5.2.1: None when the append is new."""
        name, epoch, seq = producer
        known = life.producers.get(name)
        if known is None:
            return None if seq == 0 else Answer(409, {"expected": 0, "received": seq})
        if epoch < known[0]:
            return Answer(403, {"epoch": known[0]})
        if epoch > known[0]:
            return None if seq == 0 else Answer(400)
        if seq <= known[1]:
            return Answer(204, {"next": life.token(len(life.log)), "closed": life.closed, "producer": known})
        return None if seq == known[1] + 1 else Answer(409, {"expected": known[1] + 1, "received": seq})

    def _post_closed(self, life: Life, body: bytes, producer: tuple[str, int, int] | None) -> Answer:
        facts: dict[str, object] = {"next": life.token(len(life.log)), "closed": True}
        if producer is not None and producer == life.closer:
            return Answer(204, {**facts, "producer": producer[1:]})
        if body:
            return Answer(409, facts)
        known = life.producers.get(producer[0]) if producer is not None else None
        if producer is not None and known is not None and known[0] == producer[1]:
            facts["producer"] = known
        return Answer(204, facts)

    def _close_only(self, life: Life, judged: Answer) -> Answer:
        """A repeated sequence number without a body closes an open stream, and changes nothing else."""

        def change() -> None:
            life.closed = True
            life.used_ms = self.now_ms

        return Answer(204, {**judged.facts, "closed": True}, change)


def kind_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def place(life: Life, offset: str | None, count: int) -> int | None:
    """How many messages lie before an offset; None when it is no place among the first `count` of them."""
    if offset in (None, "-1"):
        return 0
    if offset == "now":
        return count
    return next((at for at in range(count + 1) if life.token(at) == offset), None)


def split(life: Life, body: bytes) -> list[bytes] | None:
    """The messages of a body; None when it is not what the stream's type asks for."""
    if not body or not life.json:
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


def stored_after(life: Life, added: list[bytes]) -> int:
    return life.size(len(life.log)) + sum(len(message) + life.json for message in added)


def _skip(text: str, at: int) -> int:
    found = re.compile(f"[{_SPACE}]*").match(text, at)
    assert found is not None
    return found.end()


def _refuse(constant: str) -> None:
    raise ValueError(constant)
