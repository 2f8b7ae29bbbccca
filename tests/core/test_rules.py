"""The rules for creating, forking and appending: decisions, the order of checks, and the content of refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.catalog import Catalog, StreamState
from headwater.core.errors import (
    BadRequest,
    ConfigMismatch,
    ContentTypeMismatch,
    EmptyBody,
    InvalidContentType,
    InvalidJson,
    InvalidProducer,
    Refusal,
    SequenceGap,
    SequenceRegression,
    StaleEpoch,
    StreamClosed,
)
from headwater.core.producers import ProducerHeaders
from headwater.core.records import Append, Create, ForkPoint
from headwater.core.rules import (
    AppendOutcome,
    CreateRequest,
    ForkRequest,
    check_same_config,
    decide_append,
    decide_create,
    decide_fork,
)

NOW = 1_000_000
TEXT = "text/plain"
JSON = "application/json"


def asked(
    content_type: str | None = TEXT,
    ttl_secs: int | None = None,
    expires_at_ms: int | None = None,
    closed: bool = False,
    body: bytes = b"",
    fork: ForkRequest | None = None,
) -> CreateRequest:
    return CreateRequest("a", content_type, ttl_secs, expires_at_ms, closed, body, fork)


def stream_of(request: CreateRequest) -> StreamState:
    return installed(decide_create(request, 1, NOW))


def installed(*records: Create | Append) -> StreamState:
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in records:
        catalog.apply(record)
    return catalog.by_id[records[-1].id]


class Writer:
    """A stream and its writers: every accepted record is applied at once."""

    def __init__(self, content_type: str = TEXT) -> None:
        self._catalog: Catalog[StreamState] = Catalog(StreamState)
        self._catalog.apply(decide_create(asked(content_type), 1, NOW))
        self.stream = self._catalog.by_id[1]

    def append(
        self,
        body: bytes = b"x",
        content_type: str | None = TEXT,
        producer: tuple[str, int, int] | None = None,
        seq: str | None = None,
        close: bool = False,
    ) -> Append | AppendOutcome:
        who = ProducerHeaders(*producer) if producer is not None else None
        decision = decide_append(self.stream, content_type, body, who, seq, close, NOW + 1)
        if isinstance(decision, Append):
            self._catalog.apply(decision)
        return decision


# -- creating (§5.1)


def test_create_without_content_type_is_octet_stream() -> None:
    assert decide_create(asked(content_type=None), 7, NOW) == Create(7, "a", NOW, "application/octet-stream")


def test_create_record_has_content_closure_and_expiry() -> None:
    record = decide_create(asked(JSON, ttl_secs=9, closed=True, body=b"[1,22]"), 7, NOW)
    assert record == Create(7, "a", NOW, JSON, 9, None, True, b"1,22,", (2, 3))


def test_a_create_with_a_bad_body_creates_nothing() -> None:
    with pytest.raises(InvalidJson):
        decide_create(asked(JSON, body=b"{"), 7, NOW)


@pytest.mark.parametrize(
    ("there", "request_"),
    [
        (asked(), asked()),
        (asked(), asked("TEXT/plain; charset=utf-8")),
        (asked(None), asked("application/octet-stream")),
        (asked("application/octet-stream"), asked(None)),
        (asked(ttl_secs=5), asked(ttl_secs=5)),
        (asked(ttl_secs=0), asked(ttl_secs=0)),
        (asked(expires_at_ms=99), asked(expires_at_ms=99)),
        (asked(closed=True), asked(closed=True)),
        (asked(body=b"one"), asked(body=b"another")),
    ],
)
def test_repeated_create_with_the_same_configuration_succeeds(there: CreateRequest, request_: CreateRequest) -> None:
    check_same_config(stream_of(there), request_)


@pytest.mark.parametrize(
    ("there", "request_"),
    [
        (asked(), asked(JSON)),
        (asked(), asked(None)),
        (asked(), asked(ttl_secs=5)),
        (asked(ttl_secs=5), asked()),
        (asked(ttl_secs=5), asked(ttl_secs=6)),
        (asked(ttl_secs=0), asked()),
        (asked(expires_at_ms=99), asked()),
        (asked(expires_at_ms=99), asked(expires_at_ms=98)),
        (asked(ttl_secs=5), asked(expires_at_ms=5000)),
        (asked(), asked(closed=True)),
        (asked(closed=True), asked()),
        (asked(), asked(fork=ForkRequest("s", None, 0))),
    ],
)
def test_create_with_another_configuration_is_a_conflict(there: CreateRequest, request_: CreateRequest) -> None:
    with pytest.raises(ConfigMismatch) as refused:
        check_same_config(stream_of(there), request_)
    assert refused.value.status == 409


def test_repeated_create_is_compared_with_the_current_closure() -> None:
    writer = Writer()
    writer.append(b"", close=True)
    with pytest.raises(ConfigMismatch):
        check_same_config(writer.stream, asked())
    check_same_config(writer.stream, asked(closed=True))


# -- forking


def forked(source: CreateRequest, request: CreateRequest) -> Create:
    point = ForkPoint(1, "a", 0, 0)
    return decide_fork(request, stream_of(source), point, 2, NOW + 7)


FORK = ForkRequest("a", None, 0)


@pytest.mark.parametrize("content_type", [None, JSON, "APPLICATION/JSON; x=y"])
def test_fork_inherits_the_content_type(content_type: str | None) -> None:
    record = forked(asked("application/json; charset=utf-8"), asked(content_type, fork=FORK, body=b"[1]"))
    assert (record.content_type, record.payload) == ("application/json; charset=utf-8", b"1,")


@pytest.mark.parametrize("content_type", [TEXT, "application/octet-stream"])
def test_a_fork_of_another_type_is_a_conflict(content_type: str) -> None:
    with pytest.raises(ContentTypeMismatch) as refused:
        forked(asked(JSON), asked(content_type, fork=FORK))
    assert refused.value.status == 409


@pytest.mark.parametrize(
    ("source", "own", "expected"),
    [
        ((None, None), (None, None), (None, None)),
        ((60, None), (None, None), (60, None)),
        ((None, NOW + 5), (None, None), (None, NOW + 5)),
        ((60, None), (5, None), (5, None)),
        ((5, None), (60, None), (60, None)),
        ((60, None), (None, NOW + 5), (None, NOW + 5)),
        ((None, NOW + 5), (60, None), (60, None)),
        ((None, NOW + 5), (None, NOW + 99), (None, NOW + 99)),
        ((60, None), (0, None), (0, None)),
    ],
)
def test_fork_has_the_requested_expiry_or_that_of_its_source(
    source: tuple[int | None, int | None], own: tuple[int | None, int | None], expected: tuple[int | None, int | None]
) -> None:
    record = forked(asked(None, *source), asked(None, *own, fork=FORK))
    assert (record.ttl_secs, record.expires_at_ms) == expected


def test_ttl_window_of_a_fork_begins_at_its_creation() -> None:
    stream = installed(decide_create(asked(ttl_secs=10), 1, NOW), forked(asked(ttl_secs=10), asked(fork=FORK)))
    assert stream.deadline_ms() == NOW + 7 + 10_000


@pytest.mark.parametrize("closed", [False, True])
def test_fork_is_open_unless_the_request_closes_it(closed: bool) -> None:
    assert forked(asked(closed=True), asked(fork=FORK, closed=closed)).closed is closed


@pytest.mark.parametrize(
    "again",
    [
        asked(None, fork=ForkRequest("a", "t", 2)),
        asked(TEXT, fork=ForkRequest("a", "t", 2)),
        asked(None, 60, fork=ForkRequest("a", "t", 2)),
        asked(None, body=b"ignored", fork=ForkRequest("a", "t", 2)),
    ],
)
def test_repeated_fork_request_succeeds(again: CreateRequest) -> None:
    check_same_config(a_fork(), again)


@pytest.mark.parametrize(
    "again",
    [
        asked(None),
        asked(None, fork=ForkRequest("b", "t", 2)),
        asked(None, fork=ForkRequest("a", "u", 2)),
        asked(None, fork=ForkRequest("a", "t", 3)),
        asked(None, fork=ForkRequest("a", None, 2)),
        asked(JSON, fork=ForkRequest("a", "t", 2)),
        asked(None, 61, fork=ForkRequest("a", "t", 2)),
        asked(None, None, 61, fork=ForkRequest("a", "t", 2)),
        asked(None, closed=True, fork=ForkRequest("a", "t", 2)),
    ],
)
def test_another_fork_under_the_same_name_is_a_conflict(again: CreateRequest) -> None:
    with pytest.raises(ConfigMismatch):
        check_same_config(a_fork(), again)


def a_fork() -> StreamState:
    """A fork of `a` at token `t` with sub-offset 2 and the source's TTL of 60 s."""
    source = decide_create(asked(ttl_secs=60, body=b"12345"), 1, NOW)
    request = asked(None, fork=ForkRequest("a", "t", 2))
    point = ForkPoint(1, "a", 1, 2, requested_offset="t", requested_sub_offset=2)
    return installed(source, decide_fork(request, installed(source), point, 2, NOW))


