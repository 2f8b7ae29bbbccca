"""JSON mode: messages are stored unchanged, one level of array is flattened, invalid JSON is refused (§7.1, T-28)."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.core.content import Messages, split_json
from headwater.core.errors import InvalidJson, Refusal

pytestmark = pytest.mark.usefixtures("build")

KEPT = [
    b"9007199254740993",
    b"-9007199254740993",
    b"123456789012345678901234567890",
    b"1.0",
    b"1.00",
    b"-0",
    b"-0.0",
    b"1E5",
    b"1e+05",
    b"1e400",
    b"0.1000000000000000055511151231257827",
    b'{"a":1,"a":2}',
    b'{"z":1,"a":2,"m":3}',
    b'{ "a" :\t1 ,\r\n "b" : [ 1 , 2 ] }',
    b'"\\u0041"',
    b'"\\/"',
    b'"\\u00e9"',
    b'"\xc3\xa9"',
    b'"\\ud83d\\ude00"',
    b'"\\uD83D\\uDE00"',
    b'"\xf0\x9f\x98\x80"',
    b'"\xe2\x80\xa8\xc2\x85"',
    b'"\x7f"',
    b'"\\u0000"',
    b'"],["',
    b'"\\"]"',
    b'"[,]"',
    b'{"]":"[","\\\\":"\\""}',
    b"true",
    b"false",
    b"null",
    b'""',
    b"{}",
    b"[]",
    b"[[1,2],[3,4]]",
]


@pytest.mark.parametrize("value", [value for value in KEPT if not value.startswith(b"[")])
def test_single_value_is_stored_unchanged(value: bytes) -> None:
    assert split_json(value) == (value + b",", (len(value) + 1,))


@pytest.mark.parametrize("value", KEPT)
def test_array_element_is_stored_unchanged(value: bytes) -> None:
    assert split_json(b"[" + value + b"]") == (value + b",", (len(value) + 1,))


def test_array_elements_are_stored_in_order_without_surrounding_whitespace() -> None:
    body = b" \r\n[ " + b" ,\n\t ".join(KEPT) + b"\t]\n "
    assert split_json(body) == (b",".join(KEPT) + b",", tuple(len(value) + 1 for value in KEPT))


def test_whitespace_around_a_single_value_is_removed_and_inside_it_is_kept() -> None:
    assert split_json(b' \t\r\n{ "a" : 1 } \r\n').payload == b'{ "a" : 1 },'


@pytest.mark.parametrize(
    ("body", "messages"),
    [
        (b'{"event":"created"}', [b'{"event":"created"}']),
        (b'[{"event":"a"},{"event":"b"}]', [b'{"event":"a"}', b'{"event":"b"}']),
        (b"[[1,2],[3,4]]", [b"[1,2]", b"[3,4]"]),
        (b"[[[1,2,3]]]", [b"[[1,2,3]]"]),
        (b"[[]]", [b"[]"]),
    ],
)
def test_exactly_one_level_of_array_is_flattened(body: bytes, messages: list[bytes]) -> None:
    assert split(split_json(body)) == messages


@pytest.mark.parametrize(
    "body",
    [
        # not a value, or more than one
        b" ",
        b"\n",
        b"nul",
        b"True",
        b"undefined",
        b"truefalse",
        b"1 2",
        b"[1] x",
        b"[1][2]",
        b"[1],",
        b",[1]",
        b"{}{}",
        b'"a" "b"',
        b"[1]\x00",
        b"\x00[1]",
        # unfinished
        b"[",
        b"[1",
        b"[1,",
        b'"abc',
        b'{"a"',
        b'{"a":',
        b'{"a":1',
        b'["\\u"]',
        b'"\\',
        # punctuation
        b"[1,]",
        b"[,1]",
        b"[,]",
        b"[1 2]",
        b'{"a":1,}',
        b"{,}",
        b'{"a" 1}',
        b'{"a":1 "b":2}',
        b'{"a":}',
        b"{a:1}",
        b"{1:1}",
        b"]",
        b"[1}",
        # numbers
        b"01",
        b"-01",
        b"00",
        b"+1",
        b"1.",
        b".5",
        b"-",
        b"1e",
        b"1e+",
        b"0x10",
        b"1_000",
        b"NaN",
        b"[NaN]",
        b"Infinity",
        b"-Infinity",
        b'{"a":NaN}',
        # strings
        b"'a'",
        b'"\\x41"',
        b'"\\a"',
        b'"\\u00g0"',
        b'"a\nb"',
        b'"a\rb"',
        b'"a\tb"',
        b'"\x00"',
        b'"\x1f"',
        b'{"a\nb":1}',
        # comments, other white space, byte order marks
        b"// c\n1",
        b"/* c */ 1",
        b"# c\n1",
        b"\x0b1",
        b"\x0c[1]",
        b"\xc2\xa01",
        b"\xe2\x80\xa8[1]",
        b"\xef\xbb\xbf[1]",
        b"\xef\xbb\xbf1",
        b"[1]\xef\xbb\xbf",
        b"\xff\xfe[\x001\x00]\x00",
        # lone surrogates, escaped and raw
        b'"\\ud800"',
        b'["\\udc00"]',
        b'"\\udc00\\ud800"',
        b'"\\ud83d\\u0041"',
        b'"\\ud83dx"',
        b'{"\\ud800":1}',
        b'[{"a":["\\udfff"]}]',
        b'"\xed\xa0\x80"',
        b'"\xed\xb0\x80"',
        b'"\xed\xa0\xbd\xed\xb8\x80"',
        # not UTF-8
        b'"\xff"',
        b'["\xc3"]',
        b'"\xc0\xaf"',
        b'"\xf5\x80\x80\x80"',
        b"\x80",
    ],
)
def test_invalid_json_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidJson) as refused:
        split_json(body)
    assert refused.value.status == 400
    assert refused.value.code == "invalid_json"


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
@pytest.mark.parametrize("inner", [b"1", b""])
def test_excessive_nesting_is_refused(depth: int, opening: bytes, closing: bytes, inner: bytes) -> None:
    with pytest.raises(InvalidJson):
        split_json(opening * depth + inner + closing * depth)
    with pytest.raises(InvalidJson):
        split_json(opening * depth)


def test_reasonable_nesting_is_accepted() -> None:
    depth = 100
    value = b'{"a":[' * depth + b"1" + b"]}" * depth
    assert split_json(b"[" + value + b"]").payload == value + b","
    assert sys.getrecursionlimit() > 2 * depth


def test_error_for_invalid_utf_8_has_the_byte_position() -> None:
    with pytest.raises(InvalidJson, match="byte 5"):
        split_json(b'["ab"\xff]')


def encodes(value: object) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
).filter(encodes)


def split(messages: Messages) -> list[bytes]:
    """The messages without the comma that each is stored with."""
    found = []
    at = 0
    for length in messages.lengths:
        assert messages.payload[at + length - 1 : at + length] == b","
        found.append(messages.payload[at : at + length - 1])
        at += length
    assert at == len(messages.payload)
    return found


@given(st.lists(json_values, min_size=1, max_size=6), st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_every_document_is_stored_as_the_received_text(
    values: list[object], escaped: bool, indent: int | str | None
) -> None:
    texts = [json.dumps(value, ensure_ascii=escaped, indent=indent).encode() for value in values]
    assert split(split_json(b"[" + b" ,\r\n".join(texts) + b"]")) == texts


@given(st.lists(json_values, min_size=1, max_size=6))
def test_run_of_stored_messages_in_brackets_is_an_array(values: list[object]) -> None:
    stored = split_json(json.dumps(values).encode())
    for start in range(len(values)):
        for end in range(start + 1, len(values) + 1):
            run = stored.payload[sum(stored.lengths[:start]) : sum(stored.lengths[:end])]
            assert json.loads(b"[" + run[:-1] + b"]") == values[start:end]


def strictly(text: str) -> Any:
    """Parse with the standard library, but without its deviations from the JSON standard."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False).encode()  # Refuses lone surrogates.
    return value


FRAGMENTS = ["[", "]", "{", "}", ",", ":", '"', "\\", "a", "\\u", "d83d", "\\ude00", "0", "1", "-", ".", "e", "+", " "]
FRAGMENTS += ["\n", "\r", "\t", "true", "null", "NaN", '"k"', "[]", "\x00", "\x1f", "é", "\u2028", "\ufeff", "[1]"]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))
@example('["\\ud83d\\ude00"]')
@example("[1,[2,[3]]]")
def test_bodies_are_accepted_exactly_if_a_strict_parser_accepts_them(text: str) -> None:
    try:
        value = strictly(text)
    except (ValueError, RecursionError):
        value = None
        valid = False
    else:
        valid = True
    try:
        messages = split_json(text.encode(), allow_empty=True)
    except Refusal:
        assert not valid, f"{text!r} is valid JSON and was refused"
        return
    assert valid, f"{text!r} is not valid JSON and was accepted"
    assert [strictly(message.decode()) for message in split(messages)] == (
        value if isinstance(value, list) else [value]
    )
