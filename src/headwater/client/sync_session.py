"""Perform operations by blocking: the part of the synchronous client that streams and producers share."""

from __future__ import annotations

import time
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from headwater.client.effects import Emit, HttpRequest, Open, Operation, Policy, Receive, Sleep
from headwater.client.errors import ClientError
from headwater.client.http1 import HttpResponse
from headwater.client.settings import ClientOptions, ClientSettings, RequestHeaders
from headwater.client.sync_transport import SyncConnection, SyncTransport

T = TypeVar("T")


class SyncSession:
    """The settings and connections of a client, and how operations are performed over them."""

    def __init__(self, **options: Unpack[ClientOptions]) -> None:
        settings = ClientSettings(**options)
        self.policy = settings.policy or Policy(settings.retry)
        self.timeout_s = settings.timeout_s
        self.headers = RequestHeaders(settings)
        self.transport = SyncTransport(settings.tls(), settings.connect_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close idle connections. The client may be used again."""
        self.transport.close()

    def run(self, operation: Operation[T]) -> T:
        """The result of an operation that emits nothing."""
        performer = _Performer(self)
        try:
            effect = next(operation)
            while True:
                assert not isinstance(effect, Emit), "the operation emits values; iterate over it"
                try:
                    result = performer.perform(effect)
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

    def iterate(self, operation: Operation[Any]) -> Generator[Any, None, None]:
        """The values that an operation emits. Leaving the loop ends the operation."""
        performer = _Performer(self)
        try:
            effect = next(operation)
            while True:
                result: Any = None
                try:
                    if isinstance(effect, Emit):
                        yield effect.value
                    else:
                        result = performer.perform(effect)
                except ClientError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(result)
        except StopIteration:
            return
        finally:
            performer.close()
            operation.close()

    def send(self, request: HttpRequest) -> HttpResponse:
        """Send one request, once."""
        timeout_s = self.timeout_s if request.timeout_s is None else request.timeout_s
        return self.transport.send(request, self.headers.of(request), timeout_s)

    def open(self, request: HttpRequest) -> tuple[SyncConnection, HttpResponse]:
        """Send one request; returns as soon as the head of the response has arrived."""
        timeout_s = self.timeout_s if request.timeout_s is None else request.timeout_s
        return self.transport.open(request, self.headers.of(request), timeout_s)


class _Performer:
    """Performs the effects of one operation by blocking."""

    __slots__ = ("_opened", "_session")

    def __init__(self, session: SyncSession) -> None:
        self._session = session
        self._opened: SyncConnection | None = None

    def perform(self, effect: HttpRequest | Open | Receive | Sleep) -> Any:
        match effect:
            case HttpRequest():
                return self._session.send(effect)
            case Receive():
                assert self._opened is not None
                data = self._opened.more(effect.response)
                if not data:
                    self._session.transport.give_back(self._opened, effect.response)
                    self._opened = None
                return data
            case Open():
                self.close()
                self._opened, response = self._session.open(effect.request)
                return response
            case Sleep():
                time.sleep(effect.seconds)
                return None

    def close(self) -> None:
        """Close a response that was not read to its end."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
