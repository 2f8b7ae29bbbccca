"""Compact and vacuum an archive at regular intervals while it is written."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from headwater.pipeline.archive.table import ArchiveTable

log = logging.getLogger("headwater.pipeline")


class ArchiveMaintenance:
    """Call `run_if_due()` after each batch. The work is done in a thread, so that archiving continues."""

    def __init__(self, lake: Path, every_s: float, keep_s: float) -> None:
        self._lake = lake
        self._every_s = every_s
        self._keep_s = keep_s
        self._due_at = time.monotonic() + every_s
        self._thread: threading.Thread | None = None

    def run_if_due(self) -> None:
        is_running = self._thread is not None and self._thread.is_alive()
        if not self._every_s or is_running or time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + self._every_s
        self._thread = threading.Thread(target=self._run, name="headwater-archive-maintenance", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the run in progress has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            table = ArchiveTable(self._lake)
            replaced, by = table.compact()
            deleted = table.vacuum(self._keep_s)
        except Exception:  # The next run may succeed; archiving must continue.
            log.exception("Maintenance of %s failed.", self._lake)
        else:
            log.info("%s: compacted %d files into %d, deleted %d", self._lake, replaced, by, deleted)
