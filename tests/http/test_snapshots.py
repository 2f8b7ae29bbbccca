"""Publishing snapshots, §2.1 and §2.2 of the extensions, and their limits. Tests are named after these sections."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.bucketed import Bucket, BucketStream
from tests.http.protocol import ZERO, Stream, assert_problem, offset
from tests.http.raw import RawConnection, chunked, connect, encode
from tests.http.watching import samples
from tests.serving import Server, serve
from tests.waiting import wait_until

ONE, TWO, THREE = offset(1, 3), offset(2, 6), offset(3, 11)
MAX_BYTES = 300_000
LARGE = bytes(range(256)) * 1100
"""Too large to be kept in memory, but within `MAX_BYTES`."""


@pytest.fixture(scope="module")
def limited() -> Iterator[Server]:
    """A server with limits: 300 kB per snapshot, 1 kB per ordinary body, and 2 MB in total."""
    with serve(
        moving_time=True,
        DS_LIMITS__MAX_SNAPSHOT_BYTES=str(MAX_BYTES),
        DS_HTTP__MAX_BODY_BYTES="1000",
        DS_LIMITS__MAX_MEMORY_BYTES="2000000",
        DS_SERVER__READ_TIMEOUT_SECS="600",
    ) as running:
        yield running


@pytest.fixture
def small_server(limited: Server, bucket_id: str) -> Iterator[BucketStream]:
    """A stream with the messages `one`, `two`, `three` on the server with limits."""
    with httpx.Client(base_url=limited.url) as http:
        stream = Bucket(http, bucket_id).create().stream("log").create()
        for text in ("one", "two", "three"):
            stream.append(text)
        yield stream
        stream.delete()


# -- 2.1 offsets


def test_2_1_snapshot_can_be_published_at_every_returned_offset(bucket: Bucket) -> None:
    for kind, bodies in (
        ("text/plain", [b"one", b"two"]),
        ("application/json", [b'{"a":1}', b"[1,2,3]", b"[[]]"]),
        ("application/octet-stream", [b"\x00", b"\xff" * 100]),
    ):
        stream = bucket.stream(kind.replace("/", " "), kind).create()
        offsets = [stream.tail(), *(stream.append(body) for body in bodies)]
        for at in offsets:
            stream.publish(at, f"state at {at}")
            assert stream.snapshot(at).text == f"state at {at}"
            # Ordinary reads have the same boundaries.
            assert stream.get(offset=at).status_code == 200


def test_2_1_snapshot_can_be_published_within_a_json_batch(bucket: Bucket) -> None:
    stream = bucket.stream("json", "application/json").create('[{"a":1},{"a":2},{"a":3}]')
    stream.publish(offset(2, 16))
    assert stream.get(offset=offset(2, 16)).json() == [{"a": 3}]


# -- 2.2 publish


def test_2_2_publish_is_204(log_stream: BucketStream) -> None:
    response = log_stream.put_snapshot(TWO, "state")
    assert (response.status_code, response.content) == (204, b"")
    assert response.headers["stream-snapshot-offset"] == TWO


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/json", "application/x-custom+cbor", 'text/plain; charset="utf-8"; x=y', "IMAGE/PNG"],
)
def test_2_2_the_content_type_is_kept_and_returned(log_stream: BucketStream, content_type: str) -> None:
    log_stream.publish(TWO, "state", content_type)
    assert log_stream.snapshot(TWO).headers["content-type"] == content_type
    assert log_stream.parts()[0].content_type == content_type


def test_2_2_the_content_type_defaults_to_octet_stream(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state", None)
    assert log_stream.snapshot(TWO).headers["content-type"] == "application/octet-stream"


def test_2_2_a_malformed_content_type_is_400_and_publishes_nothing(log_stream: BucketStream) -> None:
    assert_problem(log_stream.put_snapshot(TWO, "state", "nonsense"), 400, "invalid_content_type")
    assert log_stream.latest().status_code == 404


@pytest.mark.parametrize(
    "at",
    [
        "-1",
        "now",
        "0",
        "zzz",
        " ",
        "0000000000000002",
        "2_6",
        TWO.upper() + "0",
        TWO + "_",
        offset(2, 6).replace("_", "-"),
        "0000000000000002_000000000000000G",
        TWO.replace("0", "O", 1),
    ],
)
def test_2_2_publish_at_an_invalid_offset_is_400(log_stream: BucketStream, at: str) -> None:
    assert_problem(log_stream.put_snapshot(at), 400, "invalid_offset")
    assert log_stream.latest().status_code == 404


@pytest.mark.parametrize("at", [offset(2, 5), offset(2, 7), offset(1, 6), offset(1, 0), offset(0, 3), offset(2, 11)])
def test_2_2_publish_at_unaligned_offset_is_400(log_stream: BucketStream, at: str) -> None:
    assert_problem(log_stream.put_snapshot(at), 400, "invalid_offset")
    assert log_stream.latest().status_code == 404


def test_2_2_publish_on_a_missing_stream_is_404(bucket: Bucket) -> None:
    assert_problem(bucket.stream("none").put_snapshot(ZERO), 404, "stream_not_found")


def test_2_2_publish_in_a_missing_bucket_is_404(client: httpx.Client, bucket_id: str) -> None:
    assert_problem(Bucket(client, bucket_id).stream("none").put_snapshot(ZERO), 404, "bucket_not_found")


@pytest.mark.parametrize("at", [offset(4, 12), offset(3, 12), offset(99, 999), "f" * 16 + "_" + "f" * 16])
def test_2_2_publish_beyond_the_tail_is_409(log_stream: BucketStream, at: str) -> None:
    assert_problem(log_stream.put_snapshot(at), 409, "conflict")
    assert log_stream.latest().status_code == 404


@pytest.mark.parametrize("at", [ZERO, ONE, offset(1, 4), offset(0, 1)])
def test_2_2_publish_before_the_earliest_retained_offset_is_410(log_stream: BucketStream, at: str) -> None:
    log_stream.publish(TWO, "state")
    assert_problem(log_stream.put_snapshot(at, "older"), 410, "offset_gone")
    assert log_stream.snapshot(TWO).content == b"state"


def test_2_2_publish_of_too_large_a_snapshot_is_413(small_server: BucketStream) -> None:
    small_server.publish(TWO, b"x" * MAX_BYTES)
    assert_problem(small_server.put_snapshot(THREE, b"x" * (MAX_BYTES + 1)), 413, "payload_too_large")
    assert small_server.snapshot(TWO).content == b"x" * MAX_BYTES
    assert small_server.snapshot(THREE).status_code == 404


def test_2_2_publish_of_too_large_a_chunked_snapshot_is_413(small_server: BucketStream) -> None:
    pieces = itertools.repeat(b"x" * 10_000, 31)
    response = small_server.http.put(f"{small_server.path}/snapshot/{TWO}", content=pieces)
    assert_problem(response, 413, "payload_too_large")
    assert small_server.latest().status_code == 404


def test_2_2_a_snapshot_may_be_larger_than_other_bodies(small_server: BucketStream) -> None:
    assert small_server.post("x" * 1001).status_code == 413
    small_server.publish(TWO, LARGE)
    assert small_server.snapshot(TWO).content == LARGE


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 262_143, 262_144, 262_145])
def test_2_2_snapshot_of_any_size_is_returned_unchanged(small_server: BucketStream, size: int) -> None:
    content = (LARGE * 2)[:size]
    small_server.publish(TWO, content)
    response = small_server.snapshot(TWO)
    assert (response.content, response.headers["content-length"]) == (content, str(size))
    assert small_server.parts()[0].body == content


@pytest.mark.parametrize("piece", [1, 1000, 65_536, 262_144])
def test_2_2_a_snapshot_may_be_chunked(server: Server, log_stream: BucketStream, piece: int) -> None:
    content = LARGE[: piece * 300] if piece == 1 else LARGE
    pieces = [content[at : at + piece] for at in range(0, len(content), piece)]
    with connect(server) as connection:
        head = encode("PUT", f"{log_stream.path}/snapshot/{TWO}", headers={"Transfer-Encoding": "chunked"})
        connection.send(head + chunked(*pieces))
        assert connection.response().status == 204
        # The connection still works.
        assert connection.request("GET", f"{log_stream.path}/snapshot/{TWO}").body == content


def test_2_2_the_client_may_wait_for_100_continue(server: Server, log_stream: BucketStream) -> None:
    headers = {"Expect": "100-continue", "Content-Length": str(len(LARGE))}
    with connect(server) as connection:
        connection.send(encode("PUT", f"{log_stream.path}/snapshot/{TWO}", headers=headers))
        assert connection.response().status == 100
        connection.send(LARGE)
        assert connection.response().status == 204
    assert log_stream.snapshot(TWO).content == LARGE


@pytest.mark.parametrize(
    ("at", "length", "status"), [("zzz", 300_000, 400), (offset(9, 99), 300_000, 409), (TWO, 2**40, 413)]
)
def test_2_2_a_refusal_is_sent_before_the_body(
    server: Server, log_stream: BucketStream, at: str, length: int, status: int
) -> None:
    headers = {"Expect": "100-continue", "Content-Length": str(length)}
    with connect(server) as connection:
        connection.send(encode("PUT", f"{log_stream.path}/snapshot/{at}", headers=headers))
        assert connection.response().status == status


def test_2_2_a_pipelined_snapshot_is_answered_in_order(server: Server, log_stream: BucketStream) -> None:
    """Pipelined: an append, a large snapshot at the new tail, and a read of it."""
    after = offset(4, 15)
    with connect(server) as connection:
        connection.send(
            encode("POST", log_stream.path, headers={"Content-Type": "text/plain"}, body=b"four")
            + encode("PUT", f"{log_stream.path}/snapshot/{after}", body=LARGE)
            + encode("GET", f"{log_stream.path}/snapshot/{after}")
            + encode("PUT", f"{log_stream.path}/snapshot/{ONE}", body=LARGE)
            + encode("GET", f"{log_stream.path}/bootstrap")
        )
        assert [connection.response().status for _ in range(2)] == [204, 204]
        assert connection.response().body == LARGE
        # If the body is sent although it was refused, the connection is closed, but the answer is never lost.
        assert connection.response().status == 410


def test_2_2_retention_effect_every_offset_before_is_410(log_stream: BucketStream) -> None:
    log_stream.publish(TWO)
    for at in ("-1", ZERO, ONE, offset(1, 2), offset(0, 6)):
        for query in ("", "&live=long-poll", "&live=sse"):
            response = log_stream.http.get(f"{log_stream.path}?offset={at}{query}")
            assert_problem(response, 410, "offset_gone")
            assert response.headers["stream-earliest-offset"] == TWO
    assert_problem(log_stream.get(), 410, "offset_gone")
    assert log_stream.get(offset=TWO).content == b"three"
    assert log_stream.get(offset=THREE).status_code == 200
    assert log_stream.get(offset="now").status_code == 200


def test_2_2_snapshot_at_the_beginning_drops_no_messages(log_stream: BucketStream) -> None:
    log_stream.publish(ZERO, "empty state")
    assert log_stream.content() == b"onetwothree"
    assert log_stream.snapshot(ZERO).content == b"empty state"


def test_2_2_new_snapshot_replaces_the_previous_one_at_once(log_stream: BucketStream) -> None:
    log_stream.publish(ONE, "first", "text/x-first")
    log_stream.publish(TWO, "second", "text/x-second")
    assert log_stream.snapshot(ONE).status_code == 404
    assert log_stream.snapshot(TWO).content == b"second"
    assert log_stream.latest().headers["location"].rpartition("/")[2] == TWO
    assert log_stream.head().headers["stream-snapshot-offset"] == TWO
    # Also at the same offset.
    log_stream.publish(TWO, "second, corrected", "text/x-third")
    response = log_stream.snapshot(TWO)
    assert (response.content, response.headers["content-type"]) == (b"second, corrected", "text/x-third")


def test_2_2_publishing_does_not_block_appends(server: Server, log_stream: BucketStream) -> None:
    """During a slow upload everything else continues, and the offset of the snapshot does not change."""
    with connect(server) as connection:
        connection.send(
            encode("PUT", f"{log_stream.path}/snapshot/{THREE}", headers={"Content-Length": str(len(LARGE))})
        )
        connection.send(LARGE[:100_000])
        for number in range(50):
            log_stream.append(f"{number % 10}")
        assert log_stream.content().startswith(b"onetwothree0123")
        connection.send(LARGE[100_000:])
        assert connection.response().status == 204
    assert log_stream.get(offset=THREE).content == b"0123456789" * 5
    assert log_stream.snapshot(THREE).headers["stream-up-to-date"] == "false"


def begin_upload(connection: RawConnection, path: str) -> None:
    """Send the first part of a snapshot. The 100 means that the server has accepted it for the present stream."""
    headers = {"Expect": "100-continue", "Content-Length": str(len(LARGE))}
    connection.send(encode("PUT", path, headers=headers))
    assert connection.response().status == 100
    connection.send(LARGE[:1000])


def test_2_2_the_older_of_two_concurrent_snapshots_is_410(server: Server, log_stream: BucketStream) -> None:
    with connect(server) as connection:
        begin_upload(connection, f"{log_stream.path}/snapshot/{ONE}")
        log_stream.publish(TWO, "newer")
        connection.send(LARGE[1000:])
        assert connection.response().status == 410
    assert log_stream.snapshot(TWO).content == b"newer"


def test_2_2_stream_that_is_deleted_during_the_upload_is_404(server: Server, log_stream: BucketStream) -> None:
    with connect(server) as connection:
        begin_upload(connection, f"{log_stream.path}/snapshot/{TWO}")
        log_stream.delete()
        log_stream.create()
        for text in ("ONE", "TWO", "THREE"):
            log_stream.append(text)
        connection.send(LARGE[1000:])
        # The new stream has the same boundaries, but the snapshot is of the old stream.
        assert connection.response().status == 404
    assert log_stream.latest().status_code == 404


def test_2_2_client_that_disconnects_during_the_upload_publishes_nothing(
    server: Server, log_stream: BucketStream
) -> None:
    before = samples(server)["headwater_connections"]
    with connect(server) as connection:
        connection.send(encode("PUT", f"{log_stream.path}/snapshot/{TWO}", headers={"Content-Length": str(len(LARGE))}))
        connection.send(LARGE[:-1])
        wait_until(lambda: samples(server)["headwater_connections"] > before)
    wait_until(lambda: samples(server)["headwater_connections"] <= before)
    assert log_stream.latest().status_code == 404
    assert log_stream.content() == b"onetwothree"


def test_2_2_a_client_that_sends_too_slowly_is_408(small_server: BucketStream, limited: Server) -> None:
    with connect(limited) as connection:
        connection.send(
            encode("PUT", f"{small_server.path}/snapshot/{TWO}", headers={"Content-Length": str(len(LARGE))})
        )
        for _ in range(3):
            connection.send(b"x" * 10)
            assert small_server.latest().status_code == 404, "the server has read what was sent before this request"
            limited.pass_time(250)
        assert connection.response().status == 408
    assert small_server.latest().status_code == 404


def test_2_2_a_closed_stream_accepts_a_snapshot(log_stream: BucketStream) -> None:
    log_stream.close()
    log_stream.publish(THREE, "final")
    response = log_stream.snapshot(THREE)
    assert (response.headers["stream-up-to-date"], response.headers["stream-closed"]) == ("true", "true")


def test_2_2_publishing_restarts_a_sliding_window(
    moving_server: Server, moving_client: httpx.Client, bucket_id: str
) -> None:
    stream = Bucket(moving_client, bucket_id).create().stream("ttl").create("one", headers={"Stream-TTL": "3600"})
    moving_server.pass_time(2400)
    stream.publish(ONE)
    moving_server.pass_time(2400)
    assert stream.snapshot(ONE).status_code == 200


def test_2_2_only_the_bucketed_surface_has_snapshots(client: httpx.Client, stream: Stream) -> None:
    stream.create("one")
    assert client.put(f"{stream.path}/snapshot/{ONE}", content="x").status_code == 201
    assert stream.content() == b"one"


# -- limits and storage modes


def test_snapshots_count_against_the_memory_limit_and_are_freed(small_server: BucketStream) -> None:
    """The limit is 2 MB: if nothing were freed, the seventh snapshot of 300 kB would not fit."""
    for number in range(30):
        small_server.publish(THREE, bytes([number]) * MAX_BYTES)
    streams = [small_server.bucket.stream(f"other {number}").create("x") for number in range(5)]
    for stream in streams:
        stream.publish(offset(1, 1), b"x" * MAX_BYTES)
    assert_problem(
        small_server.bucket.stream("too many").create("x").put_snapshot(ZERO, b"x" * MAX_BYTES), 413, "memory_full"
    )
    for stream in streams:
        stream.delete()
    for number in range(30):
        # Aborted and refused uploads are freed as well.
        assert small_server.put_snapshot(offset(9, 99), b"x" * MAX_BYTES).status_code == 409
        small_server.publish(THREE, bytes([number]) * MAX_BYTES)


ONE_STORE: dict[str, Any] = {"DS_SERVER__WORKERS": "1"}
"""For tests that look at the files of the store."""


def blobs(directory: Path) -> list[Path]:
    return sorted((directory / "data" / "streams" / "blobs").iterdir())


def wait_for_blobs(directory: Path, count: int) -> None:
    """Superseded blobs are deleted shortly afterwards."""
    wait_until(lambda: len(blobs(directory)), lambda found: found == count, what="number of blobs")


def test_snapshots_survive_a_kill_and_only_the_latest_is_kept(tmp_path: Path, persistent_mode: str) -> None:
    with (
        serve(directory=tmp_path, **ONE_STORE, DS_STORAGE__MODE=persistent_mode) as first,
        httpx.Client(base_url=first.url) as http,
    ):
        stream = Bucket(http, "bucket").create().stream("log").create()
        for text in ("one", "two", "three"):
            stream.append(text)
        for at in (ONE, TWO):
            stream.publish(at, LARGE + at.encode())
        other = Bucket(http, "bucket").stream("short").create("x")
        other.publish(offset(1, 1), "gone")
        other.delete()
        wait_for_blobs(tmp_path, 1)
        # A file as left by a crash in the middle of a publish.
        (tmp_path / "data/streams/blobs/0123456789abcdef.part").write_bytes(b"half")
        (tmp_path / "data/streams/blobs/0123456789abcdee").write_bytes(b"orphan")
        first.kill()
    with (
        serve(directory=tmp_path, **ONE_STORE, DS_STORAGE__MODE=persistent_mode) as second,
        httpx.Client(base_url=second.url) as http,
    ):
        stream = Bucket(http, "bucket").stream("log")
        assert len(blobs(tmp_path)) == 1
        assert stream.head().headers["stream-snapshot-offset"] == TWO
        assert stream.snapshot(TWO).content == LARGE + TWO.encode()
        assert stream.snapshot(ONE).status_code == 404
        assert_problem(stream.get(offset="-1"), 410, "offset_gone")
        assert [part.body for part in stream.parts()] == [LARGE + TWO.encode(), b"three"]
        assert stream.delete().status_code == 204
        wait_for_blobs(tmp_path, 0)


def test_a_damaged_snapshot_is_never_served(tmp_path: Path) -> None:
    with (
        serve(directory=tmp_path, **ONE_STORE, DS_STORAGE__MODE="file-durable") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        stream = Bucket(http, "bucket").create().stream("log").create("one")
        stream.publish(ONE, LARGE * 4)
        path = blobs(tmp_path)[0]
        healthy = path.read_bytes()
        for at in (0, len(LARGE) * 4 - 1, len(LARGE) * 4 + 2, len(healthy) - 1):
            damaged = bytearray(healthy)
            damaged[at] ^= 1
            path.write_bytes(damaged)
            for address in (f"{stream.path}/snapshot/{ONE}", f"{stream.path}/bootstrap"):
                try:
                    response = http.get(address)
                except httpx.RemoteProtocolError:
                    continue  # The response is cut off, and its Content-Length shows that.
                assert_problem(response, 500, "data_corrupt")
        path.write_bytes(healthy)
        assert stream.snapshot(ONE).content == LARGE * 4
        path.unlink()
        assert_problem(stream.snapshot(ONE), 500, "data_corrupt")
        stream.publish(ONE, "again")
        assert stream.snapshot(ONE).content == b"again"


def test_many_publishers_at_once_leave_one_snapshot(tmp_path: Path) -> None:
    with (
        serve(directory=tmp_path, **ONE_STORE, DS_STORAGE__MODE="file-durable") as server,
        httpx.Client(base_url=server.url) as http,
    ):
        stream = Bucket(http, "bucket").create().stream("log").create()
        offsets = [stream.append(f"{number}") for number in range(20)]
        codes: list[int] = []

        def publish(number: int) -> None:
            with httpx.Client(base_url=server.url, timeout=60) as own:
                content = bytes([number]) * (200_000 + number)
                codes.append(own.put(f"{stream.path}/snapshot/{offsets[number]}", content=content).status_code)

        threads = [threading.Thread(target=publish, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(codes) <= {204, 410}
        assert 204 in codes
        assert stream.head().headers["stream-snapshot-offset"] == offsets[19]
        assert stream.snapshot(offsets[19]).content == bytes([19]) * 200_019
        wait_for_blobs(tmp_path, 1)
