"""The content type of an append: malformed, not matching, or with another charset."""

from __future__ import annotations

import pytest

from tests.http.protocol import Stream, assert_problem

MALFORMED = [
    "nonsense",
    "text/",
    "/plain",
    "text/plain extra",
    "text//plain",
    "; charset=utf-8",
    "text/plain; charset",
    "text/plain; charset=",
    'text/plain; charset="x',
]


@pytest.mark.parametrize("content_type", MALFORMED)
def test_a_malformed_content_type_is_400(stream: Stream, content_type: str) -> None:
    """protocol line 106: 409 is for a valid type that does not match; line 127: invalid header syntax is 400."""
    stream.create()
    assert_problem(stream.post("a", headers={"Content-Type": content_type}), 400, "invalid_content_type")
    assert stream.content() == b""


@pytest.mark.parametrize(
    "content_type", ["text/plain;", "text/plain ; ; charset=utf-8", 'text/plain; note="a \\" b; c"']
)
def test_empty_and_quoted_parameters_are_valid(stream: Stream, content_type: str) -> None:
    """protocol line 127: only invalid header syntax is 400; RFC 9110 allows these."""
    stream.create()
    stream.append("a", headers={"Content-Type": content_type})
    assert stream.content() == b"a"


def test_long_malformed_content_type_is_refused_quickly(stream: Stream) -> None:
    """protocol line 127: a header of many parameters and spaces is refused without trying every way to split it."""
    stream.create()
    content_type = "text/plain" + (";" + " " * 50) * 60 + "="
    assert_problem(stream.post("a", headers={"Content-Type": content_type}), 400, "invalid_content_type")


def test_a_valid_content_type_that_does_not_match_is_409(stream: Stream) -> None:
    """protocol line 106."""
    stream.create()
    assert_problem(stream.post("a", headers={"Content-Type": "image/png"}), 409, "content_type_mismatch")


def test_a_malformed_content_type_of_a_close_without_data_is_ignored(stream: Stream) -> None:
    """protocol line 107: with an empty body, servers must not reject based on Content-Type."""
    stream.create()
    assert stream.close(headers={"Content-Type": "nonsense"}).status_code == 204


@pytest.mark.parametrize("content_type", ["text/plain; charset=iso-8859-1", "text/plain", "TEXT/PLAIN;charset=utf-16"])
def test_another_charset_is_the_same_content_type(stream: Stream, content_type: str) -> None:
    """reference line 526: comparison ignores case and charset (decision P-39); protocol lines 105, 449.

    Readers get the type that the stream was created with, and the bytes as they were sent.
    """
    stream.create(headers={"Content-Type": "text/plain; charset=utf-8"})
    stream.append(b"\xe9", headers={"Content-Type": content_type})
    answer = stream.get(offset="-1")
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.content == b"\xe9"
    assert stream.put(headers={"Content-Type": content_type}).status_code == 200


def test_json_must_be_utf_8_whatever_the_charset_says(json_stream: Stream) -> None:
    """protocol line 403: appended data must be valid JSON, which is UTF-8."""
    json_stream.create()
    refused = json_stream.post(b'"\xe9"', headers={"Content-Type": "application/json; charset=iso-8859-1"})
    assert_problem(refused, 400, "invalid_json")
