"""Durable sessions for the MCP Python SDK: responses can be resumed, and sessions survive a restart of the server.

`DurableSessionManager` takes the place of the SDK's session manager. It keeps the events of each session in streams,
and what opened the session. After a restart, a request of an old session opens it again from there: the client keeps
its session id, and what it missed is replayed. A call that the restart interrupted ends with an error, not silence.

MCP numbers its streams per session (by request id), but gives one event store to all sessions, so each session has its
own. Invariant: a store replays only events of its session, and event ids are unique, also across restarts. A session is
opened again only for the credential that opened it.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any, Final

import msgspec
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser, authorization_context
from mcp.server.streamable_http import (
    GET_STREAM_KEY,
    MCP_SESSION_ID_HEADER,
    EventCallback,
    EventId,
    EventMessage,
    EventStore,
    StreamId,
)
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCMessage
from pydantic import TypeAdapter

from headwater.ai.retried_appends import RetriedAppends
from headwater.client import StreamNotFoundError
from headwater.client.asynchronous import AsyncClient, AsyncStream

DEFAULT_TTL_S: Final = 24 * 3600
SESSIONS_MAX: Final = 20_000
"""Sessions that a manager remembers; more than the SDK's own limit of open ones."""
INTERRUPTED: Final = "The server was restarted during this call. Call again."
_SESSION_HEADER: Final = MCP_SESSION_ID_HEADER.lower().encode()
_messages: Final[TypeAdapter[Any]] = TypeAdapter(JSONRPCMessage)

_Message = MutableMapping[str, Any]
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class DurableEventStore(EventStore):
    """The events of one MCP session, below `{prefix}/{session}/`. Streams expire `ttl_s` after their last use."""

    def __init__(
        self, client: AsyncClient, prefix: str = "mcp", *, session: str = "", ttl_s: int = DEFAULT_TTL_S
    ) -> None:
        self.session = session or uuid.uuid4().hex
        self._client = client
        self._root = f"{prefix.strip('/')}/{_path_safe(self.session)}"
        self._ttl_s = ttl_s
        self._appends: dict[str, RetriedAppends] = {}
        """By the id of their stream, those that this process has created."""
        self._started_ns = time.time_ns()
        self._numbers = itertools.count()

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        appends = self._appends.get(stream_id)
        if appends is None:
            stream = self._stream(stream_id)
            await stream.create(ttl_s=self._ttl_s)
            appends = self._appends.setdefault(stream_id, RetriedAppends(stream))
        number = f"{self._started_ns:x}-{next(self._numbers):x}"
        stored = None
        if message is not None:
            stored = _messages.dump_python(message, mode="json", by_alias=True, exclude_none=True)
        await appends.append({"id": number, "message": stored})
        return f"{_path_safe(stream_id)}.{number}"

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        encoded, _, number = last_event_id.rpartition(".")
        try:
            stream_id = bytes.fromhex(encoded).decode()
        except ValueError:
            return None
        found = is_answered = False
        try:
            async for event in self._stream(stream_id).read():
                stored = event["message"]
                if found and stored is not None:
                    await send_callback(EventMessage(_messages.validate_python(stored), f"{encoded}.{event['id']}"))
                found = found or event["id"] == number
                is_answered = is_answered or (stored is not None and "method" not in stored)
        except StreamNotFoundError:
            return None
        if found and not is_answered and stream_id != GET_STREAM_KEY and stream_id not in self._appends:
            # The process that had the call is gone.
            request_id = int(stream_id) if stream_id.isdecimal() else stream_id
            ended = JSONRPCError(
                jsonrpc="2.0", id=request_id, error=ErrorData(code=INTERNAL_ERROR, message=INTERRUPTED)
            )
            await send_callback(EventMessage(ended, await self.store_event(stream_id, ended)))
        return stream_id if found else None

    def _stream(self, stream_id: str) -> AsyncStream:
        return self._client.stream(f"{self._root}/{_path_safe(stream_id)}")


def _path_safe(text: str) -> str:
    """Clients choose these ids, so nothing of them may be a path."""
    return text.encode().hex() or "-"


