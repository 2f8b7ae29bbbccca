"""Creating, describing and deleting streams: PUT, HEAD and DELETE (protocol §5.1, §5.4, §5.5)."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.http.protocol import ZERO, Stream, assert_problem, offset
from tests.http.raw import chunked, connect, encode
from tests.serving import Server


def test_put_creates_an_empty_stream(stream: Stream) -> None:
    created = stream.put()
    assert created.status_code == 201
    assert created.headers["content-type"] == "text/plain"
    assert created.headers["stream-next-offset"] == ZERO
    assert "stream-closed" not in created.headers
    assert stream.content() == b""


def test_location_is_the_absolute_url_of_the_stream(server: Server, stream: Stream) -> None:
    assert stream.put().headers["location"] == server.stream_url(stream.name)


def test_content_type_defaults_to_octet_stream(stream: Stream) -> None:
    assert stream.put(headers={"Content-Type": ""}).headers["content-type"] == "application/octet-stream"
    assert stream.get().headers["content-type"] == "application/octet-stream"


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/json", "application/x-protobuf", "image/png", "text/html; charset=utf-8"],
)
def test_content_type_is_kept_for_all_reads(stream: Stream, content_type: str) -> None:
    stream.create(headers={"Content-Type": content_type})
    assert stream.get().headers["content-type"] == content_type
    assert stream.head().headers["content-type"] == content_type


def test_a_body_becomes_the_first_content(stream: Stream) -> None:
    created = stream.put("hello world")
    assert created.headers["stream-next-offset"] == offset(1, 11) == "0000000000000001_000000000000000b"
    assert re.fullmatch(r"0000000000000001_000000000000000b_[0-9a-f]{16}", created.headers["stream-next-offset"])
    assert stream.content() == b"hello world"


def test_a_chunked_body_becomes_the_first_content(server: Server, stream: Stream) -> None:
    headers = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
    with connect(server) as connection:
        created = connection.request("PUT", stream.path, headers=headers, body=chunked(b"one ", b"two"))
    assert (created.status, created.header("stream-next-offset")) == (201, offset(1, 7))
    assert stream.content() == b"one two"


def test_the_same_put_again_is_200_and_changes_nothing(stream: Stream) -> None:
    stream.create("first")
    again = stream.put("second")
    assert again.status_code == 200
    assert again.headers["stream-next-offset"] == offset(1, 5)
    assert again.headers["content-type"] == "text/plain"
    assert again.headers["location"] == str(again.request.url)
    assert stream.content() == b"first"


def test_a_content_type_of_more_than_1024_characters_is_400(stream: Stream) -> None:
    """Each stream keeps its content type in memory."""
    longest = "text/plain;a=" + "b" * 1011
    assert_problem(stream.put(headers={"Content-Type": longest + "b"}), 400, "invalid_content_type")
    assert stream.head().status_code == 404
    stream.create(headers={"Content-Type": longest})


def test_content_types_are_compared_case_insensitively(stream: Stream) -> None:
    stream.create(headers={"Content-Type": "text/plain"})
    assert stream.put(headers={"Content-Type": "TEXT/Plain"}).status_code == 200


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {"Content-Type": "application/json"}),
        ({}, {"Stream-TTL": "60"}),
        ({"Stream-TTL": "60"}, {}),
        ({"Stream-TTL": "60"}, {"Stream-TTL": "61"}),
        ({"Stream-TTL": "60"}, {"Stream-Expires-At": "2999-01-01T00:00:00Z"}),
        ({"Stream-Expires-At": "2999-01-01T00:00:00Z"}, {"Stream-Expires-At": "2999-01-01T00:00:01Z"}),
        ({}, {"Stream-Closed": "true"}),
        ({"Stream-Closed": "true"}, {}),
    ],
)
def test_put_with_another_configuration_is_409(stream: Stream, first: dict[str, str], second: dict[str, str]) -> None:
    stream.create("kept", headers=first)
    assert_problem(stream.put("lost", headers=second), 409, "config_mismatch")
    assert stream.content() == b"kept"


@pytest.mark.parametrize(
    "config",
    [
        {"Stream-TTL": "60"},
        {"Stream-Expires-At": "2999-01-01T00:00:00Z"},
        {"Stream-Closed": "true"},
        {"Stream-TTL": "60", "Stream-Closed": "true"},
    ],
)
def test_put_with_the_same_configuration_is_200(stream: Stream, config: dict[str, str]) -> None:
    stream.create(headers=config)
    assert stream.put(headers=config).status_code == 200


def test_a_stream_can_be_created_closed_and_empty(stream: Stream) -> None:
    created = stream.put(headers={"Stream-Closed": "true"})
    assert (created.status_code, created.headers["stream-closed"]) == (201, "true")
    assert created.headers["stream-next-offset"] == ZERO
    assert_problem(stream.post("late"), 409, "stream_closed")


def test_a_stream_can_be_created_closed_with_its_whole_content(stream: Stream) -> None:
    created = stream.put("all of it", headers={"Stream-Closed": "true"})
    assert (created.status_code, created.headers["stream-closed"]) == (201, "true")
    read = stream.get()
    assert (read.content, read.headers["stream-closed"]) == (b"all of it", "true")


@pytest.mark.parametrize("content_type", ["text", "text/", "/plain", "text plain", "text/plain, text/html", "🎈"])
def test_a_malformed_content_type_is_400_and_creates_nothing(stream: Stream, content_type: str) -> None:
    raw = content_type.encode()
    refused = stream.http.put(stream.path, headers=[(b"Content-Type", raw)])
    assert_problem(refused, 400, "invalid_content_type")
    assert not stream.exists()


def test_concurrent_puts_create_the_stream_once(stream: Stream) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(stream.put, [b"x"] * 16))
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]
    assert stream.content() == b"x"


def test_head_has_the_tail_and_no_body(server: Server, stream: Stream) -> None:
    stream.create("hello")
    with connect(server) as connection:
        head = connection.request("HEAD", stream.path)
        # The next answer on the connection proves that HEAD sent no body.
        assert connection.request("GET", stream.path).body == b"hello"
    assert (head.status, head.header("stream-next-offset")) == (200, offset(1, 5))
    assert head.header("content-type") == "text/plain"
    assert head.header("cache-control") == "no-store"
    assert head.header("stream-closed") is None


def test_delete_removes_the_stream_from_every_operation(stream: Stream) -> None:
    stream.create("gone")
    deleted = stream.delete()
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert stream.head().status_code == 404
    assert_problem(stream.get(), 404, "stream_not_found")
    assert_problem(stream.post("x"), 404, "stream_not_found")
    assert_problem(stream.delete(), 404, "stream_not_found")
    assert_problem(stream.long_poll("-1"), 404, "stream_not_found")
    assert_problem(stream.get(offset="-1", live="sse"), 404, "stream_not_found")
    assert_problem(stream.get(offset="now"), 404, "stream_not_found")


def test_deleted_stream_can_be_created_again_with_another_configuration(stream: Stream) -> None:
    stream.create("old data", headers={"Stream-Seq": "9"})
    stream.append("more", headers={"Stream-Seq": "9"})
    stream.delete()
    stream.create(b'{"new":1}', headers={"Content-Type": "application/json"})
    assert stream.get().content == b'[{"new":1}]'
    # Producer and Stream-Seq state are deleted with the stream.
    stream.append("2", headers={"Stream-Seq": "1", "Content-Type": "application/json"})


@pytest.mark.parametrize("method", ["PATCH", "TRACE", "PROPFIND"])
def test_other_methods_are_405_with_the_allowed_methods(stream: Stream, method: str) -> None:
    stream.create()
    refused = stream.http.request(method, stream.path)
    assert_problem(refused, 405, "method_not_allowed")
    allowed = {name.strip() for name in refused.headers["allow"].split(",")}
    assert allowed == {"GET", "HEAD", "PUT", "POST", "DELETE", "OPTIONS"}


def test_two_puts_in_one_packet_are_answered_in_order(server: Server, stream: Stream) -> None:
    put = encode("PUT", stream.path, headers={"Content-Type": "text/plain"})
    with connect(server) as connection:
        connection.send(put + put)
        assert [connection.response().status, connection.response().status] == [201, 200]
