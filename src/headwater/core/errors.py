"""Protocol errors: the status, the stable code, the message and the headers of every rejected request.

One class for each code. Its docstring states the cause and, in a second paragraph, the remedy; both are published in
docs/api.md. Invariant: no other module chooses the status of an error.
"""

from __future__ import annotations

from typing import ClassVar


class Refusal(Exception):
    """A rejected request, which changed nothing."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "bad_request"

    def __init__(self, detail: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(detail)
        self.detail = detail
        self.headers = headers


class BadRequest(Refusal):
    """A header, parameter or name of the request is malformed.

    Read `detail`, correct the request, and send it again.
    """


class InvalidOffset(Refusal):
    """The offset is malformed, or is not a message boundary of this stream.

    Use `-1`, `now`, or an offset that the server returned for this stream.
    """

    code = "invalid_offset"


class InvalidName(Refusal):
    """The path is not a valid stream name: an empty, `.` or `..` segment, a backslash, a control character, or
    too long.

    Choose another name; `limits.max_name_bytes` limits its length.
    """

    code = "invalid_name"


class InvalidJson(Refusal):
    """The body is not valid JSON in UTF-8, or is nested too deeply.

    Correct the body; `detail` says what is wrong.
    """

    code = "invalid_json"


class EmptyBody(Refusal):
    """The append has no body, or an empty JSON array.

    Send at least one message, or `Stream-Closed: true` to close the stream.
    """

    code = "empty_body"


class InvalidProducer(Refusal):
    """The three producer headers are incomplete or malformed.

    Send `Producer-Id`, `Producer-Epoch` and `Producer-Seq` together; the last two are decimal numbers.
    """

    code = "invalid_producer"


class InvalidExpiry(Refusal):
    """`Stream-TTL` or `Stream-Expires-At` is malformed, or both are present.

    Send one of them: seconds, or an RFC 3339 time.
    """

    code = "invalid_expiry"


class InvalidContentType(Refusal):
    """`Content-Type` is not of the form `type/subtype`.

    Send the content type of the stream.
    """

    code = "invalid_content_type"


class StaleEpoch(Refusal):
    """Another writer with the same `Producer-Id` has taken over with a newer epoch (protocol §5.2.1).

    Stop this writer, or claim the producer with a higher epoch; `Producer-Epoch` in the response is the current
    one.
    """

    status = 403
    code = "stale_epoch"


class StreamNotFound(Refusal):
    """There is no stream with this name.

    Create it with PUT, or check the name.
    """

    status = 404
    code = "stream_not_found"


class BucketNotFound(Refusal):
    """There is no bucket with this id.

    Create it with `PUT /ds/{bucket}`.
    """

    status = 404
    code = "bucket_not_found"


class SnapshotNotFound(Refusal):
    """The stream has no snapshot at this offset.

    Request the latest one: `GET …/snapshot`.
    """

    status = 404
    code = "snapshot_not_found"


class NotFound(Refusal):
    """The server has no resource at this path.

    Check the path; streams are below `/v1/stream/` and `/ds/`.
    """

    status = 404
    code = "not_found"


class MethodNotAllowed(Refusal):
    """The resource does not support this method.

    Use one of the methods in the `Allow` header.
    """

    status = 405
    code = "method_not_allowed"


class RequestTimeout(Refusal):
    """The request did not arrive completely in time.

    Send it again; `server.read_timeout_secs` is the limit.
    """

    status = 408
    code = "request_timeout"


class Conflict(Refusal):
    """The request conflicts with the state of the resource.

    Read `detail`, and read the resource before you retry.
    """

    status = 409
    code = "conflict"


class BucketExists(Conflict):
    """A bucket with this id exists.

    Use it, or choose another id.
    """

    code = "bucket_exists"


class BucketNotEmpty(Conflict):
    """The bucket still contains streams.

    Delete its streams first.
    """

    code = "bucket_not_empty"


class SnapshotNeeded(Conflict):
    """The snapshot replaces messages that are no longer stored, so it cannot be deleted.

    Publish a newer snapshot, which replaces this one.
    """

    code = "snapshot_needed"


class ConfigMismatch(Conflict):
    """A stream with this name exists with another configuration.

    Use the existing stream, delete it first, or choose another name.
    """

    code = "config_mismatch"


class ContentTypeMismatch(Conflict):
    """The content type of the append differs from that of the stream.

    Send the content type that HEAD of the stream returns.
    """

    code = "content_type_mismatch"


class StreamClosed(Conflict):
    """The stream is closed and accepts no more data.

    Append to another stream. The retry of a producer [may have been stored](clients.md#a-producer-by-hand).
    """

    code = "stream_closed"


class SequenceGap(Conflict):
    """`Producer-Seq` is higher than the next expected number.

    Send the missing appends first, starting at `Producer-Expected-Seq`.
    """

    code = "sequence_gap"


class SequenceRegression(Conflict):
    """`Stream-Seq` is not greater than that of the last append (sequence conflict).

    Another writer was faster: read the new messages, then append with a greater value.
    """

    code = "sequence_regression"


class StreamGone(Refusal):
    """The stream has been deleted, and forks still use its data.

    Use another name until the forks are deleted too.
    """

    status = 410
    code = "stream_deleted"


class OffsetGone(Refusal):
    """The messages at this offset are no longer stored.

    Bootstrap again, or read from `Stream-Earliest-Offset`.
    """

    status = 410
    code = "offset_gone"


class StreamRecreated(OffsetGone):
    """The offset belongs to a deleted stream with the same name.

    Discard it, and read the new stream from `-1`.
    """

    code = "stream_recreated"


class TooLarge(Refusal):
    """The body is larger than the limit.

    Split it into several appends; `http.max_body_bytes` and `limits.max_snapshot_bytes` are the limits.
    """

    status = 413
    code = "payload_too_large"


class StreamFull(TooLarge):
    """The stream has reached its maximum size.

    Use another stream, or raise `limits.max_stream_bytes`.
    """

    code = "stream_full"


class MemoryFull(TooLarge):
    """The memory for streams is used up.

    Delete streams, raise `limits.max_memory_bytes` or `limits.max_metadata_bytes`, or use a storage mode on disk.
    """

    code = "memory_full"


class TooManyMessages(TooLarge):
    """One request contains more messages than `limits.max_append_messages`.

    Split it into several appends.
    """

    code = "too_many_messages"


class MessageTooLarge(TooLarge):
    """One JSON message is larger than `limits.max_json_message_bytes`.

    Split the message, or store it in a stream of bytes.
    """

    code = "message_too_large"


class TooManyProducers(TooLarge):
    """The stream has seen more producer ids than `limits.max_producers_per_stream`.

    Reuse producer ids, or use another stream.
    """

    code = "too_many_producers"


class UrlTooLong(Refusal):
    """The request target is longer than `http.max_url_bytes`.

    Shorten the name or the query.
    """

    status = 414
    code = "url_too_long"


class HeadersTooLarge(Refusal):
    """The headers are larger than `http.max_header_bytes`.

    Send fewer or shorter headers, often cookies.
    """

    status = 431
    code = "headers_too_large"


class StorageUnavailable(Refusal):
    """A write to the disk failed. The server acknowledges no appends until it is restarted; reads still work.

    Check the disk and the log of the server, then restart it.
    """

    status = 503
    code = "storage_unavailable"


class StorageFull(Refusal):
    """The disk is nearly full.

    Free disk space; the server then accepts appends again without a restart.
    """

    status = 507
    code = "storage_full"


class StorageBusy(Refusal):
    """Data arrives faster than the disk can store it.

    Retry after `Retry-After` seconds.
    """

    status = 503
    code = "storage_busy"


class Draining(Refusal):
    """The server is shutting down.

    Retry; another process or the restarted server will respond.
    """

    status = 503
    code = "draining"


class Unauthorized(Refusal):
    """The server requires a token (`auth.token`), and the request has none or another one.

    Send `Authorization: Bearer TOKEN`.
    """

    status = 401
    code = "unauthorized"


class OriginNotAllowed(Refusal):
    """A web page of an origin that is not allowed tried to change something.

    Add the origin to `http.cors_origins`.
    """

    status = 403
    code = "origin_not_allowed"


class HostNotAllowed(Refusal):
    """The `Host` header does not name this server.

    Use a loopback name, or add the name to `server.allowed_hosts`.
    """

    status = 421
    code = "host_not_allowed"


class TooManyConnections(Refusal):
    """The server has reached `server.max_connections`.

    Retry later, close unused connections, or raise the limit.
    """

    status = 503
    code = "too_many_connections"


class Overloaded(Refusal):
    """The request bodies in memory have reached `limits.max_request_bodies_bytes`.

    Retry after `Retry-After` seconds.
    """

    status = 503
    code = "overloaded"


class UnsupportedHttpVersion(Refusal):
    """The request is neither HTTP/1.1 nor HTTP/1.0.

    Use HTTP/1.1, or a proxy that speaks HTTP/2 to the client.
    """

    status = 505
    code = "unsupported_http_version"


class UnsupportedTransferCoding(Refusal):
    """The request has a `Transfer-Encoding` other than `chunked`.

    Send the body with `Content-Length` or `chunked`.
    """

    status = 501
    code = "unsupported_transfer_coding"


class InternalError(Refusal):
    """A defect of the server.

    Report it with the traceback that the log contains for the `X-Request-Id` of the response.
    """

    status = 500
    code = "internal_error"


class DataCorrupt(Refusal):
    """Stored bytes do not match their checksum. The server never returns them.

    Check the disk, run `headwater store check`, and restore a backup.
    """

    status = 500
    code = "data_corrupt"


# -- subscriptions: codes in the spelling of the protocol, with additional members in the body ------------------------


class SubscriptionRefusal(Refusal):
    """A rejected request of the subscription API."""

    code = "INVALID_REQUEST"
    retry_after_s: ClassVar[int] = 0
    """Sent as `Retry-After`, unless it is 0."""

    def __init__(self, detail: str, **members: str | int) -> None:
        super().__init__(detail, (("Retry-After", str(self.retry_after_s)),) if self.retry_after_s else ())
        self.members = members


class InvalidSubscription(SubscriptionRefusal):
    """The body or a parameter of a subscription request is invalid.

    Read `detail`, and correct the request.
    """


class TooManyStreams(SubscriptionRefusal):
    """A subscription or a request names more streams than the settings allow.

    Split the request, or raise `subscriptions.max_streams_per_request` or
    `subscriptions.max_links_per_subscription`.
    """

    status = 413
    code = "TOO_MANY_STREAMS"


class SubscriptionLimitReached(SubscriptionRefusal):
    """The server has reached its limit of subscriptions, links or pattern segments.

    Delete subscriptions, raise `subscriptions.max_…`, or retry after `Retry-After` seconds.
    """

    status = 503
    code = "SUBSCRIPTION_LIMIT_REACHED"
    retry_after_s = 60


class SubscriptionBusy(SubscriptionRefusal):
    """Too many requests wait for the same subscription to be created or deleted.

    Retry after `Retry-After` seconds.
    """

    status = 503
    code = "SUBSCRIPTION_BUSY"
    retry_after_s = 1


class WebhookUrlRejected(SubscriptionRefusal):
    """The webhook URL is not a public https address.

    Use such an address; for local receivers set `subscriptions.allow_local_webhooks`.
    """

    code = "WEBHOOK_URL_REJECTED"


class TokenInvalid(SubscriptionRefusal):
    """The token of the worker is missing, malformed, or belongs to another wake.

    Use the token of the wake that the worker received.
    """

    status = 401
    code = "TOKEN_INVALID"


class SubscriptionNotFound(SubscriptionRefusal):
    """There is no subscription with this id.

    Create it with PUT.
    """

    status = 404
    code = "SUBSCRIPTION_NOT_FOUND"


class SubscriptionExists(SubscriptionRefusal):
    """A subscription with this id exists with another configuration.

    Use it, delete it first, or choose another id.
    """

    status = 409
    code = "SUBSCRIPTION_ALREADY_EXISTS"


class AlreadyClaimed(SubscriptionRefusal):
    """Another worker holds the lease of this subscription.

    Wait for the next wake, or until the lease expires.
    """

    status = 409
    code = "ALREADY_CLAIMED"


class NoPendingWork(SubscriptionRefusal):
    """The subscription has nothing to do.

    Wait for the next wake.
    """

    status = 409
    code = "NO_PENDING_WORK"


class Fenced(SubscriptionRefusal):
    """The wake of this worker has ended; another worker may have taken over.

    Stop, and claim the next wake.
    """

    status = 409
    code = "FENCED"


class InvalidAck(SubscriptionRefusal):
    """An acknowledged offset is not valid for its stream, or is beyond its end.

    Acknowledge offsets that the wake or a read returned.
    """

    status = 409
    code = "INVALID_OFFSET"
