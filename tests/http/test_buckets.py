"""Buckets: the bucketed surface as the extensions' §1 describes it. Tests are named after its sections."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.http.bucketed import Bucket
from tests.http.protocol import ZERO, Stream, assert_problem, offset, position, producer
from tests.http.raw import connect
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

ENTRY_FIELDS = {"stream_id", "status", "content_type", "tail_offset", "created_at_ms", "last_write_at_ms"}


def raw(server: Server, method: str, path: str) -> tuple[int, bytes]:
    """Send the path as it is: a client library would tidy it up."""
    with connect(server) as connection:
        answer = connection.request(method, path, headers={"Content-Type": "text/plain"} if method == "PUT" else {})
        return answer.status, answer.body


# -- 1.1 identifiers


@pytest.mark.parametrize("bucket_id", ["abcd", "a" * 64, "0123", "____", "----", "a_b-9", "streams", "snapshot"])
def test_1_1_a_bucket_id_is_4_to_64_of_lower_case_digits_underscore_and_hyphen(
    client: httpx.Client, bucket_id: str
) -> None:
    client.delete(f"/ds/{bucket_id}")
    assert client.put(f"/ds/{bucket_id}").status_code == 201
    assert client.delete(f"/ds/{bucket_id}").status_code == 204


@pytest.mark.parametrize(
    "bucket_id",
    [
        "",
        "abc",
        "a" * 65,
        "Abcd",
        "ab%20cd",
        "ab.d",
        "..ab",
        "abc%c3%a9",
        "abcd%0a",
        "%0aabcd",
        "ab%2fcd",
        "abc%ff",
        "ab+cd",
        "abc%",
    ],
)
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_1_1_any_other_bucket_id_is_400(server: Server, bucket_id: str, method: str) -> None:
    status, body = raw(server, method, f"/ds/{bucket_id}")
    assert status == 400
    assert b'"invalid_name"' in body


@pytest.mark.parametrize("method", ["PUT", "GET", "POST", "HEAD", "DELETE"])
def test_1_1_an_invalid_bucket_id_is_400_for_its_streams_too(server: Server, method: str) -> None:
    for below in ("s", "streams", "s/snapshot", f"s/snapshot/{ZERO}", "s/bootstrap"):
        assert raw(server, method, f"/ds/abc/{below}")[0] in ((400, 405) if method != "GET" else (400,))


@pytest.mark.parametrize(
    "stream_id",
    [
        "a",
        "user-1",
        "a b",
        "a.b",
        ".a",
        "ünï-cödé",
        "日本",
        "🙂",
        "a\\b",
        "a%b",
        "a?b#c",
        "snapshot",
        "bootstrap",
        "Streams",
        "streams2",
        "__ds",
        "-1",
    ],
)
def test_1_1_a_stream_id_is_any_utf_8_string_without_control_characters(bucket: Bucket, stream_id: str) -> None:
    stream = bucket.stream(stream_id).create("data")
    assert stream.content() == b"data"
    assert bucket.ids() == [stream_id]
    assert bucket.count() == 1


@pytest.mark.parametrize("stream_id", ["a\nb", "\x1b[2J", "a\x7f", "\x9bb", "\x01"])
def test_a_new_stream_id_with_a_control_character_is_400(
    client: httpx.Client, bucket: Bucket, stream: Stream, stream_id: str
) -> None:
    refused = bucket.stream(stream_id)
    assert_problem(refused.put(), 400, "invalid_name")
    stream.create()
    assert_problem(refused.put(headers={"Stream-Forked-From": stream.path}), 400, "invalid_name")
    assert bucket.ids() == []
    assert_problem(refused.get(), 404, "stream_not_found")


@pytest.mark.parametrize(
    "stream_id", ["a%2fb", "a%2Fb", "%2f", "a%00b", "%00", "..", "a..b", "%2e%2e", "a...b", ".", "%2e"]
)
@pytest.mark.parametrize("method", ["PUT", "GET", "POST", "HEAD", "DELETE"])
def test_1_1_a_slash_a_nul_or_two_dots_in_a_stream_id_are_400(
    server: Server, bucket: Bucket, stream_id: str, method: str
) -> None:
    assert raw(server, method, f"{bucket.path}/{stream_id}")[0] == 400
    assert bucket.count() == 0


@pytest.mark.parametrize("path", ["a/b", "a/b/c", "a/", "", "a/snapshot/x/y", "a/bootstrap/x", "a//b"])
def test_1_1_a_path_that_names_nothing_below_a_stream_is_400(server: Server, bucket: Bucket, path: str) -> None:
    assert raw(server, "PUT", f"{bucket.path}/{path}")[0] == 400
    assert bucket.count() == 0


@pytest.mark.parametrize("stream_id", ["%", "a%4", "a%zz", "%ff", "a%c3", "%ed%a0%80", "%c0%af"])
def test_1_1_a_stream_id_that_is_no_utf_8_is_400(server: Server, bucket: Bucket, stream_id: str) -> None:
    assert raw(server, "PUT", f"{bucket.path}/{stream_id}")[0] == 400


def test_1_1_bucket_and_stream_id_together_have_122_bytes_and_not_123(bucket: Bucket) -> None:
    room = 122 - len(bucket.id) - 1
    bucket.stream("x" * room).create("at the limit")
    assert_problem(bucket.stream("x" * (room + 1)).put(), 400, "invalid_name")
    assert bucket.ids() == ["x" * room]


def test_1_1_the_limit_counts_bytes_not_characters(client: httpx.Client) -> None:
    bucket = Bucket(client, "bytes-not-characters-1").create()
    room = 122 - len(bucket.id) - 1
    longest = "é" * (room // 2) + "x" * (room % 2)
    assert len(longest.encode()) == room
    bucket.stream(longest).create("data")
    assert_problem(bucket.stream(longest + "x").put(), 400, "invalid_name")


def test_1_1_with_the_shortest_bucket_id_a_stream_id_has_117_bytes(client: httpx.Client) -> None:
    bucket = Bucket(client, "b117").create()
    bucket.stream("x" * 117).create()
    assert bucket.stream("x" * 118).put().status_code == 400


@pytest.mark.parametrize("spelling", ["streams", "%73treams", "stream%73"])
@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_1_1_the_stream_id_streams_is_reserved(server: Server, bucket: Bucket, spelling: str, method: str) -> None:
    status, body = raw(server, method, f"{bucket.path}/{spelling}")
    assert status == 400
    assert b"reserved" in body
    assert raw(server, "PUT", f"{bucket.path}/{spelling}/snapshot/{ZERO}")[0] == 400
    assert raw(server, "GET", f"{bucket.path}/{spelling}/bootstrap")[0] == 400


def test_1_1_an_id_is_decoded_once_and_has_one_spelling(server: Server, bucket: Bucket) -> None:
    assert raw(server, "PUT", f"{bucket.path}/%2561")[0] == 201
    assert bucket.ids() == ["%61"]
    bucket.stream("plain").create("data")
    assert raw(server, "GET", f"{bucket.path}/%70l%61in")[1] == b"data"


def test_1_1_the_two_surfaces_have_names_of_their_own(client: httpx.Client, bucket: Bucket) -> None:
    bucket.stream("x").create("in the bucket")
    for name in (f"{bucket.id}/x", f"ds/{bucket.id}/x", f"/ds/{bucket.id}/x", "x"):
        assert client.get(f"/v1/stream/{name}").status_code in (400, 404)
    base = Stream(client, f"ds/{bucket.id}/x").create("on the base surface")
    assert bucket.stream("x").content() == b"in the bucket"
    assert base.delete().status_code == 204
    assert bucket.stream("x").content() == b"in the bucket"


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


def test_1_3_metadata_tells_the_id_and_the_number_of_streams(bucket: Bucket) -> None:
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


def test_1_3_no_such_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
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


# -- 1.4 list


def test_1_4_the_listing_has_every_field(bucket: Bucket) -> None:
    started = time.time() * 1000
    stream = bucket.stream("user-1").create()
    stream.append("x" * 42)
    bucket.stream("user-2", "application/json").create("[1,2]")
    bucket.stream("user-2").close(headers={"Content-Type": ""})
    bucket.stream("zed").create()
    response = bucket.listing(prefix="user-")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    listing = response.json()
    entries = listing.pop("streams")
    assert listing == {
        "bucket_id": bucket.id,
        "prefix": "user-",
        "stream_count": 2,
        "next_cursor": None,
        "has_more": False,
    }
    first, second = entries
    assert set(first) >= ENTRY_FIELDS
    assert (first["stream_id"], first["status"], first["content_type"]) == ("user-1", "Open", "text/plain")
    assert first["tail_offset"] == 42
    assert first["next_offset"] == stream.tail()
    assert started - 1000 <= first["created_at_ms"] <= first["last_write_at_ms"] <= time.time() * 1000 + 1000
    assert (second["stream_id"], second["status"], second["content_type"]) == ("user-2", "Closed", "application/json")
    # The position counts a separator after each message, which is not payload.
    assert second["tail_offset"] == position(second["next_offset"]) - int(second["next_offset"][:16], 16)


def test_1_4_tail_offset_and_times_follow_the_stream(
    moving_server: Server, moving_client: httpx.Client, bucket_id: str
) -> None:
    bucket = Bucket(moving_client, bucket_id).create()
    stream = bucket.stream("s").create()
    before = bucket.listing().json()["streams"][0]
    assert (before["tail_offset"], before["next_offset"]) == (0, ZERO)
    moving_server.pass_time(1)
    stream.append("12345")
    after = bucket.listing().json()["streams"][0]
    assert (after["tail_offset"], after["next_offset"]) == (5, offset(1, 5))
    assert after["created_at_ms"] == before["created_at_ms"]
    assert after["last_write_at_ms"] > before["last_write_at_ms"]


def test_1_4_streams_are_sorted_by_their_bytes(bucket: Bucket) -> None:
    ids = ["b", "a", "B", "é", "z", "a b", "a-b", "a0", "10", "9", "日本", "🙂", "\uffee", "aa"]
    for stream_id in ids:
        bucket.stream(stream_id).create()
    assert bucket.ids() == sorted(ids, key=lambda stream_id: stream_id.encode())


def test_1_4_prefix_filters(bucket: Bucket) -> None:
    for stream_id in ("a", "ab", "abc", "abd", "b", "ac", "é1", "é2"):
        bucket.stream(stream_id).create()
    assert bucket.ids(prefix="ab") == ["ab", "abc", "abd"]
    assert bucket.ids(prefix="abc") == ["abc"]
    assert bucket.ids(prefix="é") == ["é1", "é2"]
    assert bucket.ids(prefix="x") == []
    assert bucket.ids(prefix="") == bucket.ids()
    assert bucket.listing(prefix="x").json() == {
        "bucket_id": bucket.id,
        "prefix": "x",
        "stream_count": 0,
        "streams": [],
        "next_cursor": None,
        "has_more": False,
    }


def test_1_4_after_is_an_exclusive_cursor(bucket: Bucket) -> None:
    for stream_id in "abcd":
        bucket.stream(stream_id).create()
    assert bucket.ids(after="b") == ["c", "d"]
    assert bucket.ids(after="bb") == ["c", "d"]
    assert bucket.ids(after="d") == []
    assert bucket.ids(after="") == ["a", "b", "c", "d"]
    assert bucket.ids(after="A") == ["a", "b", "c", "d"]


def test_1_4_prefix_and_after_go_together(bucket: Bucket) -> None:
    for stream_id in ("a1", "a2", "a3", "b1"):
        bucket.stream(stream_id).create()
    assert bucket.ids(prefix="a", after="a1") == ["a2", "a3"]
    assert bucket.ids(prefix="a", after="0") == ["a1", "a2", "a3"]
    assert bucket.ids(prefix="a", after="b") == []


def test_1_4_pages_cover_everything_once(bucket: Bucket) -> None:
    ids = sorted(f"s{number:03d}" for number in range(25))
    for stream_id in ids:
        bucket.stream(stream_id).create()
    seen: list[str] = []
    query: dict[str, Any] = {"limit": 10}
    sizes = []
    while True:
        page = bucket.listing(**query).json()
        assert page["stream_count"] == len(page["streams"])
        sizes.append(page["stream_count"])
        seen += [entry["stream_id"] for entry in page["streams"]]
        if not page["has_more"]:
            assert page["next_cursor"] is None
            break
        assert page["next_cursor"] == seen[-1]
        query["after"] = page["next_cursor"]
    assert (seen, sizes) == (ids, [10, 10, 5])


def test_1_4_a_page_that_is_just_full_has_no_more(bucket: Bucket) -> None:
    for stream_id in "abc":
        bucket.stream(stream_id).create()
    assert bucket.listing(limit=3).json()["has_more"] is False
    assert bucket.listing(limit=2).json()["has_more"] is True
    assert bucket.listing(limit=2, prefix="a").json()["has_more"] is False


@pytest.mark.parametrize("limit", ["1", "10", "999", "1000"])
def test_1_4_a_limit_of_1_to_1000_is_taken(bucket: Bucket, limit: str) -> None:
    assert bucket.listing(limit=limit).status_code == 200


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "+5", "05", "1.0", "", "x", "10000", "\u0661"])
def test_1_4_any_other_limit_is_400(bucket: Bucket, limit: str) -> None:
    assert_problem(bucket.listing(limit=limit), 400, "bad_request")


def test_1_4_a_query_that_cannot_be_read_is_400(server: Server, bucket: Bucket) -> None:
    for query in ("prefix=%ff", "limit=1&limit=2", "prefix=a&prefix=b"):
        assert raw(server, "GET", f"{bucket.path}/streams?{query}")[0] == 400


def test_1_4_no_such_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
    assert_problem(client.get(f"/ds/{bucket_id}/streams"), 404, "bucket_not_found")


def test_1_4_a_deleted_stream_that_a_fork_still_reads_is_not_listed(bucket: Bucket) -> None:
    bucket.stream("source").create("data")
    bucket.stream("fork").create(headers={"Stream-Forked-From": f"{bucket.path}/source"})
    assert bucket.stream("source").delete().status_code == 204
    assert (bucket.ids(), bucket.count()) == (["fork"], 1)


# -- 1.5 delete bucket


def test_1_5_an_empty_bucket_is_deleted_with_204(client: httpx.Client, bucket: Bucket) -> None:
    assert bucket.delete().status_code == 204
    assert bucket.get().status_code == 404
    assert bucket.listing().status_code == 404
    assert bucket.stream("x").put().status_code == 404
    assert bucket.create().count() == 0


def test_1_5_no_such_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
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


def test_1_5_a_stream_and_its_bucket_cannot_both_win_a_race(client: httpx.Client, server: Server) -> None:
    """Create and delete on one connection, without waiting: whatever wins, no stream is left without a bucket."""
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


def test_1_6_a_fork_of_what_is_not_there(bucket: Bucket) -> None:
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


def test_1_6_a_bucket_whose_stream_lives_on_for_forks_elsewhere_can_go(client: httpx.Client, bucket: Bucket) -> None:
    other = Bucket(client, f"{bucket.id}-z").create()
    source = bucket.stream("source").create("one")
    fork = other.stream("fork").create(headers={"Stream-Forked-From": source.path})
    source.delete()
    assert bucket.delete().status_code == 204
    assert source.get().status_code == 404
    assert fork.content() == b"one"


# -- many streams, and all storage modes


def test_100_000_streams_are_created_counted_and_listed_in_order(server: Server, bucket: Bucket, long: bool) -> None:
    """Creating stays as fast at the end as at the beginning, and a page costs what it holds."""
    count = 100_000 if long else 10_000
    steps = 10
    seconds = []
    with connect(server) as connection:
        for step in range(steps):
            started = time.perf_counter()
            for batch in range(0, count // steps, 500):
                numbers = range(batch, batch + 500)
                # Spread over the order, so that the index cannot get by with appending.
                ids = [f"{(number * 7919 + step * 104729) % 999983:06d}-{step}-{number}" for number in numbers]
                connection.send(
                    b"".join(
                        f"PUT {bucket.path}/{id_} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
                        for id_ in ids
                    )
                )
                for _ in ids:
                    assert connection.response().status == 201
            seconds.append(time.perf_counter() - started)
    assert sum(seconds[-3:]) < 3 * sum(seconds[:3]), seconds
    started = time.perf_counter()
    for _ in range(50):
        assert bucket.count() == count
    assert (time.perf_counter() - started) / 50 < 0.02
    seen: list[str] = []
    after = None
    seconds = []
    while True:
        started = time.perf_counter()
        page = bucket.listing(**({"after": after} if after else {})).json()
        seconds.append(time.perf_counter() - started)
        seen += [entry["stream_id"] for entry in page["streams"]]
        after = page["next_cursor"]
        if not page["has_more"]:
            break
    assert len(seen) == len(set(seen)) == count
    assert seen == sorted(seen)
    assert statistics.median(seconds) < 0.1


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
