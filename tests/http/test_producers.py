"""Idempotent producers: every line of the table in protocol §5.2.1."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.http.protocol import Stream, assert_problem, offset, producer
from tests.http.raw import connect, encode
from tests.serving import Server

NUMBER_MAX = 2**53 - 1


def test_new_data_is_200_with_epoch_seq_and_tail(stream: Stream) -> None:
    stream.create()
    first = stream.post("a", headers=producer("p", 0, 0))
    assert first.status_code == 200
    assert first.headers["producer-epoch"] == "0"
    assert first.headers["producer-seq"] == "0"
    assert first.headers["stream-next-offset"] == offset(1, 1)
    second = stream.post("b", headers=producer("p", 0, 1))
    assert (second.status_code, second.headers["producer-seq"]) == (200, "1")
    assert stream.content() == b"ab"


def test_duplicate_append_is_204_with_all_headers_and_stored_once(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    repeat = stream.post("a", headers=producer("p", 0, 0))
    assert (repeat.status_code, repeat.content) == (204, b"")
    assert repeat.headers["producer-epoch"] == "0"
    assert repeat.headers["producer-seq"] == "0"
    assert repeat.headers["stream-next-offset"] == offset(1, 1)
    assert stream.content() == b"a"


def test_duplicate_of_an_old_append_has_the_highest_accepted_seq(stream: Stream) -> None:
    stream.create()
    for seq in range(5):
        stream.append(str(seq), headers=producer("p", 0, seq))
    repeat = stream.post("1", headers=producer("p", 0, 1))
    assert (repeat.status_code, repeat.headers["producer-seq"]) == (204, "4")
    assert repeat.headers["stream-next-offset"] == offset(5, 5)
    assert stream.content() == b"01234"


def test_sequence_gap_is_409_with_the_expected_and_received_numbers(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    gap = stream.post("c", headers=producer("p", 0, 2))
    assert_problem(gap, 409, "sequence_gap")
    assert gap.headers["producer-expected-seq"] == "1"
    assert gap.headers["producer-received-seq"] == "2"
    assert "stream-closed" not in gap.headers
    assert stream.content() == b"a"
    stream.append("b", headers=producer("p", 0, 1))


def test_t33_a_first_seq_other_than_0_is_409_expecting_0(stream: Stream) -> None:
    stream.create()
    gap = stream.post("x", headers=producer("p", 0, 3))
    assert_problem(gap, 409, "sequence_gap")
    assert gap.headers["producer-expected-seq"] == "0"
    assert gap.headers["producer-received-seq"] == "3"
    assert stream.content() == b""


def test_t33_a_new_epoch_that_does_not_begin_at_0_is_400(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    assert_problem(stream.post("x", headers=producer("p", 1, 1)), 400, "invalid_producer")
    # The refused claim did not take the epoch over.
    stream.append("b", headers=producer("p", 0, 1))


def test_new_epoch_starts_at_0(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    stream.append("b", headers=producer("p", 0, 1))
    taken = stream.post("c", headers=producer("p", 7, 0))
    assert (taken.status_code, taken.headers["producer-epoch"], taken.headers["producer-seq"]) == (200, "7", "0")
    assert stream.content() == b"abc"


def test_zombie_of_an_older_epoch_is_403_with_the_epoch(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 3, 0))
    for seq in (0, 1, 5):
        zombie = stream.post("z", headers=producer("p", 2, seq))
        assert_problem(zombie, 403, "stale_epoch")
        assert zombie.headers["producer-epoch"] == "3"
    assert stream.content() == b"a"


def test_auto_claim_a_fresh_producer_takes_over_with_the_next_epoch(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 5, 0))
    refused = stream.post("b", headers=producer("p", 0, 0))
    claimed = int(refused.headers["producer-epoch"]) + 1
    assert (refused.status_code, claimed) == (403, 6)
    assert stream.post("b", headers=producer("p", claimed, 0)).status_code == 200
    assert stream.content() == b"ab"


@pytest.mark.parametrize(
    "missing", [("Producer-Id",), ("Producer-Epoch",), ("Producer-Seq",), ("Producer-Id", "Producer-Seq")]
)
def test_partial_producer_headers_are_400(stream: Stream, missing: tuple[str, ...]) -> None:
    stream.create()
    headers = {name: value for name, value in producer("p", 0, 0).items() if name not in missing}
    assert_problem(stream.post("x", headers=headers), 400, "invalid_producer")
    assert stream.content() == b""


@pytest.mark.parametrize(
    "headers",
    [
        producer("", 0, 0),
        producer("p", "", 0),
        producer("p", 0, ""),
        producer("p", "-1", 0),
        producer("p", 0, "-1"),
        producer("p", "one", 0),
        producer("p", 0, "1.0"),
        producer("p", "1e3", 0),
        producer("p", "+1", 0),
        producer("p", "0x10", 0),
        producer("p", NUMBER_MAX + 1, 0),
        producer("p", 0, NUMBER_MAX + 1),
        producer("p", 2**64, 0),
        producer("p", 0, "9" * 400),
    ],
    ids=lambda headers: "-".join(value[:20] for value in headers.values()),
)
def test_malformed_producer_headers_are_400(stream: Stream, headers: dict[str, str]) -> None:
    stream.create()
    assert_problem(stream.post("x", headers=headers), 400, "invalid_producer")
    assert stream.content() == b""


def test_largest_epoch_is_2_to_the_53_minus_1(stream: Stream) -> None:
    stream.create()
    accepted = stream.post("a", headers=producer("p", NUMBER_MAX, 0))
    assert (accepted.status_code, accepted.headers["producer-epoch"]) == (200, str(NUMBER_MAX))
    zombie = stream.post("b", headers=producer("p", NUMBER_MAX - 1, 0))
    assert (zombie.status_code, zombie.headers["producer-epoch"]) == (403, str(NUMBER_MAX))


def test_producers_and_streams_do_not_share_state(
    client: httpx.Client, stream: Stream, stream_name: Callable[[], str]
) -> None:
    other = Stream(client, stream_name()).create()
    stream.create()
    stream.append("a", headers=producer("p", 4, 0))
    stream.append("b", headers=producer("P", 0, 0))
    other.append("c", headers=producer("p", 0, 0))
    assert stream.post("d", headers=producer("p", 4, 1)).status_code == 200


def test_refused_append_does_not_change_the_producer(json_stream: Stream) -> None:
    json_stream.create()
    assert json_stream.post("{broken", headers=producer("p", 0, 0)).status_code == 400
    assert json_stream.post("[]", headers=producer("p", 0, 0)).status_code == 400
    assert json_stream.post("1", headers=producer("p", 0, 0)).status_code == 200
    assert json_stream.content() == b"[1]"


def test_json_batch_uses_one_producer_seq(json_stream: Stream) -> None:
    json_stream.create()
    assert json_stream.post("[1,2,3]", headers=producer("p", 0, 0)).status_code == 200
    assert json_stream.post("[1,2,3]", headers=producer("p", 0, 0)).status_code == 204
    assert json_stream.post("[4]", headers=producer("p", 0, 1)).status_code == 200
    assert json_stream.content() == b"[1,2,3,4]"


def test_racing_senders_of_one_append_make_one_copy(stream: Stream) -> None:
    stream.create()
    with ThreadPoolExecutor(4) as pool:
        for seq in range(50):
            racing = [pool.submit(stream.post, f"{seq};", producer("p", 0, seq)) for _ in range(4)]
            assert sorted(one.result().status_code for one in racing) == [200, 204, 204, 204]
    assert stream.content() == b"".join(b"%d;" % seq for seq in range(50))


def test_pipelined_appends_of_a_producer_are_accepted_in_order(server: Server, stream: Stream) -> None:
    stream.create()
    requests = b"".join(
        encode(
            "POST",
            stream.path,
            headers={"Content-Type": "text/plain", **producer("p", 0, seq)},
            body=b"%d;" % seq,
        )
        for seq in range(100)
    )
    with connect(server) as connection:
        connection.send(requests)
        answers = [connection.response() for _ in range(100)]
    assert [(answer.status, answer.header("producer-seq")) for answer in answers] == [
        (200, str(seq)) for seq in range(100)
    ]
    assert stream.content() == b"".join(b"%d;" % seq for seq in range(100))


def test_t33_after_a_close_the_closing_tuple_is_204_and_any_other_409(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 0, 0))
    closing = stream.close("b", headers=producer("p", 0, 1))
    assert (closing.status_code, closing.headers["stream-closed"]) == (200, "true")

    repeat = stream.close("b", headers=producer("p", 0, 1))
    assert (repeat.status_code, repeat.headers["stream-closed"]) == (204, "true")
    assert repeat.headers["stream-next-offset"] == offset(2, 2)
    assert repeat.headers["producer-epoch"] == "0"
    assert repeat.headers["producer-seq"] == "1"

    others = [producer("p", 0, 0), producer("p", 0, 2), producer("p", 1, 0), producer("q", 0, 0)]
    for other in others:
        refused = stream.close("b", headers=other)
        assert_problem(refused, 409, "stream_closed")
        assert refused.headers["stream-closed"] == "true"
        assert refused.headers["stream-next-offset"] == offset(2, 2)
    assert stream.content() == b"ab"


def test_a_producer_can_close_without_data_and_repeat_it(stream: Stream) -> None:
    stream.create("a")
    for _ in range(2):
        closed = stream.close(headers=producer("p", 0, 0))
        assert (closed.status_code, closed.headers["stream-closed"]) == (204, "true")
        assert closed.headers["stream-next-offset"] == offset(1, 1)
    assert stream.content() == b"a"


def test_t33_closure_is_checked_first(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers={**producer("p", 5, 0), "Stream-Seq": "5"})
    stream.close()
    wrong_in_every_way = {"Content-Type": "application/json", "Stream-Seq": "1", **producer("p", 0, 9)}
    assert_problem(stream.post("{}", headers=wrong_in_every_way), 409, "stream_closed")


def test_t33_the_content_type_is_checked_before_the_producer(stream: Stream) -> None:
    stream.create()
    stream.append("a", headers=producer("p", 5, 0))
    refused = stream.post("{}", headers={"Content-Type": "application/json", **producer("p", 0, 0)})
    assert_problem(refused, 409, "content_type_mismatch")


def test_t33_producer_retry_is_a_duplicate_even_with_an_old_stream_seq(stream: Stream) -> None:
    stream.create()
    headers = {**producer("p", 0, 0), "Stream-Seq": "7"}
    assert stream.post("a", headers=headers).status_code == 200
    assert stream.post("a", headers=headers).status_code == 204
    fresh = {**producer("p", 0, 1), "Stream-Seq": "7"}
    assert_problem(stream.post("b", headers=fresh), 409, "sequence_regression")
    # The append was refused for its Stream-Seq and did not use up its Producer-Seq.
    assert stream.post("b", headers={**producer("p", 0, 1), "Stream-Seq": "8"}).status_code == 200
    assert stream.content() == b"ab"
