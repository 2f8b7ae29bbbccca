"""Buckets and operations on their streams, §1 of the extensions. Tests are named after its sections."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.http.bucketed import Bucket
from tests.http.protocol import Stream, assert_problem, offset, producer
from tests.http.raw import connect
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

# -- 1.2 create bucket


def test_1_2_a_bucket_is_created_with_201(client: httpx.Client, bucket_id: str) -> None:
    response = client.put(f"/ds/{bucket_id}")
    assert response.status_code == 201
    assert response.headers["location"].endswith(f"/ds/{bucket_id}")
    assert response.content == b""


def test_1_2_a_bucket_that_exists_is_409(client: httpx.Client, bucket: Bucket) -> None:
    bucket.stream("kept").create("data")
    assert_problem(client.put(bucket.path), 409, "bucket_exists")
    assert bucket.stream("kept").content() == b"data"


@pytest.mark.parametrize("method", ["PUT", "GET", "POST", "HEAD", "DELETE"])
def test_1_2_and_1_6_no_operation_on_a_stream_creates_its_bucket(
    client: httpx.Client, bucket_id: str, method: str
) -> None:
    stream = Bucket(client, bucket_id).stream("x")
    headers = {"Content-Type": "text/plain"} if method in ("PUT", "POST") else {}
    response = client.request(method, stream.path, content=b"data" if headers else None, headers=headers)
    assert response.status_code == 404
    if method != "HEAD":
        assert_problem(response, 404, "bucket_not_found")
    assert client.get(f"/ds/{bucket_id}").status_code == 404


def test_1_2_racing_creates_make_one_bucket(client: httpx.Client, server: Server, bucket_id: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(lambda _: httpx.put(f"{server.url}/ds/{bucket_id}").status_code, range(16)))
    assert sorted(codes) == [201] + [409] * 15


# -- 1.3 bucket metadata


def test_1_3_metadata_has_the_id_and_the_number_of_streams(bucket: Bucket) -> None:
    response = bucket.get()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    metadata = response.json()
    assert metadata["bucket_id"] == bucket.id
    assert metadata["streams"] == 0
    assert abs(metadata["created_at_ms"] / 1000 - time.time()) < 60
    for number in range(3):
        bucket.stream(f"s{number}").create()
    assert bucket.count() == 3
    bucket.stream("s1").delete()
    assert bucket.count() == 2
    assert bucket.http.head(bucket.path).status_code == 200


def test_1_3_missing_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
    assert_problem(client.get(f"/ds/{bucket_id}"), 404, "bucket_not_found")


def test_1_3_streams_of_other_buckets_and_of_the_base_surface_do_not_count(
    client: httpx.Client, bucket: Bucket, stream: Stream
) -> None:
    stream.create("data")
    other = Bucket(client, f"{bucket.id}-x").create()
    other.stream("x").create()
    assert bucket.count() == 0
    assert other.count() == 1


def test_1_3_an_expired_stream_is_not_counted_nor_listed(
    moving_server: Server, moving_client: httpx.Client, bucket_id: str
) -> None:
    bucket = Bucket(moving_client, bucket_id).create()
    bucket.stream("short").create(headers={"Stream-TTL": "3600"})
    bucket.stream("long").create()
    assert bucket.count() == 2
    moving_server.pass_time(3601)
    assert (bucket.count(), bucket.ids()) == (1, ["long"])


# -- 1.5 delete bucket


def test_1_5_an_empty_bucket_is_deleted_with_204(client: httpx.Client, bucket: Bucket) -> None:
    assert bucket.delete().status_code == 204
    assert bucket.get().status_code == 404
    assert bucket.listing().status_code == 404
    assert bucket.stream("x").put().status_code == 404
    assert bucket.create().count() == 0


def test_1_5_missing_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
    assert_problem(client.delete(f"/ds/{bucket_id}"), 404, "bucket_not_found")


def test_1_5_a_bucket_with_a_stream_is_409_and_keeps_it(bucket: Bucket) -> None:
    stream = bucket.stream("x").create("data")
    assert_problem(bucket.delete(), 409, "bucket_not_empty")
    assert stream.content() == b"data"
    assert stream.delete().status_code == 204
    assert bucket.delete().status_code == 204


def test_1_5_a_bucket_whose_last_stream_expired_can_be_deleted(
    moving_server: Server, moving_client: httpx.Client, bucket_id: str
) -> None:
    bucket = Bucket(moving_client, bucket_id).create()
    bucket.stream("short").create(headers={"Stream-TTL": "3600"})
    moving_server.pass_time(3601)
    assert bucket.delete().status_code == 204


def test_1_5_racing_create_and_delete_leave_no_stream_without_a_bucket(client: httpx.Client, server: Server) -> None:
    """Create and delete are pipelined on one connection; in either order no stream is left without a bucket."""
    for number in range(20):
        bucket = Bucket(client, f"race-{number:04d}").create()
        with connect(server) as one, connect(server) as two:
            one.send(f"PUT {bucket.path}/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
            two.send(f"DELETE {bucket.path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            created, deleted = one.response().status, two.response().status
        assert (created, deleted) in ((201, 409), (404, 204))
        assert bucket.get().status_code == (200 if deleted == 409 else 404)


def test_1_5_pipelined_requests_see_what_those_before_them_did(server: Server, bucket: Bucket) -> None:
    with connect(server) as connection:
        steps = [
            ("PUT", "/x", 201),
            ("GET", "/streams?prefix=x", 200),
            ("DELETE", "", 409),
            ("DELETE", "/x", 204),
            ("GET", "/x", 404),
            ("GET", "", 200),
            ("DELETE", "", 204),
            ("PUT", "/x", 404),
            ("PUT", "", 201),
            ("PUT", "/x", 201),
        ]
        connection.send(
            b"".join(
                f"{method} {bucket.path}{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
                for method, path, _ in steps
            )
        )
        answers = [connection.response() for _ in steps]
    assert [answer.status for answer in answers] == [status for _, _, status in steps]
    assert b'"stream_count":1,' in answers[1].body
    assert b'"streams":0,' in answers[5].body
    assert bucket.count() == 1


# -- 1.6 stream operations


def test_1_6_every_base_operation_works_in_a_bucket(server: Server, bucket: Bucket) -> None:
    stream = bucket.stream("all of it")
    created = stream.put("one")
    assert created.status_code == 201
    assert created.headers["location"].endswith(f"{bucket.path}/all%20of%20it")
    assert stream.put("one").status_code == 200
    assert stream.put("one", headers={"Content-Type": "image/png"}).status_code == 409
    assert stream.append("two") == offset(2, 6)
    assert stream.post("three", headers=producer("p", 0, 0)).status_code == 200
    assert stream.post("three", headers=producer("p", 0, 0)).status_code == 204
    head = stream.head()
    assert (head.status_code, head.headers["stream-next-offset"]) == (200, offset(3, 11))
    assert stream.content() == b"onetwothree"
    assert stream.get(offset=offset(1, 3)).content == b"twothree"
    assert stream.get(offset=offset(1, 4)).status_code == 400
    polled = stream.long_poll(offset(2, 6))
    assert (polled.status_code, polled.content) == (200, b"three")
    options = stream.http.options(stream.path)
    assert (options.status_code, "PUT" in options.headers["allow"]) == (204, True)
    assert stream.close().headers["stream-closed"] == "true"
    assert stream.post("late").status_code == 409
    assert stream.delete().status_code == 204
    assert stream.get().status_code == 404


def test_1_6_events_of_a_stream_in_a_bucket(server: Server, bucket: Bucket) -> None:
    stream = bucket.stream("events").create("one")
    with SseReader(server, stream.path) as reader:
        data, control = reader.pair()
        assert (data.data, control["streamNextOffset"]) == ("one", offset(1, 3))
        stream.append("two")
        assert reader.pair()[0].data == "two"


def test_1_6_json_and_expiry_in_a_bucket(bucket: Bucket) -> None:
    stream = bucket.stream("json", "application/json").create('[{"a":1},{"a":2}]', headers={"Stream-TTL": "100"})
    assert stream.get().json() == [{"a": 1}, {"a": 2}]
    assert stream.head().headers["stream-ttl"] == "100"


def test_1_6_a_fork_within_a_bucket(bucket: Bucket) -> None:
    source = bucket.stream("the source").create("one")
    fork = bucket.stream("fork").create(headers={"Stream-Forked-From": source.path})
    source.append("two")
    fork.append("three")
    assert (source.content(), fork.content()) == (b"onetwo", b"onethree")


def test_1_6_forks_across_buckets_and_surfaces(client: httpx.Client, bucket: Bucket, stream: Stream) -> None:
    other = Bucket(client, f"{bucket.id}-y").create()
    source = bucket.stream("source").create("one")
    across = other.stream("fork").create(headers={"Stream-Forked-From": source.path})
    stream.create("base")
    from_base = bucket.stream("from base").create(headers={"Stream-Forked-From": stream.path})
    to_base = Stream(client, f"{stream.name}-fork").create(headers={"Stream-Forked-From": source.path})
    across.append("+")
    from_base.append("+")
    to_base.append("+")
    assert (across.content(), from_base.content(), to_base.content()) == (b"one+", b"base+", b"one+")
    assert source.delete().status_code == 204
    assert source.get().status_code == 410
    assert (across.content(), to_base.content()) == (b"one+", b"one+")


def test_1_6_a_fork_of_a_missing_stream_is_404(bucket: Bucket) -> None:
    for path, status in (
        (f"{bucket.path}/none", 404),
        ("/ds/no-such-bucket/x", 404),
        ("/ds/x/y", 400),
        (f"{bucket.path}/streams", 400),
        (f"{bucket.path}/x/bootstrap", 400),
        (bucket.path, 400),
        ("/elsewhere/x", 400),
    ):
        assert bucket.stream("fork").put(headers={"Stream-Forked-From": path}).status_code == status
    assert bucket.count() == 0


def test_1_6_a_bucket_whose_deleted_stream_is_kept_for_forks_can_be_deleted(
    client: httpx.Client, bucket: Bucket
) -> None:
    other = Bucket(client, f"{bucket.id}-z").create()
    source = bucket.stream("source").create("one")
    fork = other.stream("fork").create(headers={"Stream-Forked-From": source.path})
    source.delete()
    assert bucket.delete().status_code == 204
    assert source.get().status_code == 404
    assert fork.content() == b"one"


# -- all storage modes


def test_buckets_survive_a_restart_and_a_kill(tmp_path: Any, persistent_mode: str) -> None:
    ids = [f"s{number:02d}" for number in range(30)]
    with serve(directory=tmp_path, DS_STORAGE__MODE=persistent_mode) as first, httpx.Client(base_url=first.url) as http:
        kept, gone = Bucket(http, "kept-bucket").create(), Bucket(http, "gone-bucket").create()
        for stream_id in reversed(ids):
            kept.stream(stream_id).create(stream_id)
        created = kept.get().json()["created_at_ms"]
        assert gone.delete().status_code == 204
        first.kill()
    with (
        serve(directory=tmp_path, DS_STORAGE__MODE=persistent_mode) as second,
        httpx.Client(base_url=second.url) as http,
    ):
        kept, gone = Bucket(http, "kept-bucket"), Bucket(http, "gone-bucket")
        assert (kept.ids(), kept.count(), gone.get().status_code) == (ids, 30, 404)
        assert kept.get().json()["created_at_ms"] == created
        assert kept.stream("s07").content() == b"s07"
        assert kept.delete().status_code == 409
        for stream_id in ids[:29]:
            kept.stream(stream_id).delete()
    with serve(directory=tmp_path, DS_STORAGE__MODE=persistent_mode) as third, httpx.Client(base_url=third.url) as http:
        kept = Bucket(http, "kept-bucket")
        assert kept.ids() == ids[29:]
        kept.stream(ids[29]).delete()
        assert kept.delete().status_code == 204
