"""What can be refused, and how each refusal looks to a client.

One small class per kind of refusal; each instance knows its status, its stable ``code``, a sentence that helps
and the headers that the protocol asks for. Nothing else in the house decides on a status of an error.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar


class Refusal(Exception):
    """A request that the rules turn down. Nothing was changed."""

    status: ClassVar[int] = HTTPStatus.BAD_REQUEST
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

    status = HTTPStatus.FORBIDDEN
    code = "stale_epoch"


class StreamNotFound(Refusal):
    status = HTTPStatus.NOT_FOUND
    code = "stream_not_found"


class NotFound(Refusal):
    """No such resource at this address."""

    status = HTTPStatus.NOT_FOUND
    code = "not_found"


class MethodNotAllowed(Refusal):
    status = HTTPStatus.METHOD_NOT_ALLOWED
    code = "method_not_allowed"


class RequestTimeout(Refusal):
    status = HTTPStatus.REQUEST_TIMEOUT
    code = "request_timeout"


class Conflict(Refusal):
    status = HTTPStatus.CONFLICT
    code = "conflict"


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

    status = HTTPStatus.GONE
    code = "stream_deleted"


class OffsetGone(Refusal):
    """The offset lies before the earliest retained one."""

    status = HTTPStatus.GONE
    code = "offset_gone"


class TooLarge(Refusal):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "payload_too_large"


class StreamFull(TooLarge):
    code = "stream_full"


class MemoryFull(TooLarge):
    code = "memory_full"


class UrlTooLong(Refusal):
    status = HTTPStatus.REQUEST_URI_TOO_LONG
    code = "url_too_long"


class HeadersTooLarge(Refusal):
    status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    code = "headers_too_large"


class StorageUnavailable(Refusal):
    """A write to the disk failed: nothing more is acknowledged until a restart has read back what is durable."""

    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "storage_unavailable"


class StorageFull(Refusal):
    status = HTTPStatus.INSUFFICIENT_STORAGE
    code = "storage_full"


class Draining(Refusal):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "draining"


class TooManyConnections(Refusal):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "too_many_connections"


class InternalError(Refusal):
    """A bug. What went wrong is in the log, under the id that the answer carries."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "internal_error"


class DataCorrupt(Refusal):
    """Stored bytes do not match their checksum. They are never served."""

    status = HTTPStatus.INTERNAL_SERVER_ERROR
    code = "data_corrupt"
