"""ETags, conditional reads and `Cache-Control` (protocol §8)."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest

from tests.http.protocol import Stream, offset, stream_on
from tests.http.raw import connect
from tests.serving import Server, serve

ETAG = re.compile(r'"[0-9A-Za-z_-]{8,}:([0-9a-f_]{33}|-1):[0-9a-f_]{33}(:c)?"')


def test_t13_an_etag_is_quoted_and_names_incarnation_start_and_end(stream: Stream) -> None:
    stream.create("data")
    etag = stream.get().headers["etag"]
    assert ETAG.fullmatch(etag), etag
    assert etag.endswith(f':{offset(1, 4)}"')


def test_t12_an_etag_varies_with_start_end_and_closure(stream: Stream) -> None:
    stream.create("one")
    tags = [stream.get().headers["etag"]]
    middle = stream.tail()
    stream.append("two")
    tags += [stream.get().headers["etag"], stream.get(offset=middle).headers["etag"]]
    stream.close()
    tags += [stream.get().headers["etag"], stream.get(offset=middle).headers["etag"]]
    tags.append(stream.get(offset=stream.tail()).headers["etag"])
    assert len(set(tags)) == len(tags)
    assert [tag.endswith(':c"') for tag in tags] == [False] * 3 + [True] * 3


def test_t12_an_etag_varies_with_the_stream(client: httpx.Client, stream_name: Callable[[], str]) -> None:
    one, other = Stream(client, stream_name()).create("same"), Stream(client, stream_name()).create("same")
    assert one.get().headers["etag"] != other.get().headers["etag"]


def test_t11_etag_of_a_recreated_stream_of_the_same_size_differs(stream: Stream) -> None:
    stream.create("first data")
    etag = stream.get().headers["etag"]
    stream.delete()
    stream.create("other data")
    read = stream.get(headers={"If-None-Match": etag})
    assert (read.status_code, read.content) == (200, b"other data")


def test_the_same_read_has_the_same_etag_and_bytes(stream: Stream) -> None:
    stream.create("data")
    one, two = stream.get(), stream.get()
    assert (one.headers["etag"], one.content) == (two.headers["etag"], two.content)


FORMS = ["{}", "W/{}", '"a", {}', '{}, "b"', '"a" , W/{} ,"b"', '"x,y", {}', "*", '"a",{}']


@pytest.mark.parametrize("form", FORMS)
def test_t14_if_none_match_accepts_lists_weak_tags_and_the_star(stream: Stream, form: str) -> None:
    stream.create("data")
    etag = stream.get().headers["etag"]
    read = stream.get(headers={"If-None-Match": form.format(etag)})
    assert (read.status_code, read.content) == (304, b"")


@pytest.mark.parametrize("value", ['"other"', 'W/"other"', '"a", "b"', "", '""', "garbage", '"*"'])
def test_full_response_is_sent_when_no_etag_matches(stream: Stream, value: str) -> None:
    stream.create("data")
    read = stream.get(headers={"If-None-Match": value})
    assert (read.status_code, read.content) == (200, b"data")


def test_a_part_of_an_etag_does_not_match(stream: Stream) -> None:
    stream.create("data")
    etag = stream.get().headers["etag"]
    for near in (etag.strip('"'), etag[:-2] + '"', f'"{etag}"', etag.upper()):
        assert stream.get(headers={"If-None-Match": near}).status_code == 200


def test_t15_304_carries_the_stream_headers_and_no_body(server: Server, stream: Stream) -> None:
    stream.create("data")
    fresh = stream.get()
    with connect(server) as connection:
        unchanged = connection.request("GET", stream.path, headers={"If-None-Match": fresh.headers["etag"]})
        # With a body, the next answer would not parse.
        assert connection.request("GET", "/healthz").status == 200
    assert unchanged.status == 304
    assert unchanged.header("etag") == fresh.headers["etag"]
    assert unchanged.header("stream-next-offset") == offset(1, 4)
    assert unchanged.header("stream-up-to-date") == "true"
    assert unchanged.header("cache-control") == fresh.headers["cache-control"]
    assert unchanged.header("stream-closed") is None


def test_t15_304_of_a_closed_stream_reports_closure(stream: Stream) -> None:
    stream.create("data", headers={"Stream-Closed": "true"})
    etag = stream.get().headers["etag"]
    unchanged = stream.get(headers={"If-None-Match": etag})
    assert (unchanged.status_code, unchanged.headers["stream-closed"]) == (304, "true")


def test_closing_makes_an_etag_stale(stream: Stream) -> None:
    stream.create("data")
    etag = stream.get().headers["etag"]
    stream.close()
    read = stream.get(headers={"If-None-Match": etag})
    assert (read.status_code, read.headers["stream-closed"]) == (200, "true")


def test_appending_makes_an_etag_stale(stream: Stream) -> None:
    stream.create("one")
    etag = stream.get().headers["etag"]
    stream.append("two")
    assert stream.get(headers={"If-None-Match": etag}).content == b"onetwo"


def test_the_tail_of_an_open_stream_can_be_revalidated(stream: Stream) -> None:
    stream.create("data")
    at = stream.tail()
    etag = stream.get(offset=at).headers["etag"]
    assert stream.get(offset=at, headers={"If-None-Match": etag}).status_code == 304


def test_t14_one_strong_etag_never_names_two_encodings(stream: Stream) -> None:
    stream.create("compressible " * 1000)
    identity = stream.get(headers={"Accept-Encoding": "identity"})
    other = stream.get(headers={"Accept-Encoding": "gzip, deflate, br"})
    assert identity.content == other.content
    if "content-encoding" in other.headers:
        assert identity.headers["etag"] != other.headers["etag"]
        assert "accept-encoding" in other.headers["vary"].lower()


def test_responses_are_not_cacheable_by_default(stream: Stream) -> None:
    created = stream.put("data")
    answers = [created, stream.get(), stream.head(), stream.post("x"), stream.get(offset="garbage")]
    answers += [stream.get(offset="now"), stream.delete(), stream.get()]
    for answer in answers:
        assert answer.headers["cache-control"] == "no-store", answer.request.method


@pytest.mark.parametrize("setting", ["public", "private"])
def test_only_full_chunks_below_the_tail_are_cacheable(setting: str) -> None:
    with (
        serve(DS_HTTP__CACHE_CONTROL=setting, DS_LIMITS__MAX_CHUNK_BYTES="10") as server,
        stream_on(server, "cached") as stream,
    ):
        stream.create()
        for number in range(4):
            stream.append(f"chunk{number:04d}-")
        full = stream.get()
        assert full.content == b"chunk0000-"
        assert full.headers["cache-control"] == f"{setting}, max-age=60, stale-while-revalidate=300"
        assert stream.get().headers["etag"] == full.headers["etag"]

        last = stream.get(offset=offset(3, 30))
        assert last.headers["stream-up-to-date"] == "true"
        uncacheable = [last, stream.get(offset=offset(4, 40)), stream.get(offset="now"), stream.head()]
        uncacheable.append(stream.get(offset="garbage"))
        for answer in uncacheable:
            assert "max-age=60" not in answer.headers["cache-control"]
            assert re.search("no-store|no-cache|max-age=0", answer.headers["cache-control"])


def test_a_cacheable_chunk_stays_the_same_when_the_stream_grows_and_closes() -> None:
    with (
        serve(DS_HTTP__CACHE_CONTROL="public", DS_LIMITS__MAX_CHUNK_BYTES="10") as server,
        stream_on(server, "stable") as stream,
    ):
        stream.create()
        for number in range(3):
            stream.append(f"chunk{number:04d}-")
        before = stream.get()
        stream.append("more")
        grown = stream.get()
        stream.close("end")
        closed = stream.get()
        for later in (grown, closed):
            assert later.content == before.content
            assert later.headers["stream-next-offset"] == before.headers["stream-next-offset"]
            assert later.headers["cache-control"] == before.headers["cache-control"]
            assert "stream-closed" not in later.headers
