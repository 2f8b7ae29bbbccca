"""Run one test with both APIs of the client: the asynchronous one is driven call by call from a loop in a thread."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

SYNC = "sync"
ASYNC = "async"


class LoopThread:
    """An event loop that runs in a thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


class Blocking:
    """Wraps an object of the asynchronous API in the synchronous one."""

    def __init__(self, target: Any, thread: LoopThread) -> None:
        self.__dict__["target"] = target
        self.__dict__["thread"] = thread

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.target, name)
        if not callable(found):
            return self._wrapped(found)

        def called(*args: Any, **options: Any) -> Any:
            given = [arg.target if isinstance(arg, Blocking) else arg for arg in args]
            return self._wrapped(self.thread.run(_within(found, given, options)))

        return called

    def _wrapped(self, value: Any) -> Any:
        own = type(value).__name__.startswith("Async") or inspect.isasyncgen(value) or hasattr(value, "__aenter__")
        return Blocking(value, self.thread) if own else value

    def __iter__(self) -> Blocking:
        return self

    def __next__(self) -> Any:
        try:
            return self._wrapped(self.thread.run(_next(self.target)))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Any:
        return self._wrapped(self.thread.run(self.target.__aenter__()))

    def __exit__(self, *ended: Any) -> Any:
        return self.thread.run(self.target.__aexit__(*ended))


async def _within(called: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Call within the loop, as programs do, and await the result if it is awaitable."""
    result = called(*args, **options)
    return await result if inspect.isawaitable(result) else result


async def _next(iterator: Any) -> Any:
    return await anext(iterator)


@contextmanager
def client_of(face: str, url: str, **options: Any) -> Iterator[Any]:
    """A client of one of the APIs. Both have the same methods."""
    from headwater.client import AsyncClient, Client

    if face == SYNC:
        with Client(url, **options) as client:
            yield client
        return
    thread = LoopThread()
    try:
        with Blocking(AsyncClient(url, **options), thread) as client:
            yield client
    finally:
        thread.close()