class DurableSessionManager(StreamableHTTPSessionManager):
    """A session manager whose sessions survive a restart; each has a `DurableEventStore`.

    `client` and `prefix` say where the streams are. `options` are those of the SDK's manager.
    """

    def __init__(
        self, app: Any, client: AsyncClient, prefix: str = "mcp", *, ttl_s: int = DEFAULT_TTL_S, **options: Any
    ) -> None:
        # The store that the base class is to take next, in the task that opens a session.
        self._next_store: ContextVar[DurableEventStore | None] = ContextVar("next_store", default=None)
        self._client = client
        self._prefix = prefix.strip("/")
        self._ttl_s = ttl_s
        self._current: dict[str, str] = {}
        """The session of this process, by the id that the client has; the same unless the session was opened again."""
        self._opening = asyncio.Lock()
        super().__init__(app, **options)

    @property
    def event_store(self) -> EventStore:
        """The store of the session that is being opened."""
        return self._next_store.get() or self._new_store("")

    @event_store.setter
    def event_store(self, store: EventStore | None) -> None:
        if store is not None:
            raise TypeError("the sessions of this manager have their own event stores")

    async def handle_request(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        session = _session_of(scope)
        if session is None:
            await self._open(scope, receive, send)
            return
        current = self._current.get(session) or await self._open_again(session, scope)
        if current is not None and scope["method"] == "DELETE":
            await self._record(session).delete(missing_ok=True)
            self._current.pop(session, None)
        inner = {**scope, "headers": _with_session(scope["headers"], current or session)}
        await super().handle_request(inner, receive, self._renaming(send, session))

    def _remember(self, session: str, current: str) -> None:
        if len(self._current) >= SESSIONS_MAX:
            # A session that is forgotten here is opened again when it is used.
            del self._current[next(iter(self._current))]
        self._current[session] = current

    def _renaming(self, send: _Send, session: str) -> _Send:
        """Name the session in responses as the client knows it. One that the base class has ended is forgotten."""

        async def renamed(message: _Message) -> None:
            if message["type"] == "http.response.start":
                if message["status"] == 404:
                    self._current.pop(session, None)
                if _session_of(message) is not None:
                    message = {**message, "headers": _with_session(message["headers"], session)}
            await send(message)

        return renamed

    def _new_store(self, session: str) -> DurableEventStore:
        return DurableEventStore(self._client, self._prefix, session=session, ttl_s=self._ttl_s)

    def _record(self, session: str) -> AsyncStream:
        return self._client.stream(f"{self._prefix}/sessions/{_path_safe(session)}")

    async def _open(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Let the base class open a session, and record what opened it before the client learns its id."""
        body, again = await _read_ahead(receive, self.max_request_body_size)
        store = self._new_store("")
        self._next_store.set(store)

        async def recording(message: _Message) -> None:
            session = _session_of(message) if message["type"] == "http.response.start" else None
            if session is not None and message["status"] < 400:
                record = {"store": store.session, "owner": _owner_of(scope), "initialize": body.decode()}
                await self._record(session).create(ttl_s=self._ttl_s)
                await self._record(session).append(record)
                self._remember(session, session)
            await send(message)

        await super().handle_request(scope, again, recording)

    async def _open_again(self, session: str, scope: _Scope) -> str | None:
        """Open a session of an earlier process with what opened it first; None if there was none."""
        async with self._opening:
            if session in self._current:
                return self._current[session]
            try:
                record = (await self._record(session).last())[0]
            except (StreamNotFoundError, IndexError):
                return None
            if record["owner"] != _owner_of(scope):
                return None
            self._next_store.set(self._new_store(record["store"]))
            initialize = msgspec.json.decode(record["initialize"])
            opened = await self._call(scope, None, {**initialize, "id": f"again-{uuid.uuid4().hex}"})
            if opened is None:
                return None
            await self._call(scope, opened, {"jsonrpc": "2.0", "method": "notifications/initialized"})
            self._remember(session, opened)
            return opened

    async def _call(self, scope: _Scope, session: str | None, message: dict[str, Any]) -> str | None:
        """Send a message to the base class as a client would; returns the session that the response names."""
        body = msgspec.json.encode(message)
        headers = [
            (b"content-type", b"application/json"),
            (b"accept", b"application/json, text/event-stream"),
            *((name, value) for name, value in scope["headers"] if name in {b"host", b"origin"}),
        ]
        inner = {**scope, "method": "POST", "headers": _with_session(headers, session)}
        named: list[str | None] = []

        async def receive() -> _Message:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(answer: _Message) -> None:
            if answer["type"] == "http.response.start" and answer["status"] < 400:
                named.append(_session_of(answer))

        await super().handle_request(inner, _once(receive), send)
        return named[0] if named else None


def _session_of(message: _Message) -> str | None:
    return next((value.decode("latin-1") for name, value in message["headers"] if name == _SESSION_HEADER), None)


def _with_session(headers: Any, session: str | None) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in headers if name != _SESSION_HEADER]
    return kept if session is None else [*kept, (_SESSION_HEADER, session.encode("latin-1"))]


def _owner_of(scope: _Scope) -> str:
    """A digest of the credential of a request; empty without authentication."""
    user = scope.get("user")
    if not isinstance(user, AuthenticatedUser):
        return ""
    return hashlib.sha256(repr(authorization_context(user)).encode()).hexdigest()


async def _read_ahead(receive: _Receive, max_bytes: int) -> tuple[bytes, _Receive]:
    """The body of a request, up to a limit, and a `receive` that gives all of it once more."""
    seen: list[_Message] = []
    body = b""
    while not seen or (seen[-1].get("more_body") and len(body) <= max_bytes):
        seen.append(await receive())
        body += seen[-1].get("body", b"")
    messages = iter(seen)

    async def again() -> _Message:
        return next(messages, None) or await receive()

    return body, again


def _once(receive: _Receive) -> _Receive:
    """A request body without a real client: after it, nothing is received until the response has ended."""
    given = False

    async def received() -> _Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()
        given = True
        return await receive()

    return received
