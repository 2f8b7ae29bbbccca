"""Error messages for refused JSON bodies."""

from __future__ import annotations

import pytest

from tests.http.protocol import Stream, assert_problem


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (rb'"\ud800"', r"\ud800 at byte 1"),
        (rb'["ok","\\\uDC00"]', r"\uDC00 at byte 9"),
        (rb'{"a":"\ud83d and \ude00"}', r"\ud83d at byte 6"),
        (rb'"\ud83d\ud83d\ude00"', r"\ud83d at byte 1"),
    ],
    ids=["high", "low", "apart", "doubled"],
)
def test_lone_surrogate_is_refused_with_its_own_message(json_stream: Stream, body: bytes, named: str) -> None:
    """protocol line 403: 400 with an appropriate error message. It said "Input data was truncated"."""
    json_stream.create()
    refused = json_stream.post(body)
    assert_problem(refused, 400, "invalid_json")
    assert named in refused.json()["detail"]
    assert "surrogate" in refused.json()["detail"]
    assert "truncated" not in refused.json()["detail"]


def test_a_surrogate_pair_and_an_escaped_backslash_are_fine(json_stream: Stream) -> None:
    """protocol line 403: valid JSON is accepted, byte for byte."""
    json_stream.create()
    json_stream.append(rb'["\ud83d\ude00","\\ud800"]')
    assert json_stream.content() == rb'["\ud83d\ude00","\\ud800"]'


def test_truncated_json_is_reported_as_truncated(json_stream: Stream) -> None:
    """protocol line 403."""
    json_stream.create()
    assert "truncated" in json_stream.post(rb'{"a":"\\ud800').json()["detail"]
