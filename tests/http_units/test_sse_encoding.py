"""Encoding of server-sent events: a message cannot break out of its event, and no byte of it is lost (§5.8)."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.core.catalog import ContentType, content_type_of
from headwater.core.offsets import ZERO, Offset
from headwater.http.chunks import as_array
from headwater.http.sse_encoding import SseEvent, as_chunk, control_event, events_of, json_event, large_event

TEXT = content_type_of("text/plain")
JSON = content_type_of("application/json")
BYTES = content_type_of("application/octet-stream")


def parse_events(wire: bytes) -> list[tuple[str, str]]:
    """Parse an event stream by the HTML standard: (type, data) of each event."""
    text = wire.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    events: list[tuple[str, str]] = []
    kind = "message"
    data: list[str] = []
    for line in text.split("\n"):
        if not line:
            if data:
                events.append((kind, "\n".join(data)))
            kind, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            kind = value
        elif field == "data":
            data.append(value)
    assert not data, "the last event does not end with an empty line"
    return events


def texts(messages: Sequence[bytes], *, hold: bool = False) -> list[str]:
    """The data that a reader of a text stream gets, one per event."""
    found = events(TEXT, messages, hold=hold)
    parsed = [parse_events(event.payload) for event in found]
    assert all(len(one) == 1 and one[0][0] == "data" for one in parsed)
    return [one[0][1] for one in parsed]


def events(kind: ContentType, messages: Sequence[bytes], *, hold: bool = False) -> list[SseEvent]:
    data = b"".join(messages)
    if kind.json:
        return [json_event(data, Offset(len(messages), len(data)))]
    lengths = [len(message) for message in messages]
    return events_of(kind, data, lengths, ZERO, hold=hold)


# -- text


def test_a_text_is_one_event_on_one_line() -> None:
    assert events(TEXT, [b"hello"]) == [SseEvent(b"event: data\ndata:hello\n\n", Offset(1, 5))]


def test_each_message_is_an_event_with_the_next_offset() -> None:
    found = events_of(TEXT, b"abcde", [2, 3], Offset(7, 100), hold=True)
    assert [event.end for event in found] == [Offset(8, 102), Offset(9, 105)]
    assert [event.payload for event in found] == [b"event: data\ndata:ab\n\n", b"event: data\ndata:cde\n\n"]


@pytest.mark.parametrize(
    ("message", "received"),
    [
        (b"a\nb", "a\nb"),
        (b"a\rb", "a\nb"),
        (b"a\r\nb", "a\nb"),
        (b"a\n\rb", "a\n\nb"),
        (b"a\r\r\nb", "a\n\nb"),
        (b"\n", "\n"),
        (b"\r\n\r\n", "\n\n"),
        (b"a\n", "a\n"),
        (b"\na", "\na"),
        (b" a", " a"),
        (b"  a", "  a"),
        (b" ", " "),
        (b"a\n b\n  c", "a\n b\n  c"),
        (b":comment", ":comment"),
        (b"data:x", "data:x"),
        (b"id: 7", "id: 7"),
        (b"x\n\nevent: control\ndata:{}", "x\n\nevent: control\ndata:{}"),
        (b"x\r\revent: control\rdata:{}", "x\n\nevent: control\ndata:{}"),
    ],
)
def test_line_ends_stay_within_their_event_and_leading_space_survives(message: bytes, received: str) -> None:
    assert texts([message]) == [received]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x00"])
def test_unicode_line_separators_are_unchanged(separator: str) -> None:
    message = f"a{separator}b"
    assert events(TEXT, [message.encode()])[0].payload == b"event: data\ndata:" + message.encode() + b"\n\n"
    assert texts([message.encode()]) == [message]


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=6))
@example(["\r", "\n", " ", "\n\n", "\r\n\r\n"])
@example(["\ufeff"])
def test_line_ends_of_a_text_are_normalised(messages: list[str]) -> None:
    """CR and CRLF become LF, because an event stream cannot represent them. Everything else is unchanged."""
    received = texts([message.encode() for message in messages])
    assert received == [message.replace("\r\n", "\n").replace("\r", "\n") for message in messages]


@given(st.lists(st.binary(min_size=1), min_size=1, max_size=6))
def test_bytes_that_are_not_text_cannot_inject_events(messages: list[bytes]) -> None:
    found = events(TEXT, messages, hold=False)
    assert [kind for event in found for kind, _ in parse_events(event.payload)] == ["data"] * len(found)
    assert found[-1].end == Offset(len(messages), sum(map(len, messages)))


# -- characters that straddle appends


SAMPLE = "aé€😀z\u2028ÿ\U0010ffff"


def split_at(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(set(cuts)), len(data)]
    return [data[start:end] for start, end in pairwise(edges) if start < end]


@pytest.mark.parametrize("cut", range(1, len(SAMPLE.encode())))
def test_character_split_over_two_appends_is_joined(cut: int) -> None:
    assert "".join(texts(split_at(SAMPLE.encode(), [cut]))) == SAMPLE


def test_text_split_after_every_byte_is_joined() -> None:
    data = SAMPLE.encode()
    assert texts(split_at(data, range(1, len(data)))) == list(SAMPLE)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30), st.data())
def test_text_split_anywhere_is_joined(text: str, data: st.DataObject) -> None:
    body = text.encode()
    cuts = data.draw(st.lists(st.integers(min_value=1, max_value=len(body)), max_size=8))
    pieces = split_at(body, cuts)
    received = "".join(texts(pieces))
    # A CRLF split between two messages becomes two line ends.
    if "\r" not in text:
        assert received == text
    ends = [event.end for event in events(TEXT, pieces)]
    boundaries = {Offset(at, len(b"".join(pieces[:at]))) for at in range(len(pieces) + 1)}
    assert set(ends) <= boundaries, "an offset to resume from must be a message boundary"
    assert ends[-1].byte_position == len(body)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20), st.data())
def test_live_reader_gets_all_complete_characters_at_once(text: str, data: st.DataObject) -> None:
    """After every append, a live reader has all complete characters."""
    body = text.encode()
    pieces = split_at(body, data.draw(st.lists(st.integers(min_value=1, max_value=len(body)), max_size=8)))
    received = ""
    at = 0
    for count in range(1, len(pieces) + 1):
        waiting = pieces[at:count]
        start = Offset(at, len(b"".join(pieces[:at])))
        found = events_of(TEXT, b"".join(waiting), [len(piece) for piece in waiting], start, hold=True)
        received += "".join(data for event in found for _, data in parse_events(event.payload))
        at = found[-1].end.message_index if found else at
        so_far = b"".join(pieces[:count])
        ends_whole = so_far.decode("utf-8", "ignore").encode() == so_far
        if ends_whole:
            assert received == so_far.decode()
    assert received == text


@pytest.mark.parametrize("rest", [b"\xe2", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3"])
def test_incomplete_character_is_sent_when_the_stream_closes(rest: bytes) -> None:
    assert events(TEXT, [b"a", b"b" + rest], hold=True) == events(TEXT, [b"a"])
    last = events(TEXT, [b"a", b"b" + rest], hold=False)[-1]
    assert last == SseEvent(b"event: data\ndata:b" + rest + b"\n\n", Offset(2, 2 + len(rest)))


def test_reader_waits_when_only_an_incomplete_character_is_available() -> None:
    assert events(TEXT, [b"\xe2"], hold=True) == []
    assert events(TEXT, [b"\xe2", b"\x82"], hold=True) == []
    assert texts([b"\xe2", b"\x82", b"\xac"], hold=True) == ["€"]


@pytest.mark.parametrize(
    "message", [b"\x80", b"\xbf\xbf", b"a\x80", b"\x80\x80\x80\x80\x80", b"\xc3\xa9\x80", b"\xf0\x9f\x98\x80\x80"]
)
def test_stray_continuation_byte_is_sent_at_once(message: bytes) -> None:
    assert len(events(TEXT, [message], hold=True)) == 1


@pytest.mark.parametrize("byte", [0xC0, 0xC1, *range(0xF5, 0x100)])
def test_byte_that_begins_no_character_is_sent_at_once(byte: int) -> None:
    assert len(events(TEXT, [b"a" + bytes([byte])], hold=True)) == 1


@pytest.mark.parametrize("next_message", [b"a", b"\xe2", b"\xc3\xa9", b"\xff"])
def test_incomplete_character_that_the_next_message_does_not_complete_is_sent(next_message: bytes) -> None:
    found = events(TEXT, [b"\xe2", next_message, b"end"], hold=True)
    assert found[0] == SseEvent(b"event: data\ndata:\xe2\n\n", Offset(1, 1))
    assert found[-1].end.message_index == 3


def test_many_half_characters_cost_one_event_each() -> None:
    """A regression: the pieces of eighty thousand one-byte messages were joined again for each message."""
    found = events(TEXT, [b"\xe2"] * 2000, hold=True)
    assert [event.end.message_index for event in found] == list(range(1, 2000))


def test_text_of_another_charset_is_never_held_back() -> None:
    latin = content_type_of("text/plain; charset=ISO-8859-1")
    assert [event.end.message_index for event in events(latin, [b"caf\xe9"], hold=True)] == [1]
    for charset in ("utf-8", '"UTF-8"', "utf8"):
        assert events(content_type_of(f"text/plain; charset={charset}"), [b"caf\xe9"], hold=True) == []


def test_more_than_64_kib_are_not_held_back() -> None:
    assert len(events(TEXT, [b"x" * 65_535 + b"\xe2"], hold=True)) == 1
    assert events(TEXT, [b"x" * 65_000 + b"\xe2"], hold=True) == []


# -- large messages, piece by piece


@given(st.binary(min_size=1, max_size=60), st.lists(st.integers(min_value=1, max_value=60), max_size=6))
@example(b"a\r\n b\r", [2])
@example(b" a\n b", [3])
@example(b"\n ", [1])
@example(b"\r\r\n\n", [1, 2, 3])
def test_large_event_does_not_depend_on_its_pieces(message: bytes, cuts: list[int]) -> None:
    pieces = [memoryview(piece) for piece in split_at(message, [cut for cut in cuts if cut < len(message)])]
    assert b"".join(large_event(TEXT, pieces)) == events(TEXT, [message])[0].payload
    assert b"".join(large_event(BYTES, pieces)) == events(BYTES, [message])[0].payload


# -- JSON and bytes


@pytest.mark.parametrize("kind", [TEXT, BYTES])
def test_large_event_is_encoded_in_small_pieces(kind: ContentType) -> None:
    """A reader that does not read keeps one of them: a regression kept a megabyte for each."""
    assert max(len(piece) for piece in large_event(kind, [b"x" * 1_000_000])) <= 64 * 1024


def test_json_is_one_array_per_event() -> None:
    stored = [b'{"a":1},', b"2,", b'"x",']
    assert events(JSON, stored) == [SseEvent(b'event: data\ndata:[{"a":1},2,"x"]\n\n', Offset(3, 14))]


def test_json_with_line_breaks_stays_one_value() -> None:
    found = events(JSON, [b'{\r\n "a": [1,\r2]\n},'])
    [(kind, data)] = parse_events(found[0].payload)
    assert (kind, json.loads(data)) == ("data", [{"a": [1, 2]}])


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_json_values_are_received_unchanged(values: list[str]) -> None:
    found = events(JSON, [json.dumps(value, ensure_ascii=False).encode() + b"," for value in values])
    assert len(found) == 1
    [(_, data)] = parse_events(found[0].payload)
    assert json.loads(data) == values


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=5), st.booleans())
def test_bytes_are_sent_as_base64_one_event_per_message(messages: list[bytes], hold: bool) -> None:
    found = events(BYTES, messages, hold=hold)
    assert [b64decode(data, validate=True) for event in found for _, data in parse_events(event.payload)] == messages
    assert [event.end.message_index for event in found] == list(range(1, len(messages) + 1))


# -- control events


def control_data(wire: bytes) -> dict[str, object]:
    [(kind, data)] = parse_events(wire)
    assert kind == "control"
    found = json.loads(data)
    assert isinstance(found, dict)
    return found


def test_control_event_has_the_offset_to_continue_from() -> None:
    assert control_data(control_event(str(Offset(1, 255)), "77", up_to_date=False, closed=False)) == {
        "streamNextOffset": "0000000000000001_00000000000000ff",
        "streamCursor": "77",
    }


def test_control_event_at_the_tail_is_up_to_date() -> None:
    assert control_data(control_event(str(ZERO), "77", up_to_date=True, closed=False))["upToDate"] is True


def test_a_control_event_at_the_end_has_no_cursor() -> None:
    assert control_data(control_event(str(Offset(2, 9)), None, up_to_date=True, closed=True)) == {
        "streamNextOffset": "0000000000000002_0000000000000009",
        "upToDate": True,
        "streamClosed": True,
    }


# -- bodies


@pytest.mark.parametrize("size", [1, 15, 16, 255, 4096])
def test_chunk_begins_with_its_length_in_hex(size: int) -> None:
    assert as_chunk(b"x" * size) == f"{size:x}\r\n".encode() + b"x" * size + b"\r\n"


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_json_array_does_not_depend_on_the_slices(messages: list[bytes], data: st.DataObject) -> None:
    stored = b"".join(message.replace(b",", b".") + b"," for message in messages)
    cuts = data.draw(st.lists(st.integers(min_value=1, max_value=len(stored)), max_size=6))
    pieces = split_at(stored, cuts)
    viewed: Iterator[bytes | memoryview] = iter([memoryview(piece) for piece in pieces])
    assert b"".join(as_array(viewed, len(stored))) == b"[" + stored[:-1] + b"]"
    plain: Iterator[bytes | memoryview] = iter(pieces)
    assert b"".join(as_array(plain, len(stored))) == b"[" + stored[:-1] + b"]"
