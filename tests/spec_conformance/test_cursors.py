"""Cursors never go backwards."""

from __future__ import annotations

import pytest

from tests.http.protocol import Stream


@pytest.mark.parametrize(
    "cursor",
    [2**53 - 2, 2**53 - 1, 2**53, 10**16 - 1, 10**32 - 1, 10**4000],
    ids=lambda cursor: f"{float(min(cursor, 10**300)):g}",
)
def test_response_to_a_huge_cursor_has_a_greater_one(stream: Stream, cursor: int) -> None:
    """protocol line 433: strictly greater than the client's cursor. 2^53-1 used to get a smaller one."""
    stream.create("data")
    for _ in range(3):
        answer = stream.long_poll("-1", cursor=str(cursor))
        assert answer.status_code == 200
        assert int(answer.headers["stream-cursor"]) > cursor
        cursor = int(answer.headers["stream-cursor"])
