"""The idempotent producer of both APIs: each message once and in order, and older instances are fenced."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import httpx
import pytest

from headwater.client import (
    ClaimLostError,
    ConnectionLostError,
    PayloadTooLargeError,
    ProducerFencedError,
    Retry,
    StreamClosedError,
    StreamNotFoundError,
)
from headwater.client.http1 import HttpResponse
from headwater.client.producing import ProducerCore, ProducerSettings
from tests.client.faces import SYNC, client_of
from tests.client.proxies import Breaking, running
from tests.serving import Server, serve

QUICK = Retry(timeout_s=60, first_delay_s=0.001, max_delay_s=0.02)


@pytest.fixture(scope="module")
def ours() -> Iterator[Server]:
    with serve(DS_HTTP__MAX_BODY_BYTES="1000000") as running:
        yield running


@pytest.fixture(scope="module", params=["headwater", "node"])
def url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("ours").url if request.param == "headwater" else request.getfixturevalue("node"))


def test_messages_are_stored_once_in_order(url: str, face: str, stream_name: Callable[[], str]) -> None:
    with client_of(face, url) as client:
        stream = client.stream(stream_name())
        stream.create()
        with stream.producer("loader", batch_messages_max=70) as producer:
            for n in range(1000):
                producer.append({"n": n})
            offset = producer.flush()
            assert offset == stream.head().next_offset
            producer.append([1000])
        assert list(stream.read()) == [*({"n": n} for n in range(1000)), [1000]]


def test_broken_connections_lose_and_duplicate_nothing(url: str, face: str, stream_name: Callable[[], str]) -> None:
    proxy = Breaking(url, seed=3)
    name = stream_name()
    with client_of(face, url) as direct:
        direct.stream(name).create()
        with running(proxy), client_of(face, proxy.url, retry=QUICK) as client:
            stream = client.stream(name, content_type="application/json")
            with stream.producer("loader", batch_messages_max=10) as producer:
                # How many responses there are, and so how many are cut, depends on how fast batches are sent.
                sent = 0
                while sent < 400 or (proxy.cuts <= 3 and sent < 40_000):
                    producer.append(sent)
                    sent += 1
        assert list(direct.stream(name).read()) == list(range(sent))
    assert proxy.cuts > 3


def test_a_new_instance_claims_the_epoch_and_fences_the_old_one(
    url: str, face: str, stream_name: Callable[[], str]
) -> None:
    with client_of(face, url) as client:
        stream = client.stream(stream_name())
        stream.create()
        with stream.producer("worker", epoch=2**50) as future:
            future.append("from a clock that runs ahead")
        old = stream.producer("worker").__enter__()
        try:
            old.append(1)
            old.flush()
            assert old.epoch == 2**50 + 1
            with stream.producer("worker") as new:
                new.append(2)
                new.flush()
                assert new.epoch == 2**50 + 2
            old.append(3)
            for call in (old.flush, old.flush, lambda: old.append(4)):
                with pytest.raises(ProducerFencedError):
                    call()
        finally:
            old.stop()
        assert list(stream.read()) == ["from a clock that runs ahead", 1, 2]


def test_the_producer_closes_the_stream_after_its_last_message(
    url: str, face: str, stream_name: Callable[[], str]
) -> None:
    with client_of(face, url) as client:
        stream = client.stream(stream_name())
        stream.create()
        with stream.producer("writer") as producer:
            producer.append("last")
            producer.close_stream()
        assert list(stream.follow()) == ["last"]
        with pytest.raises(StreamClosedError):
            stream.append("late")


def test_a_producer_that_wrote_nothing_claims_an_epoch_to_close(
    url: str, face: str, stream_name: Callable[[], str]
) -> None:
    with client_of(face, url) as client:
        stream = client.stream(stream_name())
        stream.create()
        with stream.producer("writer", epoch=2**50) as earlier:
            earlier.append("from a clock that runs ahead")
        with stream.producer("writer") as producer:
            producer.close_stream()
            assert producer.epoch == 2**50 + 1
        assert list(stream.follow()) == ["from a clock that runs ahead"]


def test_a_producer_needs_no_block(ours: Server, face: str, stream_name: Callable[[], str]) -> None:
    with client_of(face, ours.url) as client:
        stream = client.stream(stream_name())
        stream.create()
        producer = stream.producer("p")
        producer.append("a")
        producer.append("b")
        assert producer.flush() == stream.head().next_offset
        producer.stop()
        assert list(stream.read()) == ["a", "b"]


def test_a_worker_that_lost_its_claim_stops_at_once(ours: Server, face: str, stream_name: Callable[[], str]) -> None:
    """Write fencing: the refusal is neither retried nor answered with a higher epoch."""
    name, api = stream_name(), f"{ours.url}/v1/stream/__ds/subscriptions/{stream_name()}"
    with client_of(face, ours.url) as client:
        client.stream(f"{name}/s").create(headers={"Write-Fence": "true"})
        client.stream(f"{name}-wakes").create()
        wanted = {"type": "pull-wake", "pattern": f"{name}/*", "wake_stream": f"{name}-wakes", "lease_ttl_ms": 600_000}
        httpx.put(api, json=wanted).raise_for_status()
        client.stream(f"{name}/s").append("wake up")
        wake = httpx.post(f"{api}/claim", json={"worker": "w"}).raise_for_status().json()
    claim = {"wake_id": wake["wake_id"], "generation": wake["generation"]}
    with client_of(face, ours.url, headers={"Write-Token": wake["write_token"]}) as client:
        stream = client.stream(f"{name}/s")
        producer = stream.producer("agent", epoch=wake["generation"])
        producer.append("held")
        producer.flush()
        token = {"Authorization": f"Bearer {wake['token']}"}
        httpx.post(f"{api}/release", json=claim, headers=token).raise_for_status()
        producer.append("late")
        with pytest.raises(ClaimLostError, match="409 FENCED: The claim has ended"):
            producer.flush()
        producer.stop()
        with pytest.raises(ClaimLostError), stream.producer("agent") as unaware:
            unaware.append("late")
        assert list(stream.read()) == ["wake up", "held"]


def test_permanent_errors_are_raised(ours: Server, face: str, stream_name: Callable[[], str]) -> None:
    with client_of(face, ours.url) as client:
        missing = client.stream(stream_name(), content_type="application/json")
        with pytest.raises(StreamNotFoundError), missing.producer("p") as producer:
            producer.append(1)
        stream = client.stream(stream_name())
        stream.create()
        with pytest.raises(PayloadTooLargeError), stream.producer("p") as producer:
            producer.append("x" * 2_000_000)


def test_a_stopped_producer_refuses_messages(ours: Server, face: str, stream_name: Callable[[], str]) -> None:
    with client_of(face, ours.url) as client:
        stream = client.stream(stream_name())
        stream.create()
        producer = stream.producer("p").__enter__()
        producer.stop()
        with pytest.raises(ConnectionLostError, match="was stopped"):
            producer.append(1)


def test_several_threads_share_a_producer(ours: Server, stream_name: Callable[[], str]) -> None:
    with client_of(SYNC, ours.url) as client:
        stream = client.stream(stream_name())
        stream.create()
        with stream.producer("shared") as producer:

            def work(number: int) -> None:
                for n in range(200):
                    producer.append([number, n])

            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        stored = list(stream.read())
    for number in range(4):
        assert [n for worker, n in stored if worker == number] == list(range(200))


# -- the state without I/O ---------------------------------------------------------------------------------------------


def response(status: int, **headers: str) -> HttpResponse:
    return HttpResponse(status, {name.replace("_", "-"): value for name, value in headers.items()})


def test_only_one_batch_is_sent_before_the_first_response() -> None:
    core = ProducerCore("p", "http://h/s", ProducerSettings(batch_messages_max=1, in_flight_max=3), "application/json")
    for n in range(9):
        core.add(n)
    assert core.next_request() is not None
    assert core.next_request() is None
    core.answered(response(200))
    sent = [core.next_request() for _ in range(4)]
    assert [request is not None for request in sent] == [True, True, True, False]


def test_resent_batches_keep_their_number_and_bytes() -> None:
    core = ProducerCore("p", "http://h/s", ProducerSettings(epoch=4, batch_messages_max=2), "application/json")
    for n in range(5):
        core.add(n)
    first = core.next_request()
    core.answered(response(200))
    again = [core.next_request(), core.next_request()]
    assert not core.failed(ConnectionLostError("cut"))
    assert [core.next_request(), core.next_request()] == again
    assert first is not None
    assert [first.body, *(request.body for request in again if request)] == [b"[0,1]", b"[2,3]", b"[4]"]
    assert [first.headers["Producer-Seq"], *(r.headers["Producer-Seq"] for r in again if r)] == ["0", "1", "2"]


def test_explicit_epoch_is_never_increased() -> None:
    core = ProducerCore("p", "http://h/s", ProducerSettings(epoch=4), "application/json")
    core.add(1)
    core.next_request()
    fenced = ProducerFencedError(403, "stale_epoch", "", {"producer-epoch": "9"})
    with pytest.raises(ProducerFencedError):
        core.failed(fenced)
    assert core.epoch == 4
