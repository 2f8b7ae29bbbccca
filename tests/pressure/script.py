"""Random requests of one client, each with the response that the model expects.

A `Script` owns its stream names, so requests sent in order have exactly one correct response, however they are split
into segments. The model is that of the engine tests (`tests/model/reference.py`), used over HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.model.reference import Answer, Incarnation, Reference
from tests.offsets import offset_of

TEXT, JSON = "text/plain", "application/json"
CHUNK_BYTES = 4_194_304
"""The server's default `limits.max_chunk_bytes`; the streams here stay far below it."""
LOG_MAX = 60
"""The most messages in one stream before it is deleted: the model's cost grows with them."""
NAMES = 4


class Mismatch(AssertionError):
    """A response that the model does not allow."""


@dataclass(frozen=True, slots=True)
class Visible:
    """What a reader sees of one stream at one time. A log only grows, so its length is enough."""

    incarnation: Incarnation | None
    count: int = 0
    closed: bool = False

    def body(self) -> bytes | None:
        """What a whole read returns; None if the stream does not exist."""
        if self.incarnation is None:
            return None
        log = self.incarnation.log[: self.count]
        return b"[" + b",".join(log) + b"]" if self.incarnation.json else b"".join(log)


@dataclass(slots=True)
class Step:
    """One request: its bytes, its meaning, and the expected response."""

    data: bytes
    method: str
    target: str
    body: bytes
    status: int
    facts: dict[str, Any]
    name: str = ""
    before: Visible | None = None
    """What readers see of stream `name` before this request, and after it."""
    after: Visible | None = None
    waits_from: int | None = None
    """A long-poll on the wake stream from this message; checked against the messages appended there."""


@dataclass
class Wake:
    """A stream that another connection appends to, for waiting readers. Messages are `w0;`, `w1;`, …"""

    path: str
    sent: int = 0
    acknowledged: int = 0
    sizes: list[int] = field(default_factory=lambda: [0])
    """Bytes before each message."""

    def next_message(self) -> bytes:
        text = f"w{self.sent};".encode()
        self.sizes.append(self.sizes[-1] + len(text))
        self.sent += 1
        return text

    def token(self, count: int) -> str:
        return f"{count:016x}_{self.sizes[count]:016x}"

    def between(self, start: int, end: int) -> bytes:
        return b"".join(b"w%d;" % number for number in range(start, end))

    def count_at(self, token: str) -> int:
        """How many messages are before an offset, which must be an offset of this stream."""
        count = int(offset_of(token).split("_")[0], 16)
        if count > self.sent:
            raise Mismatch(f"offset {token} is beyond the {self.sent} messages that were sent")
        if offset_of(token) != self.token(count):
            raise Mismatch(f"offset {token} is not a message boundary; expected {self.token(count)}")
        return count


