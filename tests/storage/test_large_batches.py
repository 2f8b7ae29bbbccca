"""A batch that is too large for the journal is refused before anything is written, and the store still works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.core.catalog import Catalog, StreamState
from headwater.core.records import Append, Create
from headwater.storage import interface
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.interface import BatchTooLargeError, Committed, Storage
from headwater.storage.journal import frames
from headwater.storage.packs.pack_store import file_storage
from tests.storage.acid.driver import open_acid

OPENERS: dict[str, Callable[[Path], Storage]] = {
    "file-durable": lambda directory: file_storage(RealFilesystem(), directory, durable=True),
    "acid": lambda directory: open_acid(directory, 1, 2**26, 2**20),
}


def batch(count: int, size: int) -> list[Committed]:
    creation = Committed(Create(7, "refused", 1, "text/plain"))
    return [creation, *(Committed(Append(7, 1, n, n * size, b"x" * size, (size,))) for n in range(count))]


@pytest.mark.parametrize("mode", OPENERS)
@pytest.mark.parametrize(
    ("limit", "count", "size"),
    [("BATCH_MAX_BYTES", 20, 1000), ("RECORD_MAX_BYTES", 1, 20_000)],
    ids=["many records", "one record"],
)
def test_an_oversized_batch_is_refused_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, limit: str, count: int, size: int
) -> None:
    monkeypatch.setattr(interface, limit, 10_000)
    storage = OPENERS[mode](tmp_path)
    list(storage.recover())
    with pytest.raises(BatchTooLargeError):
        storage.write(batch(count, size))
    assert storage.refusal() is None
    good = [Committed(Create(8, "taken", 1, "text/plain", payload=b"data", lengths=(4,)))]
    storage.write(good)
    storage.publish(good)
    storage.close()
    again = OPENERS[mode](tmp_path)
    catalog: Catalog[StreamState] = Catalog(StreamState)
    for record in again.recover():
        catalog.apply(record)
    assert set(catalog.by_name) == {"taken"}
    assert b"".join(again.read(8, 0, 4)) == b"data"
    again.close()


def test_a_frame_that_outgrows_its_length_field_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder catches what the size estimate does not count, such as names."""
    monkeypatch.setattr(frames, "BODY_MAX_BYTES", 10_000)
    storage = OPENERS["file-durable"](tmp_path)
    list(storage.recover())
    with pytest.raises(BatchTooLargeError):
        storage.write([Committed(Create(7, "n" * 20_000, 1, "text/plain"))])
    assert storage.refusal() is None
    good = [Committed(Create(8, "taken", 1, "text/plain"))]
    storage.write(good)
    storage.publish(good)
    storage.close()
