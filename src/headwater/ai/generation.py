"""A generation: a task that writes the events of an asynchronous iterator to a stream.

Invariant: one writer at a time. The task writes with a fenced producer, so a writer that was replaced or stopped cannot
write after the one that replaced it. However it ends, the stream is closed, and its last event says how: the source's
own last event, an error, or that it was stopped. If the whole process ends, its lease is not renewed, and the server
writes the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

from headwater.client import (
    ClientError,
    ConflictError,
    LeaseNotFoundError,
    LeaseUnsupportedError,
    ProducerFencedError,
    StreamClosedError,
    StreamNotFoundError,
)
from headwater.client.asynchronous import AsyncClient, AsyncStream
from headwater.client.http1 import split_url

log = logging.getLogger("headwater.ai")

PRODUCER_ID: Final = "generation"
JSON: Final = "application/json"
LEASE_S: Final = 30.0
"""A process that does not answer for so long has lost its generations."""
_RENEWALS: Final = 3
"""Renewals within the time of a lease."""

Outcome = Literal["running", "finished", "failed", "stopped", "replaced"]


class _LoopState:
    """What an event loop has running: tasks and connections cannot be used from another one."""

    def __init__(self) -> None:
        self.generations: dict[str, Generation] = {}
        """By the URL of their stream. Holding them keeps their tasks alive."""
        self.clients: dict[str, AsyncClient] = {}
        """By origin; for streams that are given by their URL."""


_states: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = WeakKeyDictionary()


def _state() -> _LoopState:
    return _states.setdefault(asyncio.get_running_loop(), _LoopState())


def stream_at(url: str) -> AsyncStream:
    """A stream by its URL, over connections that all generations of this event loop share."""
    clients, origin = _state().clients, str(split_url(url)[0])
    client = clients.get(origin)
    if client is None:
        client = clients[origin] = AsyncClient(origin)
    return client.stream(url)


@dataclass(frozen=True, slots=True)
class EventFormat:
    """How a generation's end looks in the events of its protocol. Readers see it, so it holds no internals."""

    error: Callable[[str], Any]
    stopped: Callable[[str], Any]


AI_SDK: Final = EventFormat(
    error=lambda text: {"type": "error", "errorText": text},
    stopped=lambda reason: {"type": "abort", "reason": reason},
)
"""UI message chunks of the Vercel AI SDK."""

AG_UI: Final = EventFormat(
    error=lambda text: {"type": "RUN_ERROR", "message": text},
    stopped=lambda reason: {"type": "RUN_ERROR", "message": reason, "code": "stopped"},
)
"""Events of the AG-UI protocol, which TanStack AI also uses."""


class _ReplacedError(Exception):
    """Another writer took over, or the lease expired."""


