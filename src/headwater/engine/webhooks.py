"""Webhook calls: one signed POST each, to the address that was checked.

The host is resolved once per call. All addresses that it resolves to must be allowed, and the connection is made to one
of them by address, with the name for TLS and the Host header. So there is no second lookup with another result (DNS
rebinding). Redirects are not followed, proxy settings of the environment are ignored, connections are not shared
between calls, each call has one timeout, and a response is read up to a limit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from ipaddress import ip_address
from time import perf_counter
from typing import Final, NamedTuple, Protocol, TypeAlias

import httpx
import msgspec

from headwater.core.addresses import WebhookUrl, check_address, parse_webhook_url
from headwater.core.errors import InternalError, Refusal
from headwater.core.subscription_errors import WebhookUrlRejected
from headwater.engine.call_queue import CallQueue, HostHealth

log = logging.getLogger("headwater.webhooks")

RESPONSE_MAX_BYTES: Final = 64 * 1024
VET_TIMEOUT_S: Final = 5.0
"""Timeout of the resolution of a webhook's host when a subscription is created."""
_CAUSES_MAX: Final = 16
RESPONSIVE_S: Final = 5.0
"""A receiver that responds within this time may get several calls at once."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]


class Outgoing(NamedTuple):
    """A request to send."""

    headers: dict[str, str]
    body: bytes


class Answer(NamedTuple):
    """The outcome of a call: accepted (2xx) or not, whether the receiver is done, and why the call failed."""

    accepted: bool
    done: bool = False
    reason: str = ""
    is_from_receiver: bool = False
    """Whether it is an HTTP response, of any status."""


Compose: TypeAlias = Callable[[], Outgoing | None]
"""Builds the request when the call is made, so that it is current and freshly signed; None cancels the call."""
OnAnswer: TypeAlias = Callable[[Answer], None]
OnVetted: TypeAlias = Callable[[Refusal | None], None]


class Caller(Protocol):
    """The interface of subscriptions to the network. Tests replace it."""

    def vet(self, url: str, done: OnVetted) -> None:
        """Check whether a URL may be called; `done` may be called before this returns."""

    def call(self, url: str, compose: Compose, timeout_s: float, done: OnAnswer) -> None:
        """Make a call when there is a slot for it; `done` is called once with the outcome, unless the call is
        cancelled."""

    async def stop(self) -> None: ...


async def system_resolve(host: str, port: int) -> list[str]:
    """Resolve a host with the resolver of the system."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class CallSpan(Protocol):
    """A call in a trace (`headwater.otel`)."""

    headers: dict[str, str]
    """Sent with the call, so that the receiver continues the trace."""

    def end(self, failure: str) -> None: ...


BeginSpan: TypeAlias = Callable[[str], CallSpan]
"""Begins the span of a call to a URL."""


class _QueuedCall(NamedTuple):
    """A call that waits for its turn."""

    url: str
    compose: Compose
    timeout_s: float
    done: OnAnswer


class _Reply(msgspec.Struct):
    done: bool = False


_decode_reply = msgspec.json.Decoder(_Reply).decode