# -- appending (§5.2)


def test_append_is_placed_at_the_tail() -> None:
    writer = Writer()
    writer.append(b"abc")
    assert writer.append(b"de") == Append(1, NOW + 1, 1, 3, b"de", (2,))
    assert str(writer.stream.tail).endswith("5")


def test_a_json_batch_is_one_record_of_many_messages() -> None:
    assert Writer(JSON).append(b"[1,22,333]", JSON) == Append(1, NOW + 1, 0, 0, b"1,22,333,", (2, 3, 4))


def test_a_json_batch_is_all_or_nothing() -> None:
    writer = Writer(JSON)
    with pytest.raises(InvalidJson):
        writer.append(b"[1,22,oops]", JSON)
    assert writer.stream.message_index == 0


def test_an_empty_body_is_refused_unless_it_closes() -> None:
    writer = Writer()
    with pytest.raises(EmptyBody):
        writer.append(b"")
    assert writer.append(b"", None, close=True) == Append(1, NOW + 1, 0, 0, b"", (), close=True)
    assert writer.stream.closed


@pytest.mark.parametrize("content_type", [JSON, "nonsense", "", None])
def test_the_type_of_an_empty_close_does_not_matter(content_type: str | None) -> None:
    assert isinstance(Writer().append(b"", content_type, close=True), Append)


