"""Perform operations by awaiting: the part of the asynchronous client that streams and producers share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from headwater.client.async_transport import AsyncConnection, AsyncTransport
from headwater.client.effects import Emit, HttpRequest, Open, Operation, Policy, Receive, Sleep
from headwater.client.errors import ClientError
from headwater.client.http1 import HttpResponse
from headwater.client.settings import ClientOptions, ClientSettings, RequestHeaders

T = TypeVar("T")


class AsyncSession:
    """The settings and connections of a client, and how operations are performed over them."""

    def __init__(self, **options: Unpack[ClientOptions]) -> None:
        settings = ClientSettings(**options)
        self.policy = settings.policy or Policy(settings.retry)
        self.timeout_s = settings.timeout_s
        self.headers = RequestHeaders(settings)
        self.transport = AsyncTransport(settings.tls(), settings.connect_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close idle connections. The client may be used again."""
        self.transport.close()

    async def run(self, operation: Operation[T]) -> T:
        """The result of an operation that emits nothing."""
        performer = _AsyncPerformer(self)
        try:
            effect = next(operation)
            while True:
                assert not isinstance(effect, Emit), "the operation emits values; iterate over it"
                try:
                    result = await performer.perform(effect)
                except ClientError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration as stop:
            value: T = stop.value
            return value
        finally:
            performer.close()
            operation.close()

    async def iterate(self, operation: Operation[Any]) -> AsyncGenerator[Any, None]:
        """The values that an operation emits. Leaving the loop ends the operation."""
        performer = _AsyncPerformer(self)
        try:
            effect = next(operation)
            while True:
                result: Any = None
                try:
                    if isinstance(effect, Emit):
                        yield effect.value
                    else:
                        result = await performer.perform(effect)
                except ClientError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration:
            return
        finally:
            performer.close()
            operation.close()

    async def send(self, request: HttpRequest) -> HttpResponse:
        """Send one request, once."""
        timeout_s = self.timeout_s if request.timeout_s is None else request.timeout_s
        return await self.transport.send(request, await self.headers.async_of(request), timeout_s)

    async def open(self, request: HttpRequest) -> tuple[AsyncConnection, HttpResponse]:
        """Send one request; returns as soon as the head of the response has arrived."""
        timeout_s = self.timeout_s if request.timeout_s is None else request.timeout_s
        return await self.transport.open(request, await self.headers.async_of(request), timeout_s)


class _AsyncPerformer:
    """Performs the effects of one operation by awaiting."""

    __slots__ = ("_opened", "_session")

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._opened: AsyncConnection | None = None

    async def perform(self, effect: HttpRequest | Open | Receive | Sleep) -> Any:
        match effect:
            case HttpRequest():
                return await self._session.send(effect)
            case Receive():
                assert self._opened is not None
                data = await self._opened.more(effect.response)
                if not data:
                    self._session.transport.give_back(self._opened, effect.response)
                    self._opened = None
                return data
            case Open():
                self.close()
                self._opened, response = await self._session.open(effect.request)
                return response
            case Sleep():
                await asyncio.sleep(effect.seconds)
                return None

    def close(self) -> None:
        """Close a response that was not read to its end."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
