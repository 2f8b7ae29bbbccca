"""Migrate an archive of an earlier release to the current format, without copying data.

Earlier releases wrote Parquet files under `data/` with their own manifest, or a Delta table whose `date` was text.
The files stay where they are; a Delta log that names them is created, or its schema is changed. Invariant: the old
manifest is renamed only after the Delta log is complete, so a migration that was killed can be repeated.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from pathlib import Path
from typing import Final

import msgspec
from deltalake import DeltaTable

from headwater.pipeline.archive.errors import ArchiveError
from headwater.pipeline.archive.files import ArchivedPosition, ArchiveFile
from headwater.pipeline.archive.table import OLD_MANIFEST, TABLE_SCHEMA, ArchiveTable
from headwater.pipeline.archive.transaction_log import LOG_DIRECTORY

RETIRED_MANIFEST: Final = "_manifest-before-delta"
_FORMAT: Final = 1


class _ManifestCommit(msgspec.Struct, frozen=True):
    version: int
    query: str = ""
    batch: int = -1
    add: tuple[ArchiveFile, ...] = ()
    remove: tuple[str, ...] = ()
    streams: dict[str, ArchivedPosition] = {}
    shards: int = 0
    format: int = _FORMAT


_commits: Final = msgspec.json.Decoder(_ManifestCommit)


class _ManifestCheckpoint(msgspec.Struct):
    version: int = 0
    shards: int = 0
    files: tuple[ArchiveFile, ...] = ()
    streams: dict[str, ArchivedPosition] = {}
    batches: dict[str, int] = {}
    format: int = _FORMAT


_checkpoints: Final = msgspec.json.Decoder(_ManifestCheckpoint)


def migrate(lake: Path) -> str:
    """Migrate the archive; return a sentence that says what was done."""
    manifest = lake / OLD_MANIFEST
    if manifest.is_dir():
        return _migrate_manifest(lake, manifest)
    ArchiveTable(lake).require()
    if DeltaTable(str(lake)).schema() == TABLE_SCHEMA:
        return f"{lake} needs no migration."
    _change_schema(lake)
    return f"Changed the type of the column date of {lake} to date."


def _migrate_manifest(lake: Path, manifest: Path) -> str:
    contents = _read_manifest(manifest)
    table = ArchiveTable(lake)
    if not table.exists:
        table.commit(contents.batches, contents.files, contents.streams, contents.shards, {})
        if _read_manifest(manifest).version != contents.version:
            shutil.rmtree(lake / LOG_DIRECTORY)
            raise _written_meanwhile(lake)
    manifest.rename(lake / RETIRED_MANIFEST)
    return f"Migrated {lake} to a Delta table: {len(contents.files):,} files, {len(contents.streams):,} streams."


def _read_manifest(manifest: Path) -> _ManifestCheckpoint:
    """The state after the last commit of a manifest."""
    names = {path.name for path in manifest.iterdir()}
    checkpoints = sorted(name for name in names if name.endswith(".checkpoint.json"))
    state = _ManifestCheckpoint()
    if checkpoints:
        state = _checkpoints.decode((manifest / checkpoints[-1]).read_bytes())
    files = {file.path: file for file in state.files}
    while f"{state.version + 1:020d}.json" in names:
        body = (manifest / f"{state.version + 1:020d}.json").read_bytes()
        commit = _commits.decode(body)
        if commit.format != _FORMAT or commit.version != state.version + 1:
            raise ArchiveError(f"{manifest}: commit {state.version + 1} has a format that this release cannot read.")
        for path in commit.remove:
            del files[path]
        files.update({file.path: file for file in commit.add})
        state.streams = state.streams | commit.streams
        if commit.query:
            state.batches = state.batches | {commit.query: commit.batch}
        state.shards = commit.shards or state.shards
        state.version = commit.version
    latest = max((int(name[:20]) for name in names if name[:20].isdigit()), default=0)
    if latest != state.version:
        raise ArchiveError(f"{manifest}: commit {state.version + 1} is missing, but commit {latest} exists.")
    state.files = tuple(files.values())
    return state


def _change_schema(lake: Path) -> None:
    """Commit a new schema for the same files. Partition values are text in the log, so no file changes."""
    table = DeltaTable(str(lake))
    old = table.metadata()
    metadata = {
        "id": str(old.id),
        "name": old.name,
        "description": old.description,
        "format": {"provider": "parquet", "options": {}},
        "schemaString": TABLE_SCHEMA.to_json(),
        "partitionColumns": old.partition_columns,
        "createdTime": old.created_time,
        "configuration": old.configuration,
    }
    info = {"timestamp": time.time_ns() // 1_000_000, "operation": "CHANGE COLUMN", "operationParameters": {}}
    body = "\n".join(json.dumps(action) for action in ({"commitInfo": info}, {"metaData": metadata}))
    temporary = lake / LOG_DIRECTORY / f".{secrets.token_hex(8)}"
    temporary.write_text(body + "\n", encoding="utf-8")
    try:
        # A link, unlike a rename, fails if another writer has taken the version.
        os.link(temporary, lake / LOG_DIRECTORY / f"{table.version() + 1:020d}.json")
    except FileExistsError:
        raise _written_meanwhile(lake) from None
    finally:
        temporary.unlink()


def _written_meanwhile(lake: Path) -> ArchiveError:
    return ArchiveError(f"{lake} was written to during the migration; stop its archive and migrate again.")
