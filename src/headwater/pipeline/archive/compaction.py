"""Fewer and larger files: the small ones of a day and shard become one, and what nobody needs any more is swept.

Invariant: a lake holds the same rows before and after, for every reader at every moment: the exchange is one commit,
and the old files stay on the disk for as long as a reader of the version before may need them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.pipeline.archive.files import SCHEMA, ShardWriter
from headwater.pipeline.archive.manifest import CHECKPOINT_EVERY, DATA, DIRECTORY, File, Manifest, Outrun

TARGET_BYTES: Final = 256 * 1024 * 1024
GRACE_S: Final = 3600.0
_BATCH_ROWS: Final = 64 * 1024
_INCARNATION_AT: Final = len("0000000000000000_0000000000000000_")


@dataclass(frozen=True, slots=True)
class Compacted:
    files_before: int
    files_after: int
    rows: int


Told = Callable[[int, int], None]
"""Called with how many groups are done, and of how many."""


def compact(lake: Path, target_bytes: int = TARGET_BYTES, told: Told | None = None) -> Compacted:
    """Merge small files, group by group, each a commit of its own: a kill loses the group under way at most."""
    manifest = Manifest(lake)
    groups = _groups(list(manifest.contents().files.values()), target_bytes)
    before = after = rows = 0
    for done, group in enumerate(groups):
        if told is not None:
            told(done, len(groups))
        merged = _merge(lake, group)
        while True:
            contents = manifest.contents()
            if any(file.path not in contents.files for file in group):
                # Another compaction had them first; ours is nobody's, and is swept some day.
                break
            try:
                manifest.commit(contents, add=(merged,), remove=[file.path for file in group])
            except Outrun:
                continue
            before, after, rows = before + len(group), after + 1, rows + merged.rows
            break
    if told is not None:
        told(len(groups), len(groups))
    return Compacted(before, after, rows)


def sweep(lake: Path, older_than_s: float = GRACE_S) -> int:
    """Delete files that no recent version names, and commits that a checkpoint stands for; how many files."""
    manifest = Manifest(lake)
    contents = manifest.contents()
    latest = time.time() - older_than_s
    swept = 0
    for path in (lake / DATA).rglob("*.parquet"):
        place = path.relative_to(lake).as_posix()
        removed_ms = contents.removed.get(place)
        is_over = path.stat().st_mtime < latest if removed_ms is None else removed_ms / 1000 < latest
        if place not in contents.files and is_over:
            path.unlink()
            swept += 1
    gone = [place for place in contents.removed if not (lake / place).exists()]
    manifest.forget(contents, gone)
    for path in (lake / DIRECTORY).glob("*.json"):
        is_old = int(path.name[:20]) < contents.version - CHECKPOINT_EVERY
        if is_old and path.stat().st_mtime < latest:
            path.unlink()
    return swept


def _groups(files: list[File], target_bytes: int) -> list[list[File]]:
    """Small files of the same day and shard, together up to the target, in the order they came."""
    by_place: dict[tuple[str, int], list[File]] = defaultdict(list)
    for file in files:
        if file.bytes < target_bytes:
            by_place[file.date, file.shard].append(file)
    groups: list[list[File]] = []
    for place in sorted(by_place):
        group: list[File] = []
        size = 0
        for file in by_place[place]:
            if group and size + file.bytes > target_bytes:
                groups.append(group)
                group, size = [], 0
            group.append(file)
            size += file.bytes
        groups.append(group)
    return [group for group in groups if len(group) > 1]


def _merge(lake: Path, group: list[File]) -> File:
    """One file with the rows of all, sorted by stream, incarnation (in the order they came) and position.

    Held in memory: a group is at most the target.
    """
    tables = [pq.ParquetFile(lake / file.path).read(columns=SCHEMA.names) for file in group]
    rows = pa.concat_tables(tables).cast(SCHEMA)
    lives = pc.utf8_slice_codeunits(pc.fill_null(rows["offset"], ""), _INCARNATION_AT)
    lives = pc.binary_join_element_wise(rows["stream"], lives, "\0")
    order = [(name, "ascending") for name in ("stream", "life", "position")] + [("snapshot", "descending")]
    sorting = rows.append_column("life", pc.index_in(lives, pc.unique(lives)))
    rows = rows.take(pc.sort_indices(sorting, sort_keys=order))
    writer = ShardWriter(lake, DATA, group[0].date, group[0].shard, "compacted")
    for batch in rows.to_batches(_BATCH_ROWS):
        writer.write(batch)
    merged = writer.close()
    assert merged.rows == sum(file.rows for file in group), "a compaction that loses rows is never committed"
    return merged
