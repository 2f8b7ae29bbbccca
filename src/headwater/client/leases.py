"""Operations of writer leases: acquire, renew, release and show. No I/O; an extension of Headwater."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypedDict

import msgspec

from headwater.client.effects import HttpRequest, Operation, send
from headwater.client.errors import LeaseUnsupportedError, ResponseError
from headwater.client.http1 import HttpResponse
from headwater.client.operations import StreamOperations, encode_json

LEASE_TYPE: Final = "application/vnd.headwater.lease+json"
_OTHER_SERVER: Final = frozenset((400, 404, 405, 409, 415))
"""Statuses from servers without leases, which treat the request as an append with the wrong content type."""


class LeaseOptions(TypedDict, total=False):
    """Options of a lease; see `LeaseTerms` of the server."""

    ttl_s: float
    final: Any
    """The message that the server appends when the lease expires: a JSON value, or text on other streams."""
    close: bool
    """Whether the server closes the stream when the lease expires. If not, `producer_id` is required."""
    producer_id: str | None
    """The writer's producer, which the server fences when the lease expires."""
    take_over: bool
    """Replace another holder."""


@dataclass(frozen=True, slots=True)
class Lease:
    holder: str
    ttl_s: float
    expires_in_s: float


def acquire(
    stream: StreamOperations,
    holder: str,
    *,
    ttl_s: float = 30.0,
    final: Any = None,
    close: bool = True,
    producer_id: str | None = None,
    take_over: bool = False,
) -> Operation[Lease]:
    body: dict[str, Any] = {"holder": holder, "ttl_ms": round(ttl_s * 1000), "close": close, "take_over": take_over}
    if final is not None:
        body["append"] = final
    if producer_id is not None:
        body["producer_id"] = producer_id
    try:
        response = yield from _send(stream, "acquire", body)
    except ResponseError as error:
        if error.status in _OTHER_SERVER and error.code in {"", "content_type_mismatch"}:
            raise LeaseUnsupportedError(f"{stream.url}: the server has no writer leases ({error})") from None
        raise
    return _lease_of(response)


def renew(stream: StreamOperations, holder: str) -> Operation[Lease]:
    return _lease_of((yield from _send(stream, "renew", {"holder": holder})))


def release(stream: StreamOperations, holder: str) -> Operation[None]:
    yield from _send(stream, "release", {"holder": holder})


def show(stream: StreamOperations) -> Operation[Lease]:
    return _lease_of((yield from send(stream.policy, HttpRequest("GET", stream.url, "lease=show"), 200)))


def _send(stream: StreamOperations, action: str, body: dict[str, Any]) -> Operation[HttpResponse]:
    headers = {"Content-Type": LEASE_TYPE}
    request = HttpRequest("POST", stream.url, f"lease={action}", headers, encode_json(body))
    return send(stream.policy, request, 200, 204)


def _lease_of(response: HttpResponse) -> Lease:
    found = msgspec.json.decode(response.body)
    return Lease(found["holder"], found["ttl_ms"] / 1000, found["expires_in_ms"] / 1000)
