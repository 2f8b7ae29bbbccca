"""The interface of tiering to an object store: objects, ranges of them, and conditional writes.

There are three errors: `ObjectStoreError` if the store cannot be used at the moment, `ObjectConflictError` if a
condition was not met, `FileNotFoundError` for a missing object. The implementation needs the package `obstore`, which
is loaded only when it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from headwater.storage.interface import StorageError


class ObjectStoreError(OSError):
    """The object store failed a request; a retry may succeed."""


class ObjectConflictError(Exception):
    """The condition of a write was not met: the object exists, or another process replaced it."""


@contextmanager
def required_store() -> Iterator[None]:
    """Translate `ObjectStoreError` to `StorageError`, where the work cannot continue without the object store."""
    try:
        yield
    except ObjectStoreError as error:
        raise StorageError(f"The object store of storage.cold cannot be used: {error.strerror}") from error


class StoredObject(NamedTuple):
    data: bytes
    tag: str
    """A tag that changes with the content, and can be the condition of a replacement."""


class Objects(Protocol):
    """Objects below one prefix. All calls block, and may be made from any thread."""

    @property
    def url(self) -> str: ...

    def put(self, key: str, data: bytes | Path) -> None:
        """Write an object. Its name is new, or its content is the same as before."""

    def create(self, key: str, data: bytes) -> str:
        """Write an object that does not exist yet, and return its tag."""

    def replace(self, key: str, data: bytes, tag: str) -> str:
        """Replace the object that has this tag, and return the new one."""

    def get(self, key: str) -> StoredObject | None: ...

    def read(self, key: str, start: int, length: int) -> bytes:
        """Read exactly this range of an object."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """The objects whose keys begin with a prefix that ends in `/`, and their sizes."""

    def delete(self, key: str) -> None:
        """Remove an object; no error if it does not exist."""

    def check_conditions(self) -> None:
        """Refuse a store that ignores the conditions of a write, because two servers could then both own a prefix.

        Raises `StorageError`, or `ObjectStoreError` if the store cannot be reached.
        """
