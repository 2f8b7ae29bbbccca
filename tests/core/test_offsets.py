"""Offsets: one canonical text per position, and the order of the texts is the order in the stream (protocol §6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import native
from headwater.core.offsets import BEGINNING, NOW, ZERO, Offset, OffsetToken, format_token, parse_token, same_offset

parts = st.integers(min_value=0, max_value=2**64 - 1)
offsets = st.builds(Offset, parts, parts)


def test_a_token_is_two_16_digit_hex_numbers_joined_by_an_underscore() -> None:
    assert str(Offset(1, 255)) == "0000000000000001_00000000000000ff"
    assert str(ZERO) == "0000000000000000_0000000000000000"


@given(offsets)
def test_token_parses_to_its_offset(offset: Offset) -> None:
    assert parse_token(str(offset)) == OffsetToken(offset, None)


@given(offsets, parts)
def test_a_token_of_three_parts_names_the_incarnation(offset: Offset, incarnation: int) -> None:
    text = format_token(offset.message_index, offset.byte_position, incarnation)
    assert text == f"{offset}_{incarnation:016x}"
    assert parse_token(text) == OffsetToken(offset, incarnation)


@given(offsets, offsets, parts)
def test_tokens_of_three_parts_sort_with_those_of_two(a: Offset, b: Offset, incarnation: int) -> None:
    new = format_token(b.message_index, b.byte_position, incarnation)
    assert (str(a) < new) == (a <= b)
    assert (new < str(a)) == (b < a)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (None, None, True),
        (None, str(ZERO), False),
        ("-1", "-1", True),
        ("-1", str(ZERO), False),
        (str(ZERO), format_token(0, 0, 7), True),
        (format_token(0, 0, 7), str(ZERO), True),
        (format_token(0, 0, 7), format_token(0, 0, 7), True),
        (format_token(0, 0, 7), format_token(0, 0, 8), False),
        (format_token(0, 0, 7), str(Offset(1, 1)), False),
    ],
)
def test_tokens_with_and_without_incarnation_are_the_same_position(
    one: str | None, other: str | None, same: bool
) -> None:
    assert same_offset(one, other) is same


@given(offsets, offsets)
def test_tokens_sort_like_their_positions(a: Offset, b: Offset) -> None:
    assert (str(a) < str(b)) == (a < b)


@given(parts, parts)
def test_later_position_has_a_greater_token(message_index: int, byte_position: int) -> None:
    here = Offset(message_index // 2, byte_position // 2)
    assert str(here) < str(Offset(here.message_index + 1, here.byte_position + 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        BEGINNING,
        NOW,
        "0",
        "0_0",
        "000000000000000A_0000000000000000",
        "0000000000000000-0000000000000000",
        "0000000000000000_000000000000000",
        "0000000000000000_00000000000000000",
        "0000000000000000_0000000000000000 ",
        " 0000000000000000_0000000000000000",
        "0000000000000000_0000000000000000\n",
        "+000000000000001_0000000000000000",
        "0x00000000000001_0000000000000000",
        "000000000000_001_0000000000000000",
        "\u0660000000000000000_0000000000000000",
        "0000000000000000_000000000000000g",
        "0000000000000000_0000000000000000_",
        "0000000000000000_0000000000000000_000000000000000",
        "0000000000000000_0000000000000000_00000000000000000",
        "0000000000000000_0000000000000000_000000000000000A",
        "0000000000000000_0000000000000000_0000000000000000_0000000000000000",
        "0000000000000000,0000000000000000",
    ],
)
def test_any_other_spelling_is_not_a_token(text: str) -> None:
    assert parse_token(text) is None


@given(st.text(max_size=60))
def test_only_the_canonical_form_of_a_token_parses(text: str) -> None:
    parsed = parse_token(text)
    if parsed is not None:
        suffix = "" if parsed.incarnation is None else f"_{parsed.incarnation:016x}"
        assert f"{parsed.offset}{suffix}" == text


@given(parts, parts, parts)
def test_native_token_is_the_formatted_one(message_index: int, byte_position: int, incarnation: int) -> None:
    expected = format_token(message_index, byte_position, incarnation).encode()
    assert native.offset_token(message_index, byte_position, incarnation) == expected
    assert native.pure_offset_token(message_index, byte_position, incarnation) == expected
