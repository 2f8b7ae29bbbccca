"""The warm standby of a shard: a process that follows the journal of the shard in Postgres, to take it over quickly.

A standby reads the rows of the journal, and not whether a standby of Postgres has them. Such a row can only be lost if
another server becomes the primary, which then begins a new timeline. So everything is read on one timeline: if it is
another one after a reconnection, or when the shard is taken over, the standby begins again. A shard that is taken over
on the same timeline has every row that was read on it.

If clients read from the standby (`standby_reads`), it applies only rows that cannot be lost. Those are all but the last
one, because the owner commits one batch after the other, and the last one once the owner says that it is committed. It
says so with its epoch: a server of Postgres that does not have this epoch is a former primary, whose last row may be a
lost one that has the same number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import psycopg

from headwater.cluster.nodes.open_shard import open_journal, shard_objects, store_settings, tier_settings
from headwater.cluster.nodes.postgres_journal import read_batches
from headwater.cluster.nodes.schema import Connection, connect, newest_timeline
from headwater.config import Settings
from headwater.core.records import Record
from headwater.engine.open_storage import Store
from headwater.storage.blobs import BLOBS_NAME, FileBlobs
from headwater.storage.descriptor_reserve import DescriptorReserve
from headwater.storage.interface import StorageError
from headwater.storage.tiering.standby_store import FollowedStorage, FollowStep, OutdatedError, Promotion

log = logging.getLogger("headwater.cluster")


_POSITION: Final = """
SELECT epoch, seq,
    (SELECT max(journal.seq) FROM headwater.journal WHERE journal.shard = shard.id AND journal.seq < shard.seq)
FROM headwater.shard WHERE id = %s
"""


class CommittedPosition(NamedTuple):
    """What an owner has committed in its epoch, and so is replicated."""

    epoch: int
    lsn: int


class StandbyJournal:
    """The journal of a shard that another process writes."""

    def __init__(self, url: str, shard: int, *, waits_for_owner: bool = False) -> None:
        """One that `waits_for_owner` has only batches that are certainly replicated: readers may see them."""
        self._url = url
        self.shard: Final = shard
        self._connection: Connection | None = None
        self.timeline: int | None = None
        """The timeline of Postgres on which everything was read."""
        self.replicated_lsn = 0
        self._confirmed: CommittedPosition | None = CommittedPosition(0, 0) if waits_for_owner else None

    def confirm(self, committed: CommittedPosition) -> None:
        """Note what the owner has committed. Can be called from any thread."""
        self._confirmed = committed

    def last_lsn(self) -> int | None:
        try:
            row: Any = self._connected().execute(_POSITION, [self.shard]).fetchone()
        except psycopg.Error as error:
            log.debug("the journal of shard %d cannot be followed at the moment: %s", self.shard, error)
            self.close()
            return None
        if row is None:
            raise StorageError(f"Postgres does not know shard {self.shard}; check cluster.postgres_url.")
        epoch, last_lsn, previous_lsn = row
        self.replicated_lsn = self._replicated(epoch, last_lsn, previous_lsn or 0)
        return int(last_lsn)

    def _replicated(self, epoch: int, last_lsn: int, previous_lsn: int) -> int:
        confirmed = self._confirmed
        if confirmed is None:
            return last_lsn
        # A server that does not have the epoch may have other batches of the same numbers.
        return max(previous_lsn, min(last_lsn, confirmed.lsn)) if epoch >= confirmed.epoch else previous_lsn

    def batches(self, after_lsn: int) -> Iterator[bytearray]:
        try:
            yield from read_batches(self._connected(), self.shard, after_lsn)
        except psycopg.Error as error:
            raise OutdatedError(f"The journal of shard {self.shard} could not be read: {error}") from None

    def check_timeline(self) -> None:
        """Raise `OutdatedError` if another server is the primary now than the one that was read."""
        if self.timeline is not None and self.timeline != newest_timeline():
            raise OutdatedError("Another server of Postgres is the primary now.")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                connection.close()

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._url, f"standby of shard {self.shard}")
            self.check_timeline()
            self.timeline = newest_timeline()
        return self._connection


class StandbyStorage(FollowedStorage):
    journal: StandbyJournal

    def follow(self) -> Iterator[Record | FollowStep]:
        try:
            yield from super().follow()
        except psycopg.Error as error:
            raise StorageError(f"The journal of the shard cannot be read: {error}") from error


def open_standby(
    settings: Settings,
    shard: int,
    shards: int,
    directory: Path,
    open_packs_max: int,
    *,
    wait: Callable[[], int | None],
    on_warm: Callable[[], None],
    is_ours: Callable[[], bool],
) -> Store:
    """A store that follows the shard until `wait` returns the epoch of this process."""
    storage, cluster = settings.storage, settings.cluster
    assert storage.cold is not None
    journal = StandbyJournal(cluster.postgres_url, shard, waits_for_owner=cluster.standby_reads)

    def taken() -> Promotion | None:
        epoch = wait()
        if epoch is None:
            return None
        replica = open_journal(settings, shard, epoch, is_ours)
        journal.check_timeline()
        return Promotion(epoch, replica)

    opened = StandbyStorage(
        shard_objects(storage.cold, shard),
        directory,
        tier_settings(settings, shards),
        store_settings(settings, open_packs_max),
        journal=journal,
        wait=taken,
        on_warm=on_warm,
        reserve=DescriptorReserve(),
    )
    opened.journal = journal
    blobs = FileBlobs(opened.files, directory / BLOBS_NAME, durable=True)
    return Store(opened, blobs, opened.files, opened.files.cache.deferring)
