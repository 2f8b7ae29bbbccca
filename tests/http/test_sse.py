"""Live reads by server-sent events (protocol §5.8)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator

import pytest

from tests.http.protocol import ZERO, Stream, assert_problem, byte_position, offset, stream_on
from tests.http.raw import RawConnection, encode
from tests.http.sse_reader import Event, SseReader
from tests.serving import Server, serve

BINARY = "application/octet-stream"


@pytest.fixture(scope="module")
def lasting() -> Iterator[Server]:
    """A server that never ends an SSE response on its own."""
    with serve(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as running:
        yield running


@pytest.fixture
def live(lasting: Server, stream_name: Callable[[], str]) -> Iterator[Stream]:
    """A text stream on that server, not yet created."""
    with stream_on(lasting, stream_name()) as stream:
        yield stream


def as_lines(text: str) -> str:
    """The lines of a text, as an SSE reader sees them."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def test_the_response_is_an_unbounded_event_stream(lasting: Server, live: Stream) -> None:
    live.create("data")
    with SseReader(lasting, live.name) as events:
        assert events.status == 200
        assert events.header("content-type") == "text/event-stream"
        assert events.header("content-length") is None
        assert "no-cache" in str(events.header("cache-control"))
        assert events.header("stream-sse-data-encoding") is None
        assert events.header("etag") is None


def test_event_frames_have_the_documented_form(lasting: Server, live: Stream) -> None:
    live.create("hello")
    with SseReader(lasting, live.name) as events:
        events.until_up_to_date()
        data, control = events.wire.split(b"\n\n")[:2]
    at = offset(1, 5).encode()
    assert data.startswith(b"event: data\ndata:hello\nid:" + at)
    assert data.count(b"\n") == 2
    start = b'event: control\ndata:{"streamNextOffset":"0000000000000001_0000000000000005_'
    assert re.match(re.escape(start) + b'[0-9a-f]{16}"', control)


def test_an_empty_stream_begins_with_a_control_event(lasting: Server, live: Stream) -> None:
    live.create()
    with SseReader(lasting, live.name) as events:
        control = events.next().control
        assert control["streamNextOffset"] == ZERO
        assert control["upToDate"] is True
        assert control["streamCursor"].isdigit()
        assert "streamClosed" not in control


def test_text_is_sent_as_one_event_per_message_with_its_next_offset(lasting: Server, live: Stream) -> None:
    live.create()
    tokens = [live.append(f"message {number}") for number in range(10)]
    with SseReader(lasting, live.name) as events:
        pairs = [events.pair() for _ in range(10)]
    assert [data.data for data, _ in pairs] == [f"message {number}" for number in range(10)]
    assert [control["streamNextOffset"] for _, control in pairs] == tokens
    assert [control.get("upToDate") for _, control in pairs] == [None] * 9 + [True]
    assert all(control["streamCursor"].isdigit() for _, control in pairs)


def test_reading_can_resume_at_every_control_offset(lasting: Server, live: Stream) -> None:
    live.create()
    for number in range(10):
        live.append(f"<{number}>")
    with SseReader(lasting, live.name) as events:
        controls = [events.pair()[1]["streamNextOffset"] for _ in range(10)]
    whole = live.content()
    for token in controls:
        assert live.get(offset=token).content == whole[byte_position(token) :]


def test_appends_are_sent_at_once(lasting: Server, live: Stream) -> None:
    live.create()
    with SseReader(lasting, live.name) as events:
        events.until_up_to_date()
        for number in range(20):
            token = live.append(f"live {number}")
            data, control = events.pair()
            assert data.data == f"live {number}"
            assert control["streamNextOffset"] == token
            assert control["upToDate"] is True


def test_now_skips_history(lasting: Server, live: Stream) -> None:
    live.create("history")
    with SseReader(lasting, live.name, offset="now") as events:
        first = events.next().control
        assert (first["streamNextOffset"], first["upToDate"]) == (offset(1, 7), True)
        live.append("news")
        assert events.pair()[0].data == "news"


def test_reading_from_an_offset(lasting: Server, live: Stream) -> None:
    live.create("one")
    token = live.tail()
    live.append("two")
    with SseReader(lasting, live.name, offset=token) as events:
        assert events.pair()[0].data == "two"


def test_the_offset_is_required(stream: Stream) -> None:
    stream.create()
    assert stream.get(live="sse").status_code == 400


def test_sse_read_of_a_missing_stream_is_404(stream: Stream) -> None:
    assert_problem(stream.get(offset="-1", live="sse"), 404, "stream_not_found")


