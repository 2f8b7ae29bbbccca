"""The list of the streams of a bucket, §1.4 of the extensions. Tests are named after the section."""

from __future__ import annotations

import time
from typing import Any

import httpx
import psutil
import pytest

from tests.http.bucketed import Bucket
from tests.http.protocol import ZERO, assert_problem, byte_position, offset
from tests.http.raw import connect, request_path
from tests.serving import Server

ENTRY_FIELDS = {"stream_id", "status", "content_type", "tail_offset", "created_at_ms", "last_write_at_ms"}


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
    # The byte position counts a separator after each message, which is not payload.
    assert second["tail_offset"] == byte_position(second["next_offset"]) - int(second["next_offset"][:16], 16)


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


def test_1_4_prefix_and_after_can_be_combined(bucket: Bucket) -> None:
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
def test_1_4_a_limit_of_1_to_1000_is_accepted(bucket: Bucket, limit: str) -> None:
    assert bucket.listing(limit=limit).status_code == 200


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "+5", "05", "1.0", "", "x", "10000", "\u0661"])
def test_1_4_any_other_limit_is_400(bucket: Bucket, limit: str) -> None:
    assert_problem(bucket.listing(limit=limit), 400, "bad_request")


def test_1_4_a_malformed_query_is_400(server: Server, bucket: Bucket) -> None:
    for query in ("prefix=%ff", "limit=1&limit=2", "prefix=a&prefix=b"):
        assert request_path(server, "GET", f"{bucket.path}/streams?{query}")[0] == 400


def test_1_4_missing_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
    assert_problem(client.get(f"/ds/{bucket_id}/streams"), 404, "bucket_not_found")


def test_1_4_a_deleted_stream_that_a_fork_still_reads_is_not_listed(bucket: Bucket) -> None:
    bucket.stream("source").create("data")
    bucket.stream("fork").create(headers={"Stream-Forked-From": f"{bucket.path}/source"})
    assert bucket.stream("source").delete().status_code == 204
    assert (bucket.ids(), bucket.count()) == (["fork"], 1)


def cpu_s(server: Server) -> float:
    """CPU time of the server so far, which other load on the machine does not change."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children()]
    return sum(sum(process.cpu_times()[:2]) for process in processes)


@pytest.mark.one_process
def test_100_000_streams_are_created_counted_and_listed_in_order(server: Server, bucket: Bucket, long: bool) -> None:
    """Creation does not become slower, and the cost of a page depends on its size."""
    count = 100_000 if long else 10_000
    steps = 10
    seconds = []
    with connect(server) as connection:
        for step in range(steps):
            started_s = cpu_s(server)
            for batch in range(0, count // steps, 500):
                numbers = range(batch, batch + 500)
                # In mixed order, so that the index cannot just append.
                ids = [f"{(number * 7919 + step * 104729) % 999983:06d}-{step}-{number}" for number in numbers]
                connection.send(
                    b"".join(
                        f"PUT {bucket.path}/{id_} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
                        for id_ in ids
                    )
                )
                for _ in ids:
                    assert connection.response().status == 201
            seconds.append(cpu_s(server) - started_s)
    # The least of several: what other programs take from the machine is not in all of them.
    assert min(seconds[-3:]) < 3 * min(seconds[:3]), seconds
    started_s = cpu_s(server)
    for _ in range(50):
        assert bucket.count() == count
    assert (cpu_s(server) - started_s) / 50 < 0.02
    seen: list[str] = []
    after = None
    pages = 0
    started_s = cpu_s(server)
    while True:
        page = bucket.listing(**({"after": after} if after else {})).json()
        pages += 1
        seen += [entry["stream_id"] for entry in page["streams"]]
        after = page["next_cursor"]
        if not page["has_more"]:
            break
    assert len(seen) == len(set(seen)) == count
    assert seen == sorted(seen)
    assert (cpu_s(server) - started_s) / pages < 0.1
