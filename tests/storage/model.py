"""The expected content of a store: a list of messages for each stream.

`Model` shares no code with the catalog or the storage modes, so that it does not repeat their mistakes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create, Delete, Document, Record, Retain, Touch
from headwater.storage.arrival_times import TimeRun
from headwater.storage.interface import Committed, Storage


@dataclass
class ModelStream:
    name: str
    content_type: str
    ttl_secs: int | None
    base: tuple[int, int]
    start: tuple[int, int]
    """Where the readable part of its own data begins."""
    fork_of: int | None
    messages: list[bytes]
    times_ms: list[int]
    """When each message was received."""
    accessed_ms: int
    written_ms: int
    closed: bool
    closed_by: tuple[str, int, int] | None = None
    stream_seq: str | None = None
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)
    deleted: bool = False

    @property
    def end(self) -> tuple[int, int]:
        return self.start[0] + len(self.messages), self.start[1] + sum(map(len, self.messages))


def split(payload: bytes, lengths: tuple[int, ...]) -> list[bytes]:
    messages, at = [], 0
    for length in lengths:
        messages.append(payload[at : at + length])
        at += length
    assert at == len(payload)
    return messages


class Model:
    def __init__(self) -> None:
        self.streams: dict[int, ModelStream] = {}
        self.documents: dict[str, bytes] = {}

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def after(self, batch: list[Committed]) -> Model:
        later = self.copy()
        later.apply_all(batch)
        return later

    def apply_all(self, batch: list[Committed]) -> None:
        for record, removed in batch:
            self.apply(record)
            for stream_id in removed:
                del self.streams[stream_id]

    def apply(self, record: Record) -> None:
        if isinstance(record, Create):
            fork = record.fork
            base = (fork.message_index, fork.byte_position) if fork is not None else (0, 0)
            self.streams[record.id] = ModelStream(
                record.name,
                record.content_type,
                record.ttl_secs,
                base,
                base,
                fork.source_id if fork is not None else None,
                split(record.payload, record.lengths),
                [record.at_ms] * len(record.lengths),
                record.at_ms,
                record.at_ms,
                record.closed,
            )
        elif isinstance(record, Append):
            stream = self.streams[record.id]
            assert stream.end == (record.message_index, record.byte_position)
            stream.messages += split(record.payload, record.lengths)
            stream.times_ms += [record.at_ms] * len(record.lengths)
            stream.accessed_ms = stream.written_ms = record.at_ms
            if record.producer_id is not None:
                stream.producers[record.producer_id] = (record.epoch, record.seq)
                if record.close:
                    stream.closed_by = (record.producer_id, record.epoch, record.seq)
            if record.stream_seq is not None:
                stream.stream_seq = record.stream_seq
            stream.closed = stream.closed or record.close
        elif isinstance(record, Delete):
            self.streams[record.id].deleted = True
        elif isinstance(record, Touch):
            stream = self.streams[record.id]
            stream.accessed_ms = max(stream.accessed_ms, record.at_ms)
        elif isinstance(record, Retain):
            stream = self.streams[record.id]
            while stream.start[0] < record.message_index:
                message_index, byte_position = stream.start
                stream.start = (message_index + 1, byte_position + len(stream.messages.pop(0)))
                del stream.times_ms[0]
            assert stream.start == (record.message_index, record.byte_position)
        elif isinstance(record, Document):
            if record.value is None:
                self.documents.pop(record.key, None)
            else:
                self.documents[record.key] = record.value
        else:
            raise AssertionError(f"unexpected {record!r}")

    def dump(self) -> dict[str, Any]:
        streams: dict[str, Any] = {}
        for stream_id, stream in self.streams.items():
            streams[f"{stream_id:x}"] = {**vars(stream)}
        return {"streams": streams, "documents": dict(self.documents)}


def read_messages(storage: Storage, stream_id: int, start: tuple[int, int], end: tuple[int, int]) -> list[bytes]:
    """Read all messages of a stream, split at the boundaries of its index."""
    data = b"".join(storage.read(stream_id, start[1], end[1]))
    assert len(data) == end[1] - start[1], f"{len(data)} bytes instead of {end[1] - start[1]}"
    messages = []
    byte_position = start[1]
    for message_index in range(start[0] + 1, end[0] + 1):
        boundary = storage.boundary(stream_id, message_index)
        assert boundary is not None, f"message {message_index} of {stream_id:x} has no end"
        messages.append(data[byte_position - start[1] : boundary - start[1]])
        byte_position = boundary
    assert byte_position == end[1]
    assert storage.boundary(stream_id, end[0] + 1) is None
    return messages


def expanded(runs: Sequence[TimeRun]) -> list[int]:
    """Return the time of each message."""
    return [run.at_ms for run in runs for _ in range(run.messages)]


def read_times(storage: Storage, stream_id: int, message_index: int, end_index: int) -> list[int]:
    """Read the time of each message of a stream, and check that the lookup by time agrees."""
    times = expanded(storage.arrivals(stream_id, message_index, end_index))
    assert times == sorted(times)
    for at_ms in {*times[::7], *times[-1:]}:
        first = message_index + times.index(at_ms)
        found = storage.first_since(stream_id, at_ms)
        assert found == first or found <= first == message_index, f"{found} instead of {first}"
    if times:
        assert storage.first_since(stream_id, times[-1] + 1) == end_index
    return times


def model_of(catalog: Catalog[StreamState], storage: Storage) -> Model:
    """Build a model from everything that a store returns through its interface."""
    model = Model()
    for stream in catalog:
        base = (stream.base_index, stream.base_position)
        start = max(base, (stream.retained_index, stream.retained_position))
        model.streams[stream.id] = ModelStream(
            name=stream.name,
            content_type=stream.type.header,
            ttl_secs=stream.ttl_secs,
            base=base,
            start=start,
            fork_of=stream.fork.source_id if stream.fork is not None else None,
            messages=read_messages(storage, stream.id, start, (stream.message_index, stream.byte_position)),
            times_ms=read_times(storage, stream.id, start[0], stream.message_index),
            accessed_ms=stream.accessed_ms,
            written_ms=stream.written_ms,
            closed=stream.closed,
            closed_by=stream.closed_by,
            stream_seq=stream.stream_seq,
            producers={key: (state.epoch, state.seq) for key, state in (stream.producers or {}).items()},
            deleted=stream.deleted,
        )
    model.documents = dict(catalog.documents)
    return model


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Describe the first differences of two dumps for a failure message."""
    problems: list[str] = []
    for stream_id in sorted(expected["streams"].keys() | found["streams"].keys()):
        wanted, got = expected["streams"].get(stream_id), found["streams"].get(stream_id)
        if wanted is None or got is None:
            problems.append(f"stream {stream_id} is {'missing' if got is None else 'not expected'}: {wanted or got}")
            continue
        problems += [
            f"stream {stream_id} {key}: expected {wanted[key]!r}, found {got[key]!r}"
            for key in wanted
            if wanted[key] != got[key]
        ]
    if expected["documents"] != found["documents"]:
        problems.append(f"documents: expected {expected['documents']}, found {found['documents']}")
    return "; ".join(problems[:4])[:1500]