def test_t24_json_is_sent_as_one_array_per_event(lasting: Server) -> None:
    messages = [{"n": number, "text": "line\nbreak"} for number in range(50)]
    with stream_on(lasting, "sse-json", "application/json") as stream:
        stream.create()
        for number in range(0, 50, 5):
            stream.append(json.dumps(messages[number : number + 5]))
        with SseReader(lasting, stream.name) as events:
            got = events.until_up_to_date()
            assert [event.kind for event in got] == ["data", "control"] * (len(got) // 2)
            arrays = [json.loads(event.data) for event in got if event.kind == "data"]
            assert [message for array in arrays for message in array] == messages
            stream.append('{"live": 1.0}')
            assert events.pair()[0].data == '[{"live": 1.0}]'
            stream.append("[[1], [2]]")
            assert json.loads(events.pair()[0].data) == [[1], [2]]


def test_t24_an_empty_json_stream_sends_no_empty_batch(lasting: Server) -> None:
    with stream_on(lasting, "sse-json-empty", "application/json") as stream:
        stream.create()
        with SseReader(lasting, stream.name) as events:
            assert events.next().control["upToDate"] is True
            stream.append("1")
            assert events.pair()[0].data == "[1]"


@pytest.mark.parametrize("content_type", [BINARY, "image/png", "application/x-protobuf", "application/ndjson"])
def test_binary_data_is_sent_as_base64(lasting: Server, content_type: str, stream_name: Callable[[], str]) -> None:
    payloads = [bytes(range(256)), b"\r\n\r\n", b"\x00", b"ab", b"event: control\ndata: x\n\n", b"\xff\xfe" * 500]
    with stream_on(lasting, stream_name(), content_type) as stream:
        stream.create(payloads[0])
        for payload in payloads[1:3]:
            stream.append(payload)
        with SseReader(lasting, stream.name) as events:
            assert events.header("stream-sse-data-encoding") == "base64"
            got = [event for event in events.until_up_to_date() if event.kind == "data"]
            for payload in payloads[3:]:
                stream.append(payload)
                got.append(events.pair()[0])
    assert [event.decoded for event in got] == payloads
    assert all(len(event.data.replace("\n", "")) % 4 == 0 for event in got)


def test_text_reads_have_no_encoding_header(lasting: Server) -> None:
    for number, content_type in enumerate(("text/plain", "text/html; charset=utf-8", "application/json")):
        with stream_on(lasting, f"plain-{number}", content_type) as stream:
            stream.create()
            with SseReader(lasting, stream.name) as events:
                assert events.header("stream-sse-data-encoding") is None


@pytest.mark.parametrize(
    "payload",
    [
        "one\ntwo",
        "one\r\ntwo",
        "one\rtwo",
        "\n",
        "\r",
        "\r\n",
        "\n\n\n",
        "trailing\n",
        "\nleading",
        " leading space",
        "  two spaces",
        "\ttab",
        ": a comment?",
        "data: fake",
        "event: control\ndata: {}",
        'x\n\nevent: control\ndata: {"streamClosed":true}\n\n',
        'x\r\n\r\nevent: control\r\ndata: {"streamClosed":true}\r\n\r\n',
        'x\r\revent: control\rdata: {"streamClosed":true}\r\r',
        "id: 7\nretry: 1\n",
        "line\u2028separator\u2029paragraph\u0085next",
        "vertical\x0btab\x0cform\x1cfeed\x1d\x1e",
        "nul\x00inside",
        "\ufeffbom",
        "🎈 ünïcödé",
    ],
    ids=lambda payload: repr(payload)[1:40],
)
def test_t23_text_cannot_inject_events(lasting: Server, live: Stream, payload: str) -> None:
    live.create(payload.encode())
    with SseReader(lasting, live.name) as events:
        caught_up = events.until_up_to_date()
        live.append(payload.encode())
        following = [events.next(), events.next()]
    for got in (caught_up, following):
        assert [event.kind for event in got] == ["data", "control"]
        assert got[0].data == as_lines(payload)
        assert "streamClosed" not in got[1].control


def test_t23_crlf_split_over_two_appends_stays_two_events(lasting: Server, live: Stream) -> None:
    live.create("one\r")
    live.append("\ntwo")
    with SseReader(lasting, live.name) as events:
        got = [event.data for event in events.until_up_to_date() if event.kind == "data"]
    assert got == ["one\n", "\ntwo"]


def test_t25_character_split_over_two_appends_is_joined(lasting: Server, live: Stream) -> None:
    balloon = "🎈".encode()
    live.create(b"up " + balloon[:2])
    live.append(balloon[2:] + b" away")
    with SseReader(lasting, live.name) as events:
        got = events.until_up_to_date()
    assert "".join(event.data for event in got if event.kind == "data") == "up 🎈 away"
    assert got[-1].control["streamNextOffset"] == live.tail()


def test_t25_character_split_over_live_appends_is_joined(lasting: Server, live: Stream) -> None:
    live.create()
    with SseReader(lasting, live.name) as events:
        events.until_up_to_date()
        pieces = "é€🎈".encode()
        for byte in pieces:
            live.append(bytes([byte]))
        live.append("!")
        text = ""
        while not text.endswith("!"):
            event = events.next()
            text += event.data if event.kind == "data" else ""
    assert text == "é€🎈!"


@pytest.mark.parametrize("broken", [b"\xff", b"a\xc3(b", b"\xed\xa0\x80", b"tail\xf0\x9f"])
def test_t25_bytes_that_are_not_text_are_marked_and_the_reader_continues(
    lasting: Server, live: Stream, broken: bytes
) -> None:
    live.create(broken)
    live.append(" and on")
    with SseReader(lasting, live.name) as events:
        got = events.until_up_to_date()
    text = "".join(event.data for event in got if event.kind == "data")
    assert text == (broken + b" and on").decode("utf-8", "replace")
    assert live.content() == broken + b" and on"


@pytest.mark.parametrize("broken", [b"end\xff", b"end\xc0", b"end\xf8", b"end\xe0\x80", b"end\x80"])
def test_t25_a_message_whose_end_can_never_become_a_character_is_sent_at_once(
    lasting: Server, live: Stream, broken: bytes
) -> None:
    live.create()
    with SseReader(lasting, live.name) as events:
        events.until_up_to_date()
        live.append(broken)
        assert events.pair()[0].data == broken.decode("utf-8", "replace")


def test_t18_last_message_is_sent_before_stream_closed(lasting: Server) -> None:
    """A reader at the tail gets the message of a closing append with any timing."""
    rng = random.Random(18)
    for number in range(40):
        with stream_on(lasting, f"last-{number}") as stream:
            stream.create("first")
            with SseReader(lasting, stream.name) as events:
                if number % 2:
                    events.until_up_to_date()
                for _ in range(rng.choice((0, 0, 1, 5))):
                    stream.head()
                stream.close("last")
                got = list(events)
        assert [event.data for event in got if event.kind == "data"][-1] == "last"
        assert got[-1].kind == "control"
        assert got[-1].control["streamClosed"] is True
        assert got[-1].control["streamNextOffset"] == offset(2, 9)
        assert [event.kind for event in got].count("data") == (1 if number % 2 else 2)


def test_closing_without_data_ends_the_response_after_a_control_event(lasting: Server, live: Stream) -> None:
    live.create("data")
    with SseReader(lasting, live.name) as events:
        events.until_up_to_date()
        live.close()
        assert events.next().control["streamClosed"] is True
        assert events.ends()


def test_closed_stream_is_sent_completely_and_then_ends(lasting: Server, live: Stream) -> None:
    live.create("one")
    live.append("two")
    live.close("three")
    with SseReader(lasting, live.name) as events:
        got = list(events)
    assert [event.data for event in got if event.kind == "data"] == ["one", "two", "three"]
    assert [event.control.get("streamClosed") for event in got if event.kind == "control"][-1] is True
    assert sum("streamClosed" in event.data for event in got) == 1


def test_at_the_end_of_a_closed_stream_there_is_one_control_event(lasting: Server, live: Stream) -> None:
    live.create("data")
    live.close()
    with SseReader(lasting, live.name, offset=offset(1, 4)) as events:
        (only,) = list(events)
    assert only.control["streamClosed"] is True
    assert only.control["streamNextOffset"] == offset(1, 4)


def test_t21_deleting_the_stream_ends_the_response_cleanly(lasting: Server, live: Stream) -> None:
    live.create("data")
    with SseReader(lasting, live.name) as events:
        events.until_up_to_date()
        live.delete()
        rest = list(events)
    assert not [event for event in rest if event.kind == "data"]
    assert not [event for event in rest if event.kind == "control" and "streamClosed" in event.control]


def test_t21_readers_of_a_deleted_stream_get_no_data_of_its_successor(lasting: Server, live: Stream) -> None:
    live.create("data")
    with SseReader(lasting, live.name) as events:
        events.until_up_to_date()
        live.delete()
        live.create("stranger")
        live.append("more")
        assert "stranger" not in "".join(event.data for event in events)


def test_the_server_ends_the_response_after_the_reconnect_interval() -> None:
    with (
        serve(moving_time=True, DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="3600") as server,
        stream_on(server, "short") as stream,
    ):
        stream.create("data")
        with SseReader(server, stream.name) as events:
            got = events.until_up_to_date()
            server.pass_time(3000)
            assert events.connection.has_nothing()
            server.pass_time(1000)
            got += list(events)
        assert [event.data for event in got if event.kind == "data"] == ["data"]
        assert not any("streamClosed" in event.data for event in got)


def test_readers_that_reconnect_again_and_again_lose_and_repeat_nothing() -> None:
    with serve(DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0.2") as server, stream_on(server, "again") as stream:
        stream.create()
        sent, at, reconnects = 0, "-1", 0
        got: list[str] = []
        while reconnects < 10 or len(got) < sent:
            with SseReader(server, stream.name, offset=at) as events:
                reconnects += 1
                for event in events:
                    if event.kind == "data":
                        got.append(event.data)
                    else:
                        at = event.control["streamNextOffset"]
                        if reconnects < 10:
                            stream.append(f"{sent}")
                            sent += 1
        assert got == [str(number) for number in range(sent)]


def test_an_interval_of_0_never_ends_the_response() -> None:
    with (
        serve(moving_time=True, DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as server,
        stream_on(server, "endless") as stream,
    ):
        stream.create()
        with SseReader(server, stream.name) as events:
            events.until_up_to_date()
            server.pass_time(1_000_000)
            stream.append("still here")
            assert events.pair()[0].data == "still here"


def test_t16_the_cursor_of_an_sse_reader_advances(lasting: Server, live: Stream) -> None:
    live.create("data")
    held = 0
    for _ in range(10):
        with SseReader(lasting, live.name, query=f"&cursor={held}" if held else "") as events:
            cursor = int(events.pair()[1]["streamCursor"])
        assert cursor > held
        held = cursor


@pytest.mark.parametrize("digits", [4_300, 5_000, 7_000])
def test_cursor_of_very_many_digits_does_not_end_the_response(lasting: Server, live: Stream, digits: int) -> None:
    """Python does not convert them to a number; the response used to end without the data."""
    live.create("data")
    with SseReader(lasting, live.name, query=f"&cursor={'9' * digits}") as events:
        data, control = events.pair()
        assert data.data == "data"
        assert control["streamCursor"] == "9" * digits + "0"
        live.append("more")
        assert events.pair()[0].data == "more"
    assert "Traceback" not in lasting.log()


def test_long_backlog_is_sent_completely_and_in_order(lasting: Server, live: Stream) -> None:
    live.create()
    messages = [f"{number:05d}" + "x" * 20_000 for number in range(300)]
    for message in messages:
        live.append(message)
    with SseReader(lasting, live.name) as events:
        got = events.until_up_to_date()
        live.append("and live")
        assert events.pair()[0].data == "and live"
    assert [event.data for event in got if event.kind == "data"] == messages


def test_appends_during_catch_up_are_sent_once_and_in_order(lasting: Server, live: Stream) -> None:
    live.create()
    for number in range(200):
        live.append(f"{number:04d}" + "x" * 5_000)
    with SseReader(lasting, live.name) as events:
        got: list[Event] = []
        for number in range(200, 300):
            live.append(f"{number:04d}")
            got.append(events.next())
        while sum(event.kind == "data" for event in got) < 300:
            got.append(events.next())
    assert [int(event.data[:4]) for event in got if event.kind == "data"] == list(range(300))


def test_many_readers_get_the_same_frames(lasting: Server, live: Stream) -> None:
    live.create()
    readers = [SseReader(lasting, live.name, offset="now") for _ in range(50)]
    try:
        for reader in readers:
            reader.until_up_to_date()
        for number in range(20):
            live.append(f"{number}")
        for reader in readers:
            assert [reader.pair()[0].data for _ in range(20)] == [str(number) for number in range(20)]
    finally:
        for reader in readers:
            reader.connection.socket.close()


def test_over_http_1_0_the_response_ends_with_the_connection(lasting: Server, live: Stream) -> None:
    live.create("data", headers={"Stream-Closed": "true"})
    with RawConnection(lasting) as connection:
        connection.send(encode("GET", f"{live.path}?offset=-1&live=sse", version="1.0"))
        read = connection.response()
        assert read.header("transfer-encoding") is None
        assert read.body.startswith(b"event: data\ndata:data\nid:" + offset(1, 4).encode())
        assert connection.ends()


def test_a_connection_serves_other_requests_after_an_sse_response(lasting: Server, live: Stream) -> None:
    live.create("data", headers={"Stream-Closed": "true"})
    with RawConnection(lasting) as connection:
        reader = SseReader(lasting, live.name, connection=connection)
        assert [event.kind for event in reader] == ["data", "control"]
        if reader.header("connection") != "close":
            assert connection.request("GET", "/healthz").body == b"ok"
