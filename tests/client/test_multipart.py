"""Reading multipart bodies: the same parts however the body is cut into chunks, and nothing that is malformed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.client.errors import MalformedAnswer
from headwater.client.multipart import Part, boundary_of, parts

BOUNDARY = b"xyz"


def body_of(contents: list[tuple[str, bytes]], boundary: bytes = BOUNDARY) -> bytes:
    pieces = [
        b"--%b\r\nContent-Type: %b\r\n\r\n%b\r\n" % (boundary, kind.encode(), content) for kind, content in contents
    ]
    return b"".join(pieces) + b"--%b--\r\n" % boundary


def read_all(chunks: list[bytes], boundary: bytes = BOUNDARY) -> list[tuple[str, bytes]]:
    return [(part.content_type, part.read()) for part in parts(chunks, boundary)]


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
def test_parts_are_the_same_however_the_body_is_cut(found: list[tuple[str, bytes]], sizes: list[int]) -> None:
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
def test_a_body_that_is_cut_short_is_never_taken_for_whole(found: list[tuple[str, bytes]], data: st.DataObject) -> None:
    body = body_of(found)
    # The line end behind the closing delimiter may be missing.
    cut = data.draw(st.integers(0, len(body) - 3))
    with pytest.raises(MalformedAnswer):
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
def test_what_is_malformed_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        read_all([body])


def test_a_part_that_is_not_read_is_passed_over() -> None:
    body = body_of([("a/b", b"1" * 1000), ("a/b", b"2"), ("a/b", b"3" * 1000)])
    found = parts([body[at : at + 7] for at in range(0, len(body), 7)], BOUNDARY)
    first = next(found)
    assert next(first.chunks()) is not None
    assert next(found).read() == b"2"
    assert isinstance(next(found), Part)
    assert next(found, None) is None


def test_a_large_part_is_never_held_whole() -> None:
    def chunks() -> Iterator[bytes]:
        yield b"--xyz\r\nContent-Type: a/b\r\n\r\n"
        for _ in range(1000):
            yield b"x" * 65_536
        yield b"\r\n--xyz--\r\n"

    tracemalloc.start()
    try:
        size = sum(len(piece) for part in parts(chunks(), BOUNDARY) for piece in part.chunks())
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
def test_without_a_boundary_there_are_no_parts(content_type: str) -> None:
    with pytest.raises(MalformedAnswer):
        boundary_of(content_type)
