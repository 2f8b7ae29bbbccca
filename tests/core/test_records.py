"""Records: every kind decodes to exactly what was encoded."""

from __future__ import annotations

import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.producers import ProducerState
from headwater.core.records import Append, Create, Delete, Image, Record, Touch, decode_record, encode_record

RECORD_TYPES: tuple[type[msgspec.Struct], ...] = typing.get_args(Record)

PLAIN: dict[object, st.SearchStrategy[Any]] = {
    int: st.integers(min_value=0, max_value=2**63 - 1),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
    type(None): st.none(),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value of a field's type, so that new kinds of records and fields are tested automatically."""
    if hint in PLAIN:
        return PLAIN[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(part) for part in parts])
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return st.lists(values_of(parts[0]), max_size=4).map(tuple)
        return st.tuples(*[values_of(part) for part in parts])
    if origin is dict:
        return st.dictionaries(values_of(parts[0]), values_of(parts[1]), max_size=3)
    return records_of(hint)


def records_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        kind, **{name: values_of(hint) for name, hint in typing.get_type_hints(kind).items() if name[0] != "_"}
    )


@pytest.mark.parametrize("kind", RECORD_TYPES, ids=lambda kind: kind.__name__)
def test_record_decodes_to_what_was_encoded(kind: type[msgspec.Struct]) -> None:
    @given(records_of(kind))
    def check(record: Record) -> None:
        back = decode_record(encode_record(record))
        assert type(back) is type(record)
        assert back == record

    check()


def test_every_kind_of_record_has_its_own_tag() -> None:
    tags = [kind.__struct_config__.tag for kind in RECORD_TYPES]
    assert len(set(tags)) == len(tags)
    assert {Create, Append, Delete, Touch, Image} <= set(RECORD_TYPES)


def test_record_with_every_byte_and_the_largest_numbers_decodes_unchanged() -> None:
    payload = bytes(range(256))
    append = Append(2**63 - 1, 2**53, 2**40, 2**62, payload, (1,) * 256, "é\u2028", 2**53 - 1, 2**53 - 1, "\xff", True)
    assert decode_record(encode_record(append)) == append


def test_producers_of_an_image_decode_unchanged() -> None:
    image = Image(1, "n", 0, "text/plain", None, None, 0, 0, 0, 0, producers={"p": ProducerState(3, 9)})
    back = decode_record(encode_record(image))
    assert isinstance(back, Image)
    assert isinstance(back.producers["p"], ProducerState)
    assert back.producers["p"].epoch == 3


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\x00", b"\xc0", b"\x90", b"\x91\xa4nope", b"\x91\xa6create", b"\x93\xa5touch\xa1x\x00", b"\xff" * 20],
)
def test_bytes_that_are_not_a_record_are_rejected(damaged: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_record(damaged)


@given(records_of(Append), st.data())
def test_truncated_record_is_rejected(record: Append, data: st.DataObject) -> None:
    encoded = encode_record(record)
    cut = data.draw(st.integers(min_value=0, max_value=len(encoded) - 1))
    with pytest.raises(msgspec.MsgspecError):
        decode_record(encoded[:cut])
