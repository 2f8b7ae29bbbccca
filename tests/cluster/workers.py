"""Workers of a running server, for tests: their processes, and names that each of them owns."""

from __future__ import annotations

import itertools

import psutil

from headwater.cluster.shards import ShardMap
from headwater.storage.directory import LOCK_NAME
from tests.serving import Server
from tests.waiting import wait_until


def processes(server: Server) -> list[psutil.Process]:
    """The worker processes, ordered by number, which is the order of their start."""
    return sorted(psutil.Process(server.pid).children(), key=lambda process: (process.create_time(), process.pid))


def process_of(server: Server, worker: int) -> psutil.Process:
    """The process of a worker of a durable server, even after restarts."""
    store = next(server.directory.rglob(f"workers-*/{worker:02}"))
    return psutil.Process(int((store / LOCK_NAME).read_text()))


def name_in(worker: int, workers: int, prefix: str = "s") -> str:
    """A stream name whose shard the worker owns."""
    shard_map = ShardMap(16, workers)
    names = (f"{prefix}{number}" for number in itertools.count())
    return next(name for name in names if shard_map.owner_of(name) == worker)


def wait_for_restart(server: Server, pids: set[int], count: int) -> None:
    """Wait until there are `count` workers and the given ones are replaced."""
    wait_until(
        lambda: len(processes(server)) == count and not pids & {process.pid for process in processes(server)},
        what="the workers to be replaced",
    )
