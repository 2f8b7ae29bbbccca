"""A server with one rule of the cluster left out: `python -m tests.cluster.nodes.broken FAULT serve …`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from headwater.cli import main
from headwater.cluster.nodes.node_worker import NodeWorker
from headwater.cluster.nodes.postgres_journal import PostgresJournal
from headwater.cluster.nodes.standby import StandbyJournal
from headwater.cluster.nodes.standby_reads import OwnerPosition
from headwater.core.records import Record
from headwater.storage.tiering import standby_store
from headwater.storage.tiering.standby_store import FollowStep


def reads_without_a_lease() -> None:
    """A process that was paused for longer than its lease answers as if it still owned its shard."""

    def check(self: NodeWorker) -> None:
        """Nothing."""

    NodeWorker._check = check  # type: ignore[method-assign]


def answers_from_a_stale_standby() -> None:
    """A standby reads the journal only once, and not when it takes the shard over."""
    catch_up, last_lsn_of = standby_store._catch_up, StandbyJournal.last_lsn
    read: list[int] = []

    def last_lsn_at_first(self: StandbyJournal) -> int | None:
        found = None if read else last_lsn_of(self)
        read.extend([] if found is None else [found])
        return found

    def catch_up_as_standby(recovery: Any, journal: Any, last_lsn: int) -> Iterator[Record | FollowStep]:
        if not isinstance(journal, PostgresJournal):
            yield from catch_up(recovery, journal, last_lsn)

    setattr(standby_store, "_catch_up", catch_up_as_standby)  # noqa: B010 - mypy rejects a plain assignment
    StandbyJournal.last_lsn = last_lsn_at_first  # type: ignore[method-assign]


def answers_reads_without_asking() -> None:
    """A standby answers reads from what it happens to have."""

    async def is_current(self: OwnerPosition) -> bool:
        return True

    OwnerPosition.is_current = is_current  # type: ignore[method-assign]


def acknowledges_what_it_can_read() -> None:
    """A commit without the confirmation of a standby counts if its row can be read on the primary."""

    def confirm(self: PostgresJournal, new: int) -> bool:
        return self._epoch_and_seq()[1] == new

    PostgresJournal._confirm = confirm  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    fault.__name__: fault
    for fault in (
        reads_without_a_lease,
        answers_from_a_stale_standby,
        answers_reads_without_asking,
        acknowledges_what_it_can_read,
    )
}


if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    main(sys.argv[2:])
