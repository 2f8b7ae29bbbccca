"""How the tests are distributed over the processes of `make test`: whole files, those that take longest first.

What a file starts for all of its tests is started once, and no long file is left for the end. A Spark session or a
browser takes seconds of CPU time to start in each process, so only a few processes get the tests that use it.

Invariant: every file is run by one process, and the files of a directory in `FEW` by at most so many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from xdist.scheduler import LoadScopeScheduling

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling
    from xdist.workermanage import WorkerController

SPARK = ("tests/spark/", "tests/pipeline/")
BROWSER = ("tests/ui/",)
FEW = {SPARK: 2, BROWSER: 2}
"""How many processes run the files of these directories."""
ORDER = (
    *(*SPARK, *BROWSER),
    *("tests/stack/", "tests/crash/", "tests/conformance/", "tests/cluster/", "tests/model/", "tests/kills/"),
    *("tests/docs/", "tests/storage/", "tests/pressure/", "tests/examples/", "tests/test_build_hook.py"),
)
"""Directories with files that take a quarter of a minute and more, in the order in which they are started."""


def rank(file: str) -> int:
    return next((number for number, start in enumerate(ORDER) if file.startswith(start)), len(ORDER))


class Distribution(LoadScopeScheduling):  # type: ignore[misc]
    """xdist's distribution by file, which gives each process the first file in our order that it may have."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.split("::", 1)[0]

    def _left_to_others(self, node: WorkerController) -> tuple[str, ...]:
        """The directories whose files other processes run."""
        left: tuple[str, ...] = ()
        for directories, count in FEW.items():
            having = [
                one for one, files in self.assigned_work.items() if any(file.startswith(directories) for file in files)
            ]
            if node not in having and len(having) >= count:
                left += directories
        return left

    def _choice(self, node: WorkerController) -> str | None:
        """The file that this process runs next; None if only files remain that are left to others."""
        left = self._left_to_others(node)
        return min((file for file in self.workqueue if not file.startswith(left)), key=rank, default=None)

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = self._choice(node)
        if file is not None:
            self.workqueue.move_to_end(file, last=False)
            super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        is_nearly_done = self._pending_of(self.assigned_work[node]) <= 2
        if is_nearly_done and self.workqueue and not node.shutting_down and self._choice(node) is None:
            node.shutdown()
        else:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    return Distribution(config, log) if config.getvalue("dist") == "loadfile" else None
