"""Responses that are created after asynchronous preparation, such as questions to other workers."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from headwater.cluster.delegating import DelegatingResponse
from headwater.cluster.relay import RelayingConnection
from headwater.core.errors import Refusal
from headwater.http.context import Context
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Channel, Deferred, PiecewiseResponse, Response, problem
from headwater.http.routing import Handler

log = logging.getLogger("headwater.cluster")


class PreparedResponse(DelegatingResponse):
    """A response of any kind that is created after a coroutine has completed."""

    __slots__ = ("_answer", "_prepare", "_request", "_run")

    def __init__(
        self,
        prepare: Callable[[], Awaitable[None]],
        answer: Callable[[], Any],
        run: Callable[[Any], None],
        request: Request,
    ) -> None:
        super().__init__()
        self._prepare = prepare
        self._answer = answer
        self._run = run
        self._request = request

    def start(self, channel: Channel) -> None:
        self._channel = channel
        self._run(self._respond())

    async def _respond(self) -> None:
        try:
            await self._prepare()
            if self._channel is None:
                return
            response = self._answer()
            if isinstance(response, Deferred):
                response.begin(lambda result: self._complete(response, result))
            elif isinstance(response, Response | PiecewiseResponse):
                self._send(response)
            else:
                self._inner = response
                response.start(self._channel)
        except Refusal as refusal:
            self._send(problem(refusal))
        except Exception:
            log.exception("%s %r failed unexpectedly", self._request.method, self._request.target)
            self._abort()

    def _complete(self, deferred: Deferred, result: Any) -> None:
        try:
            self._send(problem(result) if isinstance(result, Refusal) else deferred.render(result))
        except Refusal as refusal:
            self._send(problem(refusal))

    def _send(self, response: Response | PiecewiseResponse) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.respond(response)

    def _abort(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            assert isinstance(channel, RelayingConnection)
            channel.abort()


Prepare: TypeAlias = Callable[[Context, Request, Address], Awaitable[None]]


def prepared(run: Callable[[Any], None], prepare: Prepare, handler: Handler) -> Handler:
    """Wrap a handler so that it is called after `prepare`. `run` starts a coroutine."""

    def handle(context: Context, request: Request, address: Address) -> PreparedResponse:
        return PreparedResponse(
            lambda: prepare(context, request, address),
            lambda: handler(context, request, address),
            run,
            request,
        )

    return handle
