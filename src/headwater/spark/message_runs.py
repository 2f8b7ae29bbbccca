"""Split response bodies into messages, with the offset after each.

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

from headwater.spark.errors import HeadwaterError
from headwater.spark.offsets import UNKNOWN, incarnation_of, split_token

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
    times_ms: npt.NDArray[np.int64] | None = None
    """When each message arrived, 0 if unknown; None if times were not read."""

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def values(self) -> pa.BinaryArray:
        return pc.binary_slice(self.stored, 0, -1) if self.separated else self.stored

    @property
    def ends(self) -> pa.StringArray:
        """The offset after each message; null if unknown."""
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


def from_frames(stream: str, content_type: str, body: bytes, start_offset: str, *, timed: bool = False) -> MessageRun:
    """The messages of a response to `frames=1` that begins at `start_offset`, with their times if it was `times=1`."""
    count = int.from_bytes(body[:4], "little")
    data_at = 4 + (12 if timed else 4) * count
    bounds = np.zeros(count + 1, np.int64)
    np.cumsum(np.frombuffer(body, "<u4", count, 4), out=bounds[1:])
    if count == 0 or data_at + int(bounds[-1]) != len(body):
        raise HeadwaterError(
            f"Stream {stream!r}, offset {start_offset}: the lengths in the frames do not match the body."
        )
    buffers = [None, pa.py_buffer(bounds.astype(np.int32)), pa.py_buffer(body).slice(data_at)]
    stored = pa.BinaryArray.from_buffers(pa.binary(), count, buffers)
    return MessageRun(
        stream,
        content_type,
        stored,
        is_json(content_type),
        split_token(start_offset)[0],
        start_offset,
        times_ms=np.frombuffer(body, "<u8", count, 4 + 4 * count).astype(np.int64) if timed else None,
    )


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
