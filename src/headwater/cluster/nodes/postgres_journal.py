"""The journal of a shard as rows in Postgres. One statement commits a batch, and only for the owner of the shard.

The statement moves the shard from the last record to the new one, on the condition that its epoch is ours, and inserts
the batch. It returns when a standby has it.

When a connection breaks after it was sent, or Postgres warns that the standby may not have it, the outcome is unknown:
a row that can be read on the primary may still be lost with it. So the statement is sent again. If it finds its own
work done, one more write under the same condition is made; when that returns without a warning, a standby has
everything before it. Only then is the batch acknowledged. A statement that was sent first and is carried out last does
nothing, because the shard has moved on.

A commit that waits for a standby also returns when the list of standbys is emptied, without a warning. So each commit
is followed, in the same round trip, by the question whether Postgres has read its settings again: it tells its sessions
to do so before it ends their waits. If it has, the outcome is unknown, as after a warning.

What is read at the opening cannot be lost either, although reading waits for no standby. The epoch was taken by a write
that a standby has (`ownership` ignores one with a warning). Every batch of an earlier epoch was committed before that
write, because both lock the row of the shard, so a standby has them too; and nobody but this process adds batches in
this epoch, because each process gets another one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import psycopg

from headwater.cluster.nodes.schema import SETTINGS_READ, SYNCHRONOUS, Connection, connect
from headwater.storage.filesystem import Bytes
from headwater.storage.interface import WriteFailedError

log = logging.getLogger("headwater.cluster")

_COMMIT: Final = """
WITH moved AS (
    UPDATE headwater.shard SET seq = %(new)s WHERE id = %(shard)s AND epoch = %(epoch)s AND seq = %(old)s {}
    RETURNING seq
)
INSERT INTO headwater.journal (shard, seq, batch) SELECT %(shard)s, seq, %(batch)b FROM moved
RETURNING pg_conf_load_time()::text
"""
_CONFIRM: Final = """
UPDATE headwater.shard SET confirmed = confirmed + 1 WHERE id = %(shard)s AND epoch = %(epoch)s AND seq = %(new)s {}
RETURNING pg_conf_load_time()::text
"""
_TRIM: Final = """
DELETE FROM headwater.journal WHERE shard = %(shard)s AND seq <= %(lsn)s
AND EXISTS (SELECT 1 FROM headwater.shard WHERE id = %(shard)s AND epoch = %(epoch)s)
"""
NOT_SYNCHRONOUS: Final = (
    "Postgres does not replicate synchronously any more; check synchronous_standby_names and the standbys."
)
RETRY_S: Final = 0.1
FETCHED_ROWS: Final = 16
BATCH_MAX_BYTES: Final = 2**29
"""Postgres accepts values of up to 1 GiB."""


class PostgresJournal:
    """The journal of one shard, for the process that owns it in this epoch."""

    def __init__(
        self,
        url: str,
        shard: int,
        epoch: int,
        *,
        require_standby: bool = True,
        is_ours: Callable[[], bool] = lambda: True,
        retry_s: float = RETRY_S,
        keep_s: float = 0.0,
    ) -> None:
        """`keep_s`: how long batches are kept that the object store has, for standbys that have not read them yet."""
        self._url = url
        self.shard: Final = shard
        self.epoch: Final = epoch
        self._is_ours = is_ours
        """Whether to continue retries: the lease has not expired."""
        self._retry_s = retry_s
        self._keep_s = keep_s
        self._require_standby = require_standby
        condition = SYNCHRONOUS if require_standby else ""
        self._commit_statement = _COMMIT.format(condition)
        self._confirm_statement = _CONFIRM.format(condition)
        self._is_warned = False
        self._connection: Connection | None = None
        found, seq = self._epoch_and_seq()
        if found != epoch:
            self.close()
            raise WriteFailedError(f"Shard {shard} was taken over by another node: its epoch is {found}, not {epoch}.")
        self.last_lsn: Final = seq

    # -- as the replica of a journal -------------------------------------------------------------------------------

    def append(self, last_lsn: int, new_lsn: int, frame: Sequence[Bytes]) -> None:
        batch = b"".join(frame)
        if len(batch) > BATCH_MAX_BYTES:
            raise WriteFailedError(
                f"A batch of {len(batch)} bytes exceeds the limit of a cluster ({BATCH_MAX_BYTES} bytes);"
                " send smaller appends."
            )
        while True:
            try:
                if self._commit(last_lsn, new_lsn, batch):
                    return
                problem = "no standby has confirmed it"
            except psycopg.OperationalError as error:
                problem = str(error).strip()
                self.close()
            except psycopg.Error as error:
                raise WriteFailedError(f"Postgres refused a batch of shard {self.shard}: {error}") from error
            if not self._is_ours():
                raise WriteFailedError(f"Whether a batch of shard {self.shard} was committed is unknown: {problem}")
            log.warning("a commit of shard %d is retried: %s", self.shard, problem)
            time.sleep(self._retry_s)

    def batches(self, after_lsn: int) -> Iterator[bytearray]:
        return read_batches(self._connected(), self.shard, after_lsn)

    def trim(self, lsn: int) -> None:
        if self._keep_s:
            timer = threading.Timer(self._keep_s, self._delete, [lsn])
            timer.daemon = True
            timer.start()
        else:
            self._delete(lsn)

    def _delete(self, lsn: int) -> None:
        # On a separate connection: another thread commits.
        try:
            with connect(self._url, f"trim {self.shard}") as connection:
                connection.execute("SET synchronous_commit = off")
                connection.execute(_TRIM, {"shard": self.shard, "epoch": self.epoch, "lsn": lsn})
        except psycopg.Error as error:
            log.warning("the journal of shard %d will be trimmed later: %s", self.shard, error)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # -- implementation --------------------------------------------------------------------------------------------

    def _commit(self, old: int, new: int, batch: bytes) -> bool:
        """Whether the batch is certainly committed. Raises `WriteFailedError` if it never can be."""
        if self._write(self._commit_statement, old=old, new=new, batch=batch):
            if not self._is_warned:
                return True
        else:
            epoch, seq = self._epoch_and_seq()
            if epoch != self.epoch:
                raise WriteFailedError(f"Shard {self.shard} was taken over by another node.")
            if seq == old:
                raise WriteFailedError(NOT_SYNCHRONOUS)
            if seq != new:
                raise WriteFailedError(f"The journal of shard {self.shard} is at record {seq}, not at {old}.")
        return self._confirm(new)

    def _confirm(self, new: int) -> bool:
        """Return whether a standby also has the batch, by one more replicated write."""
        if not self._write(self._confirm_statement, new=new):
            if self._epoch_and_seq() == (self.epoch, new):
                raise WriteFailedError(NOT_SYNCHRONOUS)
            raise WriteFailedError(f"Shard {self.shard} was taken over by another node.")
        return not self._is_warned

    def _write(self, statement: str, **values: object) -> bool:
        """Whether the statement changed anything. `_is_warned` is then whether that may not be replicated."""
        connection = self._connected()
        self._is_warned = False
        parameters = {"shard": self.shard, "epoch": self.epoch, **values}
        if not self._require_standby:
            return connection.execute(statement, parameters).fetchone() is not None
        with connection.pipeline() as pipeline:
            changed = connection.execute(statement, parameters)
            pipeline.sync()  # The end of the transaction, which waits for the standby.
            asked = connection.execute(SETTINGS_READ)
        read_before = changed.fetchone()
        if read_before is None:
            return False
        if read_before != asked.fetchone():
            log.warning("Postgres has read its settings again during a commit of shard %d", self.shard)
            self._is_warned = True
        return True

    def _epoch_and_seq(self) -> tuple[int, int]:
        row = self._connected().execute("SELECT epoch, seq FROM headwater.shard WHERE id = %s", [self.shard]).fetchone()
        if row is None:
            raise WriteFailedError(f"Postgres does not know shard {self.shard}; check cluster.postgres_url.")
        return int(str(row[0])), int(str(row[1]))

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._url, f"shard {self.shard}")
            self._connection.add_notice_handler(self._on_notice)
        return self._connection

    def _on_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        # The message is translated, its severity in this field is not.
        if notice.severity_nonlocalized == "WARNING":
            log.warning("Postgres warns about shard %d: %s", self.shard, notice.message_primary)
            self._is_warned = True


def read_batches(connection: Connection, shard: int, after_lsn: int) -> Iterator[bytearray]:
    """The batches of a shard that have records after this one, in order."""
    seq = after_lsn
    while True:
        rows = connection.execute(
            "SELECT seq, batch FROM headwater.journal WHERE shard = %s AND seq > %s ORDER BY seq LIMIT %s",
            [shard, seq, FETCHED_ROWS],
            binary=True,
        )
        found = rows.fetchall()
        if not found:
            return
        for number, batch in found:
            assert isinstance(number, int)
            assert isinstance(batch, bytes)
            seq = number
            yield bytearray(batch)
