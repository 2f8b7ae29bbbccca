"""The application transactions of a Delta table, read from its log: `deltalake` can only look up one by name.

Invariant: the result is the state after one version of the table, never a mixture of two.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pyarrow.parquet as pq

from headwater.pipeline.archive.errors import ArchiveError

LOG_DIRECTORY: Final = "_delta_log"
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet")


class _TxnAction(msgspec.Struct):
    appId: str
    version: int


class _CommitInfo(msgspec.Struct):
    timestamp: int = 0


class _Action(msgspec.Struct):
    txn: _TxnAction | None = None
    commitInfo: _CommitInfo | None = None


class _LastCheckpoint(msgspec.Struct):
    version: int


_last_checkpoints: Final = msgspec.json.Decoder(_LastCheckpoint)


_decode_action: Final = msgspec.json.Decoder(_Action).decode


class TransactionLog:
    """Reads the log once, then only what was added; `until_ms` stops before the first commit after that time."""

    def __init__(self, table: Path) -> None:
        self._directory = table / LOG_DIRECTORY
        self._version = -1
        self._versions: dict[str, int] = {}

    def advance(self, until_ms: float | None = None) -> Mapping[str, int]:
        """The version of each application id, as of now or as of `until_ms`."""
        if self._version < 0:
            self._load_checkpoint(until_ms)
        while True:
            commit = self._directory / f"{self._version + 1:020d}.json"
            if commit.exists():
                if not self._apply(commit, until_ms):
                    break
            elif not self._skip_to_last_checkpoint(until_ms):
                break
        if self._version < 0 and until_ms is None:
            raise ArchiveError(f"{self._directory} is incomplete: its first commit and its checkpoints are missing.")
        return self._versions

    def _apply(self, commit: Path, until_ms: float | None) -> bool:
        actions = [_decode_action(line) for line in commit.read_bytes().splitlines() if line]
        if until_ms is not None and any(one.commitInfo and one.commitInfo.timestamp > until_ms for one in actions):
            return False
        self._versions |= {one.txn.appId: one.txn.version for one in actions if one.txn is not None}
        self._version += 1
        return True

    def _load_checkpoint(self, until_ms: float | None) -> None:
        """Start from the newest complete checkpoint that is old enough; without one, from the first commit."""
        parts: dict[int, list[Path]] = defaultdict(list)
        wanted: dict[int, int] = {}
        for path in self._directory.glob("*.checkpoint*.parquet"):
            if (found := _CHECKPOINT.fullmatch(path.name)) is not None:
                parts[int(found[1])].append(path)
                wanted[int(found[1])] = int(found[2] or 1)
        for version in sorted(parts, reverse=True):
            # A checkpoint is written after its commit, so an old checkpoint is of an old commit.
            is_old = until_ms is None or all(path.stat().st_mtime * 1000 <= until_ms for path in parts[version])
            if len(parts[version]) == wanted[version] and is_old:
                self._read_checkpoint(version, parts[version])
                return

    def _skip_to_last_checkpoint(self, until_ms: float | None) -> bool:
        """Continue from the last checkpoint where the commits before it were cleaned up."""
        try:
            last = _last_checkpoints.decode((self._directory / "_last_checkpoint").read_bytes())
        except FileNotFoundError:
            return False
        if last.version <= self._version:
            return False
        before = self._version
        self._load_checkpoint(until_ms)
        return self._version > before

    def _read_checkpoint(self, version: int, paths: list[Path]) -> None:
        versions: dict[str, int] = {}
        for path in paths:
            for one in pq.read_table(path, columns=["txn"])["txn"].to_pylist():
                if one is not None and one["appId"] is not None:
                    versions[one["appId"]] = one["version"]
        self._version, self._versions = version, versions
