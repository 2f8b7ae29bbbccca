"""Catch-up reads: where they start and stop, and their headers (protocol §5.6, §6)."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.http.protocol import ZERO, Stream, assert_problem, byte_position, offset, stream_on
from tests.http.raw import connect
from tests.serving import Server, serve

CHUNK_BYTES = 64


@pytest.fixture(scope="module")
def chunky() -> Iterator[Server]:
    """A server whose chunks are 64 bytes."""
    with serve(DS_LIMITS__MAX_CHUNK_BYTES=str(CHUNK_BYTES)) as running:
        yield running


def test_read_returns_the_next_offset_and_up_to_date(stream: Stream) -> None:
    stream.create("hello ")
    stream.append("world")
    read = stream.get()
    assert (read.status_code, read.content) == (200, b"hello world")
    assert read.headers["content-type"] == "text/plain"
    assert read.headers["stream-next-offset"] == offset(2, 11)
    assert read.headers["stream-up-to-date"] == "true"
    assert "stream-closed" not in read.headers


def test_minus_one_and_no_offset_mean_the_beginning(stream: Stream) -> None:
    stream.create("data")
    assert stream.get(offset="-1").content == stream.get().content == stream.get(offset=ZERO).content == b"data"


def test_reading_can_resume_at_every_boundary(stream: Stream) -> None:
    stream.create()
    pieces = [f"message {number};" for number in range(20)]
    tokens = [stream.append(piece) for piece in pieces]
    for number, token in enumerate(tokens):
        assert stream.get(offset=token).text == "".join(pieces[number + 1 :])


def test_a_read_at_the_tail_is_empty_and_up_to_date(stream: Stream) -> None:
    stream.create("data")
    read = stream.get(offset=offset(1, 4))
    assert (read.status_code, read.content) == (200, b"")
    assert read.headers["stream-next-offset"] == offset(1, 4)
    assert read.headers["stream-up-to-date"] == "true"


def test_t17_now_is_the_tail_without_etag_and_uncacheable(stream: Stream, json_stream: Stream) -> None:
    stream.create("history")
    json_stream.create("[1,2]")
    for one, body in ((stream, b""), (json_stream, b"[]")):
        read = one.get(offset="now")
        assert (read.status_code, read.content) == (200, body)
        assert read.headers["stream-next-offset"] == one.tail()
        assert read.headers["stream-up-to-date"] == "true"
        assert read.headers["cache-control"] == "no-store"
        assert "etag" not in read.headers
        assert one.get(offset="now", headers={"If-None-Match": "*"}).status_code == 200


def test_reading_from_now_returns_later_messages(stream: Stream) -> None:
    stream.create("history")
    at = stream.get(offset="now").headers["stream-next-offset"]
    stream.append("news")
    assert stream.get(offset=at).content == b"news"


MALFORMED = [
    "",
    "0",
    "abc",
    "-2",
    "-1 ",
    "NOW",
    "now ",
    "0,1",
    "0 1",
    "1_1",
    "../../etc/passwd",
    "0000000000000001-0000000000000004",
    "0000000000000001_000000000000004",
    "0000000000000001_00000000000000004",
    "000000000000000A_0000000000000004",
    "+000000000000001_0000000000000004",
    "000000000000000g_0000000000000004",
    "0000000000000001_0000000000000004\x00",
    "0000000000000001_0000000000000004\n",
    "\u0660000000000000001_0000000000000004",
    "-000000000000001_0000000000000004",
    "x" * 4000,
]


@pytest.mark.parametrize("token", MALFORMED, ids=lambda token: repr(token)[:40])
@pytest.mark.parametrize("live", [None, "long-poll", "sse"])
def test_a_malformed_offset_is_400(stream: Stream, token: str, live: str | None) -> None:
    stream.create("data")
    query: dict[str, Any] = {"offset": token} | ({"live": live} if live else {})
    assert_problem(stream.get(**query), 400, "invalid_offset")


def test_two_offsets_are_400(stream: Stream) -> None:
    stream.create("data")
    assert stream.http.get(f"{stream.path}?offset=-1&offset=-1").status_code == 400


@pytest.mark.parametrize("live", [None, "long-poll", "sse"])
@pytest.mark.parametrize(
    "token",
    [
        offset(1, 4),
        offset(1, 6),
        offset(0, 5),
        offset(2, 5),
        offset(0, 1),
        offset(1, 0),
        offset(2, 9),
        offset(2, 11),
        offset(3, 10),
        offset(3, 15),
        offset(2**64 - 1, 2**64 - 1),
    ],
)
def test_t32_offset_that_is_not_a_boundary_of_the_stream_is_400(stream: Stream, token: str, live: str | None) -> None:
    stream.create("12345")
    stream.append("67890")
    query: dict[str, Any] = {"offset": token} | ({"live": live} if live else {})
    assert_problem(stream.get(**query), 400, "invalid_offset")


def test_an_unknown_live_mode_is_400(stream: Stream) -> None:
    stream.create()
    assert stream.get(offset="-1", live="websocket").status_code == 400


def test_unknown_query_parameters_do_not_matter(stream: Stream) -> None:
    stream.create("data")
    assert stream.get(offset="-1", foo="bar", utm_source="x").content == b"data"


def test_read_of_a_missing_stream_is_404(stream: Stream) -> None:
    assert_problem(stream.get(), 404, "stream_not_found")
    assert_problem(stream.get(offset="garbage" * 3), 404, "stream_not_found")


def test_an_offset_may_be_percent_encoded(server: Server, stream: Stream) -> None:
    stream.create("data")
    encoded = "".join(f"%{ord(character):02X}" for character in offset(1, 4))
    with connect(server) as connection:
        read = connection.request("GET", f"{stream.path}?%6Fffset={encoded}")
    assert (read.status, read.header("stream-next-offset")) == (200, offset(1, 4))


def test_a_long_stream_is_read_in_chunks_of_whole_messages(chunky: Server) -> None:
    rng = random.Random(7)
    messages = [bytes([65 + number % 26]) * rng.randint(1, 40) for number in range(60)]
    boundaries = {0}
    with stream_on(chunky, "chunks") as stream:
        stream.create()
        for message in messages:
            boundaries.add(byte_position(stream.append(message)))
        whole, at, read_bytes = b"".join(messages), "-1", b""
        while True:
            read = stream.get(offset=at)
            assert 0 < len(read.content) <= CHUNK_BYTES
            read_bytes += read.content
            at = read.headers["stream-next-offset"]
            assert byte_position(at) == len(read_bytes)
            assert byte_position(at) in boundaries
            if read_bytes == whole:
                break
            assert "stream-up-to-date" not in read.headers
        assert read.headers["stream-up-to-date"] == "true"


def test_a_chunk_is_as_full_as_whole_messages_allow(chunky: Server) -> None:
    with stream_on(chunky, "full-chunks") as stream:
        stream.create()
        for _ in range(20):
            stream.append("x" * 16)
        assert len(stream.get().content) == CHUNK_BYTES


def test_message_larger_than_a_chunk_is_returned_alone(chunky: Server) -> None:
    with stream_on(chunky, "large-message") as stream:
        stream.create("small")
        stream.append("L" * 1000)
        stream.append("small")
        sizes, at = [], "-1"
        while "stream-up-to-date" not in (read := stream.get(offset=at)).headers:
            sizes.append(len(read.content))
            at = read.headers["stream-next-offset"]
    assert [*sizes, len(read.content)] == [5, 1000, 5]


def test_only_the_last_chunk_of_a_closed_stream_reports_closure(chunky: Server) -> None:
    with stream_on(chunky, "closed-chunks") as stream:
        stream.create()
        for _ in range(6):
            stream.append("x" * 30)
        stream.close()
        up_to_date, at = [], "-1"
        while "stream-closed" not in (read := stream.get(offset=at)).headers:
            up_to_date.append("stream-up-to-date" in read.headers)
            at = read.headers["stream-next-offset"]
        assert up_to_date == [False, False]
        assert read.headers["stream-up-to-date"] == "true"


def test_t20_body_and_headers_are_consistent(server: Server, stream: Stream) -> None:
    """While a writer appends, a body is always exactly the data between its offset and the next offset."""
    stream.create()
    stop = threading.Event()

    def write() -> None:
        with httpx.Client(base_url=server.url, verify=False) as http:
            number = 0
            while not stop.is_set():
                number += 1
                http.post(stream.path, content=b"x" * (number % 9 + 1), headers={"Content-Type": "text/plain"})

    writer = threading.Thread(target=write)
    writer.start()
    try:
        at, total = ZERO, 0
        for _ in range(400):
            read = stream.get(offset=at)
            begin, at = at, read.headers["stream-next-offset"]
            assert len(read.content) == byte_position(at) - byte_position(begin)
            total += len(read.content)
    finally:
        stop.set()
        writer.join()
    assert total == byte_position(at) > 0


def test_t20_reads_of_a_recreated_stream_are_complete_or_404(server: Server, stream: Stream) -> None:
    stop = threading.Event()

    def churn() -> None:
        with httpx.Client(base_url=server.url, verify=False) as http:
            while not stop.is_set():
                http.put(stream.path, content=b"12345", headers={"Content-Type": "text/plain"})
                http.post(stream.path, content=b"67890", headers={"Content-Type": "text/plain"})
                http.delete(stream.path)

    churning = threading.Thread(target=churn)
    churning.start()
    try:
        seen = set()
        for _ in range(500):
            read = stream.get()
            seen.add((read.status_code, read.content if read.status_code == 200 else b""))
    finally:
        stop.set()
        churning.join()
    assert seen <= {(404, b""), (200, b"12345"), (200, b"1234567890")}
    assert len(seen) > 1


def test_t11_offset_of_a_deleted_stream_is_not_valid_for_its_successor(stream: Stream) -> None:
    stream.create("a long first life")
    old = stream.tail()
    stream.delete()
    stream.create("short")
    assert_problem(stream.get(offset=old), 410, "stream_recreated")
    # Without the incarnation it is only a position that the new stream does not have.
    assert_problem(stream.get(offset=old[:33]), 400, "invalid_offset")
