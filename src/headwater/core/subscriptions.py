"""Subscriptions: durable cursors over streams that wake workers, as a state machine without clock or I/O.

A subscription has cursors (how far each linked stream is processed) and at most one *wake*: a notice that there is
work, and the lease of whoever took it up. Work is *pending* while some cursor lies before its stream's tail.

| phase     | means                                         | leaves it                                               |
|-----------|-----------------------------------------------|---------------------------------------------------------|
| `idle`    | no wake                                       | pending work: to `out`; a claim: to `held`              |
| `out`     | notice given, or (webhook) being delivered    | claim or 2xx: to `held`; failed delivery: to `waiting`  |
| `waiting` | delivery failed, the next try has its time    | that time: to `out`                                     |
| `held`    | somebody works, until `until_ms` unless acked | done, release or end of the lease: to `idle`            |

From `idle` a subscription with pending work goes on to the next wake at once: so it is never idle with work undone.
In `out` and `waiting` a callback that knows the wake's token takes it up, as a 2xx does. Every wake has the next
`generation` and a `wake_id` of its own; whoever speaks for another one is fenced. Cursors never go back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from headwater.core.buckets import check_bucket_id, check_stream_id, ids_of, is_bucketed
from headwater.core.errors import (
    AlreadyClaimed,
    Fenced,
    InvalidAck,
    InvalidName,
    InvalidSubscription,
    NoPendingWork,
    TooManyStreams,
)
from headwater.core.globs import compile_glob
from headwater.core.names import check_name
from headwater.core.offsets import Offset, parse_token

LEASE_TTL_DEFAULT_MS: Final = 30_000
LEASE_TTL_MIN_MS: Final = 1_000
LEASE_TTL_MAX_MS: Final = 600_000
RETRY_FIRST_MS: Final = 1_000
RETRY_MAX_MS: Final = 60_000
RETRY_JITTER: Final = 0.2
ID_MAX_BYTES: Final = 256
WORKER_MAX_CHARS: Final = 256
URL_MAX_CHARS: Final = 2_048

Kind: TypeAlias = Literal["webhook", "pull-wake"]


class Config(msgspec.Struct, frozen=True, array_like=True):
    """What a subscription was created with, in normal form: two requests for the same thing are equal."""

    kind: Kind
    pattern: str | None
    streams: tuple[str, ...]
    webhook_url: str | None
    wake_stream: str | None
    lease_ttl_ms: int
    description: str | None


@dataclass(frozen=True, slots=True)
class SubscriptionLimits:
    """How much clients may keep in subscriptions. The settings say what each limit is for."""

    max_subscriptions: int = 10_000
    max_links: int = 250_000
    max_links_per_subscription: int = 100_000
    max_streams_per_request: int = 1_000
    max_pattern_segments: int = 30_000
    max_description_chars: int = 4_096
    max_waiting_requests: int = 100

    def check_request(self, count: int) -> None:
        """Refuse a request that names too many streams."""
        if count > self.max_streams_per_request:
            raise TooManyStreams(
                f"The request names {count} streams; at most {self.max_streams_per_request} are allowed in one."
            )


DEFAULT_LIMITS: Final = SubscriptionLimits()


class Phase(enum.StrEnum):
    IDLE = "idle"
    OUT = "out"
    WAITING = "waiting"
    HELD = "held"


class Wake(msgspec.Struct, frozen=True, array_like=True):
    """Where a subscription stands with its current wake; `idle` has none."""

    phase: Phase = Phase.IDLE
    generation: int = 0
    wake_id: str = ""
    trigger: str = ""
    """The stream whose work caused the wake."""
    holder: str = ""
    until_ms: int = 0
    """When `waiting` is over, or the lease of `held`."""
    failures: int = 0
    """Deliveries that failed since the last one that succeeded."""


@dataclass(frozen=True, slots=True)
class Ack:
    """A stream and the offset up to which it is processed, as a client wrote them."""

    stream: str
    offset: str


# -- what a client may ask for -----------------------------------------------------------------------------------------


def make_config(
    kind: Kind,
    pattern: str | None,
    streams: Sequence[str],
    webhook_url: str | None,
    wake_stream: str | None,
    lease_ttl_ms: int,
    description: str | None,
    max_name_bytes: int,
    limits: SubscriptionLimits = DEFAULT_LIMITS,
) -> Config:
    """Check a request and bring it into its normal form. The address of a webhook is checked elsewhere."""
    limits.check_request(len(streams))
    names = tuple(sorted({link_name(stream, max_name_bytes) for stream in streams}))
    if not pattern and not names:
        raise InvalidSubscription("Give a pattern, or streams, or both.")
    if not LEASE_TTL_MIN_MS <= lease_ttl_ms <= LEASE_TTL_MAX_MS:
        raise InvalidSubscription(f"lease_ttl_ms must be from {LEASE_TTL_MIN_MS} to {LEASE_TTL_MAX_MS}.")
    if description is not None and len(description) > limits.max_description_chars:
        raise InvalidSubscription(f"description is longer than {limits.max_description_chars} characters.")
    if kind == "webhook":
        if not webhook_url:
            raise InvalidSubscription("A webhook subscription needs webhook.url.")
        if len(webhook_url) > URL_MAX_CHARS:
            raise InvalidSubscription(f"webhook.url is longer than {URL_MAX_CHARS} characters.")
        wake_stream = None
    else:
        if not wake_stream:
            raise InvalidSubscription("A pull-wake subscription needs wake_stream.")
        webhook_url = None
        wake_stream = link_name(wake_stream, max_name_bytes)
        if is_bucketed(wake_stream):
            raise InvalidSubscription("wake_stream must be a stream of /v1/stream/, not of a bucket.")
        if wake_stream in names:
            # Each wake would be work for the next one.
            raise InvalidSubscription("A subscription cannot follow its own wake_stream.")
    return Config(
        kind,
        compile_glob(pattern, max_name_bytes).text if pattern else None,
        names,
        webhook_url,
        wake_stream,
        lease_ttl_ms,
        description,
    )


def link_name(text: str, max_name_bytes: int) -> str:
    """The name of a stream as a client wrote it in a body or address, checked."""
    name = linked_name(text)
    try:
        if is_bucketed(name):
            bucket_id, stream_id = ids_of(name)
            check_stream_id(check_bucket_id(bucket_id), stream_id)
            return name
        return check_name(name, max_name_bytes)
    except InvalidName as refusal:
        raise InvalidSubscription(refusal.detail) from None


def linked_name(text: str) -> str:
    """The name that a client wrote: a path below `/ds/` is a stream of a bucket; else slashes around are ignored."""
    return text if is_bucketed(text) else text.strip("/")


def check_subscription_id(text: str) -> str:
    if not text or text in (".", ".."):
        raise InvalidSubscription("The subscription id is missing.")
    if len(text.encode("utf-8", "surrogatepass")) > ID_MAX_BYTES:
        raise InvalidSubscription(f"The subscription id is longer than {ID_MAX_BYTES} bytes.")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        raise InvalidSubscription("The subscription id may not contain control characters.")
    return text


def check_worker(worker: str) -> str:
    if not worker or len(worker) > WORKER_MAX_CHARS:
        raise InvalidSubscription(f"worker must have from 1 to {WORKER_MAX_CHARS} characters.")
    return worker


def advance(cursor: Offset, ack: Ack, tail: Offset) -> Offset:
    """Where an ack moves a cursor to. The caller checks its boundary and incarnation."""
    token = parse_token(ack.offset)
    if token is None:
        raise InvalidAck(f"{ack.offset!r} is not an offset. Ack one that the server returned.")
    offset = token.offset
    if offset < cursor:
        raise InvalidAck(f"{ack.stream!r} is acked up to {cursor}; an ack cannot go back to {offset}.")
    if offset > tail:
        raise InvalidAck(f"{offset} lies beyond the tail of {ack.stream!r}, {tail}.")
    return offset


# -- the state machine -------------------------------------------------------------------------------------------------


def wake_up(wake: Wake, wake_id: str, trigger: str) -> Wake:
    """The next wake: work is pending, and nobody knows of it yet."""
    assert wake.phase is Phase.IDLE, "one wake at a time"
    return Wake(Phase.OUT, wake.generation + 1, wake_id, trigger, failures=wake.failures)


def claim(wake: Wake, worker: str, until_ms: int) -> Wake:
    """A worker takes up a wake that is out."""
    assert wake.phase is Phase.OUT, "only a wake that is out can be taken up"
    return msgspec.structs.replace(wake, phase=Phase.HELD, holder=worker, until_ms=until_ms)


def check_claimable(wake: Wake, has_pending: bool) -> None:
    if wake.phase is Phase.HELD:
        raise AlreadyClaimed(
            f"{wake.holder!r} holds the lease.", current_holder=wake.holder, generation=wake.generation
        )
    if not has_pending:
        raise NoPendingWork("Everything is acked; there is nothing to claim.")


def check_current(wake: Wake, generation: int, wake_id: str) -> None:
    """Fence whoever speaks for a wake that is over."""
    if wake.phase is Phase.IDLE or generation != wake.generation or wake_id != wake.wake_id:
        raise Fenced("This wake is over; another worker may have taken up its work.", generation=wake.generation)


def extend(wake: Wake, until_ms: int) -> Wake:
    """A sign of life from whoever has the wake's token. It also shows that a webhook was received."""
    assert wake.phase is not Phase.IDLE, "checked to be current"
    return msgspec.structs.replace(wake, phase=Phase.HELD, until_ms=until_ms, failures=0)


