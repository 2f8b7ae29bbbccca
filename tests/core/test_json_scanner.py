"""The compiled scanner against the decoder: the same messages and the same refusals, whatever the body is."""

from __future__ import annotations

import json
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import native
from headwater.core.content import Messages, split_json
from headwater.core.errors import Refusal

pytestmark = pytest.mark.usefixtures("build")

STRANGE = [
    b"\xef\xbb\xbf[1]",
    b"[1]\x00",
    b"[1]\x0b",
    b"[1,]",
    b"[1,",
    b"[1",
    b"[,1]",
    b"[1 2]",
    b"[01]",
    b"[-]",
    b"[1.]",
    b"[.5]",
    b"[1e]",
    b"[1e400,-1e400]",
    b"[" + b"9" * 500 + b"]",
    b"[NaN]",
    b"[nul]",
    b"[truefalse]",
    b'["a\x1fb"]',
    b'["a\tb"]',
    b'["\\x"]',
    b'["\\u12"]',
    b'["\\ud800"]',
    b'["\\udc00"]',
    b'["\\ud800\\u0041"]',
    b'["\\ud83d\\ude00"]',
    b'["abcdefgh\\',
    b'["abcdefgh\\"',
    b'["\xff"]',
    b'["\xed\xa0\x80"]',
    b'["\xc3"]',
    b'["1234567\xc3\xa9"]',
    b'[{"a":1,"a":2}]',
    b'[{"a"}]',
    b'[{"a":}]',
    b'[{"a":1,}]',
    b"[{1:2}]",
    b"[" * 63 + b"]" * 63,
    b"[" * 64 + b"]" * 64,
    b"[" * 65 + b"]" * 65,
    b"[" * 500 + b"]" * 500,
    b"[" * 100_000,
    b'[{"a":' * 100_000,
    b"[] []",
    b"[[]]",
    b" \t\r\n[ \t\r\n1 \t\r\n, \t\r\n2 \t\r\n] \t\r\n",
    b"",
    b" ",
]


def outcome(body: bytes) -> Messages | tuple[str, str]:
    try:
        return split_json(body)
    except Refusal as refusal:
        return type(refusal).__name__, refusal.detail


def outcome_of_decoder(body: bytes) -> Messages | tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "split", native.pure_split)
        return outcome(body)


def scanned_in_steps(body: bytes, step_bytes: int) -> Messages | None:
    """What the scanner makes of an array, a few bytes at a time."""
    at, payload = body.index(b"[") + 1, b""
    lengths: tuple[int, ...] = ()
    while at:
        scanned = native.scan(body, at, at + step_bytes, len(body))
        if scanned is None:
            return None
        payload, lengths, at = payload + scanned[0], lengths + scanned[1], scanned[2]
    return Messages(payload, lengths)


@pytest.mark.parametrize("body", STRANGE, ids=lambda body: repr(body[:30]))
def test_strange_bodies_are_split_and_refused_alike(body: bytes) -> None:
    assert outcome(body) == outcome_of_decoder(body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=15,
)


@given(
    st.lists(values, max_size=8) | values,
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t:\r ")]),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 10_000), st.binary(max_size=2), st.integers(0, 2)), max_size=2),
    st.integers(1, 40),
)
def test_damaged_bodies_are_split_and_refused_alike(
    value: object,
    separators: tuple[str, str],
    ascii_only: bool,
    damage: list[tuple[int, bytes, int]],
    step_bytes: int,
) -> None:
    """JSON values, with a few bytes replaced, inserted or removed."""
    body = json.dumps(value, separators=separators, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    for number, inserted, removed in damage:
        at = number % (len(body) + 1)
        body = body[:at] + inserted + body[at + removed :]
    expected = outcome_of_decoder(body)
    assert outcome(body) == expected
    if isinstance(expected, Messages) and body.lstrip(b" \t\r\n")[:1] == b"[":
        assert scanned_in_steps(body, step_bytes) in (expected, None)


def test_ordinary_bodies_are_scanned(build: str) -> None:
    """Without this the other tests could compare the decoder with itself."""
    events = [{"id": n, "name": f"é{n}", "price": n * 1.5, "tags": ["a", None], "text": 'a "quote"'} for n in range(50)]
    for body in (json.dumps(events).encode(), json.dumps(events, ensure_ascii=False).encode(), b' {"a": [1]} '):
        assert (native.split(body) is not None) == (build == "compiled")
        assert outcome(body) == outcome_of_decoder(body)


@pytest.mark.parametrize(
    "special", [b'"', b"\\n", b"\\", b"\x00", b"\x1f", b" ", "é".encode(), b"\xff", b"\x7f"], ids=repr
)
def test_special_bytes_are_seen_at_every_position(special: bytes) -> None:
    """The scanner looks at several bytes at once."""
    for length in range(50):
        for at in range(length + 1):
            body = b'["' + b"x" * at + special + b"y" * (length - at) + b'","z"]'
            assert outcome(body) == outcome_of_decoder(body)


def test_ends_are_extended_alike() -> None:
    generator = random.Random(7)
    for count in (0, 1, 2, 500):
        lengths = [generator.randrange(1, 2**33) for _ in range(count)]
        expected = array("Q", [5, 9])
        native.pure_extend_ends(expected, lengths, 9)
        for kind in (list, tuple):
            ends = array("Q", [5, 9])
            native.extend_ends(ends, kind(lengths), 9)
            assert ends == expected


@pytest.mark.parametrize("from_type", ["I", "Q"])
@pytest.mark.parametrize("to_type", ["I", "Q"])
def test_shifted_numbers_are_the_same_in_both_builds(from_type: str, to_type: str) -> None:
    generator = random.Random(6)
    for count, by in ((0, 5), (1, -3), (500, 2**20), (70_000, -(2**20)), (2, 2**32), (2, -(2**21))):
        numbers = array(from_type, [generator.randrange(2**20, 2**21) for _ in range(count)])
        for source in (numbers, memoryview(numbers), memoryview(numbers)[count // 2 :], tuple(numbers)):
            expected, column = array(to_type, [7]), array(to_type, [7])
            is_outside = False
            try:
                native.pure_extend_shifted(expected, source, by)
            except OverflowError:
                is_outside = True
            if is_outside:
                with pytest.raises(OverflowError):
                    native.extend_shifted(column, source, by)
            else:
                native.extend_shifted(column, source, by)
            assert column == expected
