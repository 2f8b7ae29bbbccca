"""Subscriptions: durable cursors over streams that wake workers, as a state machine without clock or I/O.

A subscription has cursors (how far each linked stream is processed) and at most one *wake*: a notification that there
is work, and the lease of the worker that accepted it. Work is *pending* while a cursor lies before its stream's tail.

| phase     | meaning                                       | next phase                                              |
|-----------|-----------------------------------------------|---------------------------------------------------------|
| `idle`    | no wake                                       | pending work: `out`; a claim: `held`                    |
| `out`     | announced, or (webhook) being delivered       | claim or 2xx: `held`; failed delivery: `waiting`        |
| `waiting` | delivery failed; the retry is at `until_ms`   | at that time: `out`                                     |
| `held`    | a worker has the lease, until `until_ms`      | done, release or end of the lease: `idle`               |

An `idle` subscription with pending work gets its next wake at once. In `out` and `waiting`, a callback with the token
of the wake accepts it, as a 2xx response does. Every wake has the next `generation` and its own `wake_id`; requests for
another wake are fenced. Cursors never move back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import msgspec

from headwater.core.buckets import check_bucket_id, check_stream_id, ids_of, is_bucketed
from headwater.core.errors import InvalidName
from headwater.core.globs import compile_glob
from headwater.core.names import check_name
from headwater.core.offsets import Offset, parse_token
from headwater.core.subscription_errors import (
    AlreadyClaimed,
    Fenced,
    InvalidAck,
    InvalidSubscription,
    NoPendingWork,
    TooManyStreams,
)

LEASE_TTL_DEFAULT_MS: Final = 30_000
LEASE_TTL_MIN_MS: Final = 1_000
LEASE_TTL_MAX_MS: Final = 600_000
RETRY_FIRST_MS: Final = 1_000
RETRY_MAX_MS: Final = 60_000
RETRY_JITTER: Final = 0.2
ID_MAX_BYTES: Final = 256
"""Size of the id of a subscription."""
WORKER_MAX_CHARS: Final = 256
"""Length of the name of a worker."""
URL_MAX_CHARS: Final = 2_048
"""Length of the URL of a webhook."""

Kind: TypeAlias = Literal["webhook", "pull-wake"]


class Config(msgspec.Struct, frozen=True, array_like=True):
    """The configuration of a subscription in normal form: requests for the same subscription are equal."""

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
                f"The request names {count} streams; send at most {self.max_streams_per_request} in one request"
                " (subscriptions.max_streams_per_request)."
            )


DEFAULT_LIMITS: Final = SubscriptionLimits()


class Phase(enum.StrEnum):
    IDLE = "idle"
    OUT = "out"
    WAITING = "waiting"
    HELD = "held"


class Wake(msgspec.Struct, frozen=True, array_like=True):
    """The state of the current wake; in phase `idle` there is none."""

    phase: Phase = Phase.IDLE
    generation: int = 0
    wake_id: str = ""
    trigger: str = ""
    """The stream whose work caused the wake."""
    holder: str = ""
    until_ms: int = 0
    """When `waiting` ends, or the lease of `held`."""
    failures: int = 0
    """Failed deliveries since the last successful one."""


@dataclass(frozen=True, slots=True)
class Ack:
    """A stream and the offset up to which a worker has processed it, as the client wrote them."""

    stream: str
    offset: str


# -- checks of requests ------------------------------------------------------------------------------------------------


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
    """Check and normalise a request. The address of a webhook is checked elsewhere."""
    limits.check_request(len(streams))
    names = tuple(sorted({link_name(stream, max_name_bytes) for stream in streams}))
    if not pattern and not names:
        raise InvalidSubscription("The subscription follows nothing; give a pattern, or streams, or both.")
    if not LEASE_TTL_MIN_MS <= lease_ttl_ms <= LEASE_TTL_MAX_MS:
        raise InvalidSubscription(
            f"lease_ttl_ms must be from {LEASE_TTL_MIN_MS} to {LEASE_TTL_MAX_MS}, not {lease_ttl_ms}."
        )
    if description is not None and len(description) > limits.max_description_chars:
        raise InvalidSubscription(
            f"description has {len(description)} characters; use at most {limits.max_description_chars}."
        )
    if kind == "webhook":
        if not webhook_url:
            raise InvalidSubscription(
                "A webhook subscription needs webhook.url; give one such as https://example.com/hook."
            )
        if len(webhook_url) > URL_MAX_CHARS:
            raise InvalidSubscription(f"webhook.url has {len(webhook_url)} characters; use at most {URL_MAX_CHARS}.")
        wake_stream = None
    else:
        if not wake_stream:
            raise InvalidSubscription(
                "A pull-wake subscription needs wake_stream; name the stream that announces work."
            )
        webhook_url = None
        wake_stream = link_name(wake_stream, max_name_bytes)
        if is_bucketed(wake_stream):
            raise InvalidSubscription(
                f"wake_stream must be a stream of /v1/stream/, not of a bucket like {wake_stream!r}."
            )
        if wake_stream in names:
            # Each wake would be work for the next one.
            raise InvalidSubscription(
                f"A subscription cannot follow its own wake_stream, {wake_stream!r}; name another one."
            )
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
    """Normalise and check the name of a stream that a client wrote in a body or address."""
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
    """Normalise a name that a client wrote: a path below `/ds/` is kept; otherwise outer slashes are removed."""
    return text if is_bucketed(text) else text.strip("/")


def check_subscription_id(text: str) -> str:
    if not text or text in (".", ".."):
        raise InvalidSubscription("The subscription id is missing; name it as in __ds/subscriptions/{id}.")
    if len(text.encode("utf-8", "surrogatepass")) > ID_MAX_BYTES:
        raise InvalidSubscription(f"The subscription id is longer than {ID_MAX_BYTES} bytes; choose a shorter one.")
    if any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        raise InvalidSubscription(f"Subscription id {text!r} may not contain control characters; remove them.")
    return text


def check_worker(worker: str) -> str:
    if not worker or len(worker) > WORKER_MAX_CHARS:
        raise InvalidSubscription(f"worker must have from 1 to {WORKER_MAX_CHARS} characters, not {len(worker)}.")
    return worker


def advance(cursor: Offset, ack: Ack, tail: Offset) -> Offset:
    """The cursor after an ack. The caller checks that the offset is a boundary of the right incarnation."""
    token = parse_token(ack.offset)
    if token is None:
        raise InvalidAck(f"{ack.offset!r} is not an offset. Ack one that the server returned.")
    offset = token.offset
    if offset < cursor:
        raise InvalidAck(f"{ack.stream!r} is acked up to {cursor}, and {offset} is before it; ack a later offset.")
    if offset > tail:
        raise InvalidAck(
            f"{offset} is after the end of {ack.stream!r}, {tail}; ack an offset that the server returned."
        )
    return offset


# -- the state machine -------------------------------------------------------------------------------------------------


def wake_up(wake: Wake, wake_id: str, trigger: str) -> Wake:
    """The next wake, for work that is pending."""
    assert wake.phase is Phase.IDLE, "one wake at a time"
    return Wake(Phase.OUT, wake.generation + 1, wake_id, trigger, failures=wake.failures)


def claim(wake: Wake, worker: str, until_ms: int) -> Wake:
    """Give the lease of an announced wake to a worker."""
    assert wake.phase is Phase.OUT, "only an announced wake can be claimed"
    return msgspec.structs.replace(wake, phase=Phase.HELD, holder=worker, until_ms=until_ms)


def check_claimable(wake: Wake, has_pending: bool) -> None:
    if wake.phase is Phase.HELD:
        raise AlreadyClaimed(
            f"{wake.holder!r} holds the lease; wait for the next wake, or until the lease expires.",
            current_holder=wake.holder,
            generation=wake.generation,
        )
    if not has_pending:
        raise NoPendingWork("Everything is acked, so there is nothing to claim; wait for the next wake.")


def check_current(wake: Wake, generation: int, wake_id: str) -> None:
    """Fence a request for a wake that has ended."""
    if wake.phase is Phase.IDLE or generation != wake.generation or wake_id != wake.wake_id:
        raise Fenced(
            "This wake has ended, and another worker may have claimed its work; stop, and claim the next wake.",
            generation=wake.generation,
        )


def extend(wake: Wake, until_ms: int) -> Wake:
    """Extend the lease on a request with the token of the wake, which also proves that a webhook was received."""
    assert wake.phase is not Phase.IDLE, "checked to be current"
    return msgspec.structs.replace(wake, phase=Phase.HELD, until_ms=until_ms, failures=0)


def delivered(wake: Wake, until_ms: int) -> Wake:
    """The receiver accepted the wake with a 2xx response and has the lease."""
    assert wake.phase is Phase.OUT, "only a wake in phase out is delivered"
    return msgspec.structs.replace(wake, phase=Phase.HELD, until_ms=until_ms, failures=0)


def failed(wake: Wake, now_ms: int, jitter: float) -> Wake:
    """The receiver could not be reached or did not answer 2xx: deliver the same wake again later."""
    assert wake.phase is Phase.OUT, "only a wake in phase out is delivered"
    failures = wake.failures + 1
    until_ms = now_ms + retry_delay_ms(failures, jitter)
    return msgspec.structs.replace(wake, phase=Phase.WAITING, until_ms=until_ms, failures=failures)


def retry(wake: Wake) -> Wake:
    assert wake.phase is Phase.WAITING, "only a failed delivery is retried"
    return msgspec.structs.replace(wake, phase=Phase.OUT, until_ms=0)


def finish(wake: Wake) -> Wake:
    """End a wake: done, released, or expired. The generation is kept, so that the next wake has a higher one."""
    return Wake(generation=wake.generation)


def retry_delay_ms(failures: int, jitter: float) -> int:
    """One second, doubled for each failure up to a minute, plus or minus a fifth; `jitter` is from -1 to 1."""
    assert failures >= 1
    assert -1.0 <= jitter <= 1.0
    base_ms = min(RETRY_FIRST_MS << min(failures - 1, 16), RETRY_MAX_MS)
    return round(base_ms * (1.0 + RETRY_JITTER * jitter))


# -- saved documents ---------------------------------------------------------------------------------------------------


class SavedSubscription(msgspec.Struct, frozen=True, array_like=True):
    """The immutable part of a subscription. `nonce` distinguishes it from a later one with the same id."""

    config: Config
    created_ms: int
    base_url: str
    nonce: str


class SavedLink(msgspec.Struct, frozen=True, array_like=True):
    """A cursor on one incarnation of a stream. For a later incarnation only `explicit` counts."""

    explicit: bool
    stream_id: int
    message_index: int
    byte_position: int


encode_saved = msgspec.msgpack.Encoder().encode
decode_subscription = msgspec.msgpack.Decoder(SavedSubscription).decode
decode_link = msgspec.msgpack.Decoder(SavedLink).decode
decode_wake = msgspec.msgpack.Decoder(Wake).decode
