"""Identifiers of buckets and of their streams, §1.1 of the extensions. Tests are named after the section."""

from __future__ import annotations

import httpx
import pytest

from tests.http.bucketed import Bucket
from tests.http.protocol import ZERO, Stream, assert_problem
from tests.http.raw import request_path
from tests.serving import Server


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
    status, body = request_path(server, method, f"/ds/{bucket_id}")
    assert status == 400
    assert b'"invalid_name"' in body


@pytest.mark.parametrize("method", ["PUT", "GET", "POST", "HEAD", "DELETE"])
def test_1_1_an_invalid_bucket_id_is_400_for_its_streams_too(server: Server, method: str) -> None:
    for below in ("s", "streams", "s/snapshot", f"s/snapshot/{ZERO}", "s/bootstrap"):
        assert request_path(server, method, f"/ds/abc/{below}")[0] in ((400, 405) if method != "GET" else (400,))


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


def test_a_new_name_outside_buckets_has_no_control_character(client: httpx.Client, stream: Stream) -> None:
    """U+009B begins a control sequence in some terminals."""
    refused = client.put(f"{stream.path}%C2%9B31m", headers={"Content-Type": "text/plain"})
    assert_problem(refused, 400, "invalid_name")


@pytest.mark.parametrize(
    "stream_id", ["a%2fb", "a%2Fb", "%2f", "a%00b", "%00", "..", "a..b", "%2e%2e", "a...b", ".", "%2e"]
)
@pytest.mark.parametrize("method", ["PUT", "GET", "POST", "HEAD", "DELETE"])
def test_1_1_a_slash_a_nul_or_two_dots_in_a_stream_id_are_400(
    server: Server, bucket: Bucket, stream_id: str, method: str
) -> None:
    assert request_path(server, method, f"{bucket.path}/{stream_id}")[0] == 400
    assert bucket.count() == 0


@pytest.mark.parametrize("path", ["a/b", "a/b/c", "a/", "", "a/snapshot/x/y", "a/bootstrap/x", "a//b"])
def test_1_1_unknown_path_below_a_stream_is_400(server: Server, bucket: Bucket, path: str) -> None:
    assert request_path(server, "PUT", f"{bucket.path}/{path}")[0] == 400
    assert bucket.count() == 0


@pytest.mark.parametrize("stream_id", ["%", "a%4", "a%zz", "%ff", "a%c3", "%ed%a0%80", "%c0%af"])
def test_1_1_stream_id_that_is_not_utf_8_is_400(server: Server, bucket: Bucket, stream_id: str) -> None:
    assert request_path(server, "PUT", f"{bucket.path}/{stream_id}")[0] == 400


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
    status, body = request_path(server, method, f"{bucket.path}/{spelling}")
    assert status == 400
    assert b"reserved" in body
    assert request_path(server, "PUT", f"{bucket.path}/{spelling}/snapshot/{ZERO}")[0] == 400
    assert request_path(server, "GET", f"{bucket.path}/{spelling}/bootstrap")[0] == 400


def test_1_1_an_id_is_decoded_once_and_has_one_spelling(server: Server, bucket: Bucket) -> None:
    assert request_path(server, "PUT", f"{bucket.path}/%2561")[0] == 201
    assert bucket.ids() == ["%61"]
    bucket.stream("plain").create("data")
    assert request_path(server, "GET", f"{bucket.path}/%70l%61in")[1] == b"data"


def test_1_1_the_two_surfaces_have_separate_names(client: httpx.Client, bucket: Bucket) -> None:
    bucket.stream("x").create("in the bucket")
    for name in (f"{bucket.id}/x", f"ds/{bucket.id}/x", f"/ds/{bucket.id}/x", "x"):
        assert client.get(f"/v1/stream/{name}").status_code in (400, 404)
    base = Stream(client, f"ds/{bucket.id}/x").create("on the base surface")
    assert bucket.stream("x").content() == b"in the bucket"
    assert base.delete().status_code == 204
    assert bucket.stream("x").content() == b"in the bucket"
