"""Object stores for tests: obstore's in-memory store, and a wrapper that can be switched off."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from obstore.store import MemoryStore

from headwater.storage.tiering.object_store import ObjectStoreObjects
from headwater.storage.tiering.objects import ObjectStoreError, StoredObject


def memory_objects() -> ObjectStoreObjects:
    return ObjectStoreObjects(MemoryStore(), "memory://")


class SwitchedObjects:
    """A store that fails while `is_down`, and records its requests. Calls can be intercepted."""

    def __init__(self, objects: ObjectStoreObjects) -> None:
        self._objects = objects
        self.is_down = False
        self.asked: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda *_: None

    @property
    def url(self) -> str:
        return self._objects.url

    def put(self, key: str, data: bytes | Path) -> None:
        self._ask("put", key)
        self._objects.put(key, data)

    def create(self, key: str, data: bytes) -> str:
        self._ask("create", key)
        return self._objects.create(key, data)

    def replace(self, key: str, data: bytes, tag: str) -> str:
        self._ask("replace", key)
        return self._objects.replace(key, data, tag)

    def get(self, key: str) -> StoredObject | None:
        self._ask("get", key)
        return self._objects.get(key)

    def read(self, key: str, start: int, length: int) -> bytes:
        self._ask("read", key)
        return self._objects.read(key, start, length)

    def sizes(self, prefix: str) -> dict[str, int]:
        self._ask("sizes", prefix)
        return self._objects.sizes(prefix)

    def delete(self, key: str) -> None:
        self._ask("delete", key)
        self._objects.delete(key)

    def check_conditions(self) -> None:
        self._ask("check", "")
        self._objects.check_conditions()

    def count(self, what: str, prefix: str = "") -> int:
        return sum(1 for kind, key in self.asked if kind == what and key.startswith(prefix))

    def _ask(self, *what: Any) -> None:
        self.asked.append(what)
        self.before(*what)
        if self.is_down:
            raise ObjectStoreError(errno.EIO, "the store is switched off")
