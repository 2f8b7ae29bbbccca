"""Bring what a checkpoint saved to the object store, on a thread of its own.

The order makes every `HEAD` complete: first blobs and packs, then the manifest that names them, then `HEAD`. What fails
because the store cannot be reached is tried again, for as long as it takes; meanwhile the files stay on the local disk.
An object that `HEAD` does not lead to any more is deleted after a grace period, and only while `HEAD` is still ours.
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
from headwater.storage.packs.manifest import SavedManifest
from headwater.storage.packs.pack import pack_path
from headwater.storage.packs.recovery import PACKS_NAME
from headwater.storage.tiering.home import Home, ManifestPart
from headwater.storage.tiering.objects import Objects, ObjectStoreError

log = logging.getLogger("headwater.storage")

PACKS_PREFIX: Final = "packs/"
BLOBS_PREFIX: Final = "blobs/"
MANIFEST_PREFIX: Final = "manifest/"
PARTS_MAX: Final = 64
"""A manifest of more parts is written again as one."""
RETRY_S: Final = 2.0
IDLE_S: Final = 5.0
"""How often it is looked for objects whose grace period has passed."""
OVERTAKEN_S: Final = 0.05
STOP_S: Final = 10.0


class Doomed(NamedTuple):
    """A blob that no stream refers to once the manifest includes record `lsn`."""

    lsn: int
    blob: str


class Uploader:
    """What is in the store, and what is on its way there."""

    def __init__(
        self,
        objects: Objects,
        home: Home,
        directory: Path,
        filesystem: Filesystem,
        remove: Callable[[Path], None],
        *,
        grace_s: float,
        retry_s: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._objects = objects
        self._home = home
        self._directory = directory
        self._filesystem = filesystem
        self._remove = remove
        self._grace_s = grace_s
        self._retry_s = retry_s
        self._clock = clock
        self._changed = threading.Condition()
        self._state: SavedManifest | None = None
        self._done: SavedManifest | None = None
        self._doomed: list[Doomed] = []
        self._closing = False
        self._thread: threading.Thread | None = None
        self._header = b""
        self._parts: tuple[ManifestPart, ...] = home.head.parts if home.head is not None else ()
        self._written_parts = {part.key for part in self._parts}
        """The parts of the manifest, and those of attempts since then that failed."""
        self._attempts = 0
        self._written_lsn: Callable[[], int] = lambda: 0
        self._garbage: dict[str, float] = {}
        """Objects that nothing leads to, and since when."""
        self.stored: dict[str, int] = {
            key: size for prefix in (PACKS_PREFIX, BLOBS_PREFIX) for key, size in objects.sizes(prefix).items()
        }
        """Every pack and blob in the store, with its size. Other threads may look, and copy it before they iterate."""
        self._note_garbage(set(objects.sizes(MANIFEST_PREFIX)) - {part.key for part in self._parts})
        self.waiting_bytes = 0
        """What the manifest names here and the store does not have."""
        self.on_stored: Callable[[int], None] = lambda _: None
        """Called with a record when the store has everything up to it."""
        self.failure: str | None = None
        """Why nothing will be stored any more, if so."""
        self.problem: str | None = None
        """Why nothing can be stored for the moment, if so."""

    def start(self, written_lsn: Callable[[], int]) -> None:
        """Begin. `written_lsn` says which record was written last."""
        self._written_lsn = written_lsn
        self._thread = threading.Thread(target=self._run, name="headwater-upload", daemon=True)
        self._thread.start()

    def saved(self, state: SavedManifest) -> None:
        """A manifest is durable here. Called by the store's worker."""
        with self._changed:
            self._state = state
            self._count_waiting()
            self._changed.notify_all()

    def doom(self, blob: str) -> None:
        """No stream refers to this blob once the records that were written until now are in the manifest."""
        with self._changed:
            self._doomed.append(Doomed(self._written_lsn(), blob))

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
                    log.error("the object store cannot be used, and is tried again: %s", error)
                self.problem = str(error)
            except FileNotFoundError as error:
                # A pack was merged or removed meanwhile: a newer manifest does not name it.
                log.debug("an upload was overtaken: %s", error)
                time.sleep(OVERTAKEN_S)
            except (StorageError, OSError) as error:
                log.critical("nothing more is stored in %s: %s", self._objects.url, error)
                self.failure = str(error)
            except Exception as error:
                log.critical("nothing more is stored in %s", self._objects.url, exc_info=error)
                self.failure = f"Storing packs in {self._objects.url} failed: {error!r}"
            else:
                if self.problem is not None:
                    log.info("the object store can be used again")
                self.problem = None
            with self._changed:
                if not self._is_closing() and (self.problem is not None or self.is_current or self._state is None):
                    self._changed.wait(self._retry_s if self.problem is not None else IDLE_S)

    def _is_closing(self) -> bool:
        return self._closing

    def step(self) -> None:
        """Store the newest manifest with all that it names, and delete what it is time to delete."""
        state = self._state
        if state is not None and state is not self._done:
            self._store_blobs()
            for info in state.packs:
                self._store(pack_key(info.number), pack_path(self._directory / PACKS_NAME, info.number))
            parts = self._store_manifest(state)
            self._home.commit(state.lsn, parts)
            self.on_stored(state.lsn)
            self._note_garbage(self._written_parts - {part.key for part in parts})
            self._written_parts = {part.key for part in parts}
            self._parts, self._header = parts, state.header
            self._forget(state)
            self._done = state
        self._collect()

    def store_blob(self, path: Path) -> None:
        """Store a finished blob now. Raises `OSError` if the store cannot be used."""
        self._store(BLOBS_PREFIX + path.name, path)

    def _store_blobs(self) -> None:
        blobs = self._directory / BLOBS_NAME
        if self._filesystem.exists(blobs):
            for path in sorted(blobs.iterdir()):
                if is_finished(path.name):
                    self._store(BLOBS_PREFIX + path.name, path)

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
        self.waiting_bytes = sum(info.size for info in packs if pack_key(info.number) not in self.stored)

    def _store_manifest(self, state: SavedManifest) -> tuple[ManifestPart, ...]:
        """The manifest as objects: what was added to it since the last time, or all of it."""
        data = self._filesystem.read(self._directory / MANIFEST_NAME)
        if not data.startswith(state.header) or len(data) < state.size:
            raise FileNotFoundError("the manifest was rewritten meanwhile")
        head = self._home.head
        assert head is not None
        parts = self._parts if self._header == state.header and len(self._parts) < PARTS_MAX else ()
        start = sum(part.size for part in parts)
        if start < state.size:
            # Each attempt has its own key. `HEAD` may lead to the object of an attempt whose answer was lost, and that
            # must not change.
            self._attempts += 1
            key = f"{MANIFEST_PREFIX}{head.epoch:06}{self._attempts:010}"
            self._written_parts.add(key)
            self._objects.put(key, data[start : state.size])
            parts = (*parts, ManifestPart(key, state.size - start))
        return parts

    # -- what is not needed any more -------------------------------------------------------------------------------

    def _forget(self, state: SavedManifest) -> None:
        """After `HEAD` names this manifest: what it does not lead to is garbage."""
        named = {pack_key(info.number) for info in state.packs}
        self._note_garbage({key for key in self.stored if key.startswith(PACKS_PREFIX)} - named)
        with self._changed:
            gone = [each.blob for each in self._doomed if each.lsn <= state.lsn]
            self._doomed = [each for each in self._doomed if each.lsn > state.lsn]
        for blob in gone:
            self._remove(self._directory / BLOBS_NAME / blob)
        self._note_garbage({BLOBS_PREFIX + blob for blob in gone} & self.stored.keys())

    def _note_garbage(self, keys: set[str]) -> None:
        now = self._clock()
        for key in keys:
            self._garbage.setdefault(key, now)

    def _collect(self) -> None:
        """Delete what has been garbage for long enough. It has to be ours still, though no one else refers to it."""
        until = self._clock() - self._grace_s
        due = [key for key, since in self._garbage.items() if since <= until]
        if not due or self._done is None:
            return
        self._home.check_still_ours()
        for key in due:
            self._objects.delete(key)
            del self._garbage[key]
            self.stored.pop(key, None)


def pack_key(number: int) -> str:
    return f"{PACKS_PREFIX}{pack_path(Path(), number).name}"
