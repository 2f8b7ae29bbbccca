"""Upload the files of a checkpoint to the object store, on a separate thread.

The order makes every `HEAD` complete: first blobs and packs, then the manifest that refers to them, then `HEAD`. While
the store cannot be reached, uploads are retried without a limit, and the files stay on the local disk. An object that
`HEAD` no longer refers to is deleted after a grace period, and only while this process owns the prefix.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from headwater.storage.blobs import BLOBS_NAME, is_finished
from headwater.storage.filesystem import Filesystem
from headwater.storage.interface import StorageError
from headwater.storage.packs.manifest import NAME as MANIFEST_NAME
from headwater.storage.packs.manifest import SavedManifest, empty_manifest
from headwater.storage.packs.pack import pack_path
from headwater.storage.packs.recovery import PACKS_NAME
from headwater.storage.tiering.claimed_prefix import ClaimedPrefix, ManifestPart
from headwater.storage.tiering.objects import Objects, ObjectStoreError

log = logging.getLogger("headwater.storage")

PACKS_PREFIX: Final = "packs/"
BLOBS_PREFIX: Final = "blobs/"
MANIFEST_PREFIX: Final = "manifest/"
PARTS_MAX: Final = 64
"""A manifest with more parts is rewritten as one."""
RETRY_S: Final = 2.0
IDLE_S: Final = 5.0
"""The interval of the search for objects whose grace period has passed."""
OUTDATED_S: Final = 0.05
STOP_S: Final = 10.0


class UnreferencedBlob(NamedTuple):
    """A blob that no stream refers to after record `lsn`."""

    lsn: int
    blob: str


class Uploader:
    """Uploads files, and keeps track of the objects in the store."""

    def __init__(
        self,
        objects: Objects,
        claimed: ClaimedPrefix,
        directory: Path,
        filesystem: Filesystem,
        remove: Callable[[Path], None],
        *,
        grace_s: float,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._claimed = claimed
        self._directory = directory
        self._filesystem = filesystem
        self._remove = remove
        self._grace_s = grace_s
        self._retry_s = retry_s
        self._clock = clock
        self._changed = threading.Condition()
        self._state: SavedManifest | None = None
        self._done: SavedManifest | None = None
        self._unreferenced: list[UnreferencedBlob] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._header = b""
        self._parts: tuple[ManifestPart, ...] = claimed.head.parts if claimed.head is not None else ()
        self._written_parts = {part.key for part in self._parts}
        """The parts of the manifest, and those of attempts since then that failed."""
        self._attempts = 0
        self._written_lsn: Callable[[], int] = lambda: 0
        self._garbage: dict[str, float] = {}
        """Unreferenced objects, and since when they are unreferenced."""
        self.stored: dict[str, int] = {
            key: size for prefix in (PACKS_PREFIX, BLOBS_PREFIX) for key, size in objects.sizes(prefix).items()
        }
        """Every pack and blob in the store, with its size. Other threads may read it, but must copy it to iterate."""
        self._note_garbage(set(objects.sizes(MANIFEST_PREFIX)) - {part.key for part in self._parts})
        self._waiting_blobs: dict[str, int] = {}
        """The finished blobs that the store does not have yet, with their sizes."""
        self.waiting_bytes = 0
        """Size of what the store does not have yet: packs that the manifest refers to, and blobs."""
        self.on_stored: Callable[[int], None] = lambda _: None
        """Called with a record when the store has everything up to it."""
        self.failure: str | None = None
        """Why nothing is uploaded until a restart, or None."""
        self.problem: str | None = None
        """Why nothing can be uploaded at the moment, or None."""
        blobs = directory / BLOBS_NAME
        for path in blobs.iterdir() if filesystem.exists(blobs) else ():
            if is_finished(path.name) and BLOBS_PREFIX + path.name not in self.stored:
                self.add_blob(path)

    def commit_first(self) -> None:
        """Commit an empty manifest if `HEAD` has none yet. Raises `ObjectStoreError` if the store cannot be used.

        Until the first upload, it is the only sign outside the local disk that there may be acknowledged writes.
        """
        if not self._parts:
            data = empty_manifest()
            part = ManifestPart(self._new_part(), len(data))
            self._objects.put(part.key, data)
            self._claimed.commit(0, (part,))
            self._parts = (part,)

    def start(self, written_lsn: Callable[[], int]) -> None:
        """Start the thread. `written_lsn` returns the last record that was written."""
        self._written_lsn = written_lsn
        self._thread = threading.Thread(target=self._run, name="headwater-upload", daemon=True)
        self._thread.start()

    def saved(self, state: SavedManifest) -> None:
        """Note that a manifest is durable on this disk. Called by the store's worker."""
        with self._changed:
            self._state = state
            self._count_waiting()
            self._changed.notify_all()

    def add_blob(self, path: Path) -> None:
        """Upload a finished blob soon. Can be called from any thread."""
        size = self._filesystem.size(path)
        with self._changed:
            self._waiting_blobs[path.name] = size
            self._count_waiting()
            self._changed.notify_all()

    def mark_unreferenced(self, blob: str) -> None:
        """Remove this blob when the manifest includes all records that have been written until now."""
        with self._changed:
            self._unreferenced.append(UnreferencedBlob(self._written_lsn(), blob))

    @property
    def is_current(self) -> bool:
        """Whether the store has everything that the last checkpoint saved."""
        return self._done is not None and self._done is self._state

    def close(self) -> None:
        """Stop; what is not in the store yet stays on the local disk for the next start."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(STOP_S)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing() and self.failure is None:
            try:
                self.step()
            except ObjectStoreError as error:
                if self.problem is None:
                    log.error("the object store cannot be used and will be retried: %s", error)
                self.problem = str(error)
            except FileNotFoundError as error:
                # A pack was merged or removed in the meantime: a newer manifest does not refer to it.
                log.debug("an upload is outdated: %s", error)
                time.sleep(OUTDATED_S)
            except (StorageError, OSError) as error:
                log.critical("uploads to %s have stopped: %s", self._objects.url, error)
                self.failure = str(error)
            except Exception as error:
                log.critical("uploads to %s have stopped", self._objects.url, exc_info=error)
                self.failure = f"Storing packs in {self._objects.url} failed: {error!r}"
            else:
                if self.problem is not None:
                    log.info("the object store can be used again")
                self.problem = None
            with self._changed:
                has_work = not (self.is_current or self._state is None) or bool(self._waiting_blobs)
                if not self._is_closing() and (self.problem is not None or not has_work):
                    self._changed.wait(self._retry_s if self.problem is not None else IDLE_S)

    def _is_closing(self) -> bool:
        return self._closing

    def step(self) -> None:
        """Upload the newest manifest and everything that it refers to, then delete expired garbage."""
        state = self._state
        # Without a new manifest, too: what waits may be the reason that no writes are accepted.
        self._store_blobs()
        if state is not None and state is not self._done:
            for info in state.packs:
                self._store(pack_key(info.number), pack_path(self._directory / PACKS_NAME, info.number))
            parts = self._store_manifest(state)
            self._claimed.commit(state.lsn, parts)
            self.on_stored(state.lsn)
            self._note_garbage(self._written_parts - {part.key for part in parts})
            self._written_parts = {part.key for part in parts}
            self._parts, self._header = parts, state.header
            self._find_garbage(state)
            self._done = state
        self._collect()

    def store_blob(self, path: Path) -> None:
        """Store a finished blob now. Raises `OSError` if the store cannot be used; it is then uploaded later."""
        try:
            self._store(BLOBS_PREFIX + path.name, path)
        except OSError:
            self.add_blob(path)
            raise

    def _store_blobs(self) -> None:
        with self._changed:
            names = sorted(self._waiting_blobs)
        for name in names:
            self._store(BLOBS_PREFIX + name, self._directory / BLOBS_NAME / name)
            self._forget_blob(name)

    def _forget_blob(self, name: str) -> None:
        """Note that a blob does not wait any more: it is stored, or removed."""
        with self._changed:
            if self._waiting_blobs.pop(name, None) is not None:
                self._count_waiting()

    def _store(self, key: str, path: Path) -> None:
        if key not in self.stored:
            size = self._filesystem.size(path)
            self._objects.put(key, path)
            self.stored[key] = size
            self._garbage.pop(key, None)
            with self._changed:
                self._count_waiting()

    def _count_waiting(self) -> None:
        packs = self._state.packs if self._state is not None else ()
        self.waiting_bytes = sum(self._waiting_blobs.values()) + sum(
            info.size for info in packs if pack_key(info.number) not in self.stored
        )

    def _store_manifest(self, state: SavedManifest) -> tuple[ManifestPart, ...]:
        """Upload the manifest: what was added to it since the last upload, or all of it. Returns its parts."""
        data = self._filesystem.read(self._directory / MANIFEST_NAME)
        if not data.startswith(state.header) or len(data) < state.size:
            raise FileNotFoundError("the manifest was rewritten in the meantime")
        parts = self._parts if self._header == state.header and len(self._parts) < PARTS_MAX else ()
        start = sum(part.size for part in parts)
        if start < state.size:
            key = self._new_part()
            self._objects.put(key, data[start : state.size])
            parts = (*parts, ManifestPart(key, state.size - start))
        return parts

    def _new_part(self) -> str:
        """The key of another part of the manifest.

        Each attempt has its own key. `HEAD` may refer to the object of an attempt whose response was lost, and that
        must not change.
        """
        head = self._claimed.head
        assert head is not None
        self._attempts += 1
        key = f"{MANIFEST_PREFIX}{head.epoch:06}{self._attempts:010}"
        self._written_parts.add(key)
        return key

    # -- garbage collection ----------------------------------------------------------------------------------------

    def _find_garbage(self, state: SavedManifest) -> None:
        """After `HEAD` refers to this manifest: everything that it does not refer to is garbage."""
        referenced = {pack_key(info.number) for info in state.packs}
        self._note_garbage({key for key in self.stored if key.startswith(PACKS_PREFIX)} - referenced)
        with self._changed:
            removable = [each.blob for each in self._unreferenced if each.lsn <= state.lsn]
            self._unreferenced = [each for each in self._unreferenced if each.lsn > state.lsn]
        for blob in removable:
            self._forget_blob(blob)
            self._remove(self._directory / BLOBS_NAME / blob)
        self._note_garbage({BLOBS_PREFIX + blob for blob in removable} & self.stored.keys())

    def _note_garbage(self, keys: set[str]) -> None:
        now = self._clock()
        for key in keys:
            self._garbage.setdefault(key, now)

    def _collect(self) -> None:
        """Delete objects that have been garbage for the grace period, if this process still owns the prefix."""
        until = self._clock() - self._grace_s
        due = [key for key, since in self._garbage.items() if since <= until]
        if not due or self._done is None:
            return
        self._claimed.check_ownership()
        for key in due:
            self._objects.delete(key)
            del self._garbage[key]
            self.stored.pop(key, None)


def pack_key(number: int) -> str:
    return f"{PACKS_PREFIX}{pack_path(Path(), number).name}"
