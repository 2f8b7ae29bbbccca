"""Offsets: one place, one spelling, and the order of the text is the order of the stream (protocol §6)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.offsets import BEGINNING, NOW, ZERO, Offset, parse_token

parts = st.integers(min_value=0, max_value=2**64 - 1)
offsets = st.builds(Offset, parts, parts)


def test_a_token_is_two_16_digit_hex_numbers_joined_by_an_underscore() -> None:
    assert str(Offset(1, 255)) == "0000000000000001_00000000000000ff"
    assert str(ZERO) == "0000000000000000_0000000000000000"


@given(offsets)
def test_every_offset_survives_its_token(offset: Offset) -> None:
    assert parse_token(str(offset)) == offset


@given(offsets, offsets)
def test_tokens_sort_as_their_places_do(a: Offset, b: Offset) -> None:
    assert (str(a) < str(b)) == (a < b)


@given(parts, parts)
def test_what_lies_further_on_has_a_greater_token(index: int, position: int) -> None:
    here = Offset(index // 2, position // 2)
    assert str(here) < str(Offset(here.index + 1, here.position + 1))


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
        "0000000000000000_0000000000000000_0000000000000000",
        "0000000000000000,0000000000000000",
    ],
)
def test_any_other_spelling_is_no_token(text: str) -> None:
    assert parse_token(text) is None


@given(st.text(max_size=40))
def test_what_parses_is_spelled_as_the_server_spells_it(text: str) -> None:
    parsed = parse_token(text)
    assert parsed is None or str(parsed) == text
