"""Parsing multipart bodies: the same parts however the body is split into chunks, and malformed bodies are errors."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.client.errors import MalformedResponseError
from headwater.client.multipart import MultipartParser, PartEnd, PartEvent, PartStart, boundary_of

BOUNDARY = b"xyz"


def body_of(contents: list[tuple[str, bytes]], boundary: bytes = BOUNDARY) -> bytes:
    pieces = [
        b"--%b\r\nContent-Type: %b\r\n\r\n%b\r\n" % (boundary, kind.encode(), content) for kind, content in contents
    ]
    return b"".join(pieces) + b"--%b--\r\n" % boundary


def read_all(chunks: list[bytes], boundary: bytes = BOUNDARY) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    content_type, body, ended = "", b"", True
    for event in events_of(chunks, boundary):
        if isinstance(event, PartStart):
            assert ended
            content_type, body, ended = event.content_type, b"", False
        elif isinstance(event, PartEnd):
            found.append((content_type, body))
            ended = True
        else:
            assert not ended
            body += event
    assert ended
    return found


def events_of(chunks: Iterable[bytes], boundary: bytes = BOUNDARY) -> Iterator[PartEvent]:
    parser = MultipartParser(boundary)
    for chunk in chunks:
        yield from parser.feed(chunk)
    parser.finish()


contents = st.lists(
    st.tuples(
        st.sampled_from(["text/plain", "a/b; c=d"]),
        st.one_of(
            st.binary(max_size=40),
            st.lists(st.sampled_from([b"\r\n", b"--", b"xy", b"\r", b"\n", b"-", b"z", b"--xy"]), max_size=8).map(
                b"".join
            ),
        ).filter(lambda content: BOUNDARY not in content),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(contents, st.lists(st.integers(1, 30), min_size=1, max_size=200))
def test_parts_are_the_same_for_any_split_of_the_body(found: list[tuple[str, bytes]], sizes: list[int]) -> None:
    body = body_of(found)
    chunks, at = [], 0
    for size in sizes:
        chunks.append(body[at : at + size])
        at += size
    chunks.append(body[at:])
    assert read_all(chunks) == found
    assert read_all([body[at : at + 1] for at in range(len(body))]) == found


@settings(deadline=None)
@given(contents, st.data())
def test_truncated_body_is_never_accepted_as_complete(found: list[tuple[str, bytes]], data: st.DataObject) -> None:
    body = body_of(found)
    # The line end after the closing delimiter may be missing.
    cut = data.draw(st.integers(0, len(body) - 3))
    with pytest.raises(MalformedResponseError):
        read_all([body[:cut]])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"preamble\r\n" + body_of([("a/b", b"x")]),
        body_of([("a/b", b"x")]) + b"epilogue",
        b"--xyz\r\n\r\nno type\r\n--xyz--\r\n",
        b"--xyz\r\nContent-Type: a/b\r\nContent-Type: c/d\r\n\r\nx\r\n--xyz--\r\n",
        b"--xyz\r\nContent-Type a/b\r\n\r\nx\r\n--xyz--\r\n",
        b"--xyz\r\n Content-Type: a/b\r\n\r\nx\r\n--xyz--\r\n",
        b"--xyz \r\nContent-Type: a/b\r\n\r\nx\r\n--xyz--\r\n",
        b"--xyzContent-Type: a/b\r\n\r\nx\r\n--xyz--\r\n",
        b"--xyz\r\nContent-Type: a/b\r\n\r\nx\r\n--xyz-\r\n",
        b"--xyz\nContent-Type: a/b\n\nx\n--xyz--\n",
        b"--xyz\r\nContent-Type: " + b"x" * 100_000,
    ],
)
def test_malformed_body_is_rejected(body: bytes) -> None:
    with pytest.raises(MalformedResponseError):
        read_all([body])


def test_large_part_is_not_held_in_memory() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"--xyz\r\nContent-Type: a/b\r\n\r\n"
        for _ in range(1000):
            yield b"x" * 65_536
        yield b"\r\n--xyz--\r\n"

    tracemalloc.start()
    try:
        size = sum(len(event) for event in events_of(chunks()) if isinstance(event, bytes))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size == 65_536_000
    assert peak < 2_000_000


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/mixed; boundary=abc", b"abc"),
        ("Multipart/Mixed;Boundary=a-b_c.1", b"a-b_c.1"),
        ('multipart/mixed; charset=x; boundary="a b"; y=z', b"a b"),
    ],
)
def test_the_boundary_is_found(content_type: str, boundary: bytes) -> None:
    assert boundary_of(content_type) == boundary


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "multipart/mixed", "multipart/form-data; boundary=a", "multipart/mixed; boundary="],
)
def test_missing_boundary_is_an_error(content_type: str) -> None:
    with pytest.raises(MalformedResponseError):
        boundary_of(content_type)
