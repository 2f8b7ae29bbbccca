"""Servers with one deliberate fault each, which the checkers of this package must detect.

    python -m tests.pressure.faults FAULT serve --port 0

Each fault patches the real server and then runs it. A checker that no fault can make fail proves nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from headwater.cli import main
from headwater.core.errors import StorageBusy
from headwater.engine.engine import Engine
from headwater.engine.freed_memory import MemoryReturn
from headwater.http.connection import Connection
from headwater.operating_system import Linux, glibc
from headwater.storage.acid import environment, shard
from tests.model.broken import BROKEN
from tests.pressure.metered import stalls_on_heads


def _model_fault(way: str) -> Callable[[], None]:
    """One of the model test's broken engines, active for the whole process."""

    def bend() -> None:
        broken = BROKEN[way].patch
        assert broken is not None
        broken().__enter__()

    return bend


def swaps_pipelined_requests() -> None:
    """Responses to two reads in one segment are sent in the wrong order."""
    receive = Connection.data_received

    def swapped(self: Connection, data: bytes) -> None:
        first, _, rest = data.partition(b"\r\n\r\n")
        second, end, rest = rest.partition(b"\r\n\r\n")
        if end and all(head.startswith((b"GET ", b"HEAD ")) for head in (first, second)):
            data = b"\r\n\r\n".join((second, first, rest))
        receive(self, data)

    Connection.data_received = swapped  # type: ignore[method-assign]


def loses_a_byte_between_segments() -> None:
    receive = Connection.data_received
    calls = itertools.count(1)

    def forgetful(self: Connection, data: bytes) -> None:
        receive(self, data[:-1] if next(calls) % 50 == 0 else data)

    Connection.data_received = forgetful  # type: ignore[method-assign]


def sends_a_stray_byte() -> None:
    """The response to a HEAD is followed by a stray byte."""
    receive = Connection.data_received

    def generous(self: Connection, data: bytes) -> None:
        receive(self, data)
        if b"HEAD " in data:
            self._transport.write(b"x")

    Connection.data_received = generous  # type: ignore[method-assign]


def reads_a_request_twice() -> None:
    """A segment that is one whole append is processed twice, so there is a second, unexpected response."""
    receive = Connection.data_received
    calls = itertools.count(1)

    def twice(self: Connection, data: bytes) -> None:
        receive(self, data)
        if data.startswith(b"POST ") and next(calls) % 20 == 0:
            receive(self, data)

    Connection.data_received = twice  # type: ignore[method-assign]


FUZZ_FAULTS: dict[str, Callable[[], None]] = {
    "swaps_pipelined_requests": swaps_pipelined_requests,
    "loses_a_byte_between_segments": loses_a_byte_between_segments,
    "sends_a_stray_byte": sends_a_stray_byte,
    "reads_a_request_twice": reads_a_request_twice,
    "appends_repeats_again": _model_fault("appends repeats again"),
    "takes_producer_gaps": _model_fault("accepts producer gaps"),
    "appends_to_closed_streams": _model_fault("appends to closed streams"),
    "ignores_stream_seq": _model_fault("ignores Stream-Seq"),
}


def forgives_malformed_heads() -> None:
    """Blanks before a colon and bare line feeds are corrected before the parser sees them."""
    receive = Connection.data_received

    def forgiving(self: Connection, data: bytes) -> None:
        data = data.replace(b"\r\n", b"\n").replace(b" :", b":").replace(b"\0", b"").replace(b"\n", b"\r\n")
        receive(self, data)

    Connection.data_received = forgiving  # type: ignore[method-assign]


def leaks_with_every_append() -> None:
    """Each append leaves 30 kB of memory and a descriptor behind."""
    append = Engine.append
    kept: list[object] = []

    def leaky(self: Engine, *args: Any, **more: Any) -> None:
        kept.append((bytearray(os.urandom(30_000)), os.open(os.devnull, os.O_RDONLY)))
        append(self, *args, **more)

    Engine.append = leaky  # type: ignore[method-assign]


