"""An archive as a Delta table, through the `deltalake` package.

Each commit has application transactions, which Delta keeps: the query and its batch, and the parts of each stream's
offset. Invariant: the files, the offsets of the streams and the batch are in one commit, so they cannot differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction, WriterProperties
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from headwater.pipeline.archive.errors import ArchiveError
from headwater.pipeline.archive.files import SCHEMA, ArchivedPosition, ArchiveFile, shard_of
from headwater.pipeline.archive.transaction_log import TransactionLog
from headwater.spark.offsets import incarnation_of, split_token

PARTITIONS: Final = ["date", "shard"]
TARGET_BYTES: Final = 256 * 1024 * 1024
OLD_MANIFEST: Final = "_manifest"
"""The manifest directory of releases before Delta tables."""

_MESSAGES: Final = "headwater/messages/"
_BYTES: Final = "headwater/bytes/"
_INCARNATION: Final = "headwater/incarnation/"
_DESCRIPTION: Final = "headwater archive, shards: "
_SIGN_BIT: Final = 1 << 63
TABLE_SCHEMA: Final = Schema.from_arrow(
    pa.schema([*SCHEMA, pa.field("date", pa.date32()), pa.field("shard", pa.int32())])
)


@dataclass(frozen=True, slots=True)
class ArchiveStats:
    version: int
    files: int
    rows: int
    bytes: int


class ArchiveTable:
    """Several processes may use one table at the same time, as long as each stream has one writer."""

    def __init__(self, lake: Path) -> None:
        self.lake = lake
        self._table: DeltaTable | None = None
        self._log = TransactionLog(lake)
        self._old_log = TransactionLog(lake)

    @property
    def exists(self) -> bool:
        return DeltaTable.is_deltatable(str(self.lake))

    def require(self) -> None:
        """Raise an error that says what to do if the table does not exist."""
        self.require_migrated()
        if not self.exists:
            raise ArchiveError(f"{self.lake} is not an archive; `headwater archive run --lake DIR` creates one.")

    def require_migrated(self) -> None:
        if (self.lake / OLD_MANIFEST).is_dir():
            raise ArchiveError(
                f"{self.lake} is an archive of an earlier release. Convert it, without copying data, with: headwater"
                f" archive migrate {self.lake}"
            )

    def has_batch(self, query: str, batch: int) -> bool:
        return self.exists and self._log.advance().get(query, -1) >= batch

    def shards(self) -> int:
        """The number of shards that the table was created with; 0 if it does not exist."""
        if not self.exists:
            return 0
        description = self._latest().metadata().description or ""
        return int(description.removeprefix(_DESCRIPTION)) if description.startswith(_DESCRIPTION) else 0

    def positions(self, before_ms: float | None = None) -> dict[str, ArchivedPosition]:
        """The end of the archived part of each stream, now or at an earlier time."""
        if not self.exists:
            return {}
        versions = self._log.advance() if before_ms is None else self._old_log.advance(before_ms)
        found: dict[str, ArchivedPosition] = {}
        for name, messages in versions.items():
            if name.startswith(_MESSAGES):
                stream = name.removeprefix(_MESSAGES)
                token = f"{messages:016x}_{versions[_BYTES + stream]:016x}"
                incarnation = versions.get(_INCARNATION + stream)
                if incarnation is not None:
                    token = f"{token}_{incarnation % (_SIGN_BIT << 1):016x}"
                found[stream] = ArchivedPosition(token, messages)
        return found

    def commit(
        self,
        batches: Mapping[str, int],
        files: Iterable[ArchiveFile],
        streams: Mapping[str, ArchivedPosition],
        shards: int,
        known: Mapping[str, ArchivedPosition],
    ) -> None:
        """Add the files of a batch that was written after `known`, or fail if another writer has changed that."""
        actions = [_add_action(file) for file in files]
        transactions = [Transaction(query, batch) for query, batch in batches.items()]
        for stream, end in streams.items():
            messages, size = split_token(end.offset)
            transactions += [Transaction(_MESSAGES + stream, messages), Transaction(_BYTES + stream, size)]
            if incarnation := incarnation_of(end.offset):
                transactions.append(Transaction(_INCARNATION + stream, _signed(int(incarnation, 16))))
        properties = CommitProperties(app_transactions=transactions)
        if not self.exists:
            create_table_with_add_actions(
                str(self.lake),
                TABLE_SCHEMA,
                actions,
                mode="error",
                partition_by=PARTITIONS,
                description=f"{_DESCRIPTION}{shards}",
                commit_properties=properties,
            )
            return
        # The handle is older than the positions, so a commit that the comparison misses is a conflict for Delta.
        table = self._latest()
        now = self.positions()
        if any(now.get(stream) != known.get(stream) for stream in streams):
            raise ArchiveError(f"{self.lake}: another archive job is writing the same streams.")
        added: list[AddAction | RemoveAction] = [*actions]
        try:
            table.create_write_transaction(
                added, "append", table.schema(), partition_by=PARTITIONS, commit_properties=properties
            )
        except CommitFailedError as error:
            raise ArchiveError(f"{self.lake}: another archive job is writing the same streams ({error}).") from None

    def files(self, stream: str = "") -> list[str]:
        """Paths of the files of the latest version; with a stream, only those that may hold it."""
        self.require()
        shards = self.shards()
        actions = pa.table(self._latest().get_add_actions(flatten=True))
        found: list[str] = actions["path"].to_pylist()
        if stream and shards:
            wanted = shard_of(stream, shards)
            of_shard = zip(found, actions["partition.shard"].to_pylist(), strict=True)
            found = [path for path, shard in of_shard if int(shard) == wanted]
        return [str(self.lake / path) for path in found]

    def stats(self) -> ArchiveStats:
        self.require()
        table = self._latest()
        actions = pa.table(table.get_add_actions(flatten=True))
        rows = sum(count or 0 for count in actions["num_records"].to_pylist())
        return ArchiveStats(table.version(), actions.num_rows, rows, sum(actions["size_bytes"].to_pylist()))

    def compact(self, target_bytes: int = TARGET_BYTES) -> tuple[int, int]:
        """Merge small files of the same day and shard; return the numbers of old and of new files."""
        self.require()
        properties = WriterProperties(compression="ZSTD")
        done = self._latest().optimize.compact(target_size=target_bytes, writer_properties=properties)
        return int(done["numFilesRemoved"]), int(done["numFilesAdded"])

    def vacuum(self, keep_s: float) -> int:
        """Delete files that no version of the last `keep_s` seconds names, such as those of killed tasks; return their
        number."""
        self.require()
        hours = math.ceil(keep_s / 3600)
        deleted = self._latest().vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
        return len(deleted)

    def _latest(self) -> DeltaTable:
        if self._table is None:
            self._table = DeltaTable(str(self.lake))
        else:
            self._table.update_incremental()
        return self._table


def _signed(number: int) -> int:
    """The 64 bits of a number as Delta's signed integer."""
    return number - (_SIGN_BIT << 1) if number & _SIGN_BIT else number


def _add_action(file: ArchiveFile) -> AddAction:
    stats: dict[str, object] = {"numRecords": file.rows}
    if file.first_stream:
        stats |= {"minValues": {"stream": file.first_stream}, "maxValues": {"stream": file.last_stream}}
    return AddAction(
        file.path,
        file.bytes,
        {"date": file.date, "shard": str(file.shard)},
        time.time_ns() // 1_000_000,
        data_change=True,
        stats=msgspec.json.encode(stats).decode(),
    )
