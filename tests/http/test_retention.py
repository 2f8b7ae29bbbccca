"""Retention: data before the earliest retained offset cannot be read any more, and its bytes are freed.

The effect of snapshots is the extensions' §2.2; age, size and the permission to drop are ours (docs/decisions.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.http.bucketed import Bucket, BucketStream
from tests.http.protocol import ZERO, Stream, assert_problem, offset
from tests.http.raw import ConnectionEnded, connect, encode
from tests.http.sse_reader import SseReader
from tests.http.watching import wait_for_live_readers
from tests.serving import Server, serve
from tests.waiting import wait_until

ONE, TWO, THREE = offset(1, 3), offset(2, 6), offset(3, 11)
OCTETS = "application/octet-stream"
HOUR_S = 3600
DROP = {"Stream-Retention-Drop": "allowed"}


def metric(http: httpx.Client, name: str) -> float:
    found = re.findall(rf"^headwater_{name} (\S+)$", http.get("/metrics").text, re.MULTILINE)
    assert len(found) == 1
    return float(found[0])


@pytest.fixture
def moving_bucket(moving_client: httpx.Client, bucket_id: str) -> Bucket:
    """A bucket on the server with a manual clock."""
    return Bucket(moving_client, bucket_id).create()


def run_retention(server: Server, bucket: Bucket) -> None:
    """Advance the time by an hour, and wait until retention has processed the stream that was written last."""
    marker = bucket.stream("marker").create(headers={**DROP, "Stream-Retention-Bytes": "1"})
    for _ in range(5):
        marker.append("x")
    server.pass_time(HOUR_S)
    wait_until(lambda: "stream-earliest-offset" in marker.head().headers)


# -- live readers (§2.2: for any offset before, the server must return 410)


def test_2_2_a_long_poll_before_the_earliest_retained_offset_is_410(log_stream: BucketStream) -> None:
    log_stream.publish(TWO)
    assert_problem(log_stream.long_poll("-1"), 410, "offset_gone")
    assert_problem(log_stream.long_poll(ONE), 410, "offset_gone")
    assert log_stream.long_poll(TWO).content == b"three"


def test_2_2_a_long_poll_at_the_tail_is_not_affected_by_a_snapshot(patient: Server, bucket_id: str) -> None:
    with httpx.Client(base_url=patient.url, verify=False) as http, connect(patient) as connection:
        log_stream = Bucket(http, bucket_id).create().stream("log").create("one two three")
        connection.send(encode("GET", f"{log_stream.path}?offset=now&live=long-poll"))
        wait_for_live_readers(patient, "long-poll", 1)
        log_stream.publish(log_stream.tail())
        assert connection.has_nothing()
        log_stream.append("four")
        assert connection.response().body == b"four"


def test_2_2_an_event_reader_at_the_tail_is_not_affected_by_a_snapshot(
    server: Server, log_stream: BucketStream
) -> None:
    with SseReader(server, log_stream.path, offset=THREE) as reader:
        reader.until_up_to_date()
        log_stream.publish(THREE)
        log_stream.append("four")
        assert reader.pair()[0].data == "four"


def test_2_2_an_event_reader_behind_the_snapshot_is_ended_and_gets_410(server: Server, bucket: Bucket) -> None:
    stream = bucket.stream("behind", OCTETS).create()
    for number in range(90):
        stream.append(bytes([number]) * 100_000)
    with SseReader(server, stream.path, offset="-1") as reader:
        # It does not read, and 9 MB do not fit into the socket buffers.
        stream.publish(stream.tail(), "state")
        events = list(reader)
    # The response ended cleanly, after a complete pair, long before the tail.
    assert len(events) < 180
    last = events[-1].control["streamNextOffset"]
    assert "upToDate" not in events[-1].control
    assert_problem(stream.get(offset=last, live="sse"), 410, "offset_gone")
    stream.delete()


def test_2_2_chunk_that_is_being_sent_is_completed_or_cut_off(server: Server, bucket: Bucket) -> None:
    stream = bucket.stream("chunk", OCTETS).create()
    content = b"".join(bytes([number]) * 100_000 for number in range(39))
    for number in range(39):
        stream.append(bytes([number]) * 100_000)
    with connect(server) as connection:
        connection.send(encode("GET", f"{stream.path}?offset=-1"))
        _, status, fields = connection.response_head()
        stream.publish(stream.tail(), "state")
        with suppress(ConnectionEnded):
            assert b"".join(connection.body_pieces(fields)) == content
    assert status == 200
    stream.delete()


# -- bytes given back


def test_bytes_before_a_snapshot_do_not_count_towards_the_limit(bucket: Bucket) -> None:
    """The limit of a stream (10 MiB in memory) applies to its current data, not to all it ever had."""
    stream = bucket.stream("folded", OCTETS).create()
    before = metric(bucket.http, "payload_bytes")
    for number in range(30):
        at = stream.append(bytes([number]) * 1_000_000)
        if number % 5 == 4:
            stream.publish(at, b"s" * 10)
            wait_until(lambda: metric(bucket.http, "payload_bytes") <= before + 20)
    assert stream.parts()[0].body == b"s" * 10
    stream.delete()


def test_fork_keeps_its_inherited_data_until_it_is_deleted(bucket: Bucket) -> None:
    source = bucket.stream("source", OCTETS).create()
    for number in range(10):
        source.append(bytes([number]) * 100_000)
    start = metric(bucket.http, "payload_bytes")
    headers = {"Stream-Forked-From": source.path, "Stream-Fork-Offset": offset(8, 800_000)}
    fork = bucket.stream("fork", OCTETS).create(headers=headers)
    inner = bucket.stream("inner", OCTETS).create(
        headers={"Stream-Forked-From": fork.path, "Stream-Fork-Offset": offset(4, 400_000)}
    )
    source.publish(source.tail(), "x")
    assert metric(bucket.http, "payload_bytes") >= start
    assert_problem(source.get(offset="-1"), 410, "offset_gone")
    expected = b"".join(bytes([number]) * 100_000 for number in range(8))
    assert (fork.content(), inner.content()) == (expected, expected[:400_000])
    # The nested fork needs less; data that only the other fork needed is freed with that fork's snapshot.
    fork.publish(fork.tail(), "y")
    assert_problem(fork.get(offset="-1"), 410, "offset_gone")
    assert inner.content() == expected[:400_000]
    assert metric(bucket.http, "payload_bytes") >= start
    inner.publish(offset(2, 200_000), "z")
    assert inner.get(offset=offset(2, 200_000)).content == expected[200_000:400_000]
    wait_until(lambda: metric(bucket.http, "payload_bytes") <= start - 200_000 + 10)
    inner.delete()
    wait_until(lambda: metric(bucket.http, "payload_bytes") <= start - 1_000_000 + 10)
    for stream in (source, fork):
        stream.delete()


def test_a_fork_of_a_deleted_source_keeps_only_what_it_needs(bucket: Bucket) -> None:
    source = bucket.stream("source", OCTETS).create()
    for number in range(10):
        source.append(bytes([number]) * 100_000)
    start = metric(bucket.http, "payload_bytes")
    fork = bucket.stream("fork", OCTETS).create(headers={"Stream-Forked-From": source.path})
    source.delete()
    fork.publish(offset(6, 600_000), "state")
    wait_until(lambda: metric(bucket.http, "payload_bytes") <= start - 600_000 + 10)
    assert fork.get(offset=offset(6, 600_000)).content == b"".join(bytes([n]) * 100_000 for n in range(6, 10))
    fork.delete()
    wait_until(lambda: metric(bucket.http, "payload_bytes") <= start - 1_000_000 + 10)


def disk_bytes(directory: Path) -> int:
    while True:
        try:
            return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
        except FileNotFoundError:
            pass  # The server renamed or removed a file between listing and reading it.


@contextmanager
def serve_small(directory: Path, mode: str) -> Iterator[httpx.Client]:
    with (
        serve(
            directory=directory,
            DS_STORAGE__MODE=mode,
            DS_STORAGE__HOT_TAIL_BYTES="1000000",
            DS_STORAGE__SEGMENT_BYTES="1000000",
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield http


def patient_append(stream: Stream, content: bytes) -> str:
    """Append, and retry while storage is busy."""
    answer = wait_until(lambda: stream.post(content), lambda found: found.status_code != 503)
    assert answer.status_code == 204, answer.text
    return answer.headers["stream-next-offset"]


def test_the_bytes_before_a_snapshot_are_freed_on_disk(tmp_path: Path, persistent_mode: str) -> None:
    """Eight times 20 MB are appended to a stream with snapshots; the directory stays far smaller than that."""
    with serve_small(tmp_path, persistent_mode) as http:
        bucket = Bucket(http, "bucket").create()
        keeper = bucket.stream("keeper", OCTETS).create(b"kept" * 1000)
        stream = bucket.stream("folded", OCTETS).create()
        at = ""
        sizes = []
        for _ in range(8):
            at = [patient_append(stream, bytes([number]) * 500_000) for number in range(40)][-1]
            wait_until(lambda: stream.put_snapshot(at, "state").status_code, lambda status: status == 204)  # noqa: B023
            sizes.append(disk_bytes(tmp_path))
        after = stream.append(b"after" * 1000)
        assert metric(http, "payload_bytes") < 20_000
        if persistent_mode == "acid":
            # A database file does not shrink, but its free pages are reused.
            assert sizes[-1] < sizes[3] + 20_000_000, sizes
        else:
            wait_until(lambda: disk_bytes(tmp_path) < 30_000_000)
        assert [part.body for part in stream.parts()] == [b"state", b"after" * 1000]
    with serve_small(tmp_path, persistent_mode) as http:
        bucket = Bucket(http, "bucket")
        stream, keeper = bucket.stream("folded", OCTETS), bucket.stream("keeper", OCTETS)
        assert [part.body for part in stream.parts()] == [b"state", b"after" * 1000]
        assert keeper.content() == b"kept" * 1000
        assert_problem(stream.get(offset="-1"), 410, "offset_gone")
        assert stream.get(offset=at).content == b"after" * 1000
        assert stream.append(b"x") > after
        assert metric(http, "payload_bytes") < 20_000


def test_forks_still_read_from_disk_after_their_source_was_trimmed(tmp_path: Path, persistent_mode: str) -> None:
    pieces = [bytes([number]) * 100_000 for number in range(40)]
    with serve_small(tmp_path, persistent_mode) as http:
        bucket = Bucket(http, "bucket").create()
        source = bucket.stream("source", OCTETS).create()
        offsets = [source.append(piece) for piece in pieces]
        source.publish(offsets[9], "ten")
        headers = {"Stream-Forked-From": source.path, "Stream-Fork-Offset": offsets[29]}
        fork = bucket.stream("fork", OCTETS).create(headers=headers)
        source.publish(offsets[39], "forty")
        assert fork.get(offset=offsets[9]).content == b"".join(pieces[10:30])
    with serve_small(tmp_path, persistent_mode) as http:
        fork = Bucket(http, "bucket").stream("fork", OCTETS)
        assert [part.body for part in fork.parts()] == [b"ten", *pieces[10:30]]
        fork.publish(offsets[19], "twenty")
        assert fork.get(offset=offsets[19]).content == b"".join(pieces[20:30])
        assert_problem(fork.get(offset=offsets[9]), 410, "offset_gone")
    with serve_small(tmp_path, persistent_mode) as http:
        fork = Bucket(http, "bucket").stream("fork", OCTETS)
        assert [part.body for part in fork.parts()] == [b"twenty", *pieces[20:30]]


# -- by age and size


def test_stream_is_trimmed_to_its_size_if_dropping_is_allowed(bucket: Bucket) -> None:
    stream = bucket.stream("sized", OCTETS).create(headers={**DROP, "Stream-Retention-Bytes": "10000"})
    offsets = [stream.append(bytes([number]) * 1000) for number in range(50)]
    # When retention is done: at least the limit, and at most an eighth more.
    wait_until(lambda: len(_retained(stream)) <= 11_250)
    earliest = stream.head().headers["stream-earliest-offset"]
    assert earliest in offsets
    content = _retained(stream)
    assert len(content) >= 10_000
    assert content.endswith(bytes([49]) * 1000)
    assert_problem(stream.get(offset="-1"), 410, "offset_gone")
    assert_problem(stream.get(offset=offsets[10]), 410, "offset_gone")
    # Without a snapshot, bootstrap begins with the first retained message (§3.2).
    response = stream.bootstrap()
    assert response.headers["stream-snapshot-offset"] == "-1"
    assert b"".join(part.body for part in stream.parts()) == content


def test_newest_message_is_kept_at_any_size(moving_server: Server, moving_bucket: Bucket) -> None:
    stream = moving_bucket.stream("large", OCTETS).create(headers={**DROP, "Stream-Retention-Bytes": "10"})
    at = stream.append(b"a" * 1000)
    stream.append(b"b" * 1000)
    wait_until(lambda: stream.head().headers.get("stream-earliest-offset") == at)
    moving_server.pass_time(HOUR_S)
    assert stream.get(offset=at).content == b"b" * 1000


def test_messages_beyond_the_maximum_age_are_removed(moving_server: Server, moving_bucket: Bucket) -> None:
    stream = moving_bucket.stream("aged").create(headers={**DROP, "Stream-Retention-Age": str(HOUR_S)})
    stream.append("one")
    moving_server.pass_time(0.7 * HOUR_S)
    at = stream.append("two")
    assert stream.content() == b"onetwo"
    moving_server.pass_time(0.5 * HOUR_S)
    wait_until(lambda: stream.get(offset="-1").status_code == 410)
    # Not too early: the second message is kept for its full hour.
    assert stream.get(offset=stream.head().headers["stream-earliest-offset"]).content == b"two"
    moving_server.pass_time(HOUR_S)
    wait_until(lambda: stream.head().headers["stream-earliest-offset"] == at)
    assert stream.get(offset=at).content == b""
    stream.append("three")
    assert stream.get(offset=at).content == b"three"


@pytest.mark.parametrize(
    "headers",
    [
        {"Stream-Retention-Bytes": "10"},
        {"Stream-Retention-Age": "1"},
        {"Stream-Retention-Bytes": "10", "Stream-Retention-Age": "1", "Stream-Retention-Drop": "never"},
        {"Stream-Retention-Drop": "allowed"},
        {"Stream-Retention-Bytes": "0", "Stream-Retention-Age": "0", "Stream-Retention-Drop": "allowed"},
    ],
)
def test_uncovered_messages_are_dropped_only_if_allowed(
    moving_server: Server, moving_bucket: Bucket, headers: dict[str, str]
) -> None:
    stream = moving_bucket.stream("kept", OCTETS).create(headers=headers)
    for number in range(20):
        stream.append(bytes([number]) * 100)
    run_retention(moving_server, moving_bucket)
    assert len(stream.content()) == 2000


def test_messages_after_a_snapshot_are_kept_until_the_next_one(moving_server: Server, moving_bucket: Bucket) -> None:
    """Age and size never drop messages that no snapshot covers, because bootstrap would be incomplete (§3.4)."""
    stream = moving_bucket.stream("both", OCTETS).create(headers={**DROP, "Stream-Retention-Bytes": "1000"})
    stream.publish(stream.append(b"a" * 100), "state")
    tail = [stream.append(b"b" * 100) for _ in range(30)][-1]
    run_retention(moving_server, moving_bucket)
    assert stream.bootstrap().headers["stream-snapshot-offset"].startswith(offset(1, 100))
    assert [part.body for part in stream.parts()] == [b"state", *[b"b" * 100] * 30]
    stream.publish(tail, "later")
    assert stream.head().headers["stream-earliest-offset"] == stream.head().headers["stream-next-offset"]


def test_retention_is_part_of_a_streams_configuration(bucket: Bucket) -> None:
    headers = {**DROP, "Stream-Retention-Age": "100", "Stream-Retention-Bytes": "5"}
    stream = bucket.stream("config").create(headers=headers)
    reported = stream.head().headers
    assert {name: reported[name] for name in headers} == headers
    assert stream.put(headers=headers).status_code == 200
    assert_problem(stream.put(headers={**headers, "Stream-Retention-Age": "101"}), 409, "config_mismatch")
    assert_problem(stream.put(), 409, "config_mismatch")
    fork = bucket.stream("fork").create(headers={"Stream-Forked-From": stream.path})
    assert fork.head().headers["stream-retention-age"] == "100"
    other = bucket.stream("other").create(headers={"Stream-Forked-From": stream.path, "Stream-Retention-Drop": "never"})
    assert "stream-retention-age" not in other.head().headers
    plain = bucket.stream("plain").create()
    assert not [name for name in plain.head().headers if name.startswith("stream-retention")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Stream-Retention-Age", "-1"),
        ("Stream-Retention-Age", "1.5"),
        ("Stream-Retention-Age", "01"),
        ("Stream-Retention-Age", ""),
        ("Stream-Retention-Age", "99999999999999999"),
        ("Stream-Retention-Bytes", "1k"),
        ("Stream-Retention-Bytes", "+5"),
        ("Stream-Retention-Drop", "yes"),
        ("Stream-Retention-Drop", ""),
    ],
)
def test_a_malformed_retention_header_is_400_and_creates_nothing(bucket: Bucket, name: str, value: str) -> None:
    assert_problem(bucket.stream("bad").put(headers={name: value}), 400, "bad_request")
    assert bucket.count() == 0


def test_retention_works_on_the_base_surface(stream: Stream) -> None:
    stream.create(headers={**DROP, "Stream-Retention-Bytes": "100", "Content-Type": OCTETS})
    for number in range(20):
        stream.append(bytes([number]) * 50, headers={"Content-Type": OCTETS})
    wait_until(lambda: len(_retained(stream)) == 100)
    assert stream.get(offset="-1").content == _retained(stream)
    assert_problem(stream.get(offset=ZERO), 410, "offset_gone")


@contextmanager
def dropping(
    directory: Path, mode: str, *, size: int = 0, age_secs: float = 0, drop: str = "true"
) -> Iterator[tuple[Server, httpx.Client]]:
    """A server with its own retention rule and a manual clock."""
    with (
        serve(
            directory=directory,
            DS_STORAGE__MODE=mode,
            DS_RETENTION__MAX_BYTES=str(size),
            DS_RETENTION__MAX_AGE_SECS=str(age_secs),
            DS_RETENTION__DROP_UNCOVERED=drop,
            moving_time=True,
        ) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        yield server, http


def test_server_rule_applies_to_streams_without_a_policy(tmp_path: Path) -> None:
    with dropping(tmp_path, "file-durable", size=1000) as (_, http):
        bucket = Bucket(http, "bucket").create()
        plain = bucket.stream("plain", OCTETS).create()
        never = bucket.stream("never", OCTETS).create(headers={"Stream-Retention-Drop": "never"})
        larger = bucket.stream("larger", OCTETS).create(headers={"Stream-Retention-Bytes": "3000"})
        for stream in (plain, never, larger):
            for number in range(60):
                stream.append(bytes([number]) * 100)
        wait_until(lambda: 1000 <= len(_retained(plain)) <= 1125)
        wait_until(lambda: 3000 <= len(_retained(larger)) <= 3375)
        assert len(never.content()) == 6000
    # Restarted with another rule, which applies to existing streams.
    with dropping(tmp_path, "file-durable", size=500) as (_, http):
        plain = Bucket(http, "bucket").stream("plain", OCTETS)
        wait_until(lambda: 500 <= len(_retained(plain)) <= 600)
    with dropping(tmp_path, "file-durable", size=100, drop="false") as (server, http):
        plain = Bucket(http, "bucket").stream("plain", OCTETS)
        run_retention(server, Bucket(http, "bucket"))
        assert len(_retained(plain)) >= 500


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_message_ages_survive_a_restart(tmp_path: Path, mode: str) -> None:
    with dropping(tmp_path, mode, age_secs=HOUR_S) as (server, http):
        stream = Bucket(http, "bucket").create().stream("aged").create()
        stream.append("old")
        server.pass_time(0.5 * HOUR_S)
        at = stream.append("new")
        moved_s = server.moved_s
    with dropping(tmp_path, mode, age_secs=HOUR_S) as (server, http):
        # The new server has a new manual clock: set it to the time of the old one.
        server.pass_time(moved_s)
        stream = Bucket(http, "bucket").stream("aged")
        assert stream.content() == b"oldnew"
        server.pass_time(0.6 * HOUR_S)
        wait_until(lambda: stream.get(offset="-1").status_code == 410)
        assert _retained(stream) == b"new"
        server.pass_time(0.6 * HOUR_S)
        wait_until(lambda: stream.head().headers["stream-earliest-offset"] == at)


def _retained(stream: Stream) -> bytes:
    """Read all retained data."""
    head = stream.head().headers
    return stream.get(offset=head.get("stream-earliest-offset", ZERO)).content
