"""What can be refused, and how each refusal looks to a client.

One small class per kind of refusal; each instance knows its status, its stable ``code``, a sentence that helps
and the headers that the protocol asks for. Nothing else in the house decides on a status of an error.
"""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """A request that the rules turn down. Nothing was changed."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "bad_request"

    def __init__(self, detail: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.headers = headers


class BadRequest(Refusal):
    """Malformed headers, parameters or names."""


class InvalidOffset(Refusal):
    code = "invalid_offset"


class InvalidName(Refusal):
    code = "invalid_name"


class InvalidJson(Refusal):
    code = "invalid_json"


class EmptyBody(Refusal):
    code = "empty_body"


class InvalidProducer(Refusal):
    code = "invalid_producer"


class InvalidExpiry(Refusal):
    code = "invalid_expiry"


class InvalidContentType(Refusal):
    code = "invalid_content_type"


class StaleEpoch(Refusal):
    """A zombie: the producer's epoch was taken over (protocol §5.2.1)."""

    status = 403
    code = "stale_epoch"


class StreamNotFound(Refusal):
    status = 404
    code = "stream_not_found"


class BucketNotFound(Refusal):
    status = 404
    code = "bucket_not_found"


class SnapshotNotFound(Refusal):
    status = 404
    code = "snapshot_not_found"


class NotFound(Refusal):
    """No such resource at this address."""

    status = 404
    code = "not_found"


class MethodNotAllowed(Refusal):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(Refusal):
    status = 408
    code = "request_timeout"


class Conflict(Refusal):
    status = 409
    code = "conflict"


class BucketExists(Conflict):
    code = "bucket_exists"


class BucketNotEmpty(Conflict):
    code = "bucket_not_empty"


class SnapshotNeeded(Conflict):
    """The latest snapshot stands for what is no longer there, so it cannot be deleted."""

    code = "snapshot_needed"


class ConfigMismatch(Conflict):
    code = "config_mismatch"


class ContentTypeMismatch(Conflict):
    code = "content_type_mismatch"


class StreamClosed(Conflict):
    code = "stream_closed"


class SequenceGap(Conflict):
    code = "sequence_gap"


class SequenceRegression(Conflict):
    code = "sequence_regression"


class StreamGone(Refusal):
    """The stream was deleted while forks still read from it."""

    status = 410
    code = "stream_deleted"


class OffsetGone(Refusal):
    """The offset lies before the earliest retained one."""

    status = 410
    code = "offset_gone"


class StreamRecreated(OffsetGone):
    """The offset belongs to another incarnation: its stream was deleted, and the name has a new one."""

    code = "stream_recreated"


class TooLarge(Refusal):
    status = 413
    code = "payload_too_large"


class StreamFull(TooLarge):
    code = "stream_full"


class MemoryFull(TooLarge):
    code = "memory_full"


class TooManyMessages(TooLarge):
    """One request appends more messages than `limits.max_append_messages`."""

    code = "too_many_messages"


class MessageTooLarge(TooLarge):
    """One JSON message is larger than `limits.max_json_message_bytes`."""

    code = "message_too_large"


class TooManyProducers(TooLarge):
    code = "too_many_producers"


class UrlTooLong(Refusal):
    status = 414
    code = "url_too_long"


class HeadersTooLarge(Refusal):
    status = 431
    code = "headers_too_large"


class StorageUnavailable(Refusal):
    """A write to the disk failed: nothing more is acknowledged until a restart has read back what is durable."""

    status = 503
    code = "storage_unavailable"


class StorageFull(Refusal):
    status = 507
    code = "storage_full"


class StorageBusy(Refusal):
    """Data arrives faster than it can be saved. Try again after `Retry-After` seconds."""

    status = 503
    code = "storage_busy"


class Draining(Refusal):
    status = 503
    code = "draining"


class Unauthorized(Refusal):
    """The server has a static token (`auth.token`), and the request does not carry it."""

    status = 401
    code = "unauthorized"


class OriginNotAllowed(Refusal):
    """A web page of an origin that is not allowed tried to change something."""

    status = 403
    code = "origin_not_allowed"


class HostNotAllowed(Refusal):
    """The `Host` header names a server that this one is not."""

    status = 421
    code = "host_not_allowed"


class TooManyConnections(Refusal):
    status = 503
    code = "too_many_connections"


class Overloaded(Refusal):
    """The server holds as many request bodies as its memory limit allows. Try again after `Retry-After` seconds."""

    status = 503
    code = "overloaded"


class UnsupportedHttpVersion(Refusal):
    """The request is neither HTTP/1.1 nor HTTP/1.0."""

    status = 505
    code = "unsupported_http_version"


class UnsupportedTransferCoding(Refusal):
    """The request has a `Transfer-Encoding` other than `chunked`."""

    status = 501
    code = "unsupported_transfer_coding"


class InternalError(Refusal):
    """A bug. What went wrong is in the log, under the id that the answer carries."""

    status = 500
    code = "internal_error"


class DataCorrupt(Refusal):
    """Stored bytes do not match their checksum. They are never served."""

    status = 500
    code = "data_corrupt"


# -- subscriptions: codes as the protocol spells them, and members beside the message ----------------------------------


class SubscriptionRefusal(Refusal):
    """A request below `__ds/` that is turned down."""

    code = "INVALID_REQUEST"
    retry_after_s: ClassVar[int] = 0
    """Sent as `Retry-After`, unless it is 0."""

    def __init__(self, detail: str, **members: str | int) -> None:
        super().__init__(detail, (("Retry-After", str(self.retry_after_s)),) if self.retry_after_s else ())
        self.members = members


class InvalidSubscription(SubscriptionRefusal):
    """A body or parameter that makes no subscription."""


class TooManyStreams(SubscriptionRefusal):
    """A subscription or a request names more streams than the settings allow."""

    status = 413
    code = "TOO_MANY_STREAMS"


class SubscriptionLimitReached(SubscriptionRefusal):
    """The server holds as many subscriptions, links or patterns as the settings allow."""

    status = 503
    code = "SUBSCRIPTION_LIMIT_REACHED"
    retry_after_s = 60


class SubscriptionBusy(SubscriptionRefusal):
    """Too many requests wait for the same subscription to be created or removed."""

    status = 503
    code = "SUBSCRIPTION_BUSY"
    retry_after_s = 1


class WebhookUrlRejected(SubscriptionRefusal):
    code = "WEBHOOK_URL_REJECTED"


class TokenInvalid(SubscriptionRefusal):
    status = 401
    code = "TOKEN_INVALID"


class SubscriptionNotFound(SubscriptionRefusal):
    status = 404
    code = "SUBSCRIPTION_NOT_FOUND"


class SubscriptionExists(SubscriptionRefusal):
    status = 409
    code = "SUBSCRIPTION_ALREADY_EXISTS"


class AlreadyClaimed(SubscriptionRefusal):
    status = 409
    code = "ALREADY_CLAIMED"


class NoPendingWork(SubscriptionRefusal):
    status = 409
    code = "NO_PENDING_WORK"


class Fenced(SubscriptionRefusal):
    """A worker whose wake is over: another one may be at work by now."""

    status = 409
    code = "FENCED"


class InvalidAck(SubscriptionRefusal):
    status = 409
    code = "INVALID_OFFSET"
