"""The ownership of a prefix in an object store: the object `HEAD` there, and the file `COLD` in the data directory.

`HEAD` refers to the manifest, and through it to all valid objects. It is replaced only on the condition that it is as
this process left it. Every start raises its epoch, so a server that was replaced by another one without noticing, for
instance while it was paused, cannot replace `HEAD` any more. Packs are numbered within the epoch, so it cannot
overwrite one either. `COLD` contains the prefix of the directory, and the epoch of its last start.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import msgspec

from headwater.storage.directory import decode_record, read_record, replace_file
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import StorageError
from headwater.storage.tiering.objects import ObjectConflictError, Objects, StoredObject

COLD_NAME: Final = "COLD"
HEAD_KEY: Final = "HEAD"
VERSION: Final = 1
PACKS_PER_EPOCH: Final = 10**10
"""A pack's number begins with its epoch: `{epoch:06}{count:010}`."""


class ManifestPart(msgspec.Struct, frozen=True, array_like=True):
    key: str
    size: int


class StoreHead(msgspec.Struct, frozen=True):
    """The content of the object `HEAD`."""

    version: int
    store: str
    """A random id, the same in the data directory."""
    epoch: int
    number: int = 0
    """The number of replacements, so that no two contents, and no two tags, are the same."""
    lsn: int = 0
    """The manifest includes every record up to this one."""
    parts: tuple[ManifestPart, ...] = ()
    """The objects that form the manifest, in order; empty before the first one was saved."""


_heads: Final = msgspec.json.Decoder(StoreHead)


class ColdMark(msgspec.Struct, frozen=True):
    """The content of the file `COLD`."""

    version: int
    url: str
    store: str
    epoch: int


_marks: Final = msgspec.json.Decoder(ColdMark)


class FencedError(StorageError):
    """Another server has taken over the prefix."""


def read_mark(filesystem: Filesystem, directory: Path) -> ColdMark | None:
    """Read the file `COLD` of a data directory; None if its packs are not in an object store."""
    return read_record(filesystem, directory / COLD_NAME, _marks, VERSION)


def write_mark(filesystem: Filesystem, directory: Path, mark: ColdMark) -> None:
    replace_file(filesystem, directory / COLD_NAME, msgspec.json.encode(mark) + b"\n")


class ClaimedPrefix:
    """A prefix of an object store, with its `HEAD`; written only after `claim`."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._tag = ""
        self._epoch: tuple[str, int] | None = None
        """Store and epoch, after `claim`."""
        self.head: StoreHead | None = None
        found = objects.get(HEAD_KEY)
        if found is not None:
            self._tag = found.tag
            self.head = _decode(objects.url, found.data)

    @property
    def has_data(self) -> bool:
        """Whether a store was opened here: writes may have been acknowledged, also if none is in the manifest yet."""
        return self.head is not None and bool(self.head.parts)

    def claim(self, filesystem: Filesystem, directory: Path, epoch: int | None = None) -> StoreHead:
        """Take the next epoch of this prefix for this data directory. The caller has checked that they belong together.

        If epochs are assigned elsewhere, `epoch` is the one to take; raises `FencedError` if it is not a new one.
        """
        mark = read_mark(filesystem, directory)
        head = self.head or StoreHead(VERSION, mark.store if mark is not None else secrets.token_hex(16), 0)
        if epoch is not None and epoch <= head.epoch:
            raise self._fenced()
        epoch = epoch or max(head.epoch, mark.epoch if mark is not None else 0) + 1
        if self.head is not None:
            # Before the claim: a crash in between must not look like the claim of another server.
            write_mark(filesystem, directory, ColdMark(VERSION, self._objects.url, head.store, epoch))
        claimed = self._put(msgspec.structs.replace(head, epoch=epoch))
        self._epoch = claimed.store, claimed.epoch
        if mark is None or mark.epoch != epoch:
            write_mark(filesystem, directory, ColdMark(VERSION, self._objects.url, head.store, epoch))
        return claimed

    def commit(self, lsn: int, parts: tuple[ManifestPart, ...]) -> None:
        """Make these objects the manifest. Raises `FencedError` if the prefix now belongs to another server."""
        assert self.head is not None
        self._put(msgspec.structs.replace(self.head, lsn=lsn, parts=parts))

    def check_ownership(self) -> None:
        """Raise `FencedError` if the prefix now belongs to another server."""
        if self._current_if_owned() is None:
            raise self._fenced()

    def _put(self, head: StoreHead) -> StoreHead:
        """Replace `HEAD` by this, with the next number."""
        assert self.head is None or head.number == self.head.number
        head = msgspec.structs.replace(head, number=head.number + 1)
        data = msgspec.json.encode(head)
        try:
            if self._tag:
                self._tag = self._objects.replace(HEAD_KEY, data, self._tag)
            else:
                self._tag = self._objects.create(HEAD_KEY, data)
        except ObjectConflictError:
            # It may be our own write: an earlier request that succeeded, but whose response was lost.
            found = self._current_if_owned(data)
            if found is None:
                raise self._fenced() from None
            self._tag, self.head = found.tag, _decode(self._objects.url, found.data)
            if found.data == data:
                return self.head
            return self._put(msgspec.structs.replace(head, number=self.head.number))
        self.head = head
        return head

    def _current_if_owned(self, written: bytes | None = None) -> StoredObject | None:
        """The current `HEAD`, if this process wrote it: no other process writes in its epoch."""
        found = self._objects.get(HEAD_KEY)
        if found is None or found.data == written:
            return found
        head = _decode(self._objects.url, found.data)
        is_ours = self._epoch is not None and (head.store, head.epoch) == self._epoch
        return found if is_ours else None

    def _fenced(self) -> FencedError:
        return FencedError(
            f"{self._objects.url} was taken over by another server. Stop this one: it may no longer write there."
        )


def _decode(url: str, data: bytes) -> StoreHead:
    return decode_record(f"{url}/{HEAD_KEY}", data, _heads, VERSION)
