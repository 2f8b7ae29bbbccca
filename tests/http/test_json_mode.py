"""JSON streams: arrays in, arrays out, and every message stored unchanged (protocol §7.1)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.http.protocol import ZERO, Stream, assert_problem, offset, stream_on
from tests.serving import Server, serve


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """A server with small limits: 100 bytes a chunk, 1,000 a stream."""
    with serve(DS_LIMITS__MAX_CHUNK_BYTES="100", DS_LIMITS__MAX_STREAM_BYTES="1000") as running:
        yield running


@pytest.mark.parametrize(
    ("posted", "stored"),
    [
        ('{"event": "created"}', '[{"event": "created"}]'),
        ('[{"event": "a"}, {"event": "b"}]', '[{"event": "a"},{"event": "b"}]'),
        ("[[1,2], [3,4]]", "[[1,2],[3,4]]"),
        ("[[[1,2,3]]]", "[[[1,2,3]]]"),
        ("[[]]", "[[]]"),
        ('"text"', '["text"]'),
        ("17", "[17]"),
        ("null", "[null]"),
        ("true", "[true]"),
        ("[null, false]", "[null,false]"),
        ('""', '[""]'),
        ("{}", "[{}]"),
        (' \r\n\t{"a":1} \n', '[{"a":1}]'),
        (" [ 1 ,\n 2 ] ", "[1,2]"),
    ],
)
def test_one_level_of_array_is_flattened(json_stream: Stream, posted: str, stored: str) -> None:
    json_stream.create()
    json_stream.append(posted)
    assert json_stream.get().text == stored


@pytest.mark.parametrize(
    "message",
    [
        "9007199254740993",
        "18446744073709551616",
        "-0",
        "1.0",
        "1.10",
        "1e5",
        "1E+05",
        "0.1000000000000000055511151231257827",
        "1e400",
        '{"b":1,"a":2}',
        '{"a":1,"a":2}',
        '{"a" : 1,\t"b":[ 1, 2 ]}',
        '"\\u00e9\\/\\b"',
        '"é\u2028\u2029\u0085"',
        '"\\ud83c\\udf88 🎈"',
        '"\\u0000"',
        '{"":""}',
        '{"__proto__":{"x":1},"constructor":null}',
    ],
)
def test_t28_message_is_stored_unchanged(json_stream: Stream, message: str) -> None:
    json_stream.create()
    json_stream.append(message)
    json_stream.append(f"[{message},{message}]")
    assert json_stream.get().content == f"[{message},{message},{message}]".encode()


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"a":1',
        b'{"a":1}}',
        b'{"a":1} garbage',
        b"1 2",
        b"[1,2",
        b"[1,2,]",
        b"[,1]",
        b'{"a":1,}',
        b"{a:1}",
        b"{'a':1}",
        b'{"a"}',
        b"NaN",
        b"[NaN]",
        b"Infinity",
        b'{"a":-Infinity}',
        b"undefined",
        b"tru",
        b"01",
        b"+1",
        b".5",
        b"1.",
        b"1e",
        b"0x10",
        b"-",
        b'"open',
        b'"\\x"',
        b'"\\u12"',
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'["ok","\\ud800x"]',
        b'"tab\there"',
        b'"line\nhere"',
        b'"nul\x00here"',
        b"/* no */ 1",
        b"1 // no",
        b'"\xff"',
        b'"\xc3"',
        b'"\xed\xa0\x80"',
        b'"\xc0\xaf"',
        b'{"a":"\xf5\x80\x80\x80"}',
        b"\xff\xfe1\x00",
        b"   ",
        b"\x00",
        b"]",
        b"[" * 100_000,
        b"[" * 50_000 + b"]" * 50_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=lambda body: repr(body)[2:30],
)
def test_t28_invalid_json_is_400_and_changes_nothing(json_stream: Stream, body: bytes) -> None:
    json_stream.create("[1]")
    refused = json_stream.post(body)
    assert_problem(refused, 400, "invalid_json")
    assert json_stream.get().content == b"[1]"


@pytest.mark.parametrize("body", [b"{", b"[1,", b"NaN", b'"\xff"'])
def test_put_with_invalid_json_creates_nothing(json_stream: Stream, body: bytes) -> None:
    assert_problem(json_stream.put(body), 400, "invalid_json")
    assert not json_stream.exists()


def test_t28_an_empty_array_is_400_for_post(json_stream: Stream) -> None:
    json_stream.create("[1]")
    for empty in ("[]", " [ ] "):
        assert_problem(json_stream.post(empty), 400, "empty_body")
    assert json_stream.tail() == offset(1, 2)


def test_t28_an_empty_array_creates_an_empty_stream(json_stream: Stream) -> None:
    created = json_stream.put("[]")
    assert (created.status_code, created.headers["stream-next-offset"]) == (201, ZERO)
    assert json_stream.get().content == b"[]"


def test_an_empty_stream_reads_as_an_empty_array(json_stream: Stream) -> None:
    json_stream.create()
    read = json_stream.get()
    assert (read.content, read.headers["content-type"]) == (b"[]", "application/json")
    assert json_stream.get(offset="now").content == b"[]"


def test_reading_at_the_tail_gives_an_empty_array(json_stream: Stream) -> None:
    json_stream.create("[1,2]")
    assert json_stream.get(offset=json_stream.tail()).content == b"[]"


def test_initial_content_is_flattened_too(json_stream: Stream) -> None:
    created = json_stream.put('[{"a":1}, {"b":2}]')
    assert created.headers["stream-next-offset"] == offset(2, 16)
    assert json_stream.get().content == b'[{"a":1},{"b":2}]'


def test_an_offset_counts_messages_and_their_bytes_with_one_comma_each(json_stream: Stream) -> None:
    json_stream.create()
    assert json_stream.append('{"a":1}') == offset(1, 8)
    assert json_stream.append("[1, 22, 333]") == offset(4, 8 + 2 + 3 + 4)


def test_reading_from_an_offset_gives_the_messages_after_it(json_stream: Stream) -> None:
    json_stream.create()
    tokens = [json_stream.append(json.dumps({"n": number})) for number in range(10)]
    for number, token in enumerate(tokens):
        later = [{"n": other} for other in range(number + 1, 10)]
        assert json_stream.get(offset=token).json() == later


def test_every_message_boundary_inside_a_batch_is_an_offset(json_stream: Stream) -> None:
    json_stream.create('["a","bb","ccc"]')
    assert json_stream.get(offset=offset(1, 4)).content == b'["bb","ccc"]'
    assert json_stream.get(offset=offset(2, 9)).content == b'["ccc"]'
    assert_problem(json_stream.get(offset=offset(1, 5)), 400, "invalid_offset")


def test_a_json_stream_may_name_its_charset(json_stream: Stream) -> None:
    json_stream.create("[1,2]", headers={"Content-Type": "application/json; charset=utf-8"})
    json_stream.append("3", headers={"Content-Type": "Application/JSON"})
    assert json_stream.get().content == b"[1,2,3]"


@pytest.mark.parametrize("content_type", ["application/ndjson", "application/ld+json", "text/json"])
def test_other_types_that_look_like_json_are_plain_bytes(stream: Stream, content_type: str) -> None:
    stream.create("[1,2", headers={"Content-Type": content_type})
    assert stream.get().content == b"[1,2"


def test_a_large_batch_keeps_every_message(json_stream: Stream) -> None:
    json_stream.create()
    messages = [{"n": number, "text": "ü" * (number % 13)} for number in range(10_000)]
    json_stream.append(json.dumps(messages))
    assert json_stream.tail().startswith(f"{10_000:016x}_")
    assert json_stream.get().json() == messages


def test_long_poll_gives_an_array(json_stream: Stream) -> None:
    json_stream.create("[1]")
    json_stream.append("[2,3]")
    read = json_stream.long_poll(offset(1, 2))
    assert (read.status_code, read.content) == (200, b"[2,3]")


def test_every_chunk_is_an_array_of_whole_messages(small: Server) -> None:
    messages = [{"n": number, "pad": "x" * (number % 40)} for number in range(20)]
    with stream_on(small, "json-chunks", "application/json") as stream:
        stream.create(json.dumps(messages, separators=(",", ":")))
        seen, at, reads = [], "-1", 0
        while True:
            read = stream.get(offset=at)
            assert len(read.content) <= 101
            seen += read.json()
            reads, at = reads + 1, read.headers["stream-next-offset"]
            if "stream-up-to-date" in read.headers:
                break
    assert seen == messages
    assert reads > 5


def test_t28_a_batch_over_the_stream_limit_is_413_as_a_whole(small: Server) -> None:
    with stream_on(small, "json-limit", "application/json") as stream:
        stream.create(json.dumps(["x" * 400, "y" * 400]))
        before = stream.tail()
        batch = json.dumps(["a" * 50, "b" * 50, "c" * 50, "d" * 50])
        assert_problem(stream.post(batch), 413, "stream_full")
        assert stream.tail() == before
        stream.append(json.dumps(["a" * 50]))
