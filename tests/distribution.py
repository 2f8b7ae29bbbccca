"""How the tests are distributed over the processes of `make test`: whole files, those that take longest first.

What a file starts for all of its tests is started once, and no long file is left for the end. A Spark session takes
many seconds of CPU time to start, so only a few processes get the tests that use it.

Invariant: every file is run by one process, and tests of Spark by at most `SPARK_PROCESSES`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

SPARK_PROCESSES = 2
SPARK = ("tests/spark/", "tests/pipeline/")
LONG = ("tests/stack/", "tests/crash/", "tests/conformance/", "tests/cluster/", "tests/model/", "tests/kills/")
LONG += ("tests/docs/", "tests/ui/", "tests/storage/", "tests/pressure/", "tests/examples/", "tests/test_build_hook.py")
"""Directories with files that take half a minute and more, the longest first."""


def rank(file: str) -> int:
    """When a file is to be started: files of Spark, then the others that are long, then the rest."""
    return next((number for number, start in enumerate((*SPARK, *LONG)) if file.startswith(start)), len(SPARK + LONG))


class Distribution(LoadScopeScheduling):
    """xdist's distribution by file, which gives each process the first file in our order that it may have."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]

    def _choice(self, node: WorkerController) -> str | None:
        """The file that this process runs next; None if only files remain that are left to other processes."""
        of_spark = [one for one, files in self.assigned_work.items() if any(file.startswith(SPARK) for file in files)]
        may_use_spark = node in of_spark or len(of_spark) < SPARK_PROCESSES
        files = [file for file in self.workqueue if may_use_spark or not file.startswith(SPARK)]
        return min(files, key=rank, default=None)

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = self._choice(node)
        if file is not None:
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if self.workqueue and self._choice(node) is None and not node.shutting_down:
            node.shutdown()
        else:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return Distribution(config, log) if config.getvalue("dist") == "loadfile" else None
