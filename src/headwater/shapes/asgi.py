"""The Shape API as an ASGI application: paths, methods, CORS, size limits, and clients that disconnect.

Invariant: error responses have CORS headers too, so that a web page can read the reason.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import parse_qsl

from headwater.shapes import responses
from headwater.shapes.api import Api, EventStream
from headwater.shapes.responses import ShapeResponse

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_BYTES_MAX: Final = 1 << 20
QUERY_BYTES_MAX: Final = 48 << 10
FIELDS_MAX: Final = 3_000
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"


@dataclass(frozen=True, slots=True)
class Access:
    """Access control: the host names of the server, the allowed origins, and the secret, if there is one."""

    allows_host: Callable[[bytes], bool]
    allows_origin: Callable[[bytes], bool]
    secret: str = ""
    may_delete: bool = False


class _DisconnectedError(Exception):
    pass


class App:
    def __init__(self, api: Api, access: Access) -> None:
        self._api = api
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        headers = dict(scope["headers"])
        cors = self._cors(headers.get(b"origin"))
        try:
            response = await self._respond(scope, headers, receive)
            if isinstance(response, EventStream):
                await _send_events(response, cors, receive, send)
            else:
                await _send(response, cors, send, without_body=scope["method"] == "HEAD")
        except _DisconnectedError:
            return

    async def _respond(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive
    ) -> ShapeResponse | EventStream:
        if not self._access.allows_host(headers.get(b"host", b"")):
            return responses.refusal(421, "This host name is not in server.allowed_hosts")
        path, method = scope["path"], scope["method"]
        if method == "OPTIONS":
            return ShapeResponse(204, [("access-control-allow-methods", _METHODS), ("access-control-max-age", "86400")])
        if path in {"/v1/health", "/healthz"} and method in {"GET", "HEAD"}:
            return self._api.health()
        if path != "/v1/shape":
            return responses.refusal(404, "Not found")
        if len(scope["query_string"]) > QUERY_BYTES_MAX:
            return responses.refusal(414, "The URL is too long: send the subset as the body of a POST")
        try:
            pairs = parse_qsl(
                scope["query_string"].decode("ascii"),
                keep_blank_values=True,
                max_num_fields=FIELDS_MAX,
                errors="strict",
            )
        except ValueError:
            return responses.refusal(400, "Invalid request", {"query": ["is not a valid query string"]})
        query = dict(pairs)
        if len(query) != len(pairs):
            return responses.refusal(400, "Invalid request", {"query": ["has a parameter twice"]})
        if not self._has_secret(query):
            return responses.refusal(401, "Unauthorized - Invalid API secret")
        if method == "DELETE":
            if not self._access.may_delete:
                return responses.refusal(405, "DELETE is not allowed (shapes.allow_delete)")
            return await self._api.delete(query)
        if method not in {"GET", "HEAD", "POST"}:
            return responses.refusal(405, f"Allowed methods: {_METHODS}")
        body = None
        if method == "POST":
            body = await _body(receive)
            if body is None:
                return responses.refusal(413, f"The body is larger than {BODY_BYTES_MAX} bytes")
        etags = headers.get(b"if-none-match", b"").decode("latin-1")
        return await _unless_disconnected(self._api.shape(query, body, etags), receive)

    def _has_secret(self, query: dict[str, str]) -> bool:
        given = query.pop("secret", None) or query.pop("api_secret", None) or ""
        return not self._access.secret or hmac.compare_digest(given.encode(), self._access.secret.encode())

    def _cors(self, origin: bytes | None) -> responses.Headers:
        headers = [("vary", "Origin")]
        if origin is not None and self._access.allows_origin(origin):
            headers += [
                ("access-control-allow-origin", origin.decode("latin-1")),
                ("access-control-expose-headers", responses.EXPOSED),
                ("access-control-allow-headers", "authorization, content-type, if-none-match"),
            ]
        return headers


async def _body(receive: Receive) -> bytes | None:
    """The body, or None if it is too large."""
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _DisconnectedError
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > BODY_BYTES_MAX:
            return None
        if not message.get("more_body", False):
            return b"".join(pieces)


async def _unless_disconnected(
    work: Awaitable[ShapeResponse | EventStream], receive: Receive
) -> ShapeResponse | EventStream:
    """Return the result of `work`, which is cancelled when the client disconnects, for example during a long-poll."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _DisconnectedError
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(response: ShapeResponse, more: responses.Headers, send: Send, *, without_body: bool) -> None:
    headers = [*response.headers, *more, ("content-length", str(len(response.body)))]
    await send({"type": "http.response.start", "status": response.status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": b"" if without_body else response.body})


async def _send_events(response: EventStream, more: responses.Headers, receive: Receive, send: Send) -> None:
    headers = _encoded([*response.headers, *more])
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    # Send the head immediately: the first event may take a while.
    await send({"type": "http.response.body", "body": b": connected\n\n", "more_body": True})
    writing = asyncio.ensure_future(_write(response.pieces, send))
    leaving = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            writing.result()
    finally:
        leaving.cancel()
        writing.cancel()


async def _write(pieces: AsyncGenerator[bytes], send: Send) -> None:
    try:
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        await pieces.aclose()


def _encoded(headers: responses.Headers) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
