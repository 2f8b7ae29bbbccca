"""A lake as a Delta table, by the `deltalake` package: the same files, committed to a Delta log instead of a manifest.

Each commit carries application transactions, which Delta keeps through its own checkpoints: the query and its batch,
and for each stream the numbers of its offset. Invariant: as in the manifest, files, places and batch
are one commit.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, Transaction
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from headwater.pipeline.archive.files import SCHEMA
from headwater.pipeline.archive.manifest import Archived, File
from headwater.spark.offsets import incarnation_of, split_token

PARTITIONS: Final = ["date", "shard"]
_MESSAGES: Final = "headwater/messages/"
_BYTES: Final = "headwater/bytes/"
_INCARNATION: Final = "headwater/incarnation/"
_NAME: Final = "headwater archive, shards: "


class DeltaLake:
    def __init__(self, lake: Path) -> None:
        self._lake = lake
        self._table: DeltaTable | None = None

    @property
    def exists(self) -> bool:
        return DeltaTable.is_deltatable(str(self._lake))

    def has_batch(self, query: str, batch: int) -> bool:
        if not self.exists:
            return False
        done = self._now().transaction_version(query)
        return done is not None and done >= batch

    def shards(self) -> int:
        """As many as it was made with; 0 if it is yet to be made."""
        if not self.exists:
            return 0
        told = self._now().metadata().description or ""
        return int(told.removeprefix(_NAME)) if told.startswith(_NAME) else 0

    def archived(self, streams: Iterable[str]) -> dict[str, Archived]:
        """How far each of these streams is."""
        if not self.exists:
            return {}
        table = self._now()
        found: dict[str, Archived] = {}
        for stream in streams:
            messages = table.transaction_version(_MESSAGES + stream)
            size = table.transaction_version(_BYTES + stream)
            if messages is not None and size is not None:
                life = table.transaction_version(_INCARNATION + stream)
                place = f"{messages:016x}_{size:016x}"
                found[stream] = Archived(place if life is None else f"{place}_{life:016x}", messages)
        return found

    def commit(
        self, query: str, batch: int, files: Iterable[File], streams: Mapping[str, Archived], shards: int
    ) -> None:
        actions: list[AddAction | RemoveAction] = [self._added(file) for file in files]
        transactions = [Transaction(query, batch)]
        for stream, place in streams.items():
            messages, size = split_token(place.offset)
            transactions += [Transaction(_MESSAGES + stream, messages), Transaction(_BYTES + stream, size)]
            if incarnation := incarnation_of(place.offset):
                transactions.append(Transaction(_INCARNATION + stream, int(incarnation, 16)))
        properties = CommitProperties(app_transactions=transactions)
        schema = Schema.from_arrow(pa.schema([*SCHEMA, pa.field("date", pa.string()), pa.field("shard", pa.int32())]))
        if not self.exists:
            create_table_with_add_actions(
                str(self._lake),
                schema,
                [action for action in actions if isinstance(action, AddAction)],
                mode="error",
                partition_by=PARTITIONS,
                description=f"{_NAME}{shards}",
                commit_properties=properties,
            )
        else:
            self._now().create_write_transaction(
                actions, "append", schema, partition_by=PARTITIONS, commit_properties=properties
            )

    def files(self) -> list[str]:
        return [uri.removeprefix("file://") for uri in self._now().file_uris()]

    def compact(self, target_bytes: int) -> int:
        """By Delta's own means; how many files were replaced."""
        told = self._now().optimize.compact(target_size=target_bytes)
        return int(told["numFilesRemoved"])

    def vacuum(self, older_than_s: float) -> int:
        hours = int(older_than_s // 3600)
        return len(self._now().vacuum(hours, dry_run=False, enforce_retention_duration=False))

    def _now(self) -> DeltaTable:
        if self._table is None:
            self._table = DeltaTable(str(self._lake))
        else:
            self._table.update_incremental()
        return self._table

    def _added(self, file: File) -> AddAction:
        stats = msgspec.json.encode({"numRecords": file.rows}).decode()
        return AddAction(
            file.path,
            file.bytes,
            {"date": file.date, "shard": str(file.shard)},
            time.time_ns() // 1_000_000,
            data_change=True,
            stats=stats,
        )
