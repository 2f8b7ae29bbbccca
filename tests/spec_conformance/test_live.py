"""Live reads: cursors of events, `upToDate`, the end of a closed stream, and Last-Event-ID."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.http.protocol import Stream, offset, stream_on
from tests.http.sse_reader import SseReader
from tests.serving import Server, serve

FAR_AHEAD = 10**7


@pytest.fixture(scope="module")
def ticking(mode: str) -> Iterator[Server]:
    """A server with a manual clock whose cursor changes every second."""
    with serve(
        moving_time=True,
        DS_STORAGE__MODE=mode,
        DS_CURSOR__INTERVAL_SECS="1",
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="1",
        DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0",
    ) as running:
        yield running


def test_events_carry_the_cursor_of_now_and_not_of_an_older_frame(ticking: Server) -> None:
    """protocol lines 430-433: the current interval for each response, and never backwards.

    A frame shared with other readers was sent with the cursor of the time at which it was built.
    """
    with stream_on(ticking, "shared") as stream:
        stream.create("one")
        with SseReader(ticking, "shared") as first:
            first.pair()
            ticking.pass_time(10_000)
            polled = int(stream.long_poll("-1").headers["stream-cursor"])
            with SseReader(ticking, "shared") as second:
                assert int(second.pair()[1]["streamCursor"]) >= polled
            with SseReader(ticking, "shared", query=f"&cursor={polled}") as third:
                assert int(third.pair()[1]["streamCursor"]) > polled


def test_the_cursors_of_a_reader_that_is_ahead_never_go_back(ticking: Server) -> None:
    """protocol line 433: each event added another jitter to the cursor that the client sent, up and down."""
    with stream_on(ticking, "ahead") as stream:
        stream.create("one")
        echoed = int(stream.long_poll("-1").headers["stream-cursor"]) + FAR_AHEAD
        with SseReader(ticking, "ahead", query=f"&cursor={echoed}") as reader:
            cursors = [int(reader.pair()[1]["streamCursor"])]
            for number in range(8):
                stream.append(f"{number}")
                cursors.append(int(reader.pair()[1]["streamCursor"]))
    assert cursors[0] > echoed
    assert cursors == sorted(cursors)


@pytest.mark.parametrize("content_type", ["text/plain", "text/plain; charset=utf-8"])
def test_a_reader_is_not_up_to_date_while_bytes_are_held_back(
    server: Server, stream: Stream, content_type: str
) -> None:
    """protocol line 323: upToDate only when the client has all data; lines 308 and 320."""
    stream.create(b"caf\xc3", headers={"Content-Type": content_type})
    with SseReader(server, stream.name) as reader:
        held = reader.next().control
        assert "upToDate" not in held
        assert held["streamNextOffset"].startswith(offset(0, 0))
        stream.append(b"\xa9", headers={"Content-Type": content_type})
        data, control = reader.pair()
        assert data.data == "café"
        assert control["upToDate"] is True


def test_bytes_are_held_back_for_a_bounded_time(server: Server, stream: Stream) -> None:
    """protocol line 308: data is emitted; an incomplete character at the tail must not wait forever."""
    stream.create(b"caf\xc3")
    with SseReader(server, stream.name) as reader:
        events = reader.until_up_to_date()
    assert "".join(event.data for event in events if event.kind == "data") == "caf\ufffd"


def test_bytes_of_another_charset_are_not_held_back(server: Server, stream: Stream) -> None:
    """protocol line 308: 0xC3 ends a character in ISO 8859-1, and begins one in UTF-8 only."""
    stream.create(b"caf\xc3", headers={"Content-Type": "text/plain; charset=iso-8859-1"})
    with SseReader(server, stream.name) as reader:
        data, control = reader.pair()
    assert control["upToDate"] is True
    # If it were held back, it would be sent unchanged after the time limit.
    assert data.data != "caf"


def test_the_last_event_of_a_closed_stream_has_no_cursor(server: Server, stream: Stream) -> None:
    """protocol lines 322, 327: streamCursor is omitted when streamClosed is true; reference line 618."""
    stream.create("one")
    stream.close("two")
    with SseReader(server, stream.name) as reader:
        controls = [event.control for event in reader if event.kind == "control"]
    assert controls[-1]["streamClosed"] is True
    assert "streamCursor" not in controls[-1]


def test_data_events_have_an_id_to_resume_from(server: Server, stream: Stream) -> None:
    """reference line 490: a browser's EventSource resumes with Last-Event-ID."""
    stream.create("one")
    middle = stream.append("two")
    with SseReader(server, stream.name) as reader:
        reader.until_up_to_date()
        wire = reader.wire.decode()
    assert f"id:{middle}" in wire.replace("id: ", "id:")
    with SseReader(server, stream.name, headers={"Last-Event-ID": middle}) as reader:
        first = reader.next().control
        assert first["streamNextOffset"] == middle
        stream.append("three")
        assert reader.pair()[0].data == "three"
