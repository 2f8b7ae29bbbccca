"""Parsing server-sent events as in the HTML standard, however they are split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.client.errors import MalformedResponseError
from headwater.client.sse import Event, SseParser

WIRE = (
    b"event: data\ndata:one\ndata: two\ndata:  three\n\n"
    b": a comment\r\nevent: control\r\ndata:{}\r\n\r\n"
    b"id: 7\rretry: 5\rdata:bare\r\r"
    b"event: data\n\n"
    b"data:\xe2\x80\xa8\xc2\x85\n\n"
    b"event: cut\ndata:short\n"
)
EXPECTED = [
    Event("data", b"one\ntwo\n three"),
    Event("control", b"{}"),
    Event("message", b"bare"),
    Event("message", b"\xe2\x80\xa8\xc2\x85"),
]


def events(chunks: list[bytes]) -> list[Event]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=120))
def test_events_are_the_same_for_any_split(sizes: list[int]) -> None:
    chunks, at = [], 0
    for size in sizes:
        chunks.append(WIRE[at : at + size])
        at += size
    chunks.append(WIRE[at:])
    assert events(chunks) == EXPECTED


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(MalformedResponseError):
        events([b"nonsense\n\n"])