def slows_with_every_append() -> None:
    """Each append iterates over all earlier appends."""
    append = Engine.append
    kept: list[object] = []

    def slow(self: Engine, *args: Any, **more: Any) -> None:
        kept.append(args)
        for _ in range(30 * len(kept)):
            pass
        append(self, *args, **more)

    Engine.append = slow  # type: ignore[method-assign]


def keeps_freed_memory() -> None:
    """Freed memory is not returned to the system."""

    def nothing(self: MemoryReturn, now_s: float) -> None:
        """Do nothing, as if little had been freed."""

    MemoryReturn.check = nothing  # type: ignore[method-assign]
    # The value that glibc itself would raise it to: it then keeps the memory of smaller blocks.
    glibc.MAPPED_MIN_BYTES = 32 * 1024 * 1024  # type: ignore[misc]


def keeps_something_for_every_connection() -> None:
    """Each connection leaks 100 kB."""
    made = Connection.connection_made
    kept: list[bytearray] = []

    def costly(self: Connection, *args: Any) -> None:
        kept.append(bytearray(os.urandom(100_000)))
        made(self, *args)

    Connection.connection_made = costly  # type: ignore[assignment,method-assign]


def buffers_for_silent_readers() -> None:
    """A full socket does not stop the server from writing."""

    def ignored(self: Connection) -> None:
        """Do nothing, as if the socket were writable."""

    Connection.pause_writing = ignored  # type: ignore[method-assign]


def refuses_some_appends() -> None:
    """The third append, and every twentieth after it, is refused as if the disk were slow."""
    append = Engine.append
    calls = itertools.count()

    def busy(self: Engine, *args: Any, **more: Any) -> None:
        if next(calls) % 20 == 2:
            raise StorageBusy("Retry in a moment.", (("Retry-After", "1"),))
        append(self, *args, **more)

    Engine.append = busy  # type: ignore[method-assign]


HOLD = Path("hold")
"""The syncs of checkpoints wait while this file exists, so that a start and a stop take no longer than usual."""
CHECKPOINT_WAITS = "a sync of a checkpoint waits"
JOURNAL_SYNCS = Path("journal-syncs")
"""A file with a byte for each sync of the journal."""


def holds_checkpoints(disk: AbstractContextManager[object] = nullcontext()) -> None:  # noqa: B008
    """The syncs of checkpoints wait for the test, and those of the journal are counted."""
    sync_data, writing = Linux.sync_data, environment.writing

    def sync_checkpoint() -> None:
        with disk:
            if HOLD.exists():
                logging.getLogger(__name__).warning(CHECKPOINT_WAITS)
            while HOLD.exists():
                time.sleep(0.01)

    def counting_sync(self: Linux, descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().suffix == ".log":
            with disk, JOURNAL_SYNCS.open("ab") as counted:
                counted.write(b".")
        else:
            sync_checkpoint()
        sync_data(self, descriptor)

    @contextmanager
    def held_writing(path: Path) -> Iterator[None]:
        with writing(path):
            yield
        sync_checkpoint()

    Linux.sync_data = counting_sync  # type: ignore[method-assign]
    setattr(shard, "writing", held_writing)  # noqa: B010


def syncs_one_file_at_a_time() -> None:
    """The same, and a sync of the journal waits while a checkpoint is synced."""
    holds_checkpoints(threading.Lock())


FAULTS: dict[str, Callable[[], None]] = {
    **FUZZ_FAULTS,
    "forgives_malformed_heads": forgives_malformed_heads,
    "leaks_with_every_append": leaks_with_every_append,
    "slows_with_every_append": slows_with_every_append,
    "keeps_freed_memory": keeps_freed_memory,
    "keeps_something_for_every_connection": keeps_something_for_every_connection,
    "stalls_on_heads": stalls_on_heads,
    "buffers_for_silent_readers": buffers_for_silent_readers,
    "refuses_some_appends": refuses_some_appends,
    "holds_checkpoints": holds_checkpoints,
    "syncs_one_file_at_a_time": syncs_one_file_at_a_time,
}


if __name__ == "__main__":
    FAULTS[sys.argv[1]]()
    main(sys.argv[2:])
