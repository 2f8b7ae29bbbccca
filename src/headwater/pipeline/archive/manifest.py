"""The manifest of a Parquet lake: which files belong to it, up to which offset each stream is archived, who wrote last.

    LAKE/data/date=2026-11-16/shard=3/….parquet
    LAKE/_manifest/00000000000000000007.json               what the 7th commit added and removed
    LAKE/_manifest/00000000000000000050.checkpoint.json    everything up to the 50th, so that not all are read

A commit is one file that appears at once, under a number that only one writer can take. Invariant: the files, the
places of the streams and the batch that brought them are in the same commit, so they cannot come apart.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

DIRECTORY: Final = "_manifest"
DATA: Final = "data"
CHECKPOINT_EVERY: Final = 50
FORMAT: Final = 1


class File(msgspec.Struct, frozen=True):
    """One Parquet file, by its path within the lake."""

    path: str
    date: str
    shard: int
    rows: int
    bytes: int


class Archived(msgspec.Struct, frozen=True):
    """How far a stream is in the lake."""

    offset: str
    position: int


class Commit(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    at_ms: int
    query: str = ""
    batch: int = -1
    add: tuple[File, ...] = ()
    remove: tuple[str, ...] = ()
    streams: dict[str, Archived] = {}
    shards: int = 0
    format: int = FORMAT


class _Checkpoint(msgspec.Struct, frozen=True):
    version: int
    shards: int
    files: tuple[File, ...]
    streams: dict[str, Archived]
    batches: dict[str, int]
    removed: dict[str, int]
    format: int = FORMAT


class LakeTrouble(Exception):
    """A lake that is not as it should be, or is used in a way that it cannot be; says what to do."""


class Outrun(Exception):
    """Somebody else committed under the same number; look again."""


@dataclass(slots=True)
class Contents:
    """A lake as of one version."""

    version: int = 0
    shards: int = 0
    files: dict[str, File] = field(default_factory=dict)
    streams: dict[str, Archived] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    """The last batch of each query that ever wrote here."""
    removed: dict[str, int] = field(default_factory=dict)
    """Files that are no longer part of it, and since when: readers of an older version may still have them open."""

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files.values())

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    def apply(self, commit: Commit) -> None:
        for path in commit.remove:
            del self.files[path]
            self.removed[path] = commit.at_ms
        self.files.update({file.path: file for file in commit.add})
        self.streams.update(commit.streams)
        if commit.query:
            self.batches[commit.query] = commit.batch
        self.shards = commit.shards or self.shards
        self.version = commit.version


_commits = msgspec.json.Decoder(Commit)
_checkpoints = msgspec.json.Decoder(_Checkpoint)


class Manifest:
    """The commits of one lake. Several may write; whoever is outrun looks again."""

    def __init__(self, lake: Path) -> None:
        self.lake = lake
        self._directory = lake / DIRECTORY

    @property
    def exists(self) -> bool:
        return self._directory.is_dir()

    def contents(self) -> Contents:
        """The lake as it is now."""
        if not self.exists:
            return Contents()
        names = self._names()
        contents = Contents()
        checkpoints = sorted(name for name in names if name.endswith(".checkpoint.json"))
        if checkpoints:
            saved = _checkpoints.decode(self._read(checkpoints[-1]))
            contents = Contents(
                saved.version,
                saved.shards,
                {file.path: file for file in saved.files},
                saved.streams,
                saved.batches,
                saved.removed,
            )
        while _name(contents.version + 1) in names:
            contents.apply(self._commit(contents.version + 1))
        latest = max((int(name[:20]) for name in names if name[:20].isdigit()), default=0)
        if latest != contents.version:
            raise LakeTrouble(f"{self._directory}: commit {contents.version + 1} is missing, but there is {latest}.")
        return contents

    def commits(self) -> list[Commit]:
        """Those that are still there one by one, oldest first."""
        names = sorted(name for name in self._names() if len(name) == len(_name(0)))
        return [self._commit(int(name[:20])) for name in names]

    def commit(
        self,
        contents: Contents,
        *,
        query: str = "",
        batch: int = -1,
        add: Iterable[File] = (),
        remove: Iterable[str] = (),
        streams: Mapping[str, Archived] | None = None,
        shards: int = 0,
    ) -> Commit:
        """Make the next version, or raise `Outrun`. What is added must be on the disk already."""
        made = Commit(
            contents.version + 1,
            time.time_ns() // 1_000_000,
            query,
            batch,
            tuple(add),
            tuple(remove),
            dict(streams or {}),
            shards,
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        self._write_new(_name(made.version), msgspec.json.encode(made))
        contents.apply(made)
        if made.version % CHECKPOINT_EVERY == 0:
            self._checkpoint(contents)
        return made

    def forget(self, contents: Contents, paths: Iterable[str]) -> None:
        """Removed files that are off the disk need not be known any more; told at the next checkpoint."""
        for path in paths:
            contents.removed.pop(path, None)
        if contents.version:
            self._checkpoint(contents)

    def _checkpoint(self, contents: Contents) -> None:
        saved = _Checkpoint(
            contents.version,
            contents.shards,
            tuple(contents.files.values()),
            contents.streams,
            contents.batches,
            contents.removed,
        )
        name = f"{contents.version:020d}.checkpoint.json"
        temporary = self._temporary(msgspec.json.encode(saved))
        temporary.replace(self._directory / name)
        _sync_directory(self._directory)

    def _names(self) -> set[str]:
        return {path.name for path in self._directory.iterdir()}

    def _commit(self, version: int) -> Commit:
        commit = _commits.decode(self._read(_name(version)))
        if commit.version != version or commit.format != FORMAT:
            raise LakeTrouble(f"{self._directory / _name(version)} is not a commit that this release can read.")
        return commit

    def _read(self, name: str) -> bytes:
        return (self._directory / name).read_bytes()

    def _write_new(self, name: str, body: bytes) -> None:
        """Durable and whole, and only if nobody has the name yet: a link, unlike a rename, replaces nothing."""
        temporary = self._temporary(body)
        try:
            os.link(temporary, self._directory / name)
        except FileExistsError:
            raise Outrun(name) from None
        finally:
            temporary.unlink()
        _sync_directory(self._directory)

    def _temporary(self, body: bytes) -> Path:
        path = self._directory / f".{secrets.token_hex(8)}"
        with path.open("xb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        return path


def _name(version: int) -> str:
    return f"{version:020d}.json"


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Force a file and its name to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    with contextlib.suppress(OSError):
        _sync_directory(path.parent)
