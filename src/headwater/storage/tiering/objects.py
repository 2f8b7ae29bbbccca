"""What an object store is to tiering: whole objects, ranges of them, and conditional replacement.

Its errors are few: a store that cannot be used for the moment is an `ObjectStoreError`, a condition that was not met a
`ObjectConflictError`, a missing object a `FileNotFoundError`. The implementation needs the package `obstore`, which is
loaded only when it is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol


class ObjectStoreError(OSError):
    """The object store did not do what it was asked, and may do it later."""


class ObjectConflictError(Exception):
    """The object is not as the condition requires: it exists, or it was replaced by someone else."""


class StoredObject(NamedTuple):
    data: bytes
    tag: str
    """Differs with the content; a replacement can name it as its condition."""


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
        """Exactly this range of an object."""

    def sizes(self, prefix: str) -> dict[str, int]:
        """The objects whose keys begin with a prefix that ends in `/`, and their sizes."""

    def delete(self, key: str) -> None:
        """Remove an object; no error when there is none."""

    def check_conditions(self) -> None:
        """Refuse a store that ignores the conditions of a write: two servers could then both think that it is theirs.

        Raises `StorageError`; an `ObjectStoreError` when the store cannot be reached.
        """
