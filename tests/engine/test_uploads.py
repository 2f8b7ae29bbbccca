"""The refusal of an upload whose blob cannot be stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from headwater.core.errors import Refusal
from headwater.engine.background_threads import Background
from headwater.engine.uploads import BlobUpload
from headwater.storage.blobs import FileBlobs
from headwater.storage.filesystem import RealFilesystem
from headwater.storage.tiering.objects import ObjectStoreError


class WithoutObjectStore(RealFilesystem):
    """As in a cluster, where a blob exists once the object store has it."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def replace(self, source: Path, target: Path) -> None:
        raise self._error


class AtOnce:
    """A background thread that has finished when it was started."""

    def run(self, work: Callable[[], object], done: Callable[[BaseException | None], None]) -> None:
        try:
            work()
        except OSError as error:
            done(error)
        else:
            done(None)


@pytest.mark.parametrize(
    ("error", "retry"),
    [(ObjectStoreError(0, "connection refused"), (("Retry-After", "1"),)), (OSError(5, "input/output error"), ())],
)
def test_snapshot_is_to_be_retried_if_the_object_store_is_unavailable(
    tmp_path: Path, error: OSError, retry: tuple[tuple[str, str], ...]
) -> None:
    blobs = FileBlobs(WithoutObjectStore(error), tmp_path / "blobs", durable=True)
    upload = BlobUpload(blobs, cast("Background", AtOnce()), 1, 1000, lambda _: None, lambda _: None)
    upload.write(b"a snapshot")
    refusals: list[Refusal | None] = []
    upload.finish(refusals.append)
    (refusal,) = refusals
    assert refusal is not None
    assert (refusal.status, refusal.code, refusal.headers) == (503, "storage_unavailable", retry)
    assert blobs.ids() == set()
