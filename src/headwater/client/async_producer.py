"""The asynchronous producer: `append` queues messages, and a task sends them in batches that form while it waits."""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self, Unpack

from headwater.client.async_session import AsyncSession
from headwater.client.async_transport import AsyncConnection
from headwater.client.effects import Attempts
from headwater.client.errors import ClientError, ConnectionLostError, ProducerFencedError
from headwater.client.http1 import HttpResponse, split_url
from headwater.client.operations import Message, StreamOperations
from headwater.client.producing import ProducerCore, ProducerOptions, ProducerSettings
from headwater.client.sync_producer import transient


class AsyncProducer:
    """Appends exactly once, in order. Failed requests are retried with the same sequence number.

    `append` returns immediately; `flush` waits until everything is stored. The next call raises an error that retries
    cannot fix, and nothing is sent after it.
    """

    def __init__(
        self, session: AsyncSession, operations: StreamOperations, producer_id: str, **options: Unpack[ProducerOptions]
    ) -> None:
        self._session = session
        self._operations = operations
        self._core = ProducerCore(producer_id, operations.url, ProducerSettings(**options))
        self._starting = asyncio.Lock()
        self._error: ClientError | None = None
        self._task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._progress = asyncio.Event()
        self._stopping = False

    @property
    def epoch(self) -> int:
        return self._core.epoch

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self.flush()
        finally:
            await self.stop()

    async def append(self, message: Message) -> None:
        """Queue one message; waits only while the buffer is full."""
        await self._start()
        while self._core.is_full and self._error is None:
            await self._progressed()
        self._check()
        self._core.add(message)
        self._work.set()

    async def flush(self) -> str:
        """Wait until everything is stored; return the offset after it, or an empty string if nothing was appended."""
        await self._start()
        while not self._core.is_empty and self._error is None and not self._stopping:
            await self._progressed()
        self._check()
        return self._core.next_offset

    async def close_stream(self) -> str:
        """Flush, then close the stream with the next sequence number; return its last offset."""
        await self.flush()
        while True:
            closing = self._operations.append_body(b"", close=True, producer=self._core.close_stamp())
            try:
                return (await self._session.run(closing)).next_offset
            except ProducerFencedError as error:
                self._core.failed(error)

    async def stop(self) -> None:
        """Stop the producer. Messages that are not stored yet may be lost: `flush` first."""
        self._stopping = True
        self._progress.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _start(self) -> None:
        """Get the content type of the stream and start sending, unless already started."""
        if self._task is not None or self._stopping:
            return
        async with self._starting:
            if self._task is None:
                self._core.content_type = await self._session.run(self._operations.known_content_type())
                self._task = asyncio.create_task(self._run(), name=f"producer {self._core.producer_id}")

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._stopping:
            raise ConnectionLostError(f"{self._operations.url}: the producer was stopped")

    async def _progressed(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    # -- the task ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await self._send_all()
        except ClientError as error:
            self._error = error
            self._progress.set()

    async def _send_all(self) -> None:
        client = self._session
        attempts = Attempts(client.policy)
        while True:
            try:
                connection = await client.transport.connect(split_url(self._operations.url)[0])
                try:
                    await self._send_on(connection, attempts)
                finally:
                    connection.close()
            except ClientError as error:
                if not self._core.failed(error):
                    await asyncio.sleep(attempts.failed(transient(error)).seconds)

    async def _send_on(self, connection: AsyncConnection, attempts: Attempts) -> None:
        """Send batches and process responses on one connection, until it fails."""
        client, core = self._session, self._core
        in_flight: deque[asyncio.Future[HttpResponse]] = deque()
        try:
            while True:
                self._work.clear()
                while (request := core.next_request()) is not None:
                    headers = await client.headers.async_of(request)
                    in_flight.append(connection.send(request, headers, client.timeout_s))
                if not in_flight:
                    await self._work.wait()
                    continue
                if not in_flight[0].done():
                    work = asyncio.ensure_future(self._work.wait())
                    try:
                        await asyncio.wait((in_flight[0], work), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        work.cancel()
                while in_flight and in_flight[0].done():
                    response = in_flight.popleft().result()
                    core.answered(response)
                    attempts.succeeded()
                    self._progress.set()
                    if not response.keep_alive:
                        raise ConnectionLostError(f"{self._operations.url}: the server ended the connection")
        finally:
            for future in in_flight:
                future.cancel()
