"""Typed errors of the client: what a caller can catch, and whether a request may be sent again after it.

Invariant: every error that the client raises on purpose is a `ClientError`, and what the server said is in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Final

import msgspec

_TRANSIENT: Final = frozenset((408, 425, 429, 500, 502, 503, 504))


class ClientError(Exception):
    """Base class of all errors of the client."""

    @property
    def is_transient(self) -> bool:
        """Whether an idempotent request may succeed if it is sent again."""
        return False

    @property
    def was_not_processed(self) -> bool:
        """Whether the server certainly did nothing, so that any request may be sent again."""
        return False

    @property
    def retry_after_s(self) -> float:
        """How long the server asks clients to wait; 0 if it does not say."""
        return 0.0


class InvalidRequestError(ClientError, ValueError):
    """The request cannot be sent: a malformed URL, header or argument."""


class MalformedResponseError(ClientError):
    """A response that does not follow the protocol: cut short, or framed wrongly. Nothing of it may be used."""

    @property
    def is_transient(self) -> bool:
        return True


class HistoryMissingError(ClientError):
    """Retention dropped messages that no snapshot covers, so the state of the stream cannot be built."""


class SseUnavailableError(ClientError):
    """The server, or a proxy before it, does not deliver server-sent events; use long-poll."""


class LeaseUnsupportedError(ClientError):
    """The server has no writer leases, which are an extension of Headwater."""


class TransportError(ClientError):
    """The network failed. The server may have processed the request."""

    @property
    def is_transient(self) -> bool:
        return True


class ConnectError(TransportError):
    """There is no connection to the server; the request was not sent."""

    @property
    def was_not_processed(self) -> bool:
        return True


class ConnectionLostError(TransportError):
    """The connection ended before the response was complete."""


class RequestTimeoutError(TransportError):
    """The server was silent for longer than the timeout."""


class ResponseError(ClientError):
    """The server refused the request. Subclasses name the reasons that programs handle."""

    def __init__(self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {code}: {detail}" if code else f"{status}: {detail}")
        self.status = status
        self.code = code
        """The stable name of the error on servers that send one (RFC 9457 `code`), else empty."""
        self.detail = detail
        self.headers: Mapping[str, str] = headers or {}

    @property
    def is_transient(self) -> bool:
        return self.status in _TRANSIENT

    @property
    def was_not_processed(self) -> bool:
        return self.status == 429

    @property
    def retry_after_s(self) -> float:
        with contextlib.suppress(ValueError):
            return max(0.0, float(self.headers.get("retry-after", "0")))
        return 0.0


class UnauthorizedError(ResponseError):
    """401: the token is missing, wrong or expired."""


class ForbiddenError(ResponseError):
    """403: the token does not allow this request."""


class ProducerFencedError(ForbiddenError):
    """403: a newer epoch of the same producer id has written to the stream."""

    @property
    def current_epoch(self) -> int | None:
        return _number(self.headers, "producer-epoch")


class StreamNotFoundError(ResponseError):
    """404 or 410: the stream was never created, was deleted, or expired."""


class OffsetGoneError(ResponseError):
    """410: the data at this offset is no longer retained."""

    @property
    def earliest_offset(self) -> str | None:
        """The first offset that can still be read, on servers that say so."""
        return self.headers.get("stream-earliest-offset")


class StreamRecreatedError(OffsetGoneError):
    """410: the offset belongs to a stream that was deleted; the name has a new one."""


class ConflictError(ResponseError):
    """409: the request does not fit the state of the stream."""


class StreamClosedError(ConflictError):
    """409: the stream is closed; nothing can be appended."""


class LeaseLostError(ConflictError):
    """409: another writer holds the lease, or it has expired."""


class LeaseNotFoundError(ResponseError):
    """404: nobody holds a lease on the stream."""


class ProducerGapError(ConflictError):
    """409: the server expects a lower `Producer-Seq`."""

    @property
    def expected_seq(self) -> int | None:
        return _number(self.headers, "producer-expected-seq")


class PayloadTooLargeError(ResponseError):
    """413: the request, the message or the stream is larger than the server allows."""


class ServerError(ResponseError):
    """5xx: the server cannot answer now."""


class _Problem(msgspec.Struct):
    code: str = ""
    detail: str = ""


_BY_STATUS: Final[dict[int, type[ResponseError]]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: StreamNotFoundError,
    409: ConflictError,
    410: OffsetGoneError,
    413: PayloadTooLargeError,
}


def error_of(method: str, url: str, status: int, headers: Mapping[str, str], body: bytes) -> ResponseError:
    """The error that a response with an unexpected status stands for."""
    problem = _problem_of(body)
    detail = problem.detail or _default_detail(method, url, status, body)
    return _kind_of(status, problem.code, headers)(status, problem.code, detail, headers)


def _kind_of(status: int, code: str, headers: Mapping[str, str]) -> type[ResponseError]:
    if status == 403 and "producer-epoch" in headers:
        return ProducerFencedError
    if status == 409 and "producer-expected-seq" in headers:
        return ProducerGapError
    if status == 409 and (code == "stream_closed" or headers.get("stream-closed", "").lower() == "true"):
        return StreamClosedError
    if status == 409 and code == "lease_held":
        return LeaseLostError
    if status == 404 and code == "lease_not_found":
        return LeaseNotFoundError
    if status == 410 and code == "stream_deleted":
        return StreamNotFoundError
    if status == 410 and code == "stream_recreated":
        return StreamRecreatedError
    return _BY_STATUS.get(status, ServerError if status >= 500 else ResponseError)


def _problem_of(body: bytes) -> _Problem:
    try:
        return msgspec.json.decode(body, type=_Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Problem()


def _default_detail(method: str, url: str, status: int, body: bytes) -> str:
    """What to say where the response says nothing, as those to HEAD do."""
    if status == 404:
        return f"there is no stream {url}"
    if status == 410:
        return f"the stream {url} is gone"
    return body[:200].decode("utf-8", "replace").strip() or f"{method} {url} was refused"


def _number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
