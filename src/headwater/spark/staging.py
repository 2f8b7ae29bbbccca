"""Staged batches: the rows of a batch are written to files before the first of them is appended.

Tasks pass their rows in the commit message, or in an Arrow file if there are many. When all tasks of the batch
have succeeded, the driver writes one manifest that holds or names the rows of every task, in the order of the tasks.
Invariant: a batch has at most one manifest, so every attempt to append the batch appends the same bytes.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
import pyarrow as pa
import pyarrow.ipc
from pyarrow.fs import FileSelector, FileSystem, FileType, LocalFileSystem

from headwater.spark.errors import BatchSupersededError, HeadwaterError, OptionError

log = logging.getLogger("headwater.spark")

INLINE_BYTES_MAX: Final = 1024 * 1024
"""Rows of a task up to this size are sent in its commit message and stored in the manifest."""

_MANIFEST: Final = "manifest"
_MANIFEST_OF_0_1: Final = "manifest.json"
"""Written by earlier releases: a list of file names, appended under other producer names."""
_INSIDE_CHECKPOINT: Final = "headwater"
_OBJECT_STORE_SCHEMES: Final = {"s3a": "s3", "s3n": "s3"}


@dataclass(frozen=True, slots=True)
class StagedRows:
    """The rows of one task: in the message itself, or in a file of the staging directory."""

    partition: int
    inline: bytes | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class StagedPart:
    """The rows of one task, as they will be appended."""

    producer_part: str
    """The last part of the producer id under which they are appended."""
    rows: pa.Table


class _Entry(msgspec.Struct, array_like=True):
    partition: int
    inline: bytes | None
    file: str | None


_decode_manifest = msgspec.msgpack.Decoder(list[_Entry]).decode


def staging_root(staging_path: str, checkpoint: str) -> str:
    """The staging directory: the given one, or one inside the checkpoint, or one for temporary files."""
    if staging_path:
        return staging_path
    if checkpoint:
        return f"{checkpoint.rstrip('/')}/{_INSIDE_CHECKPOINT}"
    return f"{tempfile.gettempdir()}/headwater-staging-{os.getuid()}"


class StagedBatch:
    """The staging directory of one batch of one query."""

    def __init__(self, root: str, query: str, batch: int) -> None:
        self._files, path = _open(root)
        self._batch = batch
        self._query_path = f"{path.rstrip('/')}/{quote(query, safe='')}"
        self._path = f"{self._query_path}/{_directory_name(batch)}"

    # -- in tasks ------------------------------------------------------------------------------------------------

    def put(self, partition: int, rows: pa.Table) -> StagedRows:
        """Stage the rows of a task."""
        if rows.nbytes <= INLINE_BYTES_MAX:
            return StagedRows(partition, inline=_pack(rows))
        self._files.create_dir(self._path, recursive=True)
        name = f"part-{partition:05d}-{uuid.uuid4().hex}.arrow"
        with self._files.open_output_stream(f"{self._path}/{name}") as file, pa.ipc.new_file(file, rows.schema) as out:
            out.write_table(rows)
        return StagedRows(partition, file=name)

    # -- on the driver -------------------------------------------------------------------------------------------

    def fix(self, staged: Sequence[StagedRows]) -> Iterator[StagedPart]:
        """Make these rows the rows of the batch, unless an earlier attempt did so; then iterate over them in order."""
        if not self._exists(_MANIFEST) and not self._exists(_MANIFEST_OF_0_1):
            if not staged:
                return iter(())
            self._refuse_if_superseded()
            self._publish([_Entry(one.partition, one.inline, one.file) for one in staged])
        else:
            log.warning("batch %d was staged by an earlier attempt; appending the rows staged then", self._batch)
        return self._parts()

    def remove_earlier(self) -> None:
        """Delete the files of earlier batches: Spark does not repeat a batch that precedes a committed one."""
        for batch, path in self._batches():
            if batch < self._batch:
                self._files.delete_dir(path)

    def remove(self) -> None:
        """Delete the files of this batch, which will not be repeated, and the directory of the query if it is empty."""
        if self._files.get_file_info(self._path).type == FileType.Directory:
            self._files.delete_dir(self._path)
        if isinstance(self._files, LocalFileSystem):
            with suppress(OSError):
                Path(self._query_path).rmdir()

    def _publish(self, entries: list[_Entry]) -> None:
        self._files.create_dir(self._path, recursive=True)
        manifest = f"{self._path}/{_MANIFEST}"
        draft = f"{manifest}.{uuid.uuid4().hex}"
        with self._files.open_output_stream(draft) as file:
            file.write(msgspec.msgpack.encode(entries))
        if not isinstance(self._files, LocalFileSystem):
            self._files.move(draft, manifest)
            return
        try:
            # A hard link fails if the name exists; a rename would replace the manifest of another driver.
            Path(manifest).hardlink_to(draft)
        except FileExistsError:
            log.warning("batch %d was staged by another driver; appending the rows staged there", self._batch)
        finally:
            self._files.delete_file(draft)

    def _parts(self) -> Iterator[StagedPart]:
        if self._exists(_MANIFEST_OF_0_1):
            for name in json.loads(self._read(_MANIFEST_OF_0_1)):
                yield StagedPart(f"staged-{name.split('-')[1]}", self._table(name))
            return
        for entry in _decode_manifest(self._read(_MANIFEST)):
            rows = _unpack(entry.inline) if entry.inline is not None else self._table(entry.file or "")
            yield StagedPart(str(entry.partition), rows)

    def _table(self, name: str) -> pa.Table:
        path = f"{self._path}/{name}"
        if not self._exists(name):
            raise HeadwaterError(
                f"Batch {self._batch}: the staged file {path} does not exist on the driver. Set stagingPath to a"
                " directory that the driver and all executors share, or commitMode=task."
            )
        if isinstance(self._files, LocalFileSystem):
            with pa.memory_map(path) as file:
                return pa.ipc.open_file(file).read_all()
        with self._files.open_input_file(path) as file:
            return pa.ipc.open_file(file).read_all()

    def _read(self, name: str) -> bytes:
        with self._files.open_input_stream(f"{self._path}/{name}") as file:
            content: bytes = file.read()
        return content

    def _exists(self, name: str) -> bool:
        return bool(self._files.get_file_info(f"{self._path}/{name}").type == FileType.File)

    def _refuse_if_superseded(self) -> None:
        """Raise an error if another driver completed this batch while this driver was paused."""
        latest = max((batch for batch, _ in self._batches()), default=self._batch)
        if latest > self._batch:
            raise BatchSupersededError(
                f"Batch {self._batch} is obsolete: another driver has staged batch {latest} of the same query."
                " Two drivers use one checkpoint; stop one of them."
            )

    def _batches(self) -> Iterator[tuple[int, str]]:
        for info in self._files.get_file_info(FileSelector(self._query_path, allow_not_found=True)):
            number = info.base_name.removeprefix("batch-")
            if info.type == FileType.Directory and number.isdigit():
                yield int(number), info.path


def _open(root: str) -> tuple[FileSystem, str]:
    """The filesystem of a path or URI, and the path in it."""
    scheme, separator, rest = root.partition(":")
    if not separator or "/" in scheme:
        return LocalFileSystem(), str(Path(root).absolute())
    if scheme == "file":
        return LocalFileSystem(), "/" + rest.lstrip("/")
    try:
        files, path = FileSystem.from_uri(f"{_OBJECT_STORE_SCHEMES.get(scheme, scheme)}:{rest}")
    except (pa.ArrowException, OSError, ValueError) as error:
        raise OptionError(
            f"The sink cannot stage rows in {root} ({error}). Set stagingPath to a directory that the driver and all"
            " executors share."
        ) from error
    return files, path


def _directory_name(batch: int) -> str:
    return f"batch-{batch:012d}"


def _pack(rows: pa.Table) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.ipc.new_stream(buffer, rows.schema) as writer:
        writer.write_table(rows)
    packed: bytes = buffer.getvalue().to_pybytes()
    return packed


def _unpack(packed: bytes) -> pa.Table:
    return pa.ipc.open_stream(packed).read_all()
