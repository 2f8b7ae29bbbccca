"""Append chunks to a value: strings, lists, and the text fields of objects.

    "Hel" + "lo"                                  "Hello"
    [1] + [2]                                     [1,2]
    {"text": "Hel"} + {"text": "lo", "n": 2}      {"text": "Hello", "n": 2}

A chunk of any other kind replaces the value. Invariant: appending two chunks at once gives the same bytes as appending
them one by one, because a fold must not depend on how it was split into batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

TEXT_FIELDS: Final = ("text", "content", "delta")
"""In a chunk that is an object, strings under these names are concatenated; every other field is replaced."""

_text = msgspec.json.Decoder(str).decode
_elements = msgspec.json.Decoder(list[msgspec.Raw]).decode
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def appended(base: bytes | None, chunks: Sequence[bytes]) -> bytes:
    """The value after appending its chunks. Without a value, the first chunk is the value, byte for byte."""
    value = base
    at = 0
    while at < len(chunks):
        if value is None or _kind(value) != _kind(chunks[at]) or _kind(value) not in _GROWS:
            value = chunks[at]
            at += 1
            continue
        # Append all chunks of one kind at once: a long text has thousands of them.
        end = at
        while end < len(chunks) and _kind(chunks[end]) == _kind(value):
            end += 1
        value = _GROWS[_kind(value)](value, chunks[at:end])
        at = end
    assert value is not None, "there must be a value or a chunk"
    return value


def completed(value: bytes, before: bytes, unchanged: Sequence[str]) -> bytes:
    """A value whose missing fields are taken from the value before it."""
    if _kind(value) != b"{" or _kind(before) != b"{":
        return value
    fields, earlier = _fields(value), _fields(before)
    return _encode(fields | {name: earlier[name] for name in unchanged if name in earlier and name not in fields})


def _kind(value: bytes) -> bytes:
    return value[:1]


def _grown_text(value: bytes, chunks: Sequence[bytes]) -> bytes:
    return _encode("".join([_text(value), *map(_text, chunks)]))


def _grown_list(value: bytes, chunks: Sequence[bytes]) -> bytes:
    elements = _elements(value)
    for chunk in chunks:
        elements += _elements(chunk)
    return _encode(elements)


def _grown_object(value: bytes, chunks: Sequence[bytes]) -> bytes:
    fields = _fields(value)
    growing: dict[str, list[bytes]] = {}
    for chunk in chunks:
        for name, piece in _fields(chunk).items():
            raw = bytes(piece)
            if name in TEXT_FIELDS and name in fields and _kind(raw) == b'"' == _kind(bytes(fields[name])):
                growing.setdefault(name, []).append(raw)
            else:
                growing.pop(name, None)
                fields[name] = piece
    for name, pieces in growing.items():
        fields[name] = msgspec.Raw(_grown_text(bytes(fields[name]), pieces))
    return _encode(fields)


_GROWS: Final = {b'"': _grown_text, b"[": _grown_list, b"{": _grown_object}
