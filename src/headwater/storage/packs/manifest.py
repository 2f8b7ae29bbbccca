"""The manifest: the states of the last checkpoint, in an append-only file of framed sections.

A section has images of streams and documents, and lists the packs that were added and dropped, the streams that were
removed, and the record up to which the journal is no longer needed. Sections take effect with the next *final* one: the
sections of a checkpoint without a final section are ignored. When most of the file is out of date, a new one is written
and renamed over it.

After startup, only the store's worker calls a manifest.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from headwater.core.checksum import crc32
from headwater.core.records import Document, Image
from headwater.storage.filesystem import FileAppender, Filesystem, write_whole
from headwater.storage.interface import CorruptError, WriteFailedError
from headwater.storage.journal.frames import FRAME, NO_STREAM, Frame, find_frame, read_frame, seal
from headwater.storage.journal.replay import renew
from headwater.storage.packs.pack import PackInfo
from headwater.storage.packs.states import decode_state, encode_state

NAME: Final = "MANIFEST"
NEW_NAME: Final = "MANIFEST.new"
REWRITE_FLOOR_BYTES: Final = 1024 * 1024
"""A smaller manifest is never rewritten."""

_SECTION_BYTES: Final = 1024 * 1024
_HEADER: Final = struct.Struct("<8sQ")
_CHECKSUM: Final = struct.Struct("<I")
_HEADER_BYTES: Final = _HEADER.size + _CHECKSUM.size
_MAGIC: Final = b"HWMANIF\x01"
_HEAD_LENGTH: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<IIQQ")
"""Before each image: checksum of what follows, length, the stream's id, and the last record that it includes."""

Key: TypeAlias = int | str
"""A stream by its id, or a document by its key."""

_encode = msgspec.msgpack.Encoder().encode


class Commit(msgspec.Struct, frozen=True, array_like=True):
    """The changes of a section besides its images."""

    final: bool
    lsn: int
    """Images and packs include every record up to this one."""
    segment: int
    """The first segment of the journal that is still needed."""
    added: tuple[PackInfo, ...] = ()
    dropped: tuple[int, ...] = ()
    removed: tuple[Key, ...] = ()


_decode_commit = msgspec.msgpack.Decoder(Commit).decode


class SavedState(NamedTuple):
    """The state of a stream (or a document) after record `lsn`."""

    key: Key
    lsn: int
    state: Image | Document


class ManifestEntry(NamedTuple):
    """A state as it is stored in the file."""

    key: Key
    encoded: bytes


class SavedManifest(NamedTuple):
    """A durable manifest: the first `size` bytes of the file that begins with `header`."""

    header: bytes
    size: int
    lsn: int
    packs: tuple[PackInfo, ...]


class Sections:
    """The writer of a manifest file: encodes sections, without interpreting them."""

    def __init__(self, file: FileAppender, salt: int, size: int, number: int) -> None:
        self._file = file
        self.salt: Final = salt
        self._number = number
        self.size = size

    def write(self, commit: Commit, entries: Iterable[ManifestEntry], found: list[tuple[Key, int]]) -> Iterator[None]:
        """Write entries in sections of bounded size, each synced before the next; the last one makes them effective.

        Fills `found` with the offset of each entry. It runs in steps, and is done when the iterator ends.
        """
        partial = _encode(Commit(False, commit.lsn, commit.segment))
        final = _encode(commit)
        body = bytearray()
        waiting: list[tuple[Key, int]] = []
        for steps, (key, encoded) in enumerate(entries, 1):
            waiting.append((key, len(body)))
            body += encoded
            if len(body) >= _SECTION_BYTES:
                self._put(partial, body, waiting, found)
                body.clear()
                waiting.clear()
            if steps % 256 == 0:
                yield
        self._put(final, body, waiting, found)

    def close(self) -> None:
        self._file.close()

    def _put(self, head: bytes, body: bytearray, waiting: list[tuple[Key, int]], found: list[tuple[Key, int]]) -> None:
        frame = _begin_section(head)
        start = self.size + len(frame)
        frame += body
        seal(frame, self.salt, self._number + 1, len(waiting))
        write_whole(self._file, frame)
        self._file.sync()
        self._number += 1
        self.size += len(frame)
        found += [(key, start + at) for key, at in waiting]


