"""Search on the server: `find` returns the messages of a range that contain a text (docs/extensions.md)."""

from __future__ import annotations

import base64
from typing import Any

from headwater.http.find import MATCH_BYTES_MAX, MATCHES_MAX
from tests.http.protocol import Stream, assert_problem


def search(stream: Stream, text: str, **query: Any) -> list[dict[str, Any]]:
    """All matches, request by request."""
    found: list[dict[str, Any]] = []
    offset = "-1"
    while True:
        page = stream.get(offset=offset, find=text, **query).json()
        found += page["matches"]
        if not page["has_more"]:
            return found
        assert page["next_offset"] > offset
        offset = page["next_offset"]


def test_messages_with_the_text_are_returned_with_their_offsets(json_stream: Stream) -> None:
    json_stream.create('[{"n":"Apple"},{"n":"pear"}]')
    before = json_stream.tail()
    after = json_stream.append('{"n":"pineapple"}')
    first, second = search(json_stream, "apple")
    assert (first["position"], first["text"]) == (0, '{"n":"Apple"}')
    assert (second["position"], second["text"], second["size"]) == (2, '{"n":"pineapple"}', 17)
    assert (second["offset"], second["next_offset"]) == (before, after)
    assert 0 < first["time_ms"] <= second["time_ms"]
    assert json_stream.get(offset=second["offset"], until=second["next_offset"]).json() == [{"n": "pineapple"}]


def test_a_text_that_spans_two_messages_is_not_found(stream: Stream) -> None:
    stream.create("one")
    stream.append("two")
    assert search(stream, "onetwo") == []
    assert [match["text"] for match in search(stream, "tw")] == ["two"]


def test_a_text_at_the_start_of_a_message_is_found_after_one_that_spans_two(stream: Stream) -> None:
    stream.create()
    for message in ("xab", "abab", "aba", "bab"):
        stream.append(message)
    assert [each["text"] for each in search(stream, "aba")] == ["abab", "aba"]


def test_the_range_is_respected(stream: Stream) -> None:
    stream.create("needle 1")
    middle = stream.tail()
    stream.append("needle 2")
    assert [match["text"] for match in search(stream, "needle", until=middle)] == ["needle 1"]
    assert [match["text"] for match in stream.get(offset=middle, find="needle").json()["matches"]] == ["needle 2"]


def test_many_matches_take_several_responses(json_stream: Stream) -> None:
    json_stream.create("[" + ",".join(f'{{"n":{n}}}' for n in range(2 * MATCHES_MAX + 1)) + "]")
    first = json_stream.get(offset="-1", find="n").json()
    assert (len(first["matches"]), first["has_more"]) == (MATCHES_MAX, True)
    assert [match["position"] for match in search(json_stream, "n")] == list(range(2 * MATCHES_MAX + 1))


def test_a_long_stream_is_searched_in_bounded_requests(stream: Stream) -> None:
    stream.create()
    for number in range(8):
        stream.append("x" * 300_000 + f" mark{number}")
    page = stream.get(offset="-1", find="mark7").json()
    assert (page["matches"], page["has_more"]) == ([], True)
    assert 0 < page["scanned_bytes"] < 1_300_000
    [match] = search(stream, "MARK7")
    assert (match["position"], match["is_cut"], match["size"]) == (7, True, 300_006)
    assert len(match["text"]) == MATCH_BYTES_MAX


def test_bytes_are_returned_as_base64(stream: Stream) -> None:
    binary = Stream(stream.http, f"{stream.name}-binary", "application/octet-stream").create(b"\x00needle\xff")
    [match] = search(binary, "needle")
    assert base64.b64decode(match["base64"]) == b"\x00needle\xff"


def test_find_is_refused_without_a_text_and_in_live_reads(stream: Stream) -> None:
    stream.create("one")
    assert_problem(stream.get(offset="-1", find=""), 400, "bad_request")
    assert_problem(stream.get(offset="-1", find="x" * 1001), 400, "bad_request")
    assert_problem(stream.get(offset="now", find="one"), 400, "bad_request")
    assert_problem(stream.get(offset="-1", find="one", live="sse"), 400, "bad_request")