class Script:
    """An endless random client. The same seed and prefix give the same requests."""

    def __init__(self, dice: Random, prefix: str, wake: Wake | None = None) -> None:
        self.dice = dice
        self._prefix = prefix
        self._wake = wake
        self._generation = 0
        self._number = 0
        self.model = Reference(0)
        self.names: list[str] = []
        self.start_over()

    def start_over(self) -> None:
        """Continue with new names and an empty model, because the state after a broken connection is unknown."""
        self._generation += 1
        self.model = Reference(0)
        self.names = [f"{self._prefix}/{self._generation}/{number}" for number in range(NAMES)]

    def visible(self, name: str) -> Visible:
        incarnation = self.model.names.get(name)
        return (
            Visible(incarnation, len(incarnation.log), incarnation.closed) if incarnation is not None else Visible(None)
        )

    def step(self) -> Step:
        name = self.dice.choice(self.names)
        incarnation = self.model.names.get(name)
        if incarnation is None and self.dice.random() < 0.7:
            return self._put(name)
        if incarnation is not None and len(incarnation.log) > LOG_MAX:
            return self._delete(name)
        (kind,) = self.dice.choices(_KINDS, _WEIGHTS)
        return kind(self, name)

    # -- operations

    def _put(self, name: str) -> Step:
        dice = self.dice
        incarnation = self.model.names.get(name)
        same = incarnation.content_type if incarnation is not None and dice.random() < 0.6 else None
        content_type = same or dice.choice((TEXT, TEXT, JSON, "application/octet-stream"))
        closed = dice.random() < 0.04 if incarnation is None else incarnation.closed and dice.random() < 0.7
        body = b""
        if incarnation is None and dice.random() < 0.3:
            body = self._body(content_type == JSON)
        headers = {"Content-Type": content_type}
        if closed:
            headers["Stream-Closed"] = "true"
        answer = self.model.put(name, content_type, None, None, closed, body)
        return self._made("PUT", name, headers, body, answer)

    def _post(self, name: str, producer: tuple[str, int, int] | None = None, *, close: bool = False) -> Step:
        dice = self.dice
        incarnation = self.model.names.get(name)
        right = incarnation.content_type if incarnation is not None else TEXT
        content_type = right if dice.random() < 0.96 else dice.choice((TEXT, JSON, "image/png"))
        body = b"" if (close and dice.random() < 0.5) or dice.random() < 0.02 else self._body(content_type == JSON)
        if body and content_type == JSON and dice.random() < 0.05:
            body = dice.choice((b"{", b"[1,", b"[]", b"nul", b"[1]x"))
        headers = {"Content-Type": content_type}
        stream_seq = None
        if dice.random() < 0.05:
            stream_seq = f"{dice.randrange(1000):04d}"
            headers["Stream-Seq"] = stream_seq
        if producer is not None:
            who, epoch, seq = producer
            headers |= {"Producer-Id": who, "Producer-Epoch": str(epoch), "Producer-Seq": str(seq)}
        if close:
            headers["Stream-Closed"] = "true"
        answer = self.model.post(name, content_type, body, producer, stream_seq, close)
        return self._made("POST", name, headers, body, answer)

    def _produce(self, name: str) -> Step:
        """A producer's next append, a repeat, a gap, a new epoch, or a zombie."""
        who = self.dice.choice(("p", "q"))
        incarnation = self.model.names.get(name)
        epoch, last = incarnation.producers.get(who, (0, -1)) if incarnation is not None else (0, -1)
        (way,) = self.dice.choices(("next", "repeat", "gap", "epoch", "zombie"), (70, 15, 6, 5, 4))
        if way == "repeat" and last >= 0:
            return self._post(name, (who, epoch, self.dice.randrange(last + 1)))
        if way == "gap":
            return self._post(name, (who, epoch, last + 2))
        if way == "epoch":
            return self._post(name, (who, epoch + 1, self.dice.choice((0, 0, 3))))
        if way == "zombie" and epoch > 0:
            return self._post(name, (who, epoch - 1, 0))
        return self._post(name, (who, epoch, last + 1))

    def _close(self, name: str) -> Step:
        return self._post(name, close=True)

    def _delete(self, name: str) -> Step:
        return self._made("DELETE", name, {}, b"", self.model.delete(name))

    def _head(self, name: str) -> Step:
        answer = self.model.head(name)
        for absent in ("ttl", "expires"):
            answer.facts.pop(absent, None)
        return self._made("HEAD", name, {}, b"", answer)

    def _get(self, name: str) -> Step:
        offset = self._offset(name)
        answer = self.model.get(name, offset, CHUNK_BYTES)
        return self._made("GET", name, {}, b"", answer, f"?offset={offset}" if offset is not None else "")

    def _poll(self, name: str) -> Step:
        """A long-poll that returns immediately: there is data, an end, or an error."""
        incarnation = self.model.names.get(name)
        if incarnation is None or (incarnation.log and not incarnation.closed):
            offset = "-1"
        elif incarnation.closed:
            offset = incarnation.token(len(incarnation.log))
        else:
            return self._head(name)
        answer = self.model.get(name, offset, CHUNK_BYTES)
        if answer.status == 200 and incarnation is not None and offset != "-1":
            answer = Answer(204, {"next": offset, "closed": True, "up_to_date": True})
        return self._made("GET", name, {}, b"", answer, f"?offset={offset}&live=long-poll")

    def _wait(self, name: str) -> Step:
        """A long-poll that waits for another connection's append."""
        wake = self._wake
        if wake is None:
            return self._poll(name)
        start = max(0, wake.acknowledged - self.dice.choice((0, 0, 0, 1, 5)))
        target = f"{wake.path}?offset={wake.token(start)}&live=long-poll"
        return Step(self._encode("GET", target, {}, b""), "GET", target, b"", 0, {}, waits_from=start)

    def _elsewhere(self, name: str) -> Step:
        """Requests that are not about a stream."""
        method, target, status = self.dice.choice(
            (
                ("GET", "/healthz", 200),
                ("GET", "/nothing/here", 404),
                ("OPTIONS", f"/v1/stream/{name}", 204),
                ("GET", f"/v1/stream/{name}?offset=", 400),
                ("GET", f"/v1/stream/{name}?offset=1_2_3_4", 400),
                ("GET", f"/v1/stream/{name}?offset=-1&offset=-1", 400),
                ("POST", "/healthz", 405),
            )
        )
        if status == 400 and self.model.names.get(name) is None:
            return self._head(name)  # Which of the two errors is reported first is not specified.
        headers = {"Content-Type": TEXT} if method == "POST" else {}
        body = b"x" if method == "POST" else b""
        return Step(self._encode(method, target, headers, body), method, target, body, status, {})

    # -- inside

    def _offset(self, name: str) -> str | None:
        incarnation = self.model.names.get(name)
        if incarnation is None:
            return self.dice.choice(("-1", None, "now"))
        count = len(incarnation.log)
        inside = incarnation.token(self.dice.randrange(count + 1))
        return self.dice.choice(("-1", None, "now", inside, inside, incarnation.token(count)))

    def _body(self, json: bool) -> bytes:
        """A unique body, so that a response that contains it can belong to only one request."""
        self._number += 1
        size = self.dice.choice((0, 0, 3, 40, 200, 2000))
        text = f"{self._generation}.{self._number}." + "y" * size
        if not json:
            return (text + ";").encode()
        if self.dice.random() < 0.5:
            return f'{{"n":"{text}"}}'.encode()
        return f'["{text}", {self._number} , [ ]]'.encode()

    def _made(
        self, method: str, name: str, headers: dict[str, str], body: bytes, answer: Answer, query: str = ""
    ) -> Step:
        before = self.visible(name)
        if answer.change is not None:
            answer.change()
        target = f"/v1/stream/{self._spelled(name)}{query}"
        data = self._encode(method, target, headers, body)
        return Step(data, method, target, body, answer.status, answer.facts, name, before, self.visible(name))

    def _spelled(self, name: str) -> str:
        """The name, possibly with a percent-encoded character: both are the same stream."""
        if self.dice.random() < 0.9:
            return name
        at = self.dice.choice([index for index, letter in enumerate(name) if letter != "/"])
        return f"{name[:at]}%{ord(name[at]):02{self.dice.choice('xX')}}{name[at + 1 :]}"

    def _encode(self, method: str, target: str, headers: dict[str, str], body: bytes) -> bytes:
        """One of the many legal encodings of a request."""
        dice = self.dice
        fields = [("Host", "localhost"), *headers.items()]
        payload = body
        if body and dice.random() < 0.25:
            fields.append(("Transfer-Encoding", "chunked"))
            payload = self._chunked(body)
        elif body or (method in {"PUT", "POST"} and dice.random() < 0.7):
            fields.append(("Content-Length", str(len(body))))
        if dice.random() < 0.05:
            fields.append(("X-Filler", "z" * dice.randrange(1500)))
        if dice.random() < 0.01 and body:
            fields.append(("Expect", "100-continue"))
        lines = [f"{method} {target} HTTP/1.1"]
        for field_name, value in fields:
            spelled = dice.choice((field_name, field_name, field_name.lower(), field_name.upper()))
            lines.append(f"{spelled}:{dice.choice((' ', ' ', '', '  '))}{value}{dice.choice(('', '', ' '))}")
        return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + payload

    def _chunked(self, body: bytes) -> bytes:
        dice = self.dice
        pieces = bytearray()
        at = 0
        while at < len(body):
            size = dice.randrange(1, len(body) - at + 1)
            extension = dice.choice((b"", b"", b";x=1"))
            pieces += b"%x%b\r\n%b\r\n" % (size, extension, body[at : at + size])
            at += size
        trailer = dice.choice((b"", b"", b"X-Trailer: t\r\n"))
        return bytes(pieces) + b"0\r\n" + trailer + b"\r\n"


_Kind = Callable[[Script, str], Step]
_KINDS: list[_Kind] = [
    Script._post,
    Script._produce,
    Script._get,
    Script._head,
    Script._put,
    Script._delete,
    Script._close,
    Script._poll,
    Script._elsewhere,
    Script._wait,
]
_WEIGHTS = [34, 22, 18, 8, 5, 3, 1.5, 4, 4, 0.5]
