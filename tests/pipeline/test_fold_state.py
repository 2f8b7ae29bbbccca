"""The state of a change stream: the effect of each operation, and that a fold does not depend on where it starts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headwater.pipeline.fold.appending import appended
from headwater.pipeline.fold.state import FoldState, SnapshotFormatError


def session(operation: str, key: str, value: Any = None, kind: str = "message") -> bytes:
    return json.dumps({"key": key, "type": kind, "operation": operation, "value": value}).encode()


def change(operation: str, key: str, value: Any = None, kind: str = "user") -> bytes:
    return json.dumps({"type": kind, "key": key, "value": value, "headers": {"operation": operation}}).encode()


def folded(*messages: bytes) -> dict[tuple[str, str], Any]:
    entries = FoldState().apply_all(messages).entries
    return {key: json.loads(entry.value) for key, entry in entries.items()}


def test_the_last_operation_on_a_key_wins() -> None:
    assert folded(session("set", "a", 1), session("set", "b", 2), session("set", "a", 3)) == {
        ("message", "a"): 3,
        ("message", "b"): 2,
    }
    assert folded(session("set", "a", 1), session("remove", "a")) == {}
    assert folded(session("remove", "a"), session("set", "a", 1)) == {("message", "a"): 1}


@pytest.mark.parametrize("operation", ["insert", "update", "upsert"])
def test_the_state_protocols_operations_replace_the_whole_value(operation: str) -> None:
    assert folded(change("insert", "u", {"a": 1, "b": 2}), change(operation, "u", {"a": 3})) == {
        ("user", "u"): {"a": 3}
    }
    assert folded(change(operation, "u", {"a": 3}), change("delete", "u")) == {}


def test_same_key_of_two_types_is_two_entries() -> None:
    assert len(folded(change("insert", "1", 1, kind="user"), change("insert", "1", 2, kind="room"))) == 2


def test_reset_discards_earlier_messages() -> None:
    assert folded(change("insert", "a", 1), b'{"headers":{"control":"reset"}}', change("insert", "b", 2)) == {
        ("user", "b"): 2
    }


@pytest.mark.parametrize(
    "message",
    [b"1", b'"text"', b"null", b"[]", b"{}", b'{"key":"a"}', b'{"key":1,"operation":"set"}', b'{"operation":"set"}',
     b'{"key":"a","operation":"frobnicate","value":1}', b'{"headers":{"control":"snapshot-end"}}'],
)  # fmt: skip
def test_messages_that_are_not_changes_are_counted_and_change_nothing(message: bytes) -> None:
    state = FoldState().apply_all([session("set", "a", 1), message])
    assert (len(state), state.ignored) == (1, 1)


@pytest.mark.parametrize(
    ("values", "result"),
    [
        (["Hel", "lo", " wörld"], "Hello wörld"),
        ([[1], [2, [3]]], [1, 2, [3]]),
        ([{"text": "Hel", "n": 1}, {"text": "lo", "n": 2}], {"text": "Hello", "n": 2}),
        ([{"role": "ai", "text": "a"}, {"role": "ai", "text": "b"}], {"role": "ai", "text": "ab"}),
        ([{"text": "a"}, {"text": None}, {"text": "b"}], {"text": "b"}),
        ([1, 2], 2),
        (["a", {"text": "b"}, {"text": "c"}], {"text": "bc"}),
        ([True, "a", "b"], "ab"),
    ],
)
def test_chunks_are_concatenated(values: list[Any], result: Any) -> None:
    assert folded(*(session("append", "m", value, "chunk") for value in values)) == {("chunk", "m"): result}


def test_chunks_extend_the_value_that_was_set() -> None:
    first = [session("set", "m", "a"), session("append", "m", "b")]
    assert folded(*first) == {("message", "m"): "ab"}
    assert folded(*first, session("set", "m", "c"), session("append", "m", "d")) == {("message", "m"): "cd"}
    assert folded(*first, session("remove", "m"), session("append", "m", "d")) == {("message", "m"): "d"}


def test_time_of_many_chunks_is_linear() -> None:
    state = FoldState().apply_all(session("append", "m", "x" * 40) for _ in range(20_000))
    assert len(state.encoded()) == 20_000 * 40 + len(session("set", "m", "").replace(b" ", b"")) + 2


def test_values_keep_their_bytes() -> None:
    value = b'{"n":123456789012345678901234567890,"e":1e400,"s":"\\u0041","deep":{"b": 1,  "a":2}}'
    state = FoldState().apply_all([b'{"key":"k","operation":"set","value":' + value + b"}"])
    assert value in state.encoded()
    assert FoldState.decoded(state.encoded()).encoded() == state.encoded()


def test_snapshot_is_a_sorted_list_of_messages_in_their_original_form() -> None:
    state = FoldState().apply_all([change("update", "b", 1), session("set", "a", 2, "z"), change("insert", "a", 3)])
    assert json.loads(state.encoded()) == [
        {"type": "user", "key": "a", "value": 3, "headers": {"operation": "insert"}},
        {"type": "user", "key": "b", "value": 1, "headers": {"operation": "insert"}},
        {"type": "z", "key": "a", "operation": "set", "value": 2},
    ]
    assert FoldState().encoded() == b"[]"


@pytest.mark.parametrize("snapshot", [b"", b"{}", b"\x00\x01", b"[1]", b'[{"key":"a"}]'])
def test_snapshot_in_another_format_is_rejected_with_the_reason(snapshot: bytes) -> None:
    with pytest.raises(SnapshotFormatError, match=r"array|not changes"):
        FoldState.decoded(snapshot)


# -- a fold does not depend on where it starts -------------------------------------------------------------------------

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "delta", "n", "ü"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_kinds = st.sampled_from(["", "a", "b", "é"])
_keys = st.sampled_from(["", "1", "2", "\u0000", "𐍈", "ￜ"])


@st.composite
def _messages(draw: st.DrawFn) -> bytes:
    event: dict[str, Any] = {"key": draw(_keys), "value": draw(_json)}
    if kind := draw(_kinds):
        event["type"] = kind
    operation = draw(st.sampled_from(["set", "append", "append", "append", "remove", "insert", "delete", "?"]))
    if draw(st.booleans()):
        event["operation"] = operation
    else:
        event["headers"] = {"operation": operation}
    if draw(st.integers(0, 30)) == 0:
        event = {"headers": {"control": "reset"}}
    indent = draw(st.sampled_from([None, 1]))
    return json.dumps(event, ensure_ascii=draw(st.booleans()), indent=indent).encode()


@settings(suppress_health_check=[HealthCheck.too_slow])  # A busy machine generates slowly.
@given(st.lists(_messages(), max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_fold_from_any_snapshot_gives_the_same_bytes_as_from_the_beginning(
    messages: list[bytes], cuts: list[int]
) -> None:
    whole = FoldState().apply_all(messages).encoded()
    state = FoldState()
    begin = 0
    for end in [*sorted(min(cut, len(messages)) for cut in cuts), len(messages)]:
        state = FoldState.decoded(state.encoded()).apply_all(messages[begin:end])
        begin = end
    assert state.encoded() == whole
    msgspec.json.decode(whole)


@settings(suppress_health_check=[HealthCheck.too_slow])  # A busy machine generates slowly.
@given(_json, st.lists(_json, min_size=1, max_size=6), st.integers(0, 6))
def test_appending_chunks_together_or_one_by_one_gives_the_same_bytes(base: Any, values: list[Any], cut: int) -> None:
    chunks = [json.dumps(value).encode() for value in values]
    value = json.dumps(base).encode()
    one_by_one = value
    for chunk in chunks:
        one_by_one = appended(one_by_one, [chunk])
    assert appended(value, chunks) == one_by_one
    first = appended(value, chunks[:cut]) if cut else value
    assert (appended(first, chunks[cut:]) if chunks[cut:] else first) == one_by_one


def test_a_field_that_a_change_names_as_unchanged_is_kept() -> None:
    def change(value: dict[str, Any], operation: str = "update", **headers: Any) -> bytes:
        return json.dumps(
            {"type": "docs", "key": "1", "value": value, "headers": {"operation": operation} | headers}
        ).encode()

    messages = [
        change({"id": 1, "body": "large", "n": 0}, "insert"),
        change({"id": 1, "n": 1}, unchanged=["body"]),
        change({"id": 1, "n": 2}, unchanged=["body", "unknown"]),
    ]
    folded = FoldState().apply_all(messages)
    assert json.loads(folded.entries["docs", "1"].value) == {"id": 1, "body": "large", "n": 2}
    resumed = FoldState.decoded(FoldState().apply_all(messages[:2]).encoded()).apply_all(messages[2:])
    assert resumed.encoded() == folded.encoded()
    folded.apply(change({"id": 1, "n": 3}))
    assert json.loads(folded.entries["docs", "1"].value) == {"id": 1, "n": 3}
    folded.apply(change({"id": 1, "n": 4}, unchanged=17))
    assert json.loads(folded.entries["docs", "1"].value) == {"id": 1, "n": 4}