def test_append_requires_the_content_type_of_the_stream() -> None:
    writer = Writer()
    with pytest.raises(BadRequest):
        writer.append(content_type=None)
    with pytest.raises(ContentTypeMismatch):
        writer.append(content_type=JSON)
    assert isinstance(writer.append(content_type="Text/PLAIN; charset=x"), Append)


@pytest.mark.parametrize("content_type", ["", " ", "nonsense", "text/", "/plain", "text/plain extra", ";"])
def test_a_malformed_type_is_a_bad_request_and_not_a_mismatch(content_type: str) -> None:
    with pytest.raises(InvalidContentType):
        Writer().append(content_type=content_type)


@pytest.mark.parametrize(
    ("last", "following", "accepted"),
    [
        ("1", "2", True),
        ("1", "1", False),
        ("2", "1", False),
        ("2", "10", False),
        ("02", "10", True),
        ("a", "B", False),
        ("a", "aa", True),
        ("aa", "a", False),
        ("z", "\xe9", True),
        ("\xff", "\xfe", False),
        ("", "0", True),
        ("0", "", False),
    ],
)
def test_stream_seq_is_compared_bytewise(last: str, following: str, accepted: bool) -> None:
    writer = Writer()
    writer.append(seq=last)
    if accepted:
        assert isinstance(writer.append(seq=following), Append)
        assert writer.stream.stream_seq == following
    else:
        with pytest.raises(SequenceRegression) as refused:
            writer.append(seq=following)
        assert refused.value.status == 409
        assert writer.stream.stream_seq == last


def test_append_without_stream_seq_does_not_change_it() -> None:
    writer = Writer()
    writer.append(seq="5")
    writer.append()
    assert writer.stream.stream_seq == "5"
    with pytest.raises(SequenceRegression):
        writer.append(seq="5")


def test_producer_retry_is_a_duplicate_even_with_an_old_stream_seq() -> None:
    writer = Writer()
    writer.append(producer=("p", 0, 0), seq="5")
    assert writer.append(producer=("p", 0, 0), seq="5") is AppendOutcome.DUPLICATE
    assert writer.append(producer=("p", 0, 0), seq="4") is AppendOutcome.DUPLICATE


def test_refused_append_does_not_change_its_producer() -> None:
    writer = Writer()
    writer.append(producer=("p", 0, 0), seq="5")
    with pytest.raises(SequenceRegression):
        writer.append(producer=("p", 0, 1), seq="5")
    assert isinstance(writer.append(producer=("p", 0, 1), seq="6"), Append)


def test_producers_are_distinguished_by_id() -> None:
    writer = Writer()
    writer.append(producer=("p", 0, 0))
    assert isinstance(writer.append(producer=("q", 0, 0)), Append)
    assert isinstance(writer.append(producer=("P", 0, 0)), Append)


# -- the order of checks: closed, type, producer, Stream-Seq


def wrong_in_every_way(writer: Writer, *, type_: bool, producer: bool, seq: bool) -> Append | AppendOutcome:
    return writer.append(
        content_type=JSON if type_ else TEXT,
        producer=("p", 0, 9) if producer else None,
        seq="1" if seq else None,
    )


@pytest.mark.parametrize(
    ("closed", "type_", "producer", "seq", "refusal"),
    [
        (True, True, True, True, StreamClosed),
        (True, False, True, True, StreamClosed),
        (True, False, False, False, StreamClosed),
        (False, True, True, True, ContentTypeMismatch),
        (False, False, True, True, SequenceGap),
        (False, False, False, True, SequenceRegression),
    ],
)
def test_the_first_check_that_fails_decides(
    closed: bool, type_: bool, producer: bool, seq: bool, refusal: type[Refusal]
) -> None:
    writer = Writer()
    writer.append(seq="5")
    if closed:
        writer.append(b"", close=True)
    with pytest.raises(refusal):
        wrong_in_every_way(writer, type_=type_, producer=producer, seq=seq)


