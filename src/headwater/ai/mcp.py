"""An event store for the MCP Python SDK: the events of its resumable HTTP transport are kept in streams.

MCP numbers its streams per session (by request id), but gives one event store to all sessions. `DurableSessionManager`
therefore gives each session its own. Invariant: a store replays only events of its session, and event ids are unique,
also across restarts.
"""

from __future__ import annotations

import itertools
import time
import uuid
from typing import Any, Final

from mcp.server.streamable_http import EventCallback, EventId, EventMessage, EventStore, StreamId
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types import JSONRPCMessage
from pydantic import TypeAdapter

from headwater.client import StreamNotFoundError
from headwater.client.asynchronous import AsyncClient, AsyncStream

DEFAULT_TTL_S: Final = 24 * 3600
_messages: Final[TypeAdapter[Any]] = TypeAdapter(JSONRPCMessage)


class DurableEventStore(EventStore):
    """The events of one MCP session, below `{prefix}/{session}/`. Streams expire `ttl_s` after their last use."""

    def __init__(
        self, client: AsyncClient, prefix: str = "mcp", *, session: str = "", ttl_s: int = DEFAULT_TTL_S
    ) -> None:
        self.session = session or uuid.uuid4().hex
        self._client = client
        self._root = f"{prefix.strip('/')}/{_path_safe(self.session)}"
        self._ttl_s = ttl_s
        self._created: set[str] = set()
        self._started_ns = time.time_ns()
        self._numbers = itertools.count()

    async def store_event(self, stream_id: StreamId, message: JSONRPCMessage | None) -> EventId:
        stream = self._stream(stream_id)
        if stream_id not in self._created:
            await stream.create(ttl_s=self._ttl_s)
            self._created.add(stream_id)
        number = f"{self._started_ns:x}-{next(self._numbers):x}"
        stored = None
        if message is not None:
            stored = _messages.dump_python(message, mode="json", by_alias=True, exclude_none=True)
        await stream.append({"id": number, "message": stored})
        return f"{_path_safe(stream_id)}.{number}"

    async def replay_events_after(self, last_event_id: EventId, send_callback: EventCallback) -> StreamId | None:
        encoded, _, number = last_event_id.rpartition(".")
        try:
            stream_id = bytes.fromhex(encoded).decode()
        except ValueError:
            return None
        found = False
        try:
            async for event in self._stream(stream_id).read():
                if found and event["message"] is not None:
                    message = _messages.validate_python(event["message"])
                    await send_callback(EventMessage(message, f"{encoded}.{event['id']}"))
                found = found or event["id"] == number
        except StreamNotFoundError:
            return None
        return stream_id if found else None

    def _stream(self, stream_id: str) -> AsyncStream:
        return self._client.stream(f"{self._root}/{_path_safe(stream_id)}")


def _path_safe(text: str) -> str:
    """Clients choose these ids, so nothing of them may be a path."""
    return text.encode().hex() or "-"


class DurableSessionManager(StreamableHTTPSessionManager):
    """A session manager whose sessions each have a `DurableEventStore`."""

    def __init__(
        self, app: Any, client: AsyncClient, prefix: str = "mcp", *, ttl_s: int = DEFAULT_TTL_S, **options: Any
    ) -> None:
        self._store_of: Any = lambda: DurableEventStore(client, prefix, ttl_s=ttl_s)
        super().__init__(app, **options)

    @property
    def event_store(self) -> EventStore:
        """A new store: the base class takes one for each session that it opens."""
        store: EventStore = self._store_of()
        return store

    @event_store.setter
    def event_store(self, store: EventStore | None) -> None:
        if store is not None:
            raise TypeError("the sessions of this manager have their own event stores")
