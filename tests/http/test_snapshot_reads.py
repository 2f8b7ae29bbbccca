"""Reading and deleting snapshots, §2.3 to §2.6, §4 and §5 of the extensions. Tests are named after these sections."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from tests.http.bucketed import Bucket, BucketStream
from tests.http.protocol import ZERO, assert_problem, offset
from tests.http.raw import connect, encode
from tests.http.sse_reader import SseReader
from tests.serving import Server

ONE, TWO, THREE = offset(1, 3), offset(2, 6), offset(3, 11)
MAX_BYTES = 300_000
LARGE = bytes(range(256)) * 1100
"""Too large to be kept in memory, but within `MAX_BYTES`."""


# -- 2.3 read latest


def test_2_3_latest_is_a_redirect_to_the_snapshot(server: Server, bucket: Bucket) -> None:
    stream = bucket.stream("with space").create("one")
    stream.publish(ONE, "state")
    response = stream.latest()
    assert (response.status_code, response.content) == (307, b"")
    where, _, at = response.headers["location"].rpartition("/")
    assert where == f"{server.url}{bucket.path}/with%20space/snapshot"
    assert at == ONE
    followed = stream.http.get(f"{stream.path}/snapshot", follow_redirects=True)
    assert (followed.status_code, followed.content) == (200, b"state")
    assert stream.http.head(f"{stream.path}/snapshot").status_code == 307


def test_2_3_missing_snapshot_is_404(log_stream: BucketStream) -> None:
    assert_problem(log_stream.latest(), 404, "snapshot_not_found")


def test_2_3_missing_stream_is_404(bucket: Bucket) -> None:
    assert_problem(bucket.stream("none").latest(), 404, "stream_not_found")


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "PATCH"])
def test_2_3_other_methods_are_405(log_stream: BucketStream, method: str) -> None:
    assert log_stream.http.request(method, f"{log_stream.path}/snapshot").status_code == 405


# -- 2.4 HEAD


def test_2_4_head_has_the_snapshot_of_the_redirect(log_stream: BucketStream) -> None:
    assert "stream-snapshot-offset" not in log_stream.head().headers
    for at in (ONE, THREE):
        log_stream.publish(at)
        reported = log_stream.head().headers["stream-snapshot-offset"]
        assert reported == at
        assert log_stream.latest().headers["location"].rsplit("/", 1)[1] == reported
    assert log_stream.head().headers["stream-next-offset"] == THREE


# -- 2.5 read


def test_2_5_a_snapshot_is_read_with_all_its_headers(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state", "text/x-state")
    response = log_stream.snapshot(TWO)
    assert (response.status_code, response.content) == (200, b"state")
    assert response.headers["content-type"] == "text/x-state"
    assert response.headers["stream-snapshot-offset"] == TWO
    assert response.headers["stream-next-offset"] == TWO
    assert response.headers["stream-up-to-date"] == "false"
    assert log_stream.get(offset=response.headers["stream-next-offset"]).content == b"three"


def test_2_5_up_to_date_is_set_at_the_tail(log_stream: BucketStream) -> None:
    log_stream.publish(THREE)
    assert log_stream.snapshot(THREE).headers["stream-up-to-date"] == "true"
    log_stream.append("four")
    assert log_stream.snapshot(THREE).headers["stream-up-to-date"] == "false"


def test_2_5_head_of_a_snapshot_has_its_headers(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state")
    response = log_stream.http.head(f"{log_stream.path}/snapshot/{TWO}")
    assert (response.status_code, response.content) == (200, b"")
    assert response.headers["content-length"] == "5"
    assert response.headers["stream-snapshot-offset"] == TWO


@pytest.mark.parametrize("at", [ONE, THREE, ZERO, "-1", "now", "zzz", TWO.upper() + "x"])
def test_2_5_a_missing_snapshot_is_404(log_stream: BucketStream, at: str) -> None:
    log_stream.publish(TWO)
    assert_problem(log_stream.snapshot(at), 404, "snapshot_not_found")


def test_2_5_a_running_read_of_a_snapshot_is_completed(server: Server, bucket: Bucket) -> None:
    """The snapshot is superseded and deleted while it is being read; the running response is completed."""
    stream = bucket.stream("large").create("one")
    content = LARGE * 20
    stream.publish(ONE, content)
    with connect(server) as connection:
        connection.send(encode("GET", f"{stream.path}/snapshot/{ONE}"))
        _, status, fields = connection.response_head()
        stream.publish(ONE, "newer")
        assert stream.snapshot(ONE).content == b"newer"
        assert stream.delete().status_code == 204
        assert (status, b"".join(connection.body_pieces(fields))) == (200, content)


# -- 2.6 delete


def test_2_6_the_latest_snapshot_cannot_be_deleted(log_stream: BucketStream) -> None:
    log_stream.publish(TWO, "state")
    assert_problem(log_stream.delete_snapshot(TWO), 409, "snapshot_needed")
    assert log_stream.snapshot(TWO).content == b"state"


def test_2_6_a_superseded_snapshot_is_404(log_stream: BucketStream) -> None:
    log_stream.publish(ONE)
    log_stream.publish(TWO)
    assert_problem(log_stream.delete_snapshot(ONE), 404, "snapshot_not_found")


@pytest.mark.parametrize("at", [THREE, ZERO, "-1", "zzz"])
def test_2_6_deleting_a_missing_snapshot_is_404(log_stream: BucketStream, at: str) -> None:
    log_stream.publish(TWO)
    assert_problem(log_stream.delete_snapshot(at), 404, "snapshot_not_found")
    assert_problem(log_stream.bucket.stream("none").delete_snapshot(at), 404, "stream_not_found")


# -- 4 and 5


def test_4_binary_events_stay_base64_after_a_snapshot(server: Server, bucket: Bucket) -> None:
    stream = bucket.stream("binary", "application/octet-stream").create(b"\x00\x01")
    at = stream.tail()
    stream.append(b"\xfe\xff")
    stream.publish(at, b"\x00")
    with SseReader(server, stream.path, offset=at) as reader:
        assert reader.header("stream-sse-data-encoding") == "base64"
        assert reader.pair()[0].decoded == b"\xfe\xff"


@pytest.mark.parametrize("spelled", [TWO.replace("_", "%5F"), quote(TWO[0]) + TWO[1:], "%30" + TWO[1:]])
def test_5_an_offset_in_a_path_may_be_percent_encoded(server: Server, log_stream: BucketStream, spelled: str) -> None:
    with connect(server) as connection:
        assert connection.request("PUT", f"{log_stream.path}/snapshot/{spelled}", body=b"state").status == 204
        assert connection.request("GET", f"{log_stream.path}/snapshot/{spelled}").body == b"state"
        assert connection.request("DELETE", f"{log_stream.path}/snapshot/{spelled}").status == 409
