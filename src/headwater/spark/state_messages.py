"""State-protocol messages: write rows as upserts of keys, read keys and headers as columns.

A message of the state protocol is a JSON object with `type`, `key`, `value` and `headers`, whose `operation` says what
to do with the key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa

from headwater.spark.errors import BadRowError
from headwater.spark.json_values import encode_json, plain
from headwater.spark.message_runs import MessageRun, is_json
from headwater.spark.options import SinkOptions

RESET: Final = b'{"headers":{"control":"reset"}}'
"""The message that makes readers discard all rows."""
_OPERATIONS: Final = ("insert", "update", "upsert", "delete")


class _KeyedMessage(msgspec.Struct):
    """The members of a message that are used; others are ignored."""

    key: msgspec.Raw = msgspec.Raw(b"null")
    headers: dict[str, msgspec.Raw] | None = None


_decode: Final = msgspec.json.Decoder(_KeyedMessage).decode
_decode_text: Final = msgspec.json.Decoder(str).decode


# -- source -----------------------------------------------------------------------------------------------------------


def keys_of(messages: MessageRun) -> pa.Array:
    """The key of each message as text; null for a message that has none."""
    return pa.array([_text(one.key) if one is not None else None for one in _decoded(messages)], pa.string())


def headers_of(messages: MessageRun) -> pa.Array:
    """The headers of each message as text; null for a message that has none."""
    found = [
        [(name, _text(value)) for name, value in one.headers.items()] if one is not None and one.headers else None
        for one in _decoded(messages)
    ]
    return pa.array(found, pa.map_(pa.string(), pa.string()))


def _decoded(messages: MessageRun) -> Iterator[_KeyedMessage | None]:
    if messages.snapshot or not is_json(messages.content_type):
        yield from [None] * len(messages)
        return
    for value in messages.values:
        try:
            yield _decode(value.as_buffer())
        except (msgspec.DecodeError, RecursionError):
            yield None


def _text(value: msgspec.Raw) -> str | None:
    spelled = bytes(value)
    if spelled == b"null":
        return None
    return _decode_text(value) if spelled[:1] == b'"' else spelled.decode()


# -- sink -------------------------------------------------------------------------------------------------------------


def state_values(options: SinkOptions, batch: pa.RecordBatch, targets: pa.Array) -> pa.Array:
    """A message for each row: an upsert of its key, unless the row names another operation."""
    left_out = {options.operation_column, *(() if options.stream else (options.stream_column,))}
    names = [name for name in batch.schema.names if name not in left_out]
    messages = []
    for row, target in zip(batch.to_pylist(), targets.to_pylist(), strict=True):
        operation = row[options.operation_column] if options.operation_column else "upsert"
        if operation not in _OPERATIONS:
            raise BadRowError(
                f"The column {options.operation_column} is {operation!r} in a row for stream {target!r}; it must be"
                f" {', '.join(_OPERATIONS)}."
            )
        message = {"type": options.message_type or target, "key": _key(options, row, target)}
        if operation != "delete":
            message["value"] = {name: plain(row[name]) for name in names}
        messages.append(encode_json({**message, "headers": {"operation": operation}}))
    return pa.array(messages, pa.binary())


def _key(options: SinkOptions, row: dict[str, Any], target: str) -> str:
    """One column as its text, several as a JSON list."""
    parts = [row[name] for name in options.key_columns]
    if any(part is None for part in parts):
        raise BadRowError(
            f"A row for stream {target!r} has no key: {', '.join(options.key_columns)} is null. Filter such rows out."
        )
    if len(parts) == 1:
        return parts[0] if isinstance(parts[0], str) else encode_json(plain(parts[0])).decode().strip('"')
    return encode_json(plain(parts)).decode()