class Manifest:
    """The manifest. `at` has the offset of the newest state of each existing stream and document in the file."""

    def __init__(
        self, filesystem: Filesystem, directory: Path, *, rewrite_floor: int = REWRITE_FLOOR_BYTES, name: str = NAME
    ) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._path = directory / name
        self._rewrite_floor = rewrite_floor
        self._sections: Sections | None = None
        self._fresh_size = 0
        self._failure: str | None = None
        self._end = (0, 0, 0)
        self.on_saved: Callable[[SavedManifest], None] = lambda _: None
        """Called when new content of the file is durable."""
        self.at: dict[Key, int] = {}
        self.packs: dict[int, PackInfo] = {}
        self.lsn = 0
        self.segment = 1

    # -- reading ---------------------------------------------------------------------------------------------------

    def load(self) -> Iterable[SavedState]:
        """Read the file; returns the newest state of each stream and document."""
        data = self._filesystem.read(self._path)
        view = memoryview(data)
        salt = self._check_header(view)
        at = _HEADER_BYTES
        waiting: list[tuple[Frame, Commit]] = []
        good = number = 0
        while (frame := read_frame(view, at, salt)) is not None:
            (head_length,) = _HEAD_LENGTH.unpack_from(frame.body)
            commit = _decode_commit(frame.body[_HEAD_LENGTH.size : _HEAD_LENGTH.size + head_length])
            waiting.append((frame, commit))
            at = frame.end
            if commit.final:
                for section, part in waiting:
                    self._apply_section(section, part, view)
                waiting.clear()
                good, number = at, frame.number
        if at < len(data) and find_frame(data, at, salt) is not None:
            raise CorruptError(f"{self._path} is damaged at byte {at}, between valid sections.")
        if not good:
            raise CorruptError(f"{self._path} has no complete section: it is damaged at byte {at}.")
        self._end = (salt, good, number)
        self._fresh_size = sum(_entry_size(view, entry_at) for entry_at in self.at.values())
        return (self._decode(view, entry_at, entry_at) for entry_at in self.at.values())

    def repair(self) -> None:
        """After a successful load: cut an unfinished checkpoint, and rewrite what may not be on the disk.

        A power loss may still lose a section that was written but not synced, or whose sync failed.
        """
        renew(self._filesystem, self._path, self._end[1])
        self._sections = Sections(self._filesystem.extend(self._path), *self._end)

    def saved_state(self, key: Key) -> SavedState | None:
        """The newest state of a stream or document, from the file."""
        at = self.at.get(key)
        if at is None:
            return None
        mapped = self._filesystem.map(self._path)
        try:
            size = _entry_size(memoryview(mapped.read(at, _ENTRY.size)), 0)
            return self._decode(memoryview(mapped.read(at, size)), 0, at)
        finally:
            mapped.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Write the first manifest of a new store."""
        for _ in self._rewrite(Commit(True, 0, 1), []):
            pass

    def save(self, commit: Commit, kept: list[SavedState]) -> Iterator[None]:
        """Make a checkpoint durable; done when the iterator ends. `commit` must be final.

        If it fails, the content of the file is unknown, so the next attempt writes another file.
        """
        assert commit.final
        if self._failure is not None:
            raise WriteFailedError(self._failure)
        sections = self._sections
        if sections is None or sections.size > self._rewrite_floor + 2 * self._fresh_size:
            yield from self._rewrite(commit, kept)
            self.on_saved(self.saved())
            return
        self._sections = None
        found: list[tuple[Key, int]] = []
        try:
            yield from sections.write(commit, map(_encode_entry, kept), found)
        except BaseException:
            sections.close()
            raise
        self._sections = sections
        yield from _update(self.at, found)
        self._apply(commit)
        self.on_saved(self.saved())

    def saved(self) -> SavedManifest:
        """The durable manifest, after `create` or `repair`."""
        assert self._sections is not None
        return SavedManifest(
            _packed_header(self._sections.salt), self._sections.size, self.lsn, tuple(self.packs.values())
        )

    def close(self) -> None:
        if self._sections is not None:
            self._sections.close()
            self._sections = None

    # -- implementation --------------------------------------------------------------------------------------------

    def _check_header(self, view: memoryview) -> int:
        if len(view) >= _HEADER_BYTES:
            magic, salt = _HEADER.unpack_from(view)
            (checksum,) = _CHECKSUM.unpack_from(view, _HEADER.size)
            if magic == _MAGIC and crc32(view[: _HEADER.size]) == checksum:
                return int(salt)
        raise CorruptError(f"{self._path} has a damaged header.")

    def _apply_section(self, frame: Frame, commit: Commit, view: memoryview) -> None:
        (head_length,) = _HEAD_LENGTH.unpack_from(frame.body)
        at = frame.start + FRAME.size + _HEAD_LENGTH.size + head_length
        for _ in range(frame.entries):
            stream_id = _ENTRY.unpack_from(view, at)[2]
            self.at[stream_id if stream_id != NO_STREAM else self._decode(view, at, at).key] = at
            at += _entry_size(view, at)
        assert at == frame.end
        self._apply(commit)

    def _apply(self, commit: Commit) -> None:
        for key in commit.removed:
            self.at.pop(key, None)
        for info in commit.added:
            self.packs[info.number] = info
        for number in commit.dropped:
            del self.packs[number]
        self.lsn = commit.lsn
        self.segment = commit.segment

    def _rewrite(self, commit: Commit, kept: list[SavedState]) -> Iterator[None]:
        path = self._directory / NEW_NAME
        if self._filesystem.exists(path):
            self._filesystem.unlink(path)
        dropped = set(commit.dropped)
        packs = tuple(info for info in (*self.packs.values(), *commit.added) if info.number not in dropped)
        found: list[tuple[Key, int]] = []
        file = self._filesystem.create(path)
        try:
            salt = secrets.randbits(64)
            write_whole(file, _packed_header(salt))
            sections = Sections(file, salt, _HEADER_BYTES, 0)
            entries = self._all_entries(commit, kept)
            yield from sections.write(Commit(True, commit.lsn, commit.segment, packs), entries, found)
            self._rename(path)
        except BaseException:
            file.close()
            raise
        self.close()
        self._sections = sections
        self._fresh_size = sections.size
        self.at = {}
        yield from _update(self.at, found)
        self._apply(commit)

    def _rename(self, path: Path) -> None:
        try:
            self._filesystem.replace(path, self._path)
            self._filesystem.sync_directory(self._directory)
        except OSError as error:
            # It is unknown which of the two files a power loss would leave, so neither can be used.
            self._failure = f"Renaming {path} failed: {error}"
            raise WriteFailedError(self._failure) from error

    def _all_entries(self, commit: Commit, kept: list[SavedState]) -> Iterator[ManifestEntry]:
        """The entries of all existing streams, copied from the old file if there is no newer one."""
        replaced = {each.key for each in kept}.union(commit.removed)
        old = [(at, key) for key, at in self.at.items() if key not in replaced]
        if old:
            data = memoryview(self._filesystem.read(self._path))
            for at, key in old:
                self._check_entry(data, at, at)
                yield ManifestEntry(key, bytes(data[at : at + _entry_size(data, at)]))
        yield from map(_encode_entry, kept)

    def _decode(self, view: memoryview, at: int, file_offset: int) -> SavedState:
        self._check_entry(view, at, file_offset)
        _, length, stream_id, lsn = _ENTRY.unpack_from(view, at)
        state = decode_state(view[at + _ENTRY.size : at + _ENTRY.size + length])
        return SavedState(state.key if isinstance(state, Document) else stream_id, lsn, state)

    def _check_entry(self, view: memoryview, at: int, file_offset: int) -> None:
        # The section's checksum was checked at startup. A copy must not give later damage a valid checksum.
        checksum, length, stream_id, _ = _ENTRY.unpack_from(view, at)
        if crc32(view[at + _CHECKSUM.size : at + _ENTRY.size + length]) != checksum:
            raise CorruptError(f"{self._path} is damaged at byte {file_offset}: the state of stream {stream_id:016x}.")


def empty_manifest() -> bytes:
    """The content of the manifest of a store without streams."""
    salt = secrets.randbits(64)
    section = _begin_section(_encode(Commit(True, 0, 1)))
    seal(section, salt, 1, 0)
    return _packed_header(salt) + section


def _begin_section(head: bytes) -> bytearray:
    return bytearray(FRAME.size) + _HEAD_LENGTH.pack(len(head)) + head


def _packed_header(salt: int) -> bytes:
    header = _HEADER.pack(_MAGIC, salt)
    return header + _CHECKSUM.pack(crc32(header))


def _update(offsets: dict[Key, int], found: list[tuple[Key, int]]) -> Iterator[None]:
    for start in range(0, len(found), 4096):
        offsets.update(found[start : start + 4096])
        yield


def _encode_entry(kept: SavedState) -> ManifestEntry:
    encoded = encode_state(kept.state)
    stream_id = NO_STREAM if isinstance(kept.key, str) else kept.key
    header = _ENTRY.pack(0, len(encoded), stream_id, kept.lsn)[_CHECKSUM.size :]
    checksum = crc32(encoded, crc32(header))
    return ManifestEntry(kept.key, _CHECKSUM.pack(checksum) + header + encoded)


def _entry_size(view: memoryview, at: int) -> int:
    return _ENTRY.size + int(_ENTRY.unpack_from(view, at)[1])
