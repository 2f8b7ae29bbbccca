"""A server with one rule of the cluster left out: `python -m tests.cluster.nodes.broken FAULT serve …`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from headwater.cli import main
from headwater.cluster.nodes import node_worker
from headwater.cluster.nodes.node_worker import NodeWorker
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.core.records import Record
from headwater.storage.tiering import following


def reads_without_a_lease() -> None:
    """A process that was paused for longer than its lease answers as if it still owned its shard."""

    def check(self: NodeWorker) -> None:
        """Nothing."""

    NodeWorker._check = check  # type: ignore[method-assign]


def answers_from_a_stale_standby() -> None:
    """A standby that takes a shard over does not read the end of its journal."""
    catch_up = following._catch_up

    def catch_up_as_standby(recovery: Any, journal: Any, last_lsn: int) -> Iterator[Record]:
        if not isinstance(journal, PostgresJournal):
            yield from catch_up(recovery, journal, last_lsn)

    setattr(following, "_catch_up", catch_up_as_standby)  # noqa: B010 - mypy has it otherwise
    setattr(node_worker, "FOLLOW_S", 2.0)  # noqa: B010


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault for fault in (reads_without_a_lease, answers_from_a_stale_standby)
}


if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    main(sys.argv[2:])