class Generation:
    """Writes the events of `source` to `stream` in a task, until the source ends or the generation is stopped."""

    def __init__(
        self,
        source: AsyncIterable[Any],
        stream: AsyncStream,
        *,
        event_format: EventFormat = AI_SDK,
        error_text: str = "The answer could not be generated.",
        close: bool = True,
        lease_s: float | None = LEASE_S,
    ) -> None:
        self.stream = stream
        self.outcome: Outcome = "running"
        self.final_offset = ""
        """The offset after the last event, once the generation has ended."""
        self._source = source
        self._format = event_format
        self._error_text = error_text
        self._close = close
        self._lease_s = lease_s
        self._holder = uuid.uuid4().hex
        self._stop_reason = ""
        self._is_replaced = False
        self._task: asyncio.Task[None] | None = None

    async def start(self, content_type: str = JSON) -> None:
        """Create the stream and start to write. Raises `ClientError` if the stream cannot be created."""
        await self.stream.create(content_type)
        await self._acquire_lease()
        self._task = asyncio.create_task(self._run(), name=f"generation {self.stream.url}")
        _state().generations[self.stream.url] = self
        self._task.add_done_callback(self._ended)

    async def _acquire_lease(self) -> None:
        """Let the server end the stream if this process does not. Servers without leases leave it open then."""
        if self._lease_s is None:
            return
        try:
            await self.stream.acquire_lease(
                self._holder,
                ttl_s=self._lease_s,
                final=self._format.error(self._error_text),
                close=self._close,
                producer_id=PRODUCER_ID,
                take_over=True,
            )
        except LeaseUnsupportedError as error:
            self._lease_s = None
            log.info("%s; if this process ends, readers will wait", error)

    async def wait(self) -> str:
        """Wait for the end; returns the offset after the last event."""
        assert self._task is not None, "start it first"
        await asyncio.shield(self._task)
        return self.final_offset

    async def stop(self, reason: str = "stopped") -> None:
        """End the generation: its source is closed, and the last event says that it was stopped."""
        assert self._task is not None, "start it first"
        # Once the source has ended, the end is being written: there is nothing left to stop.
        if self.outcome == "running" and not self._task.done() and not self._stop_reason:
            self._stop_reason = reason
            self._task.cancel()
        await asyncio.wait((self._task,))

    def _ended(self, task: asyncio.Task[None]) -> None:
        generations = _state().generations
        if generations.get(self.stream.url) is self:
            del generations[self.stream.url]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.outcome = "failed"
            log.error("%s: the generation could not be written: %s", self.stream.url, error)

    async def _run(self) -> None:
        renewals = asyncio.create_task(self._renew_lease(self._lease_s)) if self._lease_s is not None else None
        try:
            async with self.stream.producer(PRODUCER_ID) as producer:
                last = await self._write(producer.append)
                if last is not None:
                    await producer.append(last)
                if self._close:
                    self.final_offset = await producer.close_stream()
                else:
                    self.final_offset = await producer.flush()
                    await self._release_lease()
        except (_ReplacedError, ProducerFencedError, StreamClosedError):
            # Another process stopped or replaced this generation, or the server ended it.
            self.outcome = "replaced"
        finally:
            if renewals is not None:
                renewals.cancel()
            await _close_source(self._source)

    async def _renew_lease(self, lease_s: float) -> None:
        """Renew until the task is cancelled; end the generation when the lease is lost."""
        while True:
            await asyncio.sleep(lease_s / _RENEWALS)
            try:
                await self.stream.renew_lease(self._holder)
            except (ConflictError, StreamNotFoundError) as error:
                log.info("%s: the generation ends: %s", self.stream.url, error)
                break
            except ClientError as error:
                log.warning("%s: the lease was not renewed: %s", self.stream.url, error)
        if self.outcome == "running" and self._task is not None:
            self._is_replaced = True
            self._task.cancel()

    async def _release_lease(self) -> None:
        if self._lease_s is not None:
            with contextlib.suppress(ConflictError, StreamNotFoundError):
                await self.stream.release_lease(self._holder)

    async def _write(self, append: Callable[[Any], Any]) -> Any:
        """Write the events of the source; returns the event that ends the stream, if the source's own did not."""
        try:
            async for event in self._source:
                await append(event)
            self.outcome = "finished"
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            if self._is_replaced:
                raise _ReplacedError from None
            if not self._stop_reason:
                self._stop_reason = "interrupted"
            self.outcome = "stopped"
            return self._format.stopped(self._stop_reason)
        except ClientError:
            raise
        except Exception:
            log.exception("%s: the source of the generation failed", self.stream.url)
            self.outcome = "failed"
            return self._format.error(self._error_text)
        return None


async def stop_generation(
    stream: AsyncStream, reason: str = "stopped", *, event_format: EventFormat = AI_SDK, close: bool = True
) -> bool:
    """Stop the generation that writes to a stream, in whichever process it runs. Whether it was running.

    In another process, the writer is fenced at once and ends when it writes its next event or renews its lease.
    `event_format` and `close` are those of the generation: with `close=False` the stream stays open.
    """
    running = _state().generations.get(stream.url)
    if running is not None:
        await running.stop(reason)
        return running.outcome == "stopped"
    try:
        info = await stream.head()
        if info.closed:
            return False
        last, holder = event_format.stopped(reason), uuid.uuid4().hex
        takes_lease = not close and "lease" in info.extensions
        if takes_lease:
            await stream.lease()
            await stream.acquire_lease(holder, final=last, close=False, producer_id=PRODUCER_ID, take_over=True)
        async with stream.producer(PRODUCER_ID) as producer:
            await producer.append(last)
            if close:
                await producer.close_stream()
        if takes_lease:
            with contextlib.suppress(ConflictError):
                await stream.release_lease(holder)
    except (StreamNotFoundError, StreamClosedError, LeaseNotFoundError):
        return False
    return True


async def shutdown(reason: str = "shutdown") -> None:
    """Stop the generations of this event loop and close its connections; for the shutdown of an application."""
    state = _state()
    await asyncio.gather(*(generation.stop(reason) for generation in list(state.generations.values())))
    while state.clients:
        _, client = state.clients.popitem()
        await client.close()


async def _close_source(source: AsyncIterable[Any]) -> None:
    close = getattr(source, "aclose", None) or getattr(source, "close", None)
    if close is None:
        return
    try:
        result = close()
        if result is not None:
            await result
    except Exception:
        log.exception("the source of a generation could not be closed")
