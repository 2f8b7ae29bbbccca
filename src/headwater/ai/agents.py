"""Sessions of the OpenAI Agents SDK in a stream: the conversation survives the process, and others can follow it.

Each change is one event: `{"add": [item, …]}`, `{"pop": true}` or `{"clear": true}`. The items are what the events
fold to. Invariant: an event is never changed, so the stream is also the history of the session.
"""

from __future__ import annotations

from typing import Any

from headwater.ai.retried_appends import RetriedAppends
from headwater.ai.sources import plain
from headwater.client.asynchronous import AsyncStream
from headwater.client.results import BEGINNING


class DurableSession:
    """A session of the OpenAI Agents SDK: pass it as `session=` to `Runner.run`. The stream is created when needed."""

    session_settings: Any = None

    def __init__(self, session_id: str, stream: AsyncStream) -> None:
        self.session_id = session_id
        self._stream = stream
        self._appends = RetriedAppends(stream)
        self._items: list[Any] = []
        self._offset = ""

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """The items of the conversation, or the latest `limit` of them, oldest first."""
        await self._catch_up()
        if limit is None:
            return list(self._items)
        return list(self._items[-limit:]) if limit > 0 else []

    async def add_items(self, items: list[Any]) -> None:
        if items:
            await self._append({"add": [plain(item) for item in items]})

    async def pop_item(self) -> Any:
        """Remove and return the latest item; None if there is none."""
        await self._catch_up()
        if not self._items:
            return None
        item = self._items[-1]
        await self._append({"pop": True})
        return item

    async def clear_session(self) -> None:
        await self._append({"clear": True})

    async def _append(self, event: dict[str, Any]) -> None:
        await self._create()
        await self._appends.append(event)

    async def _catch_up(self) -> None:
        """Apply what was appended since the last call, by this process or another one."""
        await self._create()
        reader = self._stream.read(self._offset)
        async for event in reader:
            self._apply(event)
        self._offset = reader.offset

    async def _create(self) -> None:
        if not self._offset:
            await self._stream.create()
            self._offset = BEGINNING

    def _apply(self, event: Any) -> None:
        match event:
            case {"add": [*items]}:
                self._items += items
            case {"pop": True}:
                del self._items[-1:]
            case {"clear": True}:
                self._items.clear()
