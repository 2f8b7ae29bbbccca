"""Streams that are stored at another worker than the owner of their name: forks in buckets, and fenced streams."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.cluster.shards import ShardMap
from tests.cluster.workers import name_in, process_of, wait_for_restart
from tests.http.protocol import producer
from tests.http.subscribing import Subscription
from tests.serving import Server, serve
from tests.waiting import wait_until

DURABLE: dict[str, Any] = {"DS_STORAGE__MODE": "file-durable"}
TEXT = {"Content-Type": "text/plain"}
FENCE = {"Write-Fence": "true"}


_numbers = itertools.count()


def bucket_in(worker: int, workers: int) -> str:
    """A new bucket that the worker owns."""
    shard_map = ShardMap(16, workers)
    ids = (f"bucket{number}" for number in _numbers)
    return next(id_ for id_ in ids if shard_map.owner_of_bucket(id_) == worker)


def _client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=60)


def _ok(response: httpx.Response, status: int) -> httpx.Response:
    assert response.status_code == status, response.text
    return response


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serve(DS_SERVER__WORKERS="3") as server, _client(server) as client:
        yield client


def _forked(client: httpx.Client, workers: int) -> tuple[str, str, str]:
    """Create a bucket of worker 2 with a fork of a stream of worker 1; return the source, the bucket and the fork."""
    source, bucket = (
        f"/v1/stream/{name_in(1, workers, f'source{next(_numbers)}-')}",
        f"/ds/{bucket_in(2 % workers, workers)}",
    )
    _ok(client.put(source, headers=TEXT, content="shared"), 201)
    _ok(client.put(bucket), 201)
    fork = f"{bucket}/fork"
    _ok(client.put(fork, headers={"Stream-Forked-From": source}), 201)
    return source, bucket, fork


def test_fork_from_another_worker_is_a_stream_of_its_bucket(client: httpx.Client) -> None:
    source, bucket, fork = _forked(client, 3)
    _ok(client.put(f"{bucket}/own", headers=TEXT, content="x"), 201)
    _ok(client.post(fork, headers=TEXT, content=", own"), 204)
    assert client.get(fork, params={"offset": "-1"}).text == "shared, own"
    listed = client.get(f"{bucket}/streams").json()["streams"]
    assert [(one["stream_id"], one["tail_offset"]) for one in listed] == [("fork", 11), ("own", 1)]
    assert client.get(bucket).json()["streams"] == 2
    # A fork of the fork, in a bucket of yet another worker.
    other = f"/ds/{bucket_in(0, 3)}"
    _ok(client.put(other), 201)
    _ok(client.put(f"{other}/again", headers={"Stream-Forked-From": fork}), 201)
    assert client.get(f"{other}/again", params={"offset": "-1"}).text == "shared, own"
    counts = {one["bucket_id"]: one["streams"] for one in client.get("/ds").json()["buckets"]}
    assert [counts[root.removeprefix("/ds/")] for root in (bucket, other)] == [2, 1]
    # The source is kept for its forks, and deleted with the last of them.
    _ok(client.delete(source), 204)
    _ok(client.get(source), 410)
    _ok(client.delete(f"{other}/again"), 204)
    assert client.get(fork, params={"offset": "-1"}).text == "shared, own"
    _ok(client.delete(bucket), 409)
    _ok(client.delete(f"{bucket}/own"), 204)
    _ok(client.delete(bucket), 409)
    _ok(client.delete(fork), 204)
    _ok(client.get(source), 404)
    _ok(client.delete(bucket), 204)
    _ok(client.put(fork, headers={"Stream-Forked-From": source}), 404)


def test_changes_and_snapshots_of_a_placed_stream_appear_in_its_bucket(client: httpx.Client) -> None:
    _, bucket, fork = _forked(client, 3)
    cursor = client.get(f"{bucket}/streams", params={"live": "long-poll"}).json()["changes_cursor"]
    appended = _ok(client.post(fork, headers=TEXT, content=", own"), 204)
    changed = client.get(f"{bucket}/streams", params={"live": "long-poll", "cursor": cursor}).json()["streams"]
    assert [stream["name"] for stream in changed] == ["fork"]
    offset = appended.headers["stream-next-offset"]
    large = b"s" * 300_000
    _ok(client.put(f"{fork}/snapshot/{offset}", headers=TEXT, content=large), 204)
    assert client.get(f"{fork}/snapshot", follow_redirects=True).content == large


def test_placed_streams_of_a_bucket_survive_restarts_with_other_numbers_of_workers(tmp_path: Path) -> None:
    def serving(workers: int) -> AbstractContextManager[Server]:
        return serve(DS_SERVER__WORKERS=str(workers), directory=tmp_path, **DURABLE)

    with serving(3) as server, _client(server) as client:
        _, bucket, fork = _forked(client, 3)
        _ok(client.post(fork, headers=TEXT, content=", own"), 204)
    for workers in (2, 3):
        with serving(workers) as server, _client(server) as client:
            assert client.get(fork, params={"offset": "-1"}).text == "shared, own"
            found = client.get(f"{bucket}/streams").json()["streams"]
            assert [stream["stream_id"] for stream in found] == ["fork"], workers
            assert [one["bucket_id"] for one in client.get("/ds").json()["buckets"]] == [bucket.removeprefix("/ds/")]
            _ok(client.delete(bucket), 409)


def test_recreated_name_is_found_where_the_fork_is_stored(client: httpx.Client) -> None:
    source, name = f"/v1/stream/{name_in(1, 3, 'moving-source')}", f"/v1/stream/{name_in(2, 3, 'moving')}"
    _ok(client.put(source, headers=TEXT, content="shared"), 201)
    _ok(client.put(name, headers=TEXT), 201)
    for _ in range(3):
        _ok(client.post(name, headers=TEXT, content="x"), 204)
    _ok(client.delete(name), 204)
    _ok(client.put(name, headers={"Stream-Forked-From": source}), 201)
    _ok(client.post(name, headers=TEXT, content="y"), 204)
    assert client.get(name, params={"offset": "-1"}).text == "sharedy"


def test_expired_fork_in_another_worker_leaves_its_bucket(client: httpx.Client) -> None:
    source, bucket, _ = _forked(client, 3)
    _ok(client.put(f"{bucket}/short", headers={"Stream-Forked-From": source, "Stream-TTL": "1"}), 201)
    assert client.get(bucket).json()["streams"] == 2
    wait_until(lambda: client.get(bucket).json()["streams"] == 1, what="the fork to expire")


@pytest.mark.parametrize("source", [None, 0, 1, 2])
@pytest.mark.parametrize("worker", [0, 1])
def test_fenced_stream_works_with_any_owner_of_its_name(client: httpx.Client, worker: int, source: int | None) -> None:
    """It may also be a fork of a stream of any worker."""
    json = {"Content-Type": "application/json"}
    fork: dict[str, str] = {}
    if source is not None:
        forked = f"/v1/stream/{name_in(source, 3, f'fenced-source{next(_numbers)}-')}"
        _ok(client.put(forked, headers=json, content="[0]"), 201)
        fork = {"Stream-Forked-From": forked}
    for place in (
        f"/v1/stream/{name_in(worker, 3, f'fenced{next(_numbers)}-')}",
        f"/ds/{bucket_in(worker, 3)}/fenced",
    ):
        client.put(place.rpartition("/")[0]) if place.startswith("/ds/") else None
        _ok(client.put(place, headers=FENCE | json | fork, content="" if fork else "[0]"), 201)
        assert client.head(place).headers["write-fence"] == "true"
        _ok(client.put(place, headers=json | fork), 409)
        name = place.removeprefix("/v1/stream/")
        wakes = f"wakes-{name.replace('/', '-')}"
        client.put(f"/v1/stream/{wakes}", headers=json)
        subscription = Subscription(client, f"of-{wakes}")
        subscription.pull(wakes, name, lease_ttl_ms=600_000)
        _ok(client.post(place, headers=json, content="[1]"), 204)
        wake = subscription.claimed()
        fenced = {"Write-Token": wake["write_token"]} | json
        _ok(client.post(place, headers=fenced | producer("agent", wake["generation"], 0), content='"w"'), 200)
        # An open write must not use the producer of the claim, and another stream is not for its token.
        bound = client.post(place, headers=json | producer("agent", wake["generation"], 1), content='"open"')
        assert _ok(bound, 409).json()["error"]["reason"] == "bound"
        other = f"/v1/stream/{name_in(2, 3, f'other{next(_numbers)}-')}"
        _ok(client.put(other, headers=FENCE | json), 201)
        _ok(client.post(other, headers=fenced | producer("agent", wake["generation"], 0), content='"x"'), 403)
        _ok(client.post(place, headers=json | {"Write-Token": "wt1.forged.x"}, content='"x"'), 401)
        acks = [{"stream": link["path"], "offset": link["tail_offset"]} for link in wake["streams"]]
        _ok(subscription.act("ack", wake, acks=acks, done=True), 200)
        late = client.post(place, headers=fenced | producer("agent", wake["generation"], 1), content='"late"')
        assert _ok(late, 409).json()["error"]["reason"] == "sealed"
        assert client.head(place).headers["write-fence-sealed-generation"] == str(wake["generation"])
        assert client.get(place, params={"offset": "-1"}).json() == [0, 1, "w"]


def test_end_of_a_claim_is_shown_after_the_workers_of_its_fenced_streams_have_stored_it(tmp_path: Path) -> None:
    """So the next holder of the claim never sees a write of the former one appear."""
    settings = {"DS_SERVER__WORKERS": "2", "DS_SERVER__WORKER_TIMEOUT_SECS": "60", **DURABLE}
    json = {"Content-Type": "application/json"}
    with serve(directory=tmp_path, **settings) as server, _client(server) as client, ThreadPoolExecutor() as pool:
        place, wakes = (f"/v1/stream/{name_in(worker, 2, 'fenced')}" for worker in (1, 0))
        _ok(client.put(place, headers=FENCE | json, content="[0]"), 201)
        _ok(client.put(wakes, headers=json), 201)
        subscription = Subscription(client, "sealing")
        subscription.pull(wakes.removeprefix("/v1/stream/"), place.removeprefix("/v1/stream/"), lease_ttl_ms=600_000)
        _ok(client.post(place, headers=json, content="[1]"), 204)
        wake = subscription.claimed()
        fenced = {"Write-Token": wake["write_token"]} | json
        _ok(client.post(place, headers=fenced | producer("agent", wake["generation"], 0), content='"w"'), 200)
        other = process_of(server, 1)
        with _client(server) as separate:
            # A connection at worker 0, which has the subscriptions.
            separate.get(wakes).raise_for_status()
            second = Subscription(separate, subscription.id)
            other.suspend()
            released = pool.submit(second.act, "release", wake)
            with pytest.raises(TimeoutError):
                released.result(timeout=0.5)
            assert wake_count(separate, wakes) == 1
            other.resume()
            _ok(released.result(timeout=60), 204)
        other.kill()
        wait_for_restart(server, {other.pid}, 2)
        with _client(server) as later:
            late = later.post(place, headers=fenced | producer("agent", wake["generation"], 1), content='"late"')
            assert _ok(late, 409).json()["error"]["reason"] == "sealed"
            assert later.head(place).headers["write-fence-sealed-generation"] == str(wake["generation"])
            assert later.get(place, params={"offset": "-1"}).json() == [0, 1, "w"]
            assert Subscription(later, subscription.id).claimed()["generation"] == wake["generation"] + 1


def test_fences_survive_restarts_with_other_numbers_of_workers(tmp_path: Path) -> None:
    json = {"Content-Type": "application/json"}
    source, place = (f"/v1/stream/{name_in(worker, 3, 'moved')}" for worker in (1, 2))
    with serve(DS_SERVER__WORKERS="3", directory=tmp_path, **DURABLE) as server, _client(server) as client:
        _ok(client.put(source, headers=json, content="[0]"), 201)
        _ok(client.put(place, headers=FENCE | json | {"Stream-Forked-From": source}), 201)
        _ok(client.put("/v1/stream/wakes", headers=json), 201)
        subscription = Subscription(client, "moved")
        subscription.pull("wakes", place.removeprefix("/v1/stream/"), lease_ttl_ms=600_000)
        _ok(client.post(place, headers=json, content="[1]"), 204)
        ended = subscription.claimed()
        fenced = json | {"Write-Token": ended["write_token"]}
        _ok(client.post(place, headers=fenced | producer("agent", ended["generation"], 0), content='"w"'), 200)
        _ok(subscription.act("release", ended), 204)
    for workers in (2, 1, 3):
        with serve(DS_SERVER__WORKERS=str(workers), directory=tmp_path, **DURABLE) as server, _client(server) as client:
            head = client.head(place).headers
            assert (head["write-fence"], head["write-fence-sealed-generation"]) == ("true", str(ended["generation"]))
            late = client.post(place, headers=fenced | producer("agent", ended["generation"], 1), content='"late"')
            assert _ok(late, 409).json()["error"]["reason"] == "sealed"
            wake = Subscription(client, "moved").claimed()
            current = json | {"Write-Token": wake["write_token"]}
            _ok(client.post(place, headers=current | producer("agent", wake["generation"], 0), content='"n"'), 200)
            ended, fenced = wake, current
            _ok(Subscription(client, "moved").act("release", wake), 204)
            assert client.get(place, params={"offset": "-1"}).json()[:3] == [0, 1, "w"]


def wake_count(client: httpx.Client, wakes: str) -> int:
    return len(client.get(wakes, params={"offset": "-1"}).json())
