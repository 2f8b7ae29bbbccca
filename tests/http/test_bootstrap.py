"""Bootstrap, as described in §3 of the extensions. Tests are named after its sections."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.http.bucketed import Bucket, BucketStream, MimePart, parts_of
from tests.http.protocol import ZERO, Stream, assert_problem, offset
from tests.http.raw import connect, encode
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve
from tests.waiting import wait_until

ONE, TWO, THREE = offset(1, 3), offset(2, 6), offset(3, 11)
OCTETS = "application/octet-stream"


def text(*bodies: str) -> list[MimePart]:
    return [MimePart("text/plain", body.encode()) for body in bodies]


# -- 3.1 request


@pytest.mark.parametrize("live", ["sse", "long-poll", "", "true", "other"])
def test_3_1_a_live_parameter_is_400(log_stream: BucketStream, live: str) -> None:
    assert_problem(log_stream.bootstrap(live=live), 400, "bad_request")


def test_3_1_other_parameters_are_ignored(log_stream: BucketStream) -> None:
    response = log_stream.bootstrap(offset=TWO, until=TWO, prefix="x")
    assert parts_of(response) == [MimePart(OCTETS, b""), *text("one", "two", "three")]


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_3_1_other_methods_are_405(log_stream: BucketStream, method: str) -> None:
    response = log_stream.http.request(method, f"{log_stream.path}/bootstrap")
    assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD, OPTIONS")


# -- 3.2 response


def test_3_2_without_a_snapshot_the_first_part_is_empty(log_stream: BucketStream) -> None:
    response = log_stream.bootstrap()
    assert response.status_code == 200
    assert response.headers["stream-snapshot-offset"] == "-1"
    assert response.headers["stream-next-offset"] == THREE
    assert response.headers["stream-up-to-date"] == "true"
    assert response.headers["cache-control"] == "no-store"
    assert parts_of(response) == [MimePart(OCTETS, b""), *text("one", "two", "three")]


def test_3_2_bootstrap_of_an_empty_stream_has_one_empty_part(bucket: Bucket) -> None:
    stream = bucket.stream("empty").create()
    response = stream.bootstrap()
    assert (response.headers["stream-snapshot-offset"], response.headers["stream-next-offset"]) == ("-1", ZERO)
    assert parts_of(response) == [MimePart(OCTETS, b"")]


def test_3_2_the_snapshot_comes_first_then_every_update_after_it(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state", "text/x-state")
    response = log_stream.bootstrap()
    assert response.headers["stream-snapshot-offset"] == TWO
    assert response.headers["stream-next-offset"] == THREE
    assert response.headers["stream-up-to-date"] == "true"
    assert parts_of(response) == [MimePart("text/x-state", b"state"), *text("three")]
    log_stream.publish(THREE, "all", "text/x-state")
    assert log_stream.parts() == [MimePart("text/x-state", b"all")]


def test_3_2_empty_snapshot_is_sent_as_a_snapshot(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, b"", "text/x-empty")
    response = log_stream.bootstrap()
    assert response.headers["stream-snapshot-offset"] == TWO
    assert parts_of(response) == [MimePart("text/x-empty", b""), *text("three")]


def test_3_2_body_is_formatted_like_the_example(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state", "text/x-state")
    response = log_stream.bootstrap()
    found = re.fullmatch(r"multipart/mixed; boundary=(\S+)", response.headers["content-type"])
    assert found is not None
    delimiter = f"--{found[1]}"
    assert response.text == (
        f"{delimiter}\r\nContent-Type: text/x-state\r\n\r\nstate\r\n"
        f"{delimiter}\r\nContent-Type: text/plain\r\n\r\nthree\r\n"
        f"{delimiter}--\r\n"
    )
    assert response.headers["content-length"] == str(len(response.content))


def test_3_2_a_json_update_is_one_part_byte_for_byte(bucket: Bucket) -> None:
    stream = bucket.stream("json", "application/json; charset=utf-8").create()
    stream.append(b'[{"op": "set",  "n":1.0}, "x,y", [1,2], {"b":1,"a":2,"b":3}]')
    stream.append(b"  12345678901234567890  ")
    assert [part.body for part in stream.parts()[1:]] == [
        b'{"op": "set",  "n":1.0}',
        b'"x,y"',
        b"[1,2]",
        b'{"b":1,"a":2,"b":3}',
        b"12345678901234567890",
    ]
    assert {part.content_type for part in stream.parts()[1:]} == {"application/json; charset=utf-8"}


def test_3_2_binary_payloads_are_not_reframed(bucket: Bucket) -> None:
    stream = bucket.stream("binary", OCTETS).create()
    bodies = [
        bytes(range(256)),
        b"\r\n",
        b"\r\n--",
        b"--\r\n\r\n",
        b"\x00" * 10,
        b"\r\n--headwater-",
        b"Content-Type: x\r\n\r\n",
    ]
    for body in bodies:
        stream.append(body)
    stream.publish(offset(1, 256), b"\r\n--\r\n" * 5, OCTETS)
    assert [part.body for part in stream.parts()] == [b"\r\n--\r\n" * 5, *bodies[1:]]


def test_3_2_every_response_has_its_own_boundary(log_stream: BucketStream) -> None:
    """Otherwise a client could learn the boundary from one response and put it into a message."""
    seen = set()
    for _ in range(20):
        response = log_stream.bootstrap()
        boundary = response.headers["content-type"].partition("boundary=")[2]
        assert len(boundary) >= 32
        seen.add(boundary)
        log_stream.append(f"\r\n--{boundary}--\r\n")
        assert parts_of(log_stream.bootstrap())[-1].body == f"\r\n--{boundary}--\r\n".encode()
    assert len(seen) == 20


def test_3_2_parts_have_the_boundaries_of_ordinary_reads(bucket: Bucket) -> None:
    """Every prefix of the parts ends at an offset that an ordinary read accepts."""
    stream = bucket.stream("many", OCTETS).create()
    generator = random.Random(1)
    offsets = [ZERO, *(stream.append(generator.randbytes(generator.randint(1, 3000))) for _ in range(60))]
    stream.publish(offsets[20])
    parts = stream.parts()[1:]
    for number, part in enumerate(parts, 20):
        ordinary = stream.get(offset=offsets[number]).content
        assert ordinary.startswith(part.body)
    assert b"".join(part.body for part in parts) == stream.get(offset=offsets[20]).content


def test_3_2_bootstrap_of_a_closed_stream_is_closed(log_stream: BucketStream) -> None:
    assert "stream-closed" not in log_stream.bootstrap().headers
    log_stream.close("four")
    response = log_stream.bootstrap()
    assert response.headers["stream-closed"] == "true"
    assert parts_of(response)[1:] == text("one", "two", "three", "four")


def test_3_2_head_has_the_length_and_no_body(log_stream: BucketStream) -> None:
    response = log_stream.http.head(f"{log_stream.path}/bootstrap")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == str(len(log_stream.bootstrap().content))
    assert response.headers["stream-snapshot-offset"] == "-1"


def test_3_2_missing_stream_is_404(bucket: Bucket) -> None:
    assert_problem(bucket.stream("none").bootstrap(), 404, "stream_not_found")


def test_3_2_missing_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
    assert_problem(Bucket(client, bucket_id).stream("none").bootstrap(), 404, "bucket_not_found")


@pytest.mark.parametrize("kind", ["application/json", OCTETS])
def test_3_2_long_response_equals_a_short_one(bucket: Bucket, kind: str) -> None:
    """Messages of sizes around the slice size of a long answer, after a large snapshot."""
    stream = bucket.stream("long", kind).create()
    stream.append(b'"first"' if kind != OCTETS else b"first")
    at = stream.tail()
    sizes = [10, 65_534, 65_535, 65_536, 100, 262_143, 262_144, 262_145, 1, 700_000, 3]
    messages = []
    for number, size in enumerate(sizes):
        body = json.dumps("x" * size).encode() if kind != OCTETS else bytes([number]) * size
        messages.append(body)
        stream.append(b"[" + body + b"]" if kind != OCTETS else body)
    snapshot = bytes(range(256)) * 5000
    stream.publish(at, snapshot, OCTETS)
    response = stream.bootstrap()
    assert response.headers["content-length"] == str(len(response.content))
    assert [part.body for part in parts_of(response)] == [snapshot, *messages]


def test_3_2_many_small_updates_are_separate_parts(bucket: Bucket) -> None:
    stream = bucket.stream("many", "application/json").create()
    for start in range(0, 30_000, 10_000):
        stream.append(json.dumps(list(range(start, start + 10_000))))
    stream.publish(offset(10, 20))
    assert [int(part.body) for part in stream.parts()[1:]] == list(range(10, 30_000))


def test_3_2_the_state_is_fixed_when_the_request_is_received(server: Server, bucket: Bucket) -> None:
    """Appends, newer snapshots and closure while the answer is being sent do not change it."""
    stream = bucket.stream("cut", OCTETS).create()
    old = b"old state" * 200_000
    stream.append(b"folded")
    at = stream.tail()
    updates = [bytes([number]) * 100_000 for number in range(30)]
    for update in updates:
        stream.append(update)
    stream.publish(at, old)
    tail = stream.tail()
    with connect(server) as connection:
        connection.send(encode("GET", f"{stream.path}/bootstrap"))
        _, status, fields = connection.response_head()
        for _ in range(3):
            stream.publish(stream.append(b"later" * 1000), b"new state")
        assert_problem(stream.get(offset=at), 410, "offset_gone")
        body = b"".join(connection.body_pieces(fields))
    assert status == 200
    answer = httpx.Response(200, headers=list(fields), content=body)
    assert answer.headers["stream-snapshot-offset"] == at
    assert answer.headers["stream-next-offset"] == tail
    assert [part.body for part in parts_of(answer)] == [old, *updates]
    assert [part.body for part in stream.parts()] == [b"new state"]


def test_3_2_response_is_cut_off_when_its_stream_is_deleted(server: Server, bucket: Bucket) -> None:
    stream = bucket.stream("deleted", OCTETS).create()
    for number in range(90):
        stream.append(bytes([number]) * 100_000)
    with connect(server) as connection:
        connection.send(encode("GET", f"{stream.path}/bootstrap"))
        _, status, fields = connection.response_head()
        assert status == 200
        assert stream.delete().status_code == 204
        with pytest.raises(AssertionError, match="too early"):
            b"".join(connection.body_pieces(fields))


def test_3_2_disconnected_readers_release_their_pins(server: Server, bucket: Bucket) -> None:
    """A bootstrap that is not read to its end must not keep data from being freed."""

    def held() -> int:
        metrics = bucket.http.get("/metrics").text
        return int(float(re.findall(r"^headwater_payload_bytes (\S+)$", metrics, re.MULTILINE)[0]))

    stream = bucket.stream("left", OCTETS).create()
    for number in range(90):
        stream.append(bytes([number]) * 100_000)
    before = held()
    connections = []
    for _ in range(3):
        with connect(server) as connection:
            connection.send(encode("GET", f"{stream.path}/bootstrap"))
            connection.response_head()
            connections.append(connection)
            stream.publish(stream.append(b"x"), b"state")
    wait_until(held, lambda found: found <= before - 8_000_000)
    stream.delete()


# -- 3.3 follow-up


def test_3_3_reading_continues_from_next_offset_without_gap_or_repeat(server: Server, log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state")
    at = log_stream.bootstrap().headers["stream-next-offset"]
    log_stream.append("four")
    assert log_stream.get(offset=at).content == b"four"
    assert log_stream.long_poll(at).content == b"four"
    with SseReader(server, log_stream.path, offset=at) as reader:
        assert reader.pair()[0].data == "four"


# -- 3.4 compatibility


def test_3_4_an_ordinary_read_never_returns_snapshot_bytes(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "SNAPSHOT")
    for at in (TWO, THREE, "now"):
        assert b"SNAPSHOT" not in log_stream.get(offset=at).content
    assert b"SNAPSHOT" not in log_stream.get().content


def test_3_4_bootstrap_covers_what_reads_refuse_with_410(log_stream: BucketStream) -> None:
    for at in (ONE, TWO, THREE):
        log_stream.publish(at, f"state at {at}")
        gone = log_stream.get(offset="-1")
        assert gone.status_code == 410
        response = log_stream.bootstrap()
        assert response.status_code == 200
        assert response.headers["stream-snapshot-offset"] == gone.headers["stream-earliest-offset"] == at
        assert parts_of(response)[0].body == f"state at {at}".encode()


def test_3_4_a_fork_begins_with_its_sources_snapshot(bucket: Bucket, log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state", "text/x-state")
    fork = bucket.stream("fork").create(headers={"Stream-Forked-From": log_stream.path})
    assert_problem(fork.get(offset="-1"), 410, "offset_gone")
    log_stream.publish(log_stream.append("four"), "later state")
    log_stream.delete()
    fork.append("own")
    response = fork.bootstrap()
    assert response.headers["stream-snapshot-offset"] == TWO
    assert parts_of(response) == [MimePart("text/x-state", b"state"), *text("three", "own")]
    assert fork.snapshot(TWO).content == b"state"
    fork.publish(fork.tail(), "fork state")
    assert [part.body for part in fork.parts()] == [b"fork state"]


def test_3_4_a_fork_before_the_snapshot_is_410(bucket: Bucket, log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state")
    headers = {"Stream-Forked-From": log_stream.path, "Stream-Fork-Offset": ONE}
    assert_problem(bucket.stream("fork").put(headers=headers), 410, "offset_gone")
    assert bucket.stream("fork").put(headers={**headers, "Stream-Fork-Offset": TWO}).status_code == 201
    assert bucket.stream("fork").parts()[1:] == []


def test_3_4_fork_that_cannot_be_bootstrapped_is_refused(log_stream: BucketStream, stream: Stream) -> None:
    """The base surface has no bootstrap, so a stream that begins with a snapshot cannot be forked there."""
    log_stream.publish(TWO, "state")
    assert_problem(stream.put(headers={"Stream-Forked-From": log_stream.path}), 409, "conflict")
    assert not stream.exists()


def test_3_4_fork_within_a_message_bootstraps_with_its_part_of_the_message(
    bucket: Bucket, log_stream: BucketStream
) -> None:
    headers = {"Stream-Forked-From": log_stream.path, "Stream-Fork-Offset": TWO, "Stream-Fork-Sub-Offset": "3"}
    fork = bucket.stream("fork").create(headers=headers)
    fork.append("!")
    log_stream.publish(THREE, "state")
    assert fork.parts() == [MimePart(OCTETS, b""), *text("one", "two", "thr", "!")]


@contextmanager
def serve_from_disk(directory: Path, mode: str) -> Iterator[httpx.Client]:
    """A server that holds little in memory."""
    with (
        serve(
            directory=directory,
            DS_STORAGE__MODE=mode,
            DS_STORAGE__HOT_TAIL_BYTES="400000",
            DS_STORAGE__SEGMENT_BYTES="400000",
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


def test_bootstrap_in_every_storage_mode_across_a_restart(tmp_path: Path, persistent_mode: str) -> None:
    updates = [bytes([number]) * 50_000 for number in range(60)]
    with serve_from_disk(tmp_path, persistent_mode) as http:
        stream = Bucket(http, "bucket").create().stream("log", OCTETS).create()
        offsets = [stream.append(update) for update in updates]
        stream.publish(offsets[9], b"state" * 100_000)
        assert [part.body for part in stream.parts()] == [b"state" * 100_000, *updates[10:]]
    with serve_from_disk(tmp_path, persistent_mode) as http:
        stream = Bucket(http, "bucket").stream("log", OCTETS)
        assert [part.body for part in stream.parts()] == [b"state" * 100_000, *updates[10:]]
        stream.publish(offsets[39], b"later")
        assert [part.body for part in stream.parts()] == [b"later", *updates[40:]]
