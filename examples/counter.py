"""An event-sourced counter: the stream holds what happened, the value is what that adds up to.

    python examples/counter.py add 5
    python examples/counter.py add -2
    python examples/counter.py show
    python examples/counter.py watch

Invariant: the counter never goes below zero, however many writers there are. A writer decides on the state it has read
and says so with `Stream-Seq`: if another one was faster, the server refuses (409), and the writer decides again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headwater.client import Client, ConflictError, Snapshot, Stream

SNAPSHOT_EVERY = 50
"""Events after which the state is published as a snapshot, so that nobody reads them all again."""


class WouldBeNegative(Exception):
    """The rule of this counter."""


@dataclass(slots=True)
class Counter:
    """The state: what the events add up to, and how many there were."""

    value: int = 0
    version: int = 0

    def restore(self, snapshot: Snapshot | None) -> None:
        saved = json.loads(snapshot.body) if snapshot is not None else {"value": 0, "version": 0}
        self.value, self.version = saved["value"], saved["version"]

    def apply(self, message: bytes) -> None:
        self.value += json.loads(message)["add"]
        self.version += 1


@contextmanager
def open_counter(url: str, name: str) -> Iterator[Stream]:
    """The counter's stream, created if it does not exist."""
    with Client(url) as client:
        bucket = client.bucket("counters")
        bucket.create(exist_ok=True)
        stream = bucket.stream(name)
        stream.create()
        yield stream


def load(stream: Stream) -> Counter:
    """The state as of now: the latest snapshot and what came after it."""
    counter = Counter()
    next(stream.follow_state(counter))
    return counter


def add(stream: Stream, amount: int) -> Counter:
    """Decide, append, and try again if another writer appended in between."""
    while True:
        counter = load(stream)
        if counter.value + amount < 0:
            raise WouldBeNegative(f"the counter is at {counter.value}; {amount} would bring it below zero")
        event = json.dumps({"add": amount}).encode()
        try:
            offset = stream.append(event, seq=f"{counter.version + 1:020}").next_offset
        except ConflictError:
            continue
        counter.apply(event)
        if counter.version % SNAPSHOT_EVERY == 0:
            state = json.dumps({"value": counter.value, "version": counter.version}).encode()
            stream.publish_snapshot(offset, state, "application/json")
        return counter


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--url", default=os.environ.get("DS_URL", "http://localhost:4437"), help="the server")
    parser.add_argument("--name", default="visits", help="which counter")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("add", help="add a number, which may be negative").add_argument("amount", type=int)
    commands.add_parser("show", help="print the value")
    commands.add_parser("watch", help="print the value whenever it changes")
    arguments = parser.parse_args()
    with open_counter(arguments.url.rstrip("/"), arguments.name) as stream:
        if arguments.command == "add":
            try:
                print(add(stream, arguments.amount).value)
            except WouldBeNegative as refused:
                sys.exit(str(refused))
        elif arguments.command == "show":
            print(load(stream).value)
        else:
            counter = Counter()
            shown: int | None = None
            for _ in stream.follow_state(counter):
                if counter.version != shown:
                    shown = counter.version
                    print(counter.value, flush=True)


if __name__ == "__main__":
    main()
