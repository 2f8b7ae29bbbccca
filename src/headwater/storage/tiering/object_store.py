"""The objects of a store through the package `obstore`, which only this module imports.

Its errors are translated here, once (see `objects`).
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import obstore
from obstore import exceptions
from obstore.store import ObjectStore, from_url

from headwater.storage.interface import StorageError
from headwater.storage.tiering.objects import ObjectConflictError, ObjectStoreError, StoredObject

REQUEST_TIMEOUT_S: Final = 60
CONNECT_TIMEOUT_S: Final = 5
_PROBES: Final = "probes/"


class ObjectStoreObjects:
    """The objects of a store, or below a prefix of it. See `objects.Objects`."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | Path) -> None:
        with self._writing(key):
            obstore.put(self._store, key, data)

    def create(self, key: str, data: bytes) -> str:
        with self._writing(key):
            return _tag(obstore.put(self._store, key, data, mode="create", use_multipart=False)["e_tag"])

    def replace(self, key: str, data: bytes, tag: str) -> str:
        with self._writing(key):
            return _tag(obstore.put(self._store, key, data, mode={"e_tag": tag}, use_multipart=False)["e_tag"])

    def get(self, key: str) -> StoredObject | None:
        with suppress(FileNotFoundError), self._translated(key):
            found = obstore.get(self._store, key)
            return StoredObject(bytes(found.bytes()), _tag(found.meta["e_tag"]))
        return None

    def read(self, key: str, start: int, length: int) -> bytes:
        with self._translated(key):
            data = bytes(obstore.get_range(self._store, key, start=start, length=length))
        if len(data) != length:
            raise ObjectStoreError(errno.EIO, f"{self._url}/{key} has {len(data)} bytes at {start}, not {length}")
        return data

    def sizes(self, prefix: str) -> dict[str, int]:
        with self._translated(prefix):
            listed = obstore.list(self._store, prefix=prefix)
            return {each["path"]: each["size"] for page in listed for each in page}

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError), self._translated(key):
            obstore.delete(self._store, key)

    def check_conditions(self) -> None:
        key = f"{_PROBES}{secrets.token_hex(8)}"
        try:
            first = self.create(key, b"1")
            if not self._is_refused(key, None) or self.replace(key, b"2", first) == first:
                raise self._ignores_conditions()
            if not self._is_refused(key, first):
                raise self._ignores_conditions()
        except NotImplementedError:
            raise self._ignores_conditions() from None
        except ObjectConflictError as error:
            # The name is random, so this is our own request, which the network layer has sent twice.
            raise ObjectStoreError(errno.EIO, f"{error}: a write was sent twice") from error
        finally:
            with suppress(ObjectStoreError):
                self.delete(key)

    @contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        try:
            yield
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
            raise ObjectConflictError(f"{self._url}/{key}") from error
        except (FileNotFoundError, NotImplementedError):
            raise
        except (exceptions.BaseError, OSError) as error:
            raise ObjectStoreError(errno.EIO, f"{self._url}/{key}: {_first_line(error)}") from error

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        try:
            with self._translated(key):
                yield
        except FileNotFoundError as error:
            # The bucket is missing, not the object.
            raise ObjectStoreError(errno.EIO, f"{self._url}/{key}: {_first_line(error)}") from error

    def _is_refused(self, key: str, tag: str | None) -> bool:
        try:
            if tag is None:
                self.create(key, b"3")
            else:
                self.replace(key, b"3", tag)
        except ObjectConflictError:
            return True
        return False

    def _ignores_conditions(self) -> StorageError:
        return StorageError(
            f"The object store of {self._url} has no conditional writes (If-None-Match and If-Match), so it cannot keep"
            " two servers from overwriting each other. Use one that has them as storage.cold."
        )


def open_url(url: str) -> ObjectStoreObjects:
    """Open the objects below a URL such as `s3://bucket/prefix`. Address and keys are in the environment (`AWS_…`)."""
    try:
        store = from_url(
            url,
            client_options={
                "timeout": f"{REQUEST_TIMEOUT_S}s",
                "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
                # The address says whether it is http: or https:.
                "allow_http": True,
            }
            if url.startswith("s3:")
            else None,
            retry_config={"max_retries": 2} if url.startswith("s3:") else None,
        )
    except Exception as error:
        raise StorageError(f"storage.cold is {url!r}, which cannot be used: {_first_line(error)}") from error
    return ObjectStoreObjects(store, url.rstrip("/"))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]


def _tag(found: str | None) -> str:
    assert found, "a store without tags fails `check_conditions`"
    return found
