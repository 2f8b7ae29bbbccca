"""Whose an object store's prefix is: the object `HEAD` there, and the file `COLD` in the data directory.

`HEAD` names the manifest, and by it everything that counts. It is only ever replaced on the condition that it is as
this process left it. Every start raises its epoch, so a server that was replaced by another one, and does not know it,
cannot replace `HEAD` any more, however long it was paused. Packs are numbered within the epoch, so it cannot overwrite
one either. `COLD` says to which prefix the directory belongs, and the epoch of its last start.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Final

import msgspec

from headwater.storage.directory import write_file
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import StorageError
from headwater.storage.tiering.objects import ObjectConflictError, Objects, StoredObject

COLD_NAME: Final = "COLD"
NEW_COLD_NAME: Final = "COLD.new"
HEAD_KEY: Final = "HEAD"
VERSION: Final = 1
PACKS_PER_EPOCH: Final = 10**10
"""A pack's number begins with its epoch: `{epoch:06}{count:010}`."""


class ManifestPart(msgspec.Struct, frozen=True, array_like=True):
    key: str
    size: int


class StoreHead(msgspec.Struct, frozen=True):
    """What the object `HEAD` says."""

    version: int
    store: str
    """A random id, the same in the data directory."""
    epoch: int
    number: int = 0
    """How often it was replaced. So no two contents are the same, and neither are their tags."""
    lsn: int = 0
    """The manifest includes every record up to this one."""
    parts: tuple[ManifestPart, ...] = ()
    """The objects that are the manifest, in order; none before the first was saved."""


class ColdMark(msgspec.Struct, frozen=True):
    """What the file `COLD` says."""

    version: int
    url: str
    store: str
    epoch: int


class FencedError(StorageError):
    """Another server has taken the prefix over."""


def read_mark(filesystem: Filesystem, directory: Path) -> ColdMark | None:
    """Where the packs of a data directory are, if they are in an object store."""
    path = directory / COLD_NAME
    if not filesystem.exists(path):
        return None
    try:
        found = msgspec.json.decode(filesystem.read(path), type=ColdMark)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}. It may be damaged.") from None
    if found.version != VERSION:
        raise StorageError(f"{path} has version {found.version}; this Headwater reads version {VERSION} only.")
    return found


def write_mark(filesystem: Filesystem, directory: Path, mark: ColdMark) -> None:
    fresh = directory / NEW_COLD_NAME
    if filesystem.exists(fresh):
        filesystem.unlink(fresh)
    write_file(filesystem, fresh, msgspec.json.encode(mark) + b"\n")
    filesystem.replace(fresh, directory / COLD_NAME)
    filesystem.sync_directory(directory)


class Home:
    """The head of a prefix, once it was claimed."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._tag = ""
        self._epoch: tuple[str, int] | None = None
        """Store and epoch, once they are claimed."""
        self.head: StoreHead | None = None
        found = objects.get(HEAD_KEY)
        if found is not None:
            self._tag = found.tag
            self.head = _decode(objects.url, found.data)

    @property
    def has_data(self) -> bool:
        return self.head is not None and bool(self.head.parts)

    def claim(self, filesystem: Filesystem, directory: Path, epoch: int | None = None) -> StoreHead:
        """Take the next epoch of this prefix for this data directory; it must be checked that it is theirs.

        Where epochs are given out elsewhere, `epoch` is the one to take: `FencedError` if it is not a new one.
        """
        mark = read_mark(filesystem, directory)
        head = self.head or StoreHead(VERSION, mark.store if mark is not None else secrets.token_hex(16), 0)
        if epoch is not None and epoch <= head.epoch:
            raise self._fenced()
        epoch = epoch or max(head.epoch, mark.epoch if mark is not None else 0) + 1
        if self.head is not None:
            # First here: a crash in between must not look like another server's claim.
            write_mark(filesystem, directory, ColdMark(VERSION, self._objects.url, head.store, epoch))
        claimed = self._put(msgspec.structs.replace(head, epoch=epoch))
        self._epoch = claimed.store, claimed.epoch
        if mark is None or mark.epoch != epoch:
            write_mark(filesystem, directory, ColdMark(VERSION, self._objects.url, head.store, epoch))
        return claimed

    def commit(self, lsn: int, parts: tuple[ManifestPart, ...]) -> None:
        """Make these the manifest. Raises `FencedError` when the prefix belongs to another server now."""
        assert self.head is not None
        self._put(msgspec.structs.replace(self.head, lsn=lsn, parts=parts))

    def check_still_ours(self) -> None:
        """Raise `FencedError` when the prefix belongs to another server now."""
        if self._found_ours() is None:
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
            # It may be our own doing: of an earlier request that succeeded, and whose answer was lost.
            found = self._found_ours(data)
            if found is None:
                raise self._fenced() from None
            self._tag, self.head = found.tag, _decode(self._objects.url, found.data)
            if found.data == data:
                return self.head
            return self._put(msgspec.structs.replace(head, number=self.head.number))
        self.head = head
        return head

    def _found_ours(self, written: bytes | None = None) -> StoredObject | None:
        """`HEAD` as it is now, if this process wrote it: nobody else writes in its epoch."""
        found = self._objects.get(HEAD_KEY)
        if found is None or found.data == written:
            return found
        head = _decode(self._objects.url, found.data)
        is_ours = self._epoch is not None and (head.store, head.epoch) == self._epoch
        return found if is_ours else None

    def _fenced(self) -> FencedError:
        return FencedError(
            f"{self._objects.url} was taken over by another server. This one must not write there any more: stop it."
        )


def _decode(url: str, data: bytes) -> StoreHead:
    try:
        head = msgspec.json.decode(data, type=StoreHead)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{url}/{HEAD_KEY} cannot be read: {error}. It may be damaged, or not be ours.") from None
    if head.version != VERSION:
        raise StorageError(f"{url}/{HEAD_KEY} has version {head.version}; this Headwater reads version {VERSION} only.")
    return head
