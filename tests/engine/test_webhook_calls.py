"""Webhook calls connect to exactly the address that was checked: DNS rebinding, pinning, TLS by name, limits.

A real receiver listens on loopback; only the DNS answers are simulated.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from headwater.core.addresses import WebhookUrl
from headwater.core.errors import InternalError, Refusal
from headwater.core.subscription_errors import WebhookUrlRejected
from headwater.engine import webhooks
from headwater.engine.webhooks import Answer, Outgoing, Webhooks
from tests.http.certificates import make_certificate
from tests.http.webhook_receiver import DONE, Reply, receive
from tests.ports import free_port
from tests.waiting import async_wait_until

BODY = Outgoing({"Content-Type": "application/json"}, b'{"hello": 1}')


class Names:
    """A resolver with fixed answers: one list of addresses per lookup; the last one is repeated."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(120):
            await work()

    asyncio.run(limited())


async def call(caller: Webhooks, url: str, timeout_s: float = 60.0) -> Answer:
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    caller.call(url, lambda: BODY, timeout_s, answered.set_result)
    return await answered


async def vet(caller: Webhooks, url: str) -> Refusal | None:
    vetted: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
    caller.vet(url, vetted.set_result)
    return await vetted


def test_t35_name_that_resolves_to_another_address_later_is_not_called() -> None:
    """DNS rebinding: the name resolves to an allowed address when checked and to a private one later."""
    with receive(otherwise=DONE) as receiver:

        async def work() -> None:
            names = Names(["127.0.0.1"], ["127.0.0.1"], ["10.0.0.1"])
            caller = Webhooks(concurrency=4, allow_local=True, resolve=names)
            url = f"http://localhost:{receiver.port}/"
            assert await vet(caller, url) is None
            assert await call(caller, url) == Answer(True, True, is_from_receiver=True)
            assert len(names.asked) == 2, "one lookup per call: the checked address is the one that is called"
            turned = await call(caller, url)
            assert not turned.accepted
            assert "does not resolve to this machine" in turned.reason
            assert len(receiver.received) == 1
            await caller.stop()

        run(work)


def test_failed_connection_names_the_receiver_and_the_cause() -> None:
    async def work() -> None:
        caller = Webhooks(concurrency=4, allow_local=True)
        refused = await call(caller, f"http://localhost:{free_port()}/hook")
        assert refused.reason.startswith("cannot connect to localhost:")
        assert ": Connection refused; check that the receiver runs" in refused.reason
        await caller.stop()
        unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        caller = Webhooks(concurrency=4, allow_local=True, resolve=Names(unknown))
        assert (await call(caller, "https://hook.example/")).reason == (
            "cannot resolve hook.example: Name or service not known; check the host name in the webhook's URL"
        )
        await caller.stop()

    run(work)


def test_t35_one_forbidden_address_among_allowed_ones_is_refused() -> None:
    async def work() -> None:
        for addresses in (["8.8.8.8", "10.0.0.1"], ["2606:4700::1", "::1"], ["8.8.8.8", "fe80::1%eth0"]):
            caller = Webhooks(concurrency=4, allow_local=True, resolve=Names(addresses))
            assert isinstance(await vet(caller, "https://hook.example/"), WebhookUrlRejected)
            refused = await call(caller, "https://hook.example/")
            assert not refused.accepted
            assert "private network" in refused.reason
            await caller.stop()

    run(work)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "169.254.169.254",
        "::1",
        "::ffff:127.0.0.1",
        "64:ff9b::7f00:1",
        "fd00:ec2::254",
        "0.0.0.0",
    ],
)
def test_t35_public_name_with_a_private_address_is_refused_at_creation_and_call(address: str) -> None:
    with receive(otherwise=DONE) as receiver:

        async def work() -> None:
            caller = Webhooks(concurrency=4, allow_local=True, resolve=Names([address]))
            url = f"https://hook.example:{receiver.port}/"
            assert isinstance(await vet(caller, url), WebhookUrlRejected)
            assert not (await call(caller, url)).accepted
            await caller.stop()

        run(work)
        assert receiver.received == []


def test_unresolvable_name_is_accepted_at_creation() -> None:
    async def work() -> None:
        caller = Webhooks(concurrency=4, allow_local=False, resolve=Names(OSError("no such name")))
        assert await vet(caller, "https://hook.example/") is None
        assert not (await call(caller, "https://hook.example/")).accepted
        await caller.stop()
        silent = Webhooks(concurrency=4, allow_local=False, resolve=Names([]))
        assert not (await call(silent, "https://hook.example/")).accepted
        await silent.stop()

    run(work)


def test_an_unexpected_error_while_checking_a_url_is_answered() -> None:
    """A check without an answer would lock the subscription's id."""

    async def work() -> None:
        caller = Webhooks(concurrency=4, allow_local=False, resolve=Names(RuntimeError("a bug in the resolver")))
        assert isinstance(await vet(caller, "https://hook.example/"), InternalError)
        await caller.stop()
        unicode = Webhooks(concurrency=4, allow_local=False, resolve=Names(UnicodeError("label too long")))
        assert isinstance(await vet(unicode, "https://hook.example/"), WebhookUrlRejected)
        assert not (await call(unicode, "https://hook.example/")).accepted
        await unicode.stop()

    run(work)


