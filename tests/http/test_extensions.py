"""Reads for pipelines: `until`, `splits`, `frames` and the message ordinal, as in docs/extensions.md."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem, offset, producer, stream_on
from tests.serving import serve


def unframe(body: bytes) -> list[bytes]:
    """Parse the messages of a frames body."""
    (count,) = struct.unpack_from("<I", body)
    lengths = struct.unpack_from(f"<{count}I", body, 4)
    at = 4 + 4 * count
    messages = []
    for length in lengths:
        messages.append(body[at : at + length])
        at += length
    assert at == len(body)
    return messages


def test_head_names_the_extensions(stream: Stream) -> None:
    stream.create()
    named = stream.head().headers["stream-extensions"].split(", ")
    assert {"until", "splits", "frames", "position", "digest"} <= set(named)


def test_bounded_read_does_not_return_later_appends(stream: Stream) -> None:
    stream.create("one")
    until = stream.append("two")
    before = stream.get(offset="-1", until=until)
    stream.append("three")
    after = stream.get(offset="-1", until=until)
    assert before.content == after.content == b"onetwo"
    assert after.headers["stream-next-offset"] == until
    assert before.headers["stream-up-to-date"] == "true"
    assert "stream-up-to-date" not in after.headers


def test_bounded_read_of_a_closed_stream_reports_closure_only_at_its_end(stream: Stream) -> None:
    stream.create("one")
    middle = stream.tail()
    stream.close("two")
    assert "stream-closed" not in stream.get(offset="-1", until=middle).headers
    assert stream.get(offset=middle, until=stream.tail()).headers["stream-closed"] == "true"


def test_empty_range_is_an_empty_response(stream: Stream, json_stream: Stream) -> None:
    tail = stream.create("one").tail()
    assert stream.get(offset=tail, until=tail).content == b""
    tail = json_stream.create("[1]").tail()
    assert json_stream.get(offset=tail, until=tail).json() == []


def test_until_before_offset_and_off_boundary_are_400(stream: Stream) -> None:
    stream.create("one")
    tail = stream.append("two")
    assert_problem(stream.get(offset=tail, until=offset(1, 3)), 400, "invalid_offset")
    assert_problem(stream.get(offset="-1", until=offset(1, 4)), 400, "invalid_offset")
    assert_problem(stream.get(offset="-1", until="soon"), 400, "invalid_offset")


@pytest.mark.parametrize("query", [{"until": "now"}, {"splits": 2}, {"frames": 1}])
def test_extensions_are_refused_for_live_reads(stream: Stream, query: dict[str, Any]) -> None:
    stream.create("one")
    assert_problem(stream.get(offset="-1", live="sse", **query), 400, "bad_request")
    assert_problem(stream.get(offset="now", **query), 400, "bad_request")


def test_the_ordinal_counts_messages(json_stream: Stream) -> None:
    json_stream.create("[1,2,3]")
    assert json_stream.head().headers["stream-next-position"] == "3"
    answer = json_stream.get(offset="-1")
    assert answer.headers["stream-next-position"] == "3"


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 100])
def test_splits_cover_a_range_without_gap_at_message_boundaries(json_stream: Stream, splits: int) -> None:
    messages = [{"n": n, "pad": "x" * (n % 17)} for n in range(100)]
    json_stream.create(json.dumps(messages))
    json_stream.append("[101]")
    until = offset(100, int(json_stream.tail().split("_")[1], 16) - 4)
    answer = json_stream.get(offset="-1", until=until, splits=splits)
    ranges = answer.json()["ranges"]
    assert 1 <= len(ranges) <= splits + 1
    assert ranges[0]["start"] == offset(0, 0)
    assert ranges[-1]["end"] == until
    assert [r["start"] for r in ranges[1:]] == [r["end"] for r in ranges[:-1]]
    read = [json_stream.get(offset=r["start"], until=r["end"]).json() for r in ranges]
    assert [len(part) for part in read] == [r["end_position"] - r["start_position"] for r in ranges]
    assert [message for part in read for message in part] == messages


@pytest.mark.parametrize("splits", ["0", "-1", "x", "10001", ""])
def test_invalid_number_of_splits_is_400(stream: Stream, splits: str) -> None:
    stream.create("one")
    assert_problem(stream.get(offset="-1", splits=splits), 400, "bad_request")


def test_frames_keep_every_boundary_of_bytes(stream: Stream) -> None:
    messages = [b"one", b"\x00\xff", b"\n\n", b"x" * 70_000]
    stream.create()
    for message in messages:
        stream.append(message)
    answer = stream.get(offset="-1", frames=1)
    assert answer.headers["content-type"] == "application/vnd.headwater.frames"
    assert answer.headers["stream-content-type"] == "text/plain"
    assert unframe(answer.content) == messages


def test_empty_range_has_no_frames(stream: Stream, json_stream: Stream) -> None:
    assert unframe(stream.create().get(offset="-1", frames=1).content) == []
    tail = json_stream.create("[1]").tail()
    assert unframe(json_stream.get(offset=tail, frames=1).content) == []


def test_frames_of_json_are_the_unchanged_messages(json_stream: Stream) -> None:
    json_stream.create('[ {"a" : 1.0} , 9007199254740993, "\\u00e9" ]')
    assert unframe(json_stream.get(offset="-1", frames=1).content) == [
        b'{"a" : 1.0},',
        b"9007199254740993,",
        b'"\\u00e9",',
    ]


def test_frames_are_chunked_and_the_offset_of_each_message_follows() -> None:
    with (
        serve(DS_LIMITS__MAX_CHUNK_BYTES="100") as server,
        stream_on(server, "framed", "application/json") as stream,
    ):
        stream.create(json.dumps([{"n": n} for n in range(50)]))
        until = stream.tail()
        at, got = offset(0, 0), []
        while at != until:
            answer = stream.get(offset=at, until=until, frames=1)
            message_index, byte_position = (int(part, 16) for part in at.split("_")[:2])
            for message in unframe(answer.content):
                message_index, byte_position = message_index + 1, byte_position + len(message)
                got.append(json.loads(message[:-1]))
            at = answer.headers["stream-next-offset"]
            assert at == offset(message_index, byte_position)
        assert got == [{"n": n} for n in range(50)]


def test_frames_of_a_fork_span_its_fork_point(stream: Stream) -> None:
    stream.create("hello")
    fork = Stream(stream.http, f"{stream.name}-fork")
    headers = {
        "Stream-Forked-From": stream.path,
        "Stream-Fork-Offset": offset(0, 0),
        "Stream-Fork-Sub-Offset": "3",
    }
    fork.create(headers=headers)
    fork.append("p!")
    assert unframe(fork.get(offset="-1", frames=1).content) == [b"hel", b"p!"]


def crc_and_length(body: bytes) -> str:
    return f"crc32:{zlib.crc32(body):08x}:{len(body)}"


def test_duplicate_append_returns_the_digest_of_the_accepted_body(json_stream: Stream) -> None:
    json_stream.create()
    bodies = [b"[1, 2]", b"[3]", b'{"a": 4}']
    for seq, body in enumerate(bodies):
        accepted = json_stream.post(body, producer("p", 0, seq))
        assert accepted.status_code == 200
        assert "producer-digest" not in accepted.headers
    for seq, body in enumerate(bodies):
        repeat = json_stream.post(b"[99]", producer("p", 0, seq))
        assert repeat.status_code == 204
        assert repeat.headers["producer-digest"] == crc_and_length(body)


def test_only_the_last_digests_of_an_epoch_are_kept(stream: Stream) -> None:
    stream.create()
    for seq in range(20):
        stream.append(f"{seq}", producer("p", 0, seq))
    known = [stream.post("x", producer("p", 0, seq)).headers.get("producer-digest") for seq in range(20)]
    assert known == [None] * 4 + [crc_and_length(f"{seq}".encode()) for seq in range(4, 20)]
    stream.append("new", producer("p", 1, 0))
    assert stream.post("new", producer("p", 1, 0)).headers["producer-digest"] == crc_and_length(b"new")


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_digests_survive_a_restart(tmp_path: Path, mode: str) -> None:
    settings: dict[str, Any] = {"DS_STORAGE__MODE": mode, "DS_STORAGE__DATA_DIR": str(tmp_path / "data")}
    with serve(**settings) as server, stream_on(server, "kept") as stream:
        stream.create().append("one", producer("p", 7, 0))
    with serve(**settings) as server, stream_on(server, "kept") as stream:
        assert stream.post("one", producer("p", 7, 0)).headers["producer-digest"] == crc_and_length(b"one")


def test_frames_of_many_tiny_messages_take_several_responses(
    stream_name: Callable[[], str], client: httpx.Client
) -> None:
    """The lengths of one answer are computed at once, so their number is limited."""
    count = 120_000
    stream = Stream(client, stream_name(), "application/json").create()
    for _ in range(2):
        stream.append("[" + ",".join("0" for _ in range(count // 2)) + "]")
    at, messages, answers = "-1", 0, 0
    while True:
        answer = stream.get(offset=at, frames=1)
        found = unframe(answer.content)
        assert set(found) == {b"0,"}
        messages += len(found)
        answers += 1
        at = answer.headers["stream-next-offset"]
        if "stream-up-to-date" in answer.headers:
            break
    assert messages == count
    assert answers == 3


def test_many_splits_of_a_deep_chain_of_forks_are_fast(stream_name: Callable[[], str], client: httpx.Client) -> None:
    name = stream_name()
    Stream(client, f"{name}-0").create("ab")
    for number in range(1, 200):
        fork = {"Stream-Forked-From": f"/v1/stream/{name}-{number - 1}"}
        Stream(client, f"{name}-{number}").create("cd", headers=fork)
    ranges = Stream(client, f"{name}-199").get(offset="-1", splits=10_000).json()["ranges"]
    assert [(each["start_position"], each["end_position"]) for each in ranges] == [(at, at + 1) for at in range(200)]
    assert all(each["bytes"] == 2 for each in ranges)