class Webhooks:
    """The implementation of `Caller` on the running event loop."""

    def __init__(
        self,
        *,
        concurrency: int,
        allow_local: bool,
        per_host: int | None = None,
        resolve: Resolve = system_resolve,
        tls: ssl.SSLContext | None = None,
        begin_span: BeginSpan | None = None,
    ) -> None:
        self._allow_local = allow_local
        self._resolve = resolve
        self._queue: CallQueue[_QueuedCall] = CallQueue(concurrency, per_host if per_host is not None else concurrency)
        self._tls = tls
        self._begin_span = begin_span
        self._clients: dict[str, httpx.AsyncClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def vet(self, url: str, done: OnVetted) -> None:
        try:
            parsed = parse_webhook_url(url, allow_local=self._allow_local)
        except WebhookUrlRejected as refusal:
            done(refusal)
            return
        self._run(self._vet(parsed, done))

    def call(self, url: str, compose: Compose, timeout_s: float, done: OnAnswer) -> None:
        try:
            host = parse_webhook_url(url, allow_local=self._allow_local).authority
        except WebhookUrlRejected:
            host = ""  # A setting was changed in the meantime. The call will fail at once.
        self._queue.add(host, _QueuedCall(url, compose, timeout_s, done))
        self._start_calls()

    async def stop(self) -> None:
        """Cancel all calls. Their wakes are saved as not delivered, so the next start makes them again."""
        self._queue.clear()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self._clients.values():
            await client.aclose()

    # -- implementation ------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a webhook call failed unexpectedly", exc_info=task.exception())

    async def _vet(self, url: WebhookUrl, done: OnVetted) -> None:
        """Check the addresses of a URL's host. `done` is always called: a locked id waits for it."""
        refusal: Refusal | None = None
        try:
            async with asyncio.timeout(VET_TIMEOUT_S):
                await self._address(url)
        except WebhookUrlRejected as rejected:
            refusal = rejected
        except UnicodeError:
            refusal = WebhookUrlRejected(f"{url.host!r} is not a host name that can be resolved; correct webhook.url.")
        except (OSError, TimeoutError):
            pass  # A name that does not resolve now may resolve later; each call checks again.
        except Exception:
            log.exception("checking the webhook host %r failed unexpectedly", url.host)
            refusal = InternalError(
                "The webhook URL could not be checked because of an internal error; the log of the server has the"
                " details."
            )
        done(refusal)

    def _start_calls(self) -> None:
        while (taken := self._queue.take()) is not None:
            host, call = taken
            self._run(self._call(host, call))

    async def _call(self, host: str, call: _QueuedCall) -> None:
        health: HostHealth | None = None
        try:
            outgoing = call.compose()
            if outgoing is None:
                return
            health = HostHealth.UNRESPONSIVE
            began_s = perf_counter()
            answer = await self._answer(call, outgoing)
            if answer.is_from_receiver and perf_counter() - began_s < RESPONSIVE_S:
                health = HostHealth.RESPONSIVE
        finally:
            self._queue.finished(host, health)
            self._start_calls()
        call.done(answer)

    async def _answer(self, call: _QueuedCall, outgoing: Outgoing) -> Answer:
        if self._begin_span is None:
            return await self._attempt(call, outgoing)
        span = self._begin_span(call.url)
        answer = await self._attempt(call, Outgoing({**outgoing.headers, **span.headers}, outgoing.body))
        span.end("" if answer.accepted else answer.reason)
        return answer

    async def _attempt(self, call: _QueuedCall, outgoing: Outgoing) -> Answer:
        try:
            async with asyncio.timeout(call.timeout_s):
                return await self._post(call.url, outgoing)
        except TimeoutError:
            return Answer(False, reason=f"no response within {call.timeout_s:g} s")
        except (httpx.ConnectError, socket.gaierror) as error:
            return Answer(False, reason=_unreachable(call.url, error))
        except WebhookUrlRejected as refusal:
            return Answer(False, reason=refusal.detail)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            return Answer(False, reason=f"{type(error).__name__}: {error}")
        except Exception as error:
            log.exception("calling a webhook failed unexpectedly")
            return Answer(False, reason=f"unexpected {type(error).__name__}")

    async def _post(self, text: str, outgoing: Outgoing) -> Answer:
        url = parse_webhook_url(text, allow_local=self._allow_local)
        address = await self._address(url)
        host = f"[{address}]" if ":" in address else address
        client = self._clients.get(url.scheme) or await self._open_client(url.scheme)
        request = client.build_request(
            "POST",
            f"{url.scheme}://{host}:{url.port}{url.target}",
            headers={**outgoing.headers, "Host": url.authority},
            content=outgoing.body,
            extensions={"sni_hostname": url.host},
        )
        response = await client.send(request, stream=True)
        try:
            if not response.is_success:
                return Answer(False, reason=f"status {response.status_code}", is_from_receiver=True)
            return Answer(True, _says_done(await _read_body(response)), is_from_receiver=True)
        finally:
            await response.aclose()

    async def _address(self, url: WebhookUrl) -> str:
        """The first address that the host resolves to, if all of its addresses are allowed."""
        found = await self._resolve(url.host, url.port)
        if not found:
            raise OSError(f"{url.host} does not resolve")
        for address in found:
            # A scope ("fe80::1%eth0") belongs to a local address, which is refused anyway.
            check_address(url, ip_address(address.partition("%")[0]))
        return found[0]

    async def _open_client(self, scheme: str) -> httpx.AsyncClient:
        if scheme == "https" and self._tls is None:
            # Loading the certificates takes too long for the event loop.
            self._tls = await asyncio.to_thread(httpx.create_ssl_context, trust_env=False)
        if scheme not in self._clients:
            self._clients[scheme] = httpx.AsyncClient(
                verify=self._tls if self._tls is not None else False,
                trust_env=False,
                follow_redirects=False,
                timeout=None,  # noqa: S113 - the whole call has one timeout, which also covers a slow body.
                # The pool identifies connections by address: one could be reused for a name that was not verified.
                limits=httpx.Limits(max_keepalive_connections=0),
                headers={"User-Agent": "headwater", "Accept": "application/json", "Accept-Encoding": "identity"},
            )
        return self._clients[scheme]


def _unreachable(url: str, error: Exception) -> str:
    """Which receiver could not be reached, why, and what to check."""
    parsed = httpx.URL(url)
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    place = f"{host}:{parsed.port or (443 if parsed.scheme == 'https' else 80)}"
    if isinstance(error, socket.gaierror):
        return f"cannot resolve {parsed.host}: {error.strerror}; check the host name in the webhook's URL"
    # The text of the last error is "All connection attempts failed"; the first one knows why.
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and len(causes) < _CAUSES_MAX:
        causes.append(cause)
    if any(isinstance(cause, ssl.SSLError) for cause in causes):
        return f"the TLS handshake with {place} failed: {error}"
    numbers = [cause.errno for cause in causes if isinstance(cause, OSError) and cause.errno]
    why = os.strerror(numbers[-1]) if numbers else str(error)
    return f"cannot connect to {place}: {why}; check that the receiver runs and that this machine can reach it"


async def _read_body(response: httpx.Response) -> bytes:
    """The body of a response, without decompressing it; empty if it exceeds the limit."""
    received = bytearray()
    async for piece in response.aiter_raw():
        received += piece
        if len(received) > RESPONSE_MAX_BYTES:
            return b""
    return bytes(received)


def _says_done(body: bytes) -> bool:
    try:
        return _decode_reply(body).done
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
