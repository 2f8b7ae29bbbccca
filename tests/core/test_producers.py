"""Idempotent producers: every row of the table in protocol §5.2.1, and the valid header values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import InvalidProducer, Refusal, SequenceGap, StaleEpoch
from headwater.core.producers import (
    DIGESTS_KEPT,
    ID_MAX_BYTES,
    NUMBER_MAX,
    ProducerHeaders,
    ProducerState,
    Verdict,
    digest,
    digest_of_repeat,
    judge,
    parse_producer,
    remember,
)

numbers = st.integers(min_value=0, max_value=NUMBER_MAX)


@pytest.mark.parametrize(
    ("state", "epoch", "seq", "verdict"),
    [
        # An unknown producer starts at 0, in any epoch.
        (None, 0, 0, Verdict.NEW),
        (None, 7, 0, Verdict.NEW),
        # In the same epoch, the next number is new and any earlier one is a duplicate.
        ((0, 0), 0, 1, Verdict.NEW),
        ((3, 9), 3, 10, Verdict.NEW),
        ((0, 0), 0, 0, Verdict.DUPLICATE),
        ((3, 9), 3, 9, Verdict.DUPLICATE),
        ((3, 9), 3, 0, Verdict.DUPLICATE),
        # A later epoch takes over, starting at 0.
        ((0, 41), 1, 0, Verdict.NEW),
        ((0, 41), 9, 0, Verdict.NEW),
    ],
)
def test_an_append_is_new_or_a_repeat(state: tuple[int, int] | None, epoch: int, seq: int, verdict: Verdict) -> None:
    known = ProducerState(*state) if state is not None else None
    assert judge(known, ProducerHeaders("p", epoch, seq)) is verdict


@pytest.mark.parametrize(
    ("state", "epoch", "seq", "expected"), [(None, 0, 1, 0), (None, 5, 3, 0), ((0, 0), 0, 2, 1), ((3, 9), 3, 99, 10)]
)
def test_sequence_gap_error_has_the_expected_and_received_numbers(
    state: tuple[int, int] | None, epoch: int, seq: int, expected: int
) -> None:
    known = ProducerState(*state) if state is not None else None
    with pytest.raises(SequenceGap) as refused:
        judge(known, ProducerHeaders("p", epoch, seq))
    assert refused.value.status == 409
    assert dict(refused.value.headers) == {
        "Producer-Expected-Seq": str(expected),
        "Producer-Received-Seq": str(seq),
    }


@pytest.mark.parametrize("seq", [0, 1, 9, 10, 11])
def test_zombie_is_403_with_the_current_epoch(seq: int) -> None:
    with pytest.raises(StaleEpoch) as refused:
        judge(ProducerState(3, 9), ProducerHeaders("p", 2, seq))
    assert refused.value.status == 403
    assert dict(refused.value.headers) == {"Producer-Epoch": "3"}


@pytest.mark.parametrize("seq", [1, 10, NUMBER_MAX])
def test_a_new_epoch_that_does_not_begin_at_0_is_400(seq: int) -> None:
    with pytest.raises(InvalidProducer) as refused:
        judge(ProducerState(3, 9), ProducerHeaders("p", 4, seq))
    assert refused.value.status == 400


@given(st.one_of(st.none(), st.builds(ProducerState, numbers, numbers)), numbers, numbers)
def test_only_the_next_append_is_ever_new(state: ProducerState | None, epoch: int, seq: int) -> None:
    try:
        verdict = judge(state, ProducerHeaders("p", epoch, seq))
    except Refusal:
        return
    starts_epoch = seq == 0 and (state is None or epoch > state.epoch)
    continues = state is not None and (epoch, seq) == (state.epoch, state.seq + 1)
    assert (verdict is Verdict.NEW) == (starts_epoch or continues)
    assert verdict is Verdict.NEW or (state is not None and epoch == state.epoch and seq <= state.seq)


@given(st.lists(st.tuples(st.sampled_from([0, 0, 0, 0, 1]), st.binary(max_size=4)), min_size=1, max_size=40))
def test_repeat_is_distinguished_from_a_different_body_for_the_last_appends_of_its_epoch(
    appends: list[tuple[int, bytes]],
) -> None:
    state: ProducerState | None = None
    bodies: list[bytes] = []
    for bump, body in appends:
        if state is None or bump:
            epoch, seq, bodies = (0 if state is None else state.epoch + 1), 0, []
        else:
            epoch, seq = state.epoch, state.seq + 1
        state = remember(state, epoch, seq, digest(body), 1000)
        bodies.append(body)
        assert (state.epoch, state.seq) == (epoch, seq)
        for repeated, first in enumerate(bodies):
            known = digest_of_repeat(state, repeated)
            assert known == (digest(first) if seq - repeated < DIGESTS_KEPT else None)


def test_digests_of_different_bodies_differ() -> None:
    assert len({digest(body) for body in (b"", b"a", b"b", b"ab", b"ba", b"\x00", b"\x00\x00")}) == 7


@given(numbers, numbers)
def test_three_headers_identify_a_producer(epoch: int, seq: int) -> None:
    assert parse_producer("p", str(epoch), str(seq)) == ProducerHeaders("p", epoch, seq)


def test_missing_headers_mean_no_producer() -> None:
    assert parse_producer(None, None, None) is None


@pytest.mark.parametrize(
    "headers",
    [
        ("p", None, None),
        (None, "0", None),
        (None, None, "0"),
        ("p", "0", None),
        ("p", None, "0"),
        (None, "0", "0"),
        ("", "0", "0"),
    ],
)
def test_incomplete_producer_headers_are_refused(headers: tuple[str | None, str | None, str | None]) -> None:
    with pytest.raises(InvalidProducer):
        parse_producer(*headers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-1",
        "+1",
        "1.0",
        "1e3",
        "0x1",
        "1 ",
        " 1",
        "1_0",
        "abc",
        "\u0661",
        str(NUMBER_MAX + 1),
        str(2**64),
        "9" * 99,
    ],
)
def test_a_number_is_plain_digits_up_to_2_53_minus_1(text: str) -> None:
    with pytest.raises(InvalidProducer):
        parse_producer("p", text, "0")
    with pytest.raises(InvalidProducer):
        parse_producer("p", "0", text)


def test_an_id_has_a_limit_in_bytes() -> None:
    assert parse_producer("é" * (ID_MAX_BYTES // 2), "0", "0") is not None
    with pytest.raises(InvalidProducer):
        parse_producer("é" * (ID_MAX_BYTES // 2) + "x", "0", "0")
