"""Three real Postgres servers with synchronous replication, for tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headwater.stack.replicated_postgres import ReplicatedPostgres
from tests.ports import free_port


@contextmanager
def replicated_postgres(count: int = 3, **settings: str) -> Iterator[ReplicatedPostgres]:
    """Running when the block is entered; what a test kills stays down until it calls `watch`."""
    directory = Path(tempfile.mkdtemp(prefix="headwater-pg-"))
    directory.chmod(0o755)
    servers = ReplicatedPostgres(directory, tuple(free_port() for _ in range(count)), settings=settings, sync=False)
    try:
        servers.start()
        yield servers
    finally:
        servers.kill()
        shutil.rmtree(directory)
