"""A node of the next version, which writes batches that this one cannot read. Run it as a module."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Final

from headwater.cluster.nodes import schema

# Before the modules that use it are imported.
schema.FORMAT = 2  # type: ignore[misc]

from headwater.cli import main  # noqa: E402
from headwater.cluster.nodes import open_shard  # noqa: E402
from headwater.cluster.nodes.postgres_journal import PostgresJournal  # noqa: E402
from headwater.storage.filesystem import Bytes  # noqa: E402

MARK: Final = b"the next version "


class NextJournal(PostgresJournal):
    """It reads the batches of both versions."""

    def append(self, last_lsn: int, new_lsn: int, frame: Sequence[Bytes]) -> None:
        super().append(last_lsn, new_lsn, (MARK, zlib.compress(b"".join(frame))))

    def batches(self, after_lsn: int) -> Iterator[bytearray]:
        for batch in super().batches(after_lsn):
            is_next = batch.startswith(MARK)
            yield bytearray(zlib.decompress(batch[len(MARK) :])) if is_next else batch


if __name__ == "__main__":
    setattr(open_shard, "PostgresJournal", NextJournal)  # noqa: B010 - mypy rejects a plain assignment
    main(sys.argv[1:])
