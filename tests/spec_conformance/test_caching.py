"""Cache headers and the Location header."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from tests.http.protocol import ZERO, Stream, stream_on
from tests.http.raw import connect, encode
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def cacheable(mode: str) -> Iterator[Server]:
    """A server with small chunks whose responses may be stored by shared caches."""
    with serve(
        DS_STORAGE__MODE=mode,
        DS_HTTP__CACHE_CONTROL="public",
        DS_LIMITS__MAX_CHUNK_BYTES="1024",
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="1",
    ) as running:
        yield running


def max_age(cache_control: str) -> int:
    found = re.search(r"max-age=(\d+)", cache_control)
    return int(found[1]) if found else 0


def test_a_long_poll_with_data_is_cacheable(cacheable: Server) -> None:
    """protocol lines 409, 415, 436: long-poll 200 responses are safe to cache, so that live reads can be collapsed."""
    with stream_on(cacheable, "polled") as stream:
        stream.create("data")
        answer = stream.long_poll("-1")
        assert (answer.status_code, answer.headers["stream-up-to-date"]) == (200, "true")
        assert answer.headers["cache-control"].startswith("public")
        assert max_age(answer.headers["cache-control"]) > 0


def test_long_poll_without_data_is_not_cacheable(cacheable: Server) -> None:
    """protocol line 436: 204 must not be cached."""
    with stream_on(cacheable, "quiet") as stream:
        stream.create("data")
        answer = stream.long_poll(stream.tail())
        assert (answer.status_code, answer.headers["cache-control"]) == (204, "no-store")


def test_max_age_never_outlives_the_stream(cacheable: Server) -> None:
    """protocol line 240: Cache-Control is derived from TTL and expiry. A stream that ends in 4 s had 60."""
    ends = (datetime.now(UTC) + timedelta(seconds=4)).strftime("%Y-%m-%dT%H:%M:%SZ")
    with stream_on(cacheable, "ending") as stream:
        stream.create("x" * 600, headers={"Stream-Expires-At": ends})
        stream.append("y" * 600)
        answer = stream.get(offset="-1")
        assert "stream-up-to-date" not in answer.headers
        assert max_age(answer.headers["cache-control"]) <= 4
        assert "stale-while-revalidate=300" not in answer.headers["cache-control"]


def test_an_idempotent_put_has_a_location(stream: Stream) -> None:
    """reference line 1174: response headers of a create, 201 and 200: Location, Content-Type, Stream-Next-Offset."""
    first = stream.put()
    again = stream.put()
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.headers["location"] == first.headers["location"]


def test_the_phrase_of_413_is_payload_too_large(mode: str) -> None:
    """protocol line 127, reference line 1128: 413 Payload Too Large."""
    with serve(DS_STORAGE__MODE=mode, DS_LIMITS__MAX_STREAM_BYTES="10") as server, connect(server) as connection:
        connection.request("PUT", "/v1/stream/full", headers={"Content-Type": "text/plain"})
        connection.send(encode("POST", "/v1/stream/full", headers={"Content-Type": "text/plain"}, body=b"x" * 11))
        beginning = connection.socket.recv(1000)
    assert beginning.startswith(b"HTTP/1.1 413 Payload Too Large\r\n")


def test_now_has_no_etag_and_the_beginning_is_named_by_its_offset(stream: Stream) -> None:
    """protocol line 418: ETags except for `now` responses; reference lines 777-786 differ (decision P-45)."""
    stream.create("data")
    assert "etag" not in stream.get(offset="now").headers
    etag = stream.get(offset="-1").headers["etag"]
    assert etag == stream.get(offset=ZERO).headers["etag"]
    assert stream.get(offset=ZERO, headers={"If-None-Match": etag}).status_code == 304
