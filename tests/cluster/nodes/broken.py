"""A server with one rule of the cluster left out: `python -m tests.cluster.nodes.broken FAULT serve …`."""

from __future__ import annotations

import sys
from collections.abc import Callable

from headwater.cli import main
from headwater.cluster.nodes.node_worker import NodeWorker


def reads_without_a_lease() -> None:
    """A process that was paused for longer than its lease answers as if it still owned its shard."""

    def check(self: NodeWorker) -> None:
        """Nothing."""

    NodeWorker._check = check  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {fault.__name__: fault for fault in (reads_without_a_lease,)}


if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    main(sys.argv[2:])
