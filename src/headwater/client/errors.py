"""Typed errors of the client: what callers can catch, and whether a request may be retried.

Invariant: every error that the client raises on purpose is a `ClientError` and contains the server's message.
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
        """Whether an idempotent request may succeed if it is retried."""
        return False

    @property
    def was_not_processed(self) -> bool:
        """Whether the server certainly did not process the request, so that any request may be retried."""
        return False

    @property
    def retry_after_s(self) -> float:
        """How long the server asks clients to wait; 0 if it does not send it."""
        return 0.0


class InvalidRequestError(ClientError, ValueError):
    """The request cannot be sent: a malformed URL, header or argument."""


class MalformedResponseError(ClientError):
    """The response violates the protocol: it is truncated or malformed. No part of it may be used."""

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
    """The connection to the server failed; the request was not sent."""

    @property
    def was_not_processed(self) -> bool:
        return True


class ConnectionLostError(TransportError):
    """The connection ended before the response was complete."""


class RequestTimeoutError(TransportError):
    """The server sent no data within the timeout."""


class ResponseError(ClientError):
    """The server rejected the request. Subclasses name the reasons that programs handle."""

    def __init__(self, status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status} {code}: {detail}" if code else f"{status}: {detail}")
        self.status = status
        self.code = code
        """The stable name of the error on servers that send one (RFC 9457 `code`), otherwise empty."""
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
        """The first offset that can still be read, on servers that send it."""
        return self.headers.get("stream-earliest-offset")


class StreamRecreatedError(OffsetGoneError):
    """410: the offset belongs to a deleted stream; a new stream has its name."""


class ConflictError(ResponseError):
    """409: the request conflicts with the state of the stream."""


class StreamClosedError(ConflictError):
    """409: the stream is closed; nothing can be appended."""


class ClaimLostError(ConflictError):
    """409: the claim of the write token has ended, or the producer id belongs to claims; stop writing (extension)."""


class LeaseLostError(ConflictError):
    """409: another writer holds the lease, or it has expired."""


class LeaseNotFoundError(ResponseError):
    """404: the stream has no lease."""


class ProducerGapError(ConflictError):
    """409: the server expects a lower `Producer-Seq`."""

    @property
    def expected_seq(self) -> int | None:
        return _number(self.headers, "producer-expected-seq")


class PayloadTooLargeError(ResponseError):
    """413: the request, the message or the stream is larger than the server allows."""


class ServerError(ResponseError):
    """5xx: the server cannot process the request now."""


class _SubscriptionProblem(msgspec.Struct):
    code: str = ""
    message: str = ""


class _Problem(msgspec.Struct):
    """The content of an error response: RFC 9457, or `error` as the subscription API of the protocol has it."""

    code: str = ""
    detail: str = ""
    error: _SubscriptionProblem | str | None = None


_problems: Final = msgspec.json.Decoder(_Problem)


_BY_STATUS: Final[dict[int, type[ResponseError]]] = {
    401: UnauthorizedError,
    403: ForbiddenError,
    404: StreamNotFoundError,
    409: ConflictError,
    410: OffsetGoneError,
    413: PayloadTooLargeError,
}


def error_of(method: str, url: str, status: int, headers: Mapping[str, str], body: bytes) -> ResponseError:
    """The error for a response with an unexpected status."""
    problem = _problem_of(body)
    detail = problem.detail or _default_detail(method, url, status, body)
    return _kind_of(status, problem.code, headers)(status, problem.code, detail, headers)


def _kind_of(status: int, code: str, headers: Mapping[str, str]) -> type[ResponseError]:
    if status == 403 and "producer-epoch" in headers:
        return ProducerFencedError
    if status == 409 and "producer-expected-seq" in headers:
        # A gap that has no extent is how write fencing says that no retry can succeed.
        is_gap = headers["producer-expected-seq"] != headers.get("producer-received-seq")
        return ProducerGapError if is_gap else ClaimLostError
    if status == 409 and code == "FENCED":
        return ClaimLostError
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
        problem = _problems.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _Problem()
    match problem.error:
        case _SubscriptionProblem(code=code, message=message):
            return _Problem(code, message)
        case _:
            return problem


def _default_detail(method: str, url: str, status: int, body: bytes) -> str:
    """The message for a response without one, such as any response to HEAD."""
    if status == 404:
        return f"there is no stream {url}"
    if status == 410:
        return f"the stream {url} was deleted"
    return body[:200].decode("utf-8", "replace").strip() or f"{method} {url} was rejected"


def _number(headers: Mapping[str, str], name: str) -> int | None:
    text = headers.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else None
