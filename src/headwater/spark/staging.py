"""The staged mode of the sink: rows go into files, and what the first complete attempt put there is what is appended.

For upstreams that make other rows on each attempt. Tasks write Arrow files under names of their own; the driver writes
one manifest per batch, by an atomic rename, unless there is one already; then it appends what the manifest
names. Invariant: a batch has at most one manifest, for ever, so every attempt appends the same bytes.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from headwater.spark.errors import HeadwaterError

log = logging.getLogger("headwater.spark")

_MANIFEST = "manifest.json"


def put(root: str, query: str, batch: int, partition: int, rows: pa.Table) -> str:
    """Write the rows of a task; the name of the file."""
    directory = _directory(root, query, batch)
    directory.mkdir(parents=True, exist_ok=True)
    name = f"part-{partition:05d}-{uuid.uuid4().hex}.arrow"
    with pa.OSFile(str(directory / name), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
        writer.write_table(rows)
    return name


def settle(root: str, query: str, batch: int, names: Iterable[str]) -> list[str]:
    """The files of the batch: these, unless an earlier attempt came first."""
    directory = _directory(root, query, batch)
    manifest = directory / _MANIFEST
    ordered = sorted(names)
    if not manifest.exists():
        if not ordered:
            return []
        draft = directory / f"{_MANIFEST}.{uuid.uuid4().hex}"
        draft.write_text(json.dumps(ordered), encoding="utf-8")
        try:
            # A hard link fails where the name is taken; a rename would replace it.
            manifest.hardlink_to(draft)
        except FileExistsError:
            log.warning("batch %d of %s was staged before; appending what was staged then", batch, query)
        finally:
            draft.unlink()
    settled = json.loads(manifest.read_text(encoding="utf-8"))
    assert isinstance(settled, list)
    return [str(name) for name in settled]


def take(root: str, query: str, batch: int, names: Iterable[str]) -> Iterator[pa.Table]:
    """The rows of the files, in their order."""
    directory = _directory(root, query, batch)
    for name in names:
        path = directory / name
        if not path.exists():
            raise HeadwaterError(
                f"Batch {batch}: the staged file {path} is missing. stagingPath must be one directory for all nodes."
            )
        with pa.memory_map(str(path)) as file:
            yield pa.ipc.open_file(file).read_all()


def clear_before(root: str, query: str, batch: int) -> None:
    """Remove what older batches staged: Spark never goes back behind a committed batch."""
    for directory in (Path(root) / query).glob("batch-*"):
        if int(directory.name.removeprefix("batch-")) < batch:
            shutil.rmtree(directory, ignore_errors=True)


def _directory(root: str, query: str, batch: int) -> Path:
    return Path(root) / query.replace("/", "_") / f"batch-{batch:012d}"
