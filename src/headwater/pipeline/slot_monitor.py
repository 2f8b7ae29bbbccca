"""Watch the replication slots of running jobs: publish their lag, warn, and drop a slot before it fills the disk."""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import psycopg

from headwater.pipeline.from_postgres import FromPostgres
from headwater.pipeline.status import error_state, slot_value
from headwater.pipeline.supervisor import JobSupervisor, SupervisedJob
from headwater.postgres import slots, snapshots
from headwater.postgres.connections import Connection, connect

log = logging.getLogger("headwater.pipeline")

_INTERVAL_S: Final = 5.0


class SlotMonitor:
    """Call `poll()` regularly; it checks every five seconds. `values` has the status of each slot."""

    def __init__(self, postgres: str, supervisor: JobSupervisor) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self._postgres = postgres
        self._supervisor = supervisor
        self._checked_at = 0.0
        self._connection: Connection | None = None

    def poll(self) -> None:
        readers = [
            one for one in self._supervisor.supervised if isinstance(one.job, FromPostgres) and one.job.slot_tables
        ]
        now = time.monotonic()
        if not readers or now - self._checked_at < _INTERVAL_S:
            return
        self._checked_at = now
        try:
            if self._connection is None or self._connection.closed:
                self._connection = connect(self._postgres)
            for one in readers:
                assert isinstance(one.job, FromPostgres)
                self._check(self._connection, one, one.job)
        except psycopg.Error as error:
            log.warning("Cannot read the state of the replication slots: %s", " ".join(str(error).split()))
            self.close()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _check(self, connection: Connection, one: SupervisedJob, job: FromPostgres) -> None:
        found = slots.state(connection, job.slot)
        if found is None:
            self.values.pop(job.slot, None)
            return
        error = None
        if job.lag_bytes_warn and found.lag_bytes > job.lag_bytes_warn:
            error = error_state(f"Postgres keeps {found.lag_bytes >> 20} MiB of WAL for this slot.")
            log.warning("slot %s: %s", job.slot, error["message"])
        self.values[job.slot] = slot_value(found, error)
        if job.lag_bytes_max and found.lag_bytes > job.lag_bytes_max and not one.is_finished:
            self._give_up(connection, one, job, found.lag_bytes)

    def _give_up(self, connection: Connection, one: SupervisedJob, job: FromPostgres, lag_bytes: int) -> None:
        """Drop the slot: a full database disk is worse than a new first copy."""
        self._supervisor.fail(
            one,
            f"slot {job.slot} kept {lag_bytes >> 20} MiB, more than lag_bytes_max; it was dropped to keep the disk from"
            " filling. Remove the job's checkpoint to start with a new snapshot.",
        )
        slots.drop(connection, job.slot)
        snapshots.forget(connection, job.slot)
        self.values.pop(job.slot, None)
