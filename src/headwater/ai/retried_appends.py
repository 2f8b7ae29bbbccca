"""Appends that can be retried: each event is stored once, also if the response to its request is lost."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from headwater.client.asynchronous import AsyncStream
from headwater.client.results import ProducerStamp


class RetriedAppends:
    """Appends to one stream, one after the other. Other writers may append to it too.

    A failed append may have been stored. Its number is then not used again: appends continue with a new producer id.
    """

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream
        self._turn = asyncio.Lock()
        self._producer_id = uuid.uuid4().hex
        self._next_seq = 0

    async def append(self, event: Any) -> None:
        async with self._turn:
            stamp = ProducerStamp(self._producer_id, 0, self._next_seq)
            try:
                await self._stream.append(event, producer=stamp)
            except BaseException:
                self._producer_id, self._next_seq = uuid.uuid4().hex, 0
                raise
            self._next_seq += 1