def test_body_is_checked_last() -> None:
    writer = Writer(JSON)
    writer.append(b"1", JSON, producer=("p", 1, 0), seq="5")
    with pytest.raises(StaleEpoch):
        writer.append(b"{", JSON, producer=("p", 0, 0))
    with pytest.raises(InvalidProducer):
        writer.append(b"{", JSON, producer=("p", 2, 1))
    with pytest.raises(SequenceRegression):
        writer.append(b"{", JSON, seq="5")
    assert writer.append(b"{", JSON, producer=("p", 1, 0)) is AppendOutcome.DUPLICATE


# -- closure (§4.1, §5.2.1)


def closed_by(producer: tuple[str, int, int] | None, body: bytes = b"") -> Writer:
    writer = Writer()
    writer.append(b"first", producer=("p", 0, 0))
    writer.append(body, producer=producer, close=True)
    return writer


@pytest.mark.parametrize("body", [b"", b"last"])
@pytest.mark.parametrize("repeat", [b"", b"last", b"something else"])
def test_repeat_of_the_closing_append_is_a_duplicate(body: bytes, repeat: bytes) -> None:
    writer = closed_by(("p", 0, 1), body)
    assert writer.append(repeat, producer=("p", 0, 1), close=True) is AppendOutcome.DUPLICATE


OTHER_TUPLES = [("p", 0, 0), ("p", 0, 2), ("p", 1, 0), ("q", 0, 1), ("q", 0, 0)]


@pytest.mark.parametrize("other", OTHER_TUPLES)
def test_data_from_any_other_tuple_is_refused_by_a_closed_stream(other: tuple[str, int, int]) -> None:
    writer = closed_by(("p", 0, 1))
    with pytest.raises(StreamClosed) as refused:
        writer.append(b"x", producer=other, close=True)
    assert refused.value.status == 409
    tail = f"{writer.stream.tail}_{writer.stream.id:016x}"
    assert dict(refused.value.headers) == {"Stream-Closed": "true", "Stream-Next-Offset": tail}


@pytest.mark.parametrize("other", OTHER_TUPLES)
def test_close_only_on_a_closed_stream_succeeds_for_any_tuple(other: tuple[str, int, int]) -> None:
    assert closed_by(("p", 0, 1)).append(b"", producer=other, close=True) is AppendOutcome.ALREADY_CLOSED


def test_close_only_with_an_accepted_seq_closes_and_leaves_the_producer_as_it_was() -> None:
    writer = Writer()
    writer.append(b"abc", producer=("p", 0, 0))
    before = dict(writer.stream.producers or {})
    assert writer.append(b"", producer=("p", 0, 0), close=True) == Append(1, NOW + 1, 1, 3, b"", (), close=True)
    assert writer.stream.closed
    assert writer.stream.producers == before


@pytest.mark.parametrize("closer", [None, ("p", 0, 1)])
def test_second_close_without_a_producer_succeeds_and_an_append_is_refused(closer: tuple[str, int, int] | None) -> None:
    writer = closed_by(closer)
    assert writer.append(b"", close=True) is AppendOutcome.ALREADY_CLOSED
    for close in (False, True):
        with pytest.raises(StreamClosed):
            writer.append(b"x", close=close)


# -- random requests


bodies = st.sampled_from([b"", b"x", b"[1,2]", b"{", b"[]"])
maybe_producers = st.none() | st.tuples(st.sampled_from("pq"), st.integers(0, 2), st.integers(0, 3))
attempts = st.tuples(
    bodies,
    st.sampled_from([JSON, TEXT, None]),
    maybe_producers,
    st.none() | st.sampled_from(["", "1", "2", "10"]),
    st.booleans(),
)


@given(st.lists(attempts, max_size=30))
def test_refusal_changes_nothing_and_acceptance_only_what_its_record_says(
    tries: list[tuple[bytes, str | None, tuple[str, int, int] | None, str | None, bool]],
) -> None:
    writer = Writer(JSON)
    for body, content_type, producer, seq, close in tries:
        before = writer.stream.image()
        try:
            decision = writer.append(body, content_type, producer, seq, close)
        except Refusal:
            assert writer.stream.image() == before
            continue
        if isinstance(decision, AppendOutcome):
            assert writer.stream.image() == before
        else:
            assert not before.closed
            assert writer.stream.message_index == before.message_index + len(decision.lengths)
            assert writer.stream.byte_position == before.byte_position + len(decision.payload)
            assert writer.stream.closed is close
            assert sum(decision.lengths) == len(decision.payload)
