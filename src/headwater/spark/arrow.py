"""Arrow batches from response bodies: message boundaries, the offset of each message, the columns of a schema.

Invariant: well-formed data is converted with buffers and numpy, without a Python object per message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from headwater.spark.columns import METADATA
from headwater.spark.errors import HeadwaterError, OptionError
from headwater.spark.offsets import UNKNOWN, incarnation_of, split_token
from headwater.spark.options import BadRecords
from headwater.spark.typed import TypedParser

CORRUPT: Final = "_corrupt"

_HEX_PAIRS: Final = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)


@dataclass(frozen=True, slots=True)
class MessageRun:
    """Consecutive messages of one stream, as stored. If `separated`, each value ends with a comma."""

    stream: str
    content_type: str
    stored: pa.BinaryArray
    separated: bool
    first_position: int
    start_offset: str | None = None
    """The offset of the run, if the offset after each message can be computed from it and the stored lengths."""
    last_end: str | None = None
    """Otherwise the offset after the last message, if it is known."""
    snapshot: bool = False

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def values(self) -> pa.BinaryArray:
        return pc.binary_slice(self.stored, 0, -1) if self.separated else self.stored

    @property
    def ends(self) -> pa.StringArray:
        """The offset after each message; null where it is not known."""
        count = len(self)
        if self.start_offset is not None:
            index, position = split_token(self.start_offset)
            bounds = np.frombuffer(self.stored.buffers()[1], np.int32, count + 1).astype(np.int64)
            incarnation = incarnation_of(self.start_offset)
            return _tokens(np.arange(index + 1, index + 1 + count), bounds[1:] + position, incarnation)
        if self.last_end is None or not count:
            return pa.nulls(count, pa.string())
        return pa.concat_arrays([pa.nulls(count - 1, pa.string()), pa.array([self.last_end])])


def is_json(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == "application/json"


# -- boundaries ----------------------------------------------------------------------------------------------------


def from_frames(stream: str, content_type: str, body: bytes, start_offset: str) -> MessageRun:
    """The messages of a response to `frames=1` that begins at `start_offset`."""
    count = int.from_bytes(body[:4], "little")
    data_at = 4 + 4 * count
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.frombuffer(body, "<u4", count, 4), out=bounds[1:])
    if count == 0 or data_at + int(bounds[-1]) != len(body):
        raise HeadwaterError(f"Stream {stream!r}, offset {start_offset}: the server's frames do not add up.")
    buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(body).slice(data_at)]
    stored = pa.BinaryArray.from_buffers(pa.binary(), count, buffers)
    return MessageRun(stream, content_type, stored, is_json(content_type), split_token(start_offset)[0], start_offset)


_split_array = msgspec.json.Decoder(list[msgspec.Raw]).decode


def split_json(body: bytes) -> list[msgspec.Raw]:
    """The elements of a JSON array, unparsed."""
    return _split_array(body) if body else []


def from_values(
    stream: str, content_type: str, values: Sequence[bytes | msgspec.Raw], first_position: int, last_end: str | None
) -> MessageRun:
    """Messages that are already split; at most the offset after the last one is known."""
    stored = pa.array([bytes(value) for value in values], pa.binary())
    return MessageRun(stream, content_type, stored, separated=False, first_position=first_position, last_end=last_end)


def _tokens(
    indexes: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], incarnation: str = UNKNOWN
) -> pa.StringArray:
    """`{index:016x}_{position:016x}` for each pair, followed by the incarnation if it is known."""
    count = len(indexes)
    suffix = f"_{incarnation}".encode() if incarnation else b""
    length = 33 + len(suffix)
    text = np.empty((count, length), np.uint8)
    text[:, :16] = _hex(indexes)
    text[:, 16] = ord("_")
    text[:, 17:33] = _hex(positions)
    text[:, 33:] = np.frombuffer(suffix, np.uint8)
    offsets = np.arange(0, (count + 1) * length, length, dtype=np.int32)
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))


def _hex(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """Sixteen digits for each number, by a table of the digit pairs of each byte."""
    pairs = _HEX_PAIRS[numbers.astype(">u8").view(np.uint8)]
    return pairs.view(np.uint8).reshape(len(numbers), 16)


# -- columns -------------------------------------------------------------------------------------------------------


class Layout:
    """The columns of a query, and how each is filled."""

    def __init__(self, schema: StructType, prefix: str, bad_records: BadRecords) -> None:
        self._made_of = (schema, prefix, bad_records)
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._metadata: dict[str, str] = {}
        typed: list[StructField] = []
        has_corrupt = False
        for column in schema.fields:
            name = column.name
            ours = name.removeprefix(prefix) if name.startswith(prefix) else ""
            if name == CORRUPT:
                has_corrupt = True
                if not isinstance(column.dataType, StringType):
                    raise OptionError(f"The column {CORRUPT} must be a string.")
            elif ours in METADATA:
                if column.dataType not in METADATA[ours]:
                    raise OptionError(
                        f"The column {name} is {' or '.join(one.simpleString() for one in METADATA[ours])}, not"
                        f" {column.dataType.simpleString()}. If it is a field of the JSON messages, set"
                        " metadataPrefix to give the metadata columns other names."
                    )
                self._metadata[name] = ours
            else:
                typed.append(column)
        if has_corrupt and not typed:
            raise OptionError(f"The column {CORRUPT} needs columns for fields of the messages beside it.")
        self._parser = TypedParser(StructType(typed), has_corrupt, bad_records) if typed else None

    def __reduce__(self) -> tuple[type[Layout], tuple[StructType, str, BadRecords]]:
        """Pickle the arguments, because parsers cannot be pickled."""
        return Layout, self._made_of

    def batch(self, messages: MessageRun) -> pa.RecordBatch:
        count = len(messages)
        filled: dict[str, pa.Array] = {}
        if self._parser is not None:
            filled = self._parser.nulls(count) if messages.snapshot else self._parser.parse(messages)
        for name, ours in self._metadata.items():
            filled[name] = self._column(ours, messages, self._schema.field(name).type)
        return pa.RecordBatch.from_arrays([filled[name] for name in self._schema.names], schema=self._schema)

    def _column(self, name: str, messages: MessageRun, type_: pa.DataType) -> pa.Array:
        count = len(messages)
        match name:
            case "value":
                return _value(messages, type_)
            case "offset":
                return messages.ends
            case "position":
                first = messages.first_position
                return pa.array(np.arange(first, first + count, dtype=np.int64))
            case "stream":
                return pa.repeat(pa.scalar(messages.stream), count)
            case "content_type":
                return pa.repeat(pa.scalar(messages.content_type), count)
            case _:
                return pa.repeat(pa.scalar(messages.snapshot), count)


def _value(messages: MessageRun, type_: pa.DataType) -> pa.Array:
    if type_ == pa.binary():
        return messages.values
    try:
        return pc.cast(messages.values, pa.string())
    except pa.ArrowInvalid as error:
        raise HeadwaterError(
            f"Stream {messages.stream!r} ({messages.content_type}), message {messages.first_position} and following"
            f" (offset {messages.start_offset or 'unknown'}): not text in UTF-8. Set valueType=binary,"
            " or give value the type binary in the schema."
        ) from error