def delivered(wake: Wake, until_ms: int) -> Wake:
    """The receiver said 2xx and goes on by itself."""
    assert wake.phase is Phase.OUT, "only a wake that is out is delivered"
    return msgspec.structs.replace(wake, phase=Phase.HELD, until_ms=until_ms, failures=0)


def failed(wake: Wake, now_ms: int, jitter: float) -> Wake:
    """The receiver could not be reached, or said no: the same wake once more, later."""
    assert wake.phase is Phase.OUT, "only a wake that is out is delivered"
    failures = wake.failures + 1
    until_ms = now_ms + retry_delay_ms(failures, jitter)
    return msgspec.structs.replace(wake, phase=Phase.WAITING, until_ms=until_ms, failures=failures)


def try_again(wake: Wake) -> Wake:
    assert wake.phase is Phase.WAITING, "only what waits is tried again"
    return msgspec.structs.replace(wake, phase=Phase.OUT, until_ms=0)


def finish(wake: Wake) -> Wake:
    """Done, released, or out of time. The generation stays, so that the next wake's is higher."""
    return Wake(generation=wake.generation)


def retry_delay_ms(failures: int, jitter: float) -> int:
    """Doubling from one second to a minute, moved by up to a fifth; `jitter` is from -1 to 1."""
    assert failures >= 1
    assert -1.0 <= jitter <= 1.0
    base_ms = min(RETRY_FIRST_MS << min(failures - 1, 16), RETRY_MAX_MS)
    return round(base_ms * (1.0 + RETRY_JITTER * jitter))


# -- what is kept of it ------------------------------------------------------------------------------------------------


class SavedSubscription(msgspec.Struct, frozen=True, array_like=True):
    """The part that never changes. `nonce` tells two lives of one id apart."""

    config: Config
    created_ms: int
    base_url: str
    nonce: str


class SavedLink(msgspec.Struct, frozen=True, array_like=True):
    """A cursor on one incarnation of a stream. On another one it says only whether the link is explicit."""

    explicit: bool
    stream_id: int
    index: int
    position: int


encode_saved = msgspec.msgpack.Encoder().encode
decode_subscription = msgspec.msgpack.Decoder(SavedSubscription).decode
decode_link = msgspec.msgpack.Decoder(SavedLink).decode
decode_wake = msgspec.msgpack.Decoder(Wake).decode