def test_an_unexpected_error_in_a_call_is_a_failed_delivery() -> None:
    async def work() -> None:
        caller = Webhooks(concurrency=1, allow_local=False, resolve=Names(RuntimeError("a bug in the resolver")))
        assert await call(caller, "https://hook.example/") == Answer(False, reason="unexpected RuntimeError")
        assert not (await call(caller, "https://hook.example/")).accepted, "the slot is free again"
        await caller.stop()

    run(work)


def test_the_connection_goes_to_the_address_and_tls_and_host_to_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The certificate is checked for the name in the URL, though the connection is made to an address."""
    certificate = make_certificate(tmp_path)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate.cert_path, certificate.key_path)
    asked_for: list[str | None] = []
    serving.sni_callback = lambda _socket, name, _context: asked_for.append(name)
    # Loopback stands in for a public address.
    monkeypatch.setattr(webhooks, "check_address", lambda *_: None)
    monkeypatch.setattr(webhooks, "parse_webhook_url", lambda text, **_: _parsed(text))
    with receive(otherwise=DONE, tls=serving) as receiver:

        async def work() -> None:
            caller = Webhooks(
                concurrency=4, allow_local=False, resolve=Names(["127.0.0.1"]), tls=certificate.client_context()
            )
            assert await call(caller, f"https://localhost:{receiver.port}/a?b") == Answer(
                True, True, is_from_receiver=True
            )
            wrong = await call(caller, f"https://other.example:{receiver.port}/")
            assert not wrong.accepted
            assert "certificate" in wrong.reason.lower()
            await caller.stop()

        run(work)
        assert asked_for == ["localhost", "other.example"]
        (got,) = receiver.received
        assert got.path == "/a?b"
        assert got.headers["host"] == f"localhost:{receiver.port}"


def _parsed(text: str) -> WebhookUrl:
    host, _, rest = text.removeprefix("https://").partition(":")
    port, slash, path = rest.partition("/")
    return WebhookUrl("https", host, int(port), slash + path, False)


def test_concurrent_calls_are_limited() -> None:
    full = threading.Event()
    with receive(Reply(), otherwise=Reply(hold=full)) as receiver:

        async def work() -> None:
            caller = Webhooks(concurrency=3, allow_local=True)
            url = f"http://127.0.0.1:{receiver.port}/"
            assert (await call(caller, url)).accepted, "a receiver that has answered gets several calls at once"
            calls = asyncio.gather(*(call(caller, url) for _ in range(12)))
            await async_wait_until(lambda: receiver.under_way == 3)
            full.set()
            answers = await calls
            assert all(answer.accepted for answer in answers)
            await caller.stop()

        run(work)
        assert len(receiver.received) == 13
        assert receiver.most_under_way <= 3


@contextmanager
def dead_receivers(count: int) -> Iterator[list[str]]:
    """URLs of receivers that accept a connection and never answer."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16)) for _ in range(count)]
        yield [f"http://127.0.0.1:{one.getsockname()[1]}/" for one in sockets]


def test_receivers_that_do_not_answer_do_not_delay_one_that_does() -> None:
    with receive(otherwise=DONE) as receiver, dead_receivers(8) as dead:

        async def work() -> None:
            caller = Webhooks(concurrency=4, per_host=2, allow_local=True)
            url = f"http://127.0.0.1:{receiver.port}/"
            assert (await call(caller, url)).accepted
            unanswered: list[Answer] = []
            for dead_url in dead * 3:
                caller.call(dead_url, lambda: BODY, 15.0, unanswered.append)
            for _ in range(5):
                assert (await call(caller, url)).accepted
            assert unanswered == [], "all slots but one are held by receivers that do not answer"
            await caller.stop()

        run(work)


def test_request_is_composed_when_its_turn_comes() -> None:
    """A queued call is signed when its turn comes, or cancelled."""
    composed_all = threading.Event()
    with receive(Reply(hold=composed_all)) as receiver:

        async def work() -> None:
            caller = Webhooks(concurrency=1, allow_local=True)
            url = f"http://127.0.0.1:{receiver.port}/"
            composed: list[int] = []

            def compose(number: int) -> Outgoing | None:
                composed.append(len(receiver.received))
                return BODY if number != 1 else None

            answers: list[Answer] = []
            for number in range(3):
                caller.call(url, lambda number=number: compose(number), 5.0, answers.append)  # type: ignore[misc]
            await async_wait_until(lambda: receiver.under_way == 1)
            assert composed == [0]
            composed_all.set()
            await async_wait_until(lambda: len(answers) == 2)
            assert composed == [0, 1, 1]
            await caller.stop()

        run(work)
        assert len(receiver.received) == 2


def test_the_time_limit_covers_the_whole_call() -> None:
    never = threading.Event()
    with receive(otherwise=Reply(body=b"x" * 1000, trickles=True, hold=never)) as receiver:

        async def work() -> None:
            caller = Webhooks(concurrency=1, allow_local=True)
            answer = await call(caller, f"http://127.0.0.1:{receiver.port}/", timeout_s=0.4)
            assert answer == Answer(False, reason="no response within 0.4 s")
            await caller.stop()

        run(work)
        never.set()


def test_stop_aborts_running_calls() -> None:
    never = threading.Event()
    with receive(otherwise=Reply(hold=never)) as receiver:

        async def work() -> None:
            caller = Webhooks(concurrency=1, allow_local=True)
            answers: list[Answer] = []
            for _ in range(3):
                caller.call(f"http://127.0.0.1:{receiver.port}/", lambda: BODY, 600.0, answers.append)
            await async_wait_until(lambda: receiver.under_way == 1)
            await caller.stop()
            assert answers == []

        run(work)
        never.set()
