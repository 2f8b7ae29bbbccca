"""Pull-wake: wake events, claims, acks, releases, leases and fencing (protocol §7.2, §7.3)."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.http.protocol import ZERO, Stream, offset
from tests.http.subscribing import Subscription, acks_of, assert_error, wake_events
from tests.serving import Server
from tests.waiting import wait_until

pytestmark = pytest.mark.one_process
"""An event of another process is in the wake stream a moment after the append was acknowledged."""

LEASE_S = 600


class Pool:
    """A pull-wake subscription over `{name}/*` with its wake stream."""

    def __init__(self, http: httpx.Client, name: str, *, lease_ttl_ms: int = 30_000) -> None:
        self.http = http
        self.name = name
        self.wake = f"{name}-wake"
        Stream(http, self.wake, "application/json").create()
        self.subscription = Subscription(http, name).pull(self.wake, f"{name}/*", lease_ttl_ms=lease_ttl_ms)

    def stream(self, name: str) -> Stream:
        return Stream(self.http, f"{self.name}/{name}")

    def events(self) -> list[tuple[str, int]]:
        return [(event["stream"], event["generation"]) for event in wake_events(self.http, self.wake)]

    def has_event(self, generation: int) -> bool:
        return generation in [number for _, number in self.events()]


@pytest.fixture
def pool(client: httpx.Client, stream_name: Callable[[], str]) -> Pool:
    return Pool(client, stream_name())


@pytest.fixture
def leased(moving_client: httpx.Client, stream_name: Callable[[], str]) -> Pool:
    """A subscription on a server with a manual clock, with the longest lease."""
    return Pool(moving_client, stream_name(), lease_ttl_ms=LEASE_S * 1000)


def test_an_append_writes_one_wake_event(pool: Pool) -> None:
    stream = pool.stream("a").create()
    assert pool.events() == [], "an empty stream has no pending work"
    stream.append("one")
    stream.append("two")
    # With several workers, the worker that owns the wake stream writes it after the response to the append.
    (event,) = wait_until(lambda: wake_events(pool.http, pool.wake))
    assert event == {
        "type": "wake",
        "subscription_id": pool.name,
        "stream": stream.name,
        "generation": 1,
        "ts": event["ts"],
    }
    assert abs(event["ts"] - time.time() * 1000) < 60_000


def test_initial_content_is_pending_work(pool: Pool) -> None:
    stream = pool.stream("a").create("first")
    assert wait_until(pool.events) == [(stream.name, 1)]


def test_claim_lists_the_pending_streams(pool: Pool) -> None:
    stream = pool.stream("a").create("12345")
    pool.stream("b").create()
    claimed = pool.subscription.claimed()
    assert claimed == {
        "wake_id": claimed["wake_id"],
        "generation": 1,
        "token": claimed["token"],
        "lease_ttl_ms": 30_000,
        "streams": [
            {
                "path": stream.name,
                "link_type": "glob",
                "acked_offset": ZERO,
                "tail_offset": offset(1, 5),
                "has_pending": True,
            },
            {
                "path": f"{pool.name}/b",
                "link_type": "glob",
                "acked_offset": ZERO,
                "tail_offset": ZERO,
                "has_pending": False,
            },
        ],
    }
    assert claimed["wake_id"].startswith("w_")


def test_second_claim_is_409_with_the_holder(pool: Pool) -> None:
    pool.stream("a").create("x")
    pool.subscription.claimed("ann")
    assert_error(pool.subscription.claim("bob"), 409, "ALREADY_CLAIMED", current_holder="ann", generation=1)
    assert_error(pool.subscription.claim("ann"), 409, "ALREADY_CLAIMED", current_holder="ann", generation=1)


def test_racing_claims_have_one_winner(pool: Pool) -> None:
    pool.stream("a").create("x")
    with ThreadPoolExecutor(8) as workers:
        answers = list(workers.map(lambda number: pool.subscription.claim(f"w{number}"), range(24)))
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 23
    winner = next(answer for answer in answers if answer.status_code == 200)
    assert pool.subscription.act("ack", winner.json(), acks=acks_of(winner.json()), done=True).status_code == 200


def test_without_work_there_is_nothing_to_claim(pool: Pool) -> None:
    assert_error(pool.subscription.claim(), 409, "NO_PENDING_WORK")
    pool.stream("a").create()
    assert_error(pool.subscription.claim(), 409, "NO_PENDING_WORK")


def test_done_acks_and_ends_the_lease_and_the_next_append_wakes_again(pool: Pool) -> None:
    stream = pool.stream("a").create("one")
    claimed = pool.subscription.claimed()
    done = pool.subscription.act("ack", claimed, acks=acks_of(claimed), done=True)
    assert done.status_code == 200
    assert done.json() == {"ok": True, "next_wake": False}
    assert pool.subscription.acked(stream.name) == offset(1, 3)
    assert pool.events() == [(stream.name, 1)]
    stream.append("two")
    assert pool.events() == [(stream.name, 1), (stream.name, 2)]
    assert pool.subscription.claimed()["generation"] == 2


def test_work_received_during_a_lease_is_the_next_wake(pool: Pool) -> None:
    stream = pool.stream("a").create("one")
    claimed = pool.subscription.claimed()
    stream.append("two")
    assert pool.events() == [(stream.name, 1)], "the holder of the lease needs no event"
    done = pool.subscription.act("ack", claimed, acks=acks_of(claimed), done=True)
    assert done.json() == {"ok": True, "next_wake": True}
    assert pool.events() == [(stream.name, 1), (stream.name, 2)]


def test_an_ack_without_done_moves_the_cursor_and_keeps_the_lease(moving_server: Server, leased: Pool) -> None:
    stream = leased.stream("a").create("one")
    stream.append("two")
    claimed = leased.subscription.claimed("ann")
    first = [{"path": stream.name, "offset": offset(1, 3)}]
    for _ in range(4):
        moving_server.pass_time(0.4 * LEASE_S)  # Longer in total than the lease.
        beat = leased.subscription.act("ack", claimed, acks=first)
        assert beat.json() == {"ok": True, "next_wake": False}
    assert leased.subscription.acked(stream.name) == offset(1, 3)
    assert_error(leased.subscription.claim("bob"), 409, "ALREADY_CLAIMED", current_holder="ann")
    assert leased.subscription.act("ack", claimed, acks=acks_of(claimed), done=True).json()["next_wake"] is False


def test_expired_lease_wakes_again_and_fences_the_old_worker(moving_server: Server, leased: Pool) -> None:
    stream = leased.stream("a").create("one")
    stale = leased.subscription.claimed("ann")
    moving_server.pass_time(LEASE_S + 1)
    wait_until(lambda: leased.has_event(2))
    assert_error(leased.subscription.act("ack", stale, acks=acks_of(stale), done=True), 409, "FENCED", generation=2)
    assert_error(leased.subscription.act("release", stale), 409, "FENCED")
    fresh = leased.subscription.claimed("bob")
    assert fresh["generation"] == 2
    assert fresh["wake_id"] != stale["wake_id"]
    assert_error(leased.subscription.act("ack", stale), 409, "FENCED")
    assert leased.subscription.acked(stream.name) == ZERO, "a stale ack moves nothing"
    assert leased.subscription.act("ack", fresh, acks=acks_of(fresh), done=True).status_code == 200


def test_expired_lease_without_pending_work_wakes_no_worker(moving_server: Server, leased: Pool) -> None:
    leased.stream("a").create("one")
    claimed = leased.subscription.claimed()
    assert leased.subscription.act("ack", claimed, acks=acks_of(claimed)).status_code == 200
    moving_server.pass_time(LEASE_S + 1)
    assert [number for _, number in leased.events()] == [1]
    assert_error(leased.subscription.claim(), 409, "NO_PENDING_WORK")
    assert_error(leased.subscription.act("ack", claimed), 409, "FENCED")


def test_release_writes_another_wake_event(pool: Pool) -> None:
    stream = pool.stream("a").create("one")
    claimed = pool.subscription.claimed()
    released = pool.subscription.act("release", claimed)
    assert (released.status_code, released.content) == (204, b"")
    assert pool.events() == [(stream.name, 1), (stream.name, 2)]
    assert_error(pool.subscription.act("release", claimed), 409, "FENCED")
    assert pool.subscription.claimed("other")["generation"] == 2


def test_invalid_acks_are_409_and_move_no_cursor(pool: Pool) -> None:
    stream = pool.stream("a").create("one")
    other = pool.stream("b").create("zzz")
    stream.append("two")
    claimed = pool.subscription.claimed()
    good = {"stream": other.name, "offset": offset(1, 3)}
    assert pool.subscription.act("ack", claimed, acks=[{"stream": stream.name, "offset": offset(1, 3)}]).is_success
    for wrong in (
        {"stream": stream.name, "offset": ZERO},
        {"stream": stream.name, "offset": "-1"},
        {"stream": stream.name, "offset": "now"},
        {"stream": stream.name, "offset": offset(3, 9)},
        {"stream": stream.name, "offset": offset(2, 5)},
        {"stream": stream.name, "offset": "elsewhere"},
        {"stream": "not/linked", "offset": ZERO},
        {"stream": "", "offset": ZERO},
    ):
        for acks in ([wrong], [good, wrong]):
            assert_error(pool.subscription.act("ack", claimed, acks=acks, done=True), 409, "INVALID_OFFSET")
    assert pool.subscription.acked(stream.name) == offset(1, 3)
    assert pool.subscription.acked(other.name) == ZERO, "all acks of a request, or none"
    twice = [{"stream": stream.name, "offset": offset(2, 6)}, {"stream": stream.name, "offset": offset(1, 3)}]
    assert_error(pool.subscription.act("ack", claimed, acks=twice), 409, "INVALID_OFFSET")


def test_token_is_valid_only_for_its_wake_and_subscription(pool: Pool, stream_name: Callable[[], str]) -> None:
    pool.stream("a").create("one")
    claimed = pool.subscription.claimed()
    other = Pool(pool.http, stream_name())
    other.stream("a").create("one")
    foreign = other.subscription.claimed()
    path = f"{pool.subscription.path}/ack"
    body = {"wake_id": claimed["wake_id"], "generation": claimed["generation"]}
    for token in ("", "Bearer", "Basic abc", f"Bearer {claimed['token']}x", f"Bearer {foreign['token']}"):
        response = pool.http.post(path, json=body, headers={"Authorization": token} if token else {})
        assert_error(response, 401, "TOKEN_INVALID")
    for change in ({"generation": 2}, {"generation": 0}, {"wake_id": foreign["wake_id"]}, {"wake_id": ""}):
        assert_error(pool.subscription.act("ack", claimed | change), 409, "FENCED")
    assert pool.subscription.act("ack", claimed).is_success


@pytest.mark.parametrize("body", [b"", b"{}", b'{"worker": ""}', b'{"worker": 5}', b'{"worker": null}', b"["])
def test_claim_requires_a_worker_name(pool: Pool, body: bytes) -> None:
    pool.stream("a").create("one")
    response = pool.http.post(f"{pool.subscription.path}/claim", content=body)
    assert_error(response, 400, "INVALID_REQUEST")


@pytest.mark.parametrize(
    "body", [b"{}", b'{"wake_id": "x"}', b'{"generation": 1}', b'{"wake_id":"x","generation":"1"}']
)
def test_ack_requires_its_wake(pool: Pool, body: bytes) -> None:
    headers = {"Authorization": "Bearer 1.x.y"}
    for action in ("ack", "release"):
        response = pool.http.post(f"{pool.subscription.path}/{action}", content=body, headers=headers)
        assert_error(response, 400, "INVALID_REQUEST")


def test_webhooks_and_pull_wake_have_separate_actions(pool: Pool, stream_name: Callable[[], str]) -> None:
    pool.stream("a").create("one")
    claimed = pool.subscription.claimed()
    assert_error(pool.subscription.act("callback", claimed, done=True), 400, "INVALID_REQUEST")
    hook = Subscription(pool.http, stream_name()).webhook("http://127.0.0.1:9/", "none/*")
    assert_error(hook.claim(), 400, "INVALID_REQUEST")
    assert_error(hook.act("ack", claimed), 400, "INVALID_REQUEST")
    assert_error(hook.act("release", claimed), 400, "INVALID_REQUEST")


def test_wake_stream_created_later_gets_the_event(client: httpx.Client, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    subscription = Subscription(client, name).pull(f"{name}-wake", f"{name}/*")
    Stream(client, f"{name}/a").create("one")
    Stream(client, f"{name}-wake", "application/json").create()
    assert [event["generation"] for event in wake_events(client, f"{name}-wake")] == [1]
    assert subscription.claimed()["generation"] == 1


def test_text_wake_stream_gets_one_line_per_event(client: httpx.Client, stream_name: Callable[[], str]) -> None:
    name = stream_name()
    wake = Stream(client, f"{name}-wake").create()
    Subscription(client, name).pull(wake.name, f"{name}/*")
    Stream(client, f"{name}/a").create("one")
    assert wake.get().text.endswith("}\n")


def test_a_pattern_for_everything_does_not_follow_its_own_wake_stream(
    client: httpx.Client, stream_name: Callable[[], str]
) -> None:
    name = stream_name()
    wake = Stream(client, f"{name}/wake", "application/json").create()
    subscription = Subscription(client, name).pull(wake.name, f"{name}/**")
    Stream(client, f"{name}/a").create("one")
    claimed = subscription.claimed()
    assert [link["path"] for link in claimed["streams"]] == [f"{name}/a"]
    assert subscription.act("ack", claimed, acks=acks_of(claimed), done=True).json()["next_wake"] is False


def test_cancelled_work_of_a_deleted_stream_does_not_block_the_next(pool: Pool) -> None:
    gone = pool.stream("gone").create("one")
    assert pool.http.delete(gone.path).status_code == 204
    assert_error(pool.subscription.claim(), 409, "NO_PENDING_WORK")
    stream = pool.stream("a").create("two")
    assert pool.events() == [(gone.name, 1), (stream.name, 2)]


def test_reused_id_receives_nothing_of_the_deleted_subscription(pool: Pool) -> None:
    pool.stream("a").create("one")
    old = pool.subscription.claimed()
    pool.subscription.delete()
    assert_error(pool.subscription.act("ack", old, acks=acks_of(old), done=True), 404, "SUBSCRIPTION_NOT_FOUND")
    pool.subscription.pull(pool.wake, f"{pool.name}/*")
    assert_error(pool.subscription.act("ack", old, acks=acks_of(old), done=True), 409, "FENCED")
    stream = pool.stream("b").create("x")
    # The wake stream accepts the new subscription's events from the first one.
    wait_until(lambda: pool.events()[-1] == (stream.name, 1), what="the wake of the new subscription")


def test_wake_lists_pending_streams_first_and_at_most_a_thousand(pool: Pool) -> None:
    for number in range(1_050):
        assert pool.http.put(f"/v1/stream/{pool.name}/s{number}", headers={"Content-Type": "text/plain"}).is_success
    last = pool.stream("s1049")
    last.append("work")
    claimed = pool.subscription.claimed()
    assert len(claimed["streams"]) == 1_000
    assert claimed["streams"][0]["path"] == last.name
    assert claimed["streams"][0]["has_pending"] is True
    assert len(pool.subscription.links()) == 1_050
