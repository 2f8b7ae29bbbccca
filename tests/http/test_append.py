"""Appending with POST (protocol §5.2), and `Stream-Seq`."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem, offset
from tests.http.raw import chunked, connect
from tests.serving import Server


def test_append_is_204_with_the_new_tail(stream: Stream) -> None:
    stream.create()
    appended = stream.post("hello world")
    assert (appended.status_code, appended.content) == (204, b"")
    assert re.fullmatch(r"0000000000000001_000000000000000b_[0-9a-f]{16}", appended.headers["stream-next-offset"])
    assert "stream-closed" not in appended.headers
    assert stream.append("!") == offset(2, 12)
    assert stream.content() == b"hello world!"


def test_offsets_grow_in_lexicographic_order(stream: Stream) -> None:
    stream.create()
    offsets = [stream.append("x" * (1 + index % 7)) for index in range(300)]
    assert offsets == sorted(set(offsets))
    assert offsets[-1] == offset(300, sum(1 + index % 7 for index in range(300)))


def test_an_empty_body_is_400_and_changes_nothing(stream: Stream) -> None:
    stream.create("a")
    assert_problem(stream.post(b""), 400, "empty_body")
    assert stream.tail() == offset(1, 1)


def test_an_empty_chunked_body_is_400(server: Server, stream: Stream) -> None:
    stream.create()
    headers = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
    with connect(server) as connection:
        assert connection.request("POST", stream.path, headers=headers, body=chunked()).status == 400


def test_a_missing_content_type_is_400(stream: Stream) -> None:
    stream.create()
    refused = stream.post("data", headers={"Content-Type": ""})
    assert refused.status_code == 400
    assert "Content-Type" in refused.json()["detail"]
    assert stream.content() == b""


def test_another_content_type_is_409_and_changes_nothing(stream: Stream) -> None:
    stream.create("a")
    refused = stream.post("{}", headers={"Content-Type": "application/json"})
    assert_problem(refused, 409, "content_type_mismatch")
    assert stream.content() == b"a"


@pytest.mark.parametrize("content_type", ["TEXT/PLAIN", "text/plain; charset=utf-8", "Text/Plain;charset=UTF-8"])
def test_case_and_parameters_of_the_content_type_do_not_matter(stream: Stream, content_type: str) -> None:
    stream.create()
    stream.append("a", headers={"Content-Type": content_type})
    assert stream.content() == b"a"


def test_append_to_a_missing_stream_is_404(stream: Stream) -> None:
    assert_problem(stream.post("x"), 404, "stream_not_found")
    assert not stream.exists()


def test_every_byte_value_is_stored(stream: Stream) -> None:
    stream.create(headers={"Content-Type": "application/octet-stream"})
    everything = bytes(range(256))
    for _ in range(3):
        stream.append(everything, headers={"Content-Type": "application/octet-stream"})
    assert stream.content() == everything * 3


def test_a_chunked_body_is_one_message(server: Server, stream: Stream) -> None:
    stream.create()
    headers = {"Content-Type": "text/plain", "Transfer-Encoding": "chunked"}
    pieces = [b"piece-%d;" % index for index in range(50)]
    with connect(server) as connection:
        appended = connection.request("POST", stream.path, headers=headers, body=chunked(*pieces))
    whole = b"".join(pieces)
    assert (appended.status, appended.header("stream-next-offset")) == (204, offset(1, len(whole)))
    assert stream.content() == whole


def test_large_append_is_returned_whole(stream: Stream) -> None:
    stream.create()
    large = bytes(range(256)) * 12_000
    stream.append(large)
    assert stream.content() == large


def test_concurrent_appends_are_stored_once_each_at_their_own_offset(stream: Stream) -> None:
    stream.create()
    messages = [f"<{index:03d}>" for index in range(100)]
    with ThreadPoolExecutor(20) as pool:
        offsets = list(pool.map(stream.append, messages))
    assert sorted(offsets) == [offset(index, index * 5) for index in range(1, 101)]
    # The offset in the answer to an append is the end of its message.
    content = stream.content().decode()
    for message, returned in zip(messages, offsets, strict=True):
        end = int(returned.split("_")[1], 16)
        assert content[end - 5 : end] == message


def test_an_acknowledged_append_is_seen_by_every_later_read(server: Server, stream: Stream) -> None:
    stream.create()
    with httpx.Client(base_url=server.url, verify=False) as other:
        for index in range(50):
            returned = stream.append(f"{index};")
            read = other.get(stream.path)
            assert read.content.endswith(f"{index};".encode())
            assert read.headers["stream-next-offset"] == returned


def test_stream_seq_must_increase_bytewise(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers={"Stream-Seq": "09"})
    stream.append("b", headers={"Stream-Seq": "10"})
    stream.append("c", headers={"Stream-Seq": "2"})
    stream.append("d", headers={"Stream-Seq": "B"})
    stream.append("e", headers={"Stream-Seq": "a"})
    assert_problem(stream.post("x", headers={"Stream-Seq": "Z"}), 409, "sequence_regression")
    assert stream.content() == b"abcde"


@pytest.mark.parametrize("regressed", ["001", "000", "0", "002", ""])
def test_a_stream_seq_that_does_not_grow_is_409_and_changes_nothing(stream: Stream, regressed: str) -> None:
    stream.create()
    stream.append("a", headers={"Stream-Seq": "001"})
    stream.append("b", headers={"Stream-Seq": "002"})
    refused = stream.post("x", headers={"Stream-Seq": regressed})
    assert_problem(refused, 409, "sequence_regression")
    assert "sequence conflict" in refused.json()["detail"], "the official PHP client searches for these words"
    assert stream.content() == b"ab"
    stream.append("c", headers={"Stream-Seq": "003"})


def test_appends_without_stream_seq_do_not_change_it(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers={"Stream-Seq": "5"})
    stream.append("b")
    assert stream.post("x", headers={"Stream-Seq": "5"}).status_code == 409
    stream.append("c", headers={"Stream-Seq": "6"})
    assert stream.content() == b"abc"


def test_a_refused_append_does_not_use_up_its_stream_seq(json_stream: Stream) -> None:
    json_stream.create()
    assert json_stream.post("{broken", headers={"Stream-Seq": "1"}).status_code == 400
    json_stream.append("1", headers={"Stream-Seq": "1"})
