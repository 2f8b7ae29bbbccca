"""The round trip under load: a writer, a fold that publishes snapshots, and readers that disconnect and return.

The test keeps the full history. Every reader must end with the fold of all of it; `Table.apply` fails at the first
update that is missing or duplicated.
"""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field

import httpx
import pytest

from headwater.client import Stream
from headwater.client.reading import Live
from tests.client.folding import SNAPSHOT_TYPE, Table
from tests.serving import Server, serve

KEYS = 200
SNAPSHOTS = 3
EXTRA_S = 60.0


@dataclass
class Run:
    url: str
    seconds: float
    readers: int
    history: list[bytes] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    snapshots: int = 0
    tables: list[Table] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def guarded(self, work: object, *args: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*args)  # type: ignore[operator]
            except BaseException as error:
                self.errors.append(error)

        return threading.Thread(target=run)

    def is_enough(self, seconds: float) -> bool:
        """Whether all that must happen has happened, in at least the given time; a busy machine may need more."""
        has_happened = self.snapshots >= SNAPSHOTS and max((table.restored for table in self.tables), default=0) >= 2
        return seconds >= self.seconds and (has_happened or seconds >= self.seconds + EXTRA_S)

    def write(self) -> None:
        with Stream(self.url) as stream:
            self._write(stream)

    def _write(self, stream: Stream) -> None:
        generator = random.Random(1)
        began = time.monotonic()
        while not self.is_enough(time.monotonic() - began) and not self.errors:
            batch: list[bytes] = []
            for _ in range(generator.randint(1, 20)):
                value = generator.choice([None, len(self.history) + len(batch), "x" * generator.randint(0, 100)])
                event = {
                    "number": len(self.history) + len(batch),
                    "key": f"k{generator.randrange(KEYS)}",
                    "value": value,
                }
                batch.append(json.dumps(event).encode())
            stream.append_many(batch)
            self.history += batch
            time.sleep(0.002)
        stream.close()
        self.done.set()

    def fold(self) -> None:
        """Follow like any reader, and publish a snapshot occasionally."""
        table, published = Table(), time.monotonic()
        with Stream(self.url) as stream:
            for progress in stream.follow_state(table):
                if time.monotonic() - published > 0.3:
                    stream.publish_snapshot(progress.next_offset, table.snapshot(), SNAPSHOT_TYPE)
                    self.snapshots += 1
                    published = time.monotonic()

    def read(self, number: int) -> None:
        """Follow for a while, pause, and resume, repeatedly; finally follow until the stream is closed."""
        generator = random.Random(number)
        table = Table()
        self.tables.append(table)
        live: Live = generator.choice(["sse", "sse", "long-poll"])
        with Stream(self.url) as stream:
            for progress in stream.follow_state(table, live=live):
                if not self.done.is_set() and generator.random() < 0.05:
                    time.sleep(generator.random())
                assert not self.errors
                if progress.closed:
                    return


def run_on(server: Server, seconds: float, readers: int) -> Run:
    assert httpx.put(f"{server.url}/ds/round-trip").status_code == 201
    url = f"{server.url}/ds/round-trip/state"
    with Stream(url) as stream:
        stream.create()
    run = Run(url, seconds, readers)
    threads = [run.guarded(run.write), run.guarded(run.fold)]
    threads += [run.guarded(run.read, number) for number in range(readers)]
    for number, thread in enumerate(threads):
        thread.start()
        if number >= 2:
            time.sleep(seconds / 2 / readers)
    for thread in threads:
        thread.join(timeout=seconds * 10 + 2 * EXTRA_S)
        assert not thread.is_alive()
    return run


@pytest.mark.parametrize("mode", ["memory", "file-durable", "acid"])
def test_every_reader_ends_with_the_fold_of_the_full_history(mode: str, long: bool) -> None:
    with serve(DS_STORAGE__MODE=mode, DS_LIMITS__MAX_STREAM_BYTES="0", DS_SERVER__LONG_POLL_TIMEOUT_SECS="2") as server:
        run = run_on(server, seconds=60.0 if long else 4.0, readers=50)
    assert not run.errors, run.errors[0]
    expected = Table()
    for event in run.history:
        expected.apply(event)
    assert expected.applied > 200
    assert run.snapshots >= SNAPSHOTS
    assert len(run.tables) == 50
    for table in run.tables:
        assert (table.applied, table.values) == (expected.applied, expected.values)
    # Retention must have overtaken some readers; otherwise the test would not cover that case.
    assert max(table.restored for table in run.tables) >= 2
