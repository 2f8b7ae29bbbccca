"""Pure functions for responses: If-None-Match, ETags, header blocks and problem documents."""

from __future__ import annotations

import json

import pytest

import headwater.core.http_errors  # noqa: F401 - its errors are rendered too
from headwater.core.errors import Refusal, SequenceGap, StreamClosed
from headwater.core.offsets import ZERO, Offset, format_token
from headwater.core.records import Image
from headwater.engine.reading import ReadChunk
from headwater.engine.stream import LiveStream
from headwater.http.chunks import etag_of, matches
from headwater.http.headers import CommonHeaders, header, next_offset, offset_text
from headwater.http.origins import Origins
from headwater.http.responses import problem

ETAG = b'"00000000000000ab:s:e"'


# -- If-None-Match (RFC 9110 §13.1.2, T-14)


@pytest.mark.parametrize(
    "asked",
    [
        ETAG,
        b"W/" + ETAG,
        b"*",
        b" * ",
        b" " + ETAG + b"\t",
        b'"other", ' + ETAG,
        ETAG + b',"other"',
        b'W/"other",W/' + ETAG + b', "third"',
        b'"a","b","c",' + ETAG,
        b", ," + ETAG,
    ],
)
def test_a_list_a_weak_tag_and_the_star_match(asked: bytes) -> None:
    assert matches(asked, ETAG)


@pytest.mark.parametrize(
    "asked",
    [
        b"",
        b",",
        b'""',
        b'"other"',
        b'W/"other"',
        ETAG.strip(b'"'),
        b"w/" + ETAG,
        b"W/ " + ETAG,
        ETAG[:-1],
        ETAG.upper(),
        b'"*"',
        b'"00000000000000ab:s:e:c"',
        b'"00000000000000ab:s:"',
    ],
)
def test_other_tags_do_not_match(asked: bytes) -> None:
    assert not matches(asked, ETAG)


# -- ETags (§8.1, T-11 to T-13)


TAIL = Offset(2, 9)


def chunk(stream_id: int = 0xAB, start: Offset = ZERO, end: Offset = TAIL, closed: bool = False) -> ReadChunk:
    stream = LiveStream(Image(stream_id, "a", 0, "text/plain", None, None, 2, 9, 0, 0))
    return ReadChunk(stream, start, end, (), True, closed)


def test_an_etag_is_quoted_and_names_incarnation_start_and_end() -> None:
    assert etag_of(chunk()) == (
        b'"00000000000000ab:0000000000000000_0000000000000000:0000000000000002_0000000000000009"'
    )


def test_an_etag_differs_with_incarnation_start_end_and_closure() -> None:
    chunks = [
        chunk(),
        chunk(stream_id=0xAC),
        chunk(start=Offset(1, 3)),
        chunk(end=Offset(1, 3)),
        chunk(closed=True),
        chunk(start=Offset(2, 9)),
        chunk(start=Offset(2, 9), closed=True),
    ]
    assert len({etag_of(one) for one in chunks}) == len(chunks)


# -- headers


def test_offset_header_has_the_canonical_token() -> None:
    assert next_offset(7, 1, 255) == header("Stream-Next-Offset", format_token(1, 255, 7))
    assert (
        offset_text(7, Offset(1, 255))
        == format_token(1, 255, 7)
        == "0000000000000001_00000000000000ff_0000000000000007"
    )


@pytest.mark.parametrize("origin", [b"https://a.example", b"null"])
def test_any_origin_may_read_if_all_are_allowed(origin: bytes) -> None:
    common = CommonHeaders(Origins(("*",), allow_loopback=False))
    block = common.begin(200, origin)
    assert block.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"Access-Control-Allow-Origin: *\r\n" in block
    assert b"Vary: Origin\r\n" in block
    assert b"Access-Control" not in common.begin(200, None)


def test_only_listed_origins_may_read_and_vary_is_sent() -> None:
    common = CommonHeaders(Origins(("https://a.example",), allow_loopback=False))
    assert b"Access-Control-Allow-Origin: https://a.example\r\n" in common.begin(200, b"https://a.example")
    for origin in (None, b"https://b.example", b"https://a.example.evil", b"HTTPS://A.EXAMPLE", b"*"):
        block = common.begin(404, origin)
        assert b"Access-Control-Allow-Origin" not in block
        assert b"Vary: Origin\r\n" in block


# -- problems (RFC 9457)


def test_a_refusal_is_a_problem_with_its_headers() -> None:
    answer = problem(SequenceGap("A gap.", (("Producer-Expected-Seq", "1"), ("Producer-Received-Seq", "5"))))
    headers, body = answer.headers, answer.body
    assert json.loads(body) == {
        "type": "about:blank",
        "title": "Conflict",
        "status": 409,
        "code": "sequence_gap",
        "detail": "A gap.",
    }
    assert b"Content-Type: application/problem+json\r\n" in headers
    assert b"Cache-Control: no-store\r\n" in headers
    assert b"Producer-Expected-Seq: 1\r\nProducer-Received-Seq: 5\r\n" in headers


def test_refusal_of_a_closed_stream_has_its_headers() -> None:
    headers = problem(StreamClosed("Closed.", (("Stream-Closed", "true"),))).headers
    assert b"Stream-Closed: true\r\n" in headers


def all_refusals(kind: type[Refusal] = Refusal) -> list[type[Refusal]]:
    """All refusals of the protocol; subclasses in the engine are rendered like their base class."""
    found = [one for child in kind.__subclasses__() for one in all_refusals(child)]
    return [kind, *found] if kind.__module__.startswith("headwater.core.") else found


@pytest.mark.parametrize("kind", all_refusals(), ids=lambda kind: kind.__name__)
def test_every_refusal_can_be_rendered(kind: type[Refusal]) -> None:
    body = problem(kind('A sentence with \u20ac and "quotes".')).body
    document = json.loads(body)
    code = document["error"]["code"] if "error" in document else document["code"]
    assert code == kind.code
    assert code.replace("_", "").isalpha()
    assert 400 <= kind.status < 600


def test_a_header_value_cannot_break_the_block() -> None:
    """No name or detail is put into a header, and characters outside Latin-1 are replaced."""
    assert header("X", "a\u20acb") == b"X: a?b\r\n"
