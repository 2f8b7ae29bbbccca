"""Protocol errors: the status, the stable code, the message and the headers of every rejected request.

One class for each code. Its docstring states the cause and, in a second paragraph, the remedy; both are published in
docs/api.md. Errors of the HTTP layer are in `http_errors`, those of the subscription API in `subscription_errors`.
Invariant: no module outside these three chooses the status of an error.
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


class InvalidLease(Refusal):
    """The body of a lease request is malformed, or its terms cannot be carried out.

    Read `detail`, and correct the request.
    """

    code = "invalid_lease"


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


class OutsideNamespace(Refusal):
    """The token does not allow access to a stream that the request names.

    Use a token for these streams, or name only streams in the token's namespace.
    """

    status = 403
    code = "outside_namespace"


class FollowNotFound(Refusal):
    """The id of a follower of many streams has expired, or the events to resume from are not known any more.

    Send the POST again, with the offsets of the last events that were received.
    """

    status = 404
    code = "follow_not_found"


class LeaseNotFound(Refusal):
    """There is no writer lease on this stream.

    Acquire one with `?lease=acquire`.
    """

    status = 404
    code = "lease_not_found"


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


class LeaseHeld(Conflict):
    """Another writer holds the lease of this stream, or took it over.

    Stop this writer. To replace the other one, acquire the lease with `"take_over": true`.
    """

    code = "lease_held"


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


class StreamDeleted(Refusal):
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


class PayloadTooLarge(Refusal):
    """The body is larger than the limit.

    Split it into several appends; `http.max_body_bytes` and `limits.max_snapshot_bytes` are the limits.
    """

    status = 413
    code = "payload_too_large"


class StreamFull(PayloadTooLarge):
    """The stream has reached its maximum size.

    Use another stream, or raise `limits.max_stream_bytes`.
    """

    code = "stream_full"


class MemoryFull(PayloadTooLarge):
    """The memory for streams is used up.

    Delete streams, raise `limits.max_memory_bytes` or `limits.max_metadata_bytes`, or use a storage mode on disk.
    """

    code = "memory_full"


class NamespaceFull(PayloadTooLarge):
    """The namespace of the stream has reached its quota of bytes or streams.

    Delete streams of the namespace, let retention drop old messages, or raise `quotas.max_bytes`, `quotas.max_streams`
    or the entry of `quotas.namespaces`.
    """

    code = "namespace_full"


class TooManyReaders(Refusal):
    """The namespace of the stream has reached its quota of live readers.

    Retry after `Retry-After` seconds, close unused readers, or raise `quotas.max_readers` or the entry of
    `quotas.namespaces`.
    """

    status = 429
    code = "too_many_readers"


class NamespaceBusy(Refusal):
    """The namespace of the stream has reached its quota of connections.

    Retry after `Retry-After` seconds, end unused live reads, send fewer requests at the same time, or raise
    `quotas.max_connections` or the entry of `quotas.namespaces`.
    """

    status = 429
    code = "namespace_busy"


class TooManyMessages(PayloadTooLarge):
    """One request contains more messages than `limits.max_append_messages`.

    Split it into several appends.
    """

    code = "too_many_messages"


class MessageTooLarge(PayloadTooLarge):
    """One JSON message is larger than `limits.max_json_message_bytes`.

    Split the message, or store it in a stream of bytes.
    """

    code = "message_too_large"


class TooManyProducers(PayloadTooLarge):
    """The stream has `limits.max_producers_per_stream` producers, all used within `limits.producer_idle_days`.

    Reuse producer ids, or use another stream.
    """

    code = "too_many_producers"


class TooManyFollowed(PayloadTooLarge):
    """The followers of many streams follow as many streams together as the server allows.

    Follow fewer streams, or raise `limits.max_followed_streams`.
    """

    code = "too_many_followed"


class TooManyLeases(PayloadTooLarge):
    """The server holds as many writer leases as it may.

    End the leases of writers that have finished, or raise `limits.max_leases`.
    """

    code = "too_many_leases"


class StorageUnavailable(Refusal):
    """A write to the disk failed. The server acknowledges no appends until it is restarted; reads still work. With
    `Retry-After`: the owner of the stream is changing in a cluster, or the object store is unavailable.

    With `Retry-After`, retry. Otherwise check the disk and the log of the server, then restart it.
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
    """Data arrives faster than the disk can store it, or too much waits for the object store (`storage.cold`).

    Retry after `Retry-After` seconds.
    """

    status = 503
    code = "storage_busy"


class BeingFetched(Refusal):
    """The data is in the object store (`storage.cold`) and not on the disk. It is being fetched.

    Retry after `Retry-After` seconds.
    """

    status = 503
    code = "being_fetched"


class WorkerUnavailable(Refusal):
    """The worker process that owns the stream is being restarted, and did not return in time.

    Retry after `Retry-After` seconds. Nothing was changed.
    """

    status = 503
    code = "worker_unavailable"


class TooManyFollows(Refusal):
    """The server has as many followers of many streams as it may.

    Retry after the time in `Retry-After`, or raise `limits.max_follows`.
    """

    status = 503
    code = "too_many_follows"


class FencingUnavailable(Refusal):
    """The server cannot fence the stream, because it has no subscriptions.

    Create the stream without `Write-Fence`, or serve with subscriptions.
    """

    status = 501
    code = "fencing_unavailable"


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
