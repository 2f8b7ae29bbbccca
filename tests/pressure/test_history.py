"""Concurrent clients during kills, stops, cut connections and disk errors: their history violates no guarantee."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.crash.wire import Client, Lost, NotSent, Reply
from tests.crash.workload import Violation
from tests.pressure.clients import answered
from tests.pressure.disruptions import ACKS_MIN, DISRUPTIONS, OF_WORKERS, run_disruptions
from tests.pressure.history import History, Operation, Producer, check

ROUNDS_LONG = 120
WORKER_ROUNDS_LONG = 100
WITHOUT_PROMISE = {"file-fast": {"full", "failing_disk", "no_space"}}
"""Disruptions after which a mode guarantees nothing."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["file-durable", "acid", "file-fast"])
def test_history_is_valid_after_disruptions(tmp_path: Path, mode: str, long: bool) -> None:
    names = [name for name in DISRUPTIONS if name not in WITHOUT_PROMISE.get(mode, ())]
    seed = time.time_ns() % 10**9 if long else 20_263
    disruptions = random.Random(seed).choices(names, k=ROUNDS_LONG) if long else names
    counts = asyncio.run(run_disruptions(tmp_path, mode, disruptions, seed))
    for what in ("append", "read", "tail", "create", "delete", "unknown", "events"):
        assert counts[what] > len(disruptions), f"too few {what} for a check: {counts}"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_history_is_valid_after_the_death_of_workers(tmp_path: Path, mode: str, long: bool) -> None:
    """kill -9 and SIGSTOP of random workers, and, besides these, of the supervisor with all of them."""
    seed = time.time_ns() % 10**9 if long else 20_264
    generator = random.Random(seed)
    both = list(OF_WORKERS)
    of_workers = generator.choices(both, k=WORKER_ROUNDS_LONG) if long else [*both, *both, "kill_worker"]
    disruptions = of_workers + ["kill", "cut"] * (10 if long else 1)
    generator.shuffle(disruptions)
    counts = asyncio.run(run_disruptions(tmp_path, mode, disruptions, seed, workers=2))
    assert sum(counts[name] for name in OF_WORKERS) == len(of_workers)
    for what in ("append", "read", "tail", "create", "delete", "events", "work appended"):
        assert counts[what] > len(disruptions), f"too few {what} for a check: {counts}"
    assert counts["acks"] > ACKS_MIN, f"too few acks for a check: {counts}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "mode"),
    [
        ("acknowledges_before_it_writes", "file-durable"),
        ("shows_what_is_not_durable", "file-durable"),
        ("forgets_producers", "file-durable"),
        ("forgets_deletions", "file-durable"),
        ("applies_only_some", "acid"),
    ],
)
def test_fault_is_detected_in_the_history(tmp_path: Path, fault: str, mode: str) -> None:
    with pytest.raises(Violation):
        asyncio.run(run_disruptions(tmp_path, mode, ["kill"] * 12, 3, fault=fault))


# -- the checks themselves

S = "/v1/stream/s"


class Story:
    """A history that is built from one completed operation at a time."""

    def __init__(self) -> None:
        self.history = History()

    def append(self, body: bytes, end: int, producer: Producer | None = None) -> Operation:
        operation = self.history.begin("append", S, body, producer)
        operation.end = end
        self.history.end(operation, "ok")
        return operation

    def read(self, body: bytes, start: int = 0) -> Operation:
        operation = self.history.begin("read", S, body, start=start)
        operation.end = start + len(body)
        operation.up_to_date = True
        self.history.end(operation, "ok")
        return operation

    def create(self, body: bytes) -> Operation:
        operation = self.history.begin("create", S, body)
        self.history.end(operation, "ok")
        return operation

    def delete(self) -> None:
        self.history.end(self.history.begin("delete", S), "ok")

    def missing(self) -> None:
        self.history.end(self.history.begin("read", S), "missing")


def lost_append(story: Story) -> bytes:
    story.append(b"a;", 2)
    story.append(b"b;", 4)
    return b"a;"


def misplaced_append(story: Story) -> bytes:
    story.append(b"a;", 2)
    story.append(b"b;", 4)
    return b"b;a;"


def same_offset(story: Story) -> bytes:
    story.append(b"a;", 2)
    story.append(b"a;", 2)
    return b"a;"


def changed_past(story: Story) -> bytes:
    story.history.begin("append", S, b"a;")
    story.history.begin("append", S, b"b;")
    story.read(b"a;")
    return b"b;"


def tail_went_back(story: Story) -> bytes:
    story.append(b"a;", 2)
    story.read(b"")
    return b"a;"


def appended_twice(story: Story) -> bytes:
    story.history.begin("append", S, b"a;", Producer("p", 0))
    return b"a;a;"


def out_of_order(story: Story) -> bytes:
    story.history.begin("append", S, b"a;", Producer("p", 0))
    story.history.begin("append", S, b"b;", Producer("p", 1))
    return b"b;a;"


def nobodys(story: Story) -> bytes:
    story.append(b"a;", 2)
    return b"a;x;"


def refused_is_there(story: Story) -> bytes:
    story.history.end(story.history.begin("append", S, b"a;"), "refused")
    return b"a;"


def torn(story: Story) -> bytes:
    story.append(b"a;", 2)
    return b"a;b"


def returned_after_delete(story: Story) -> None:
    story.create(b"one;")
    story.delete()
    story.read(b"one;")


def returned_after_successor(story: Story) -> None:
    story.create(b"one;")
    story.history.begin("delete", S)
    story.create(b"two;")
    story.read(b"one;")


def append_lost_within_a_life(story: Story) -> None:
    story.create(b"one;")
    story.append(b"a;", 6)
    story.read(b"one;")


def life_shrank(story: Story) -> None:
    story.create(b"one;")
    story.history.begin("append", S, b"a;")
    story.read(b"one;a;")
    story.read(b"one;")


def in_two_lives(story: Story) -> None:
    story.history.begin("append", S, b"a;")
    story.create(b"one;")
    story.read(b"one;a;")
    story.delete()
    story.create(b"two;")
    story.read(b"two;a;")


def missing_without_a_deletion(story: Story) -> None:
    story.create(b"one;")
    story.missing()


def read_before_it_was_created(story: Story) -> None:
    story.read(b"one;")
    story.create(b"one;")


WRONG: list[Callable[[Story], bytes | None]] = [
    lost_append,
    misplaced_append,
    same_offset,
    changed_past,
    tail_went_back,
    appended_twice,
    out_of_order,
    nobodys,
    refused_is_there,
    torn,
    returned_after_delete,
    returned_after_successor,
    append_lost_within_a_life,
    life_shrank,
    in_two_lives,
    missing_without_a_deletion,
    read_before_it_was_created,
]


@pytest.mark.parametrize("tell", WRONG, ids=lambda tell: str(tell.__name__))
def test_invalid_history_is_a_violation(tell: Callable[[Story], bytes | None]) -> None:
    story = Story()
    content = tell(story)
    with pytest.raises(Violation):
        check(story.history, {} if content is None else {S: content})


def test_append_with_unknown_outcome_may_be_present_or_missing() -> None:
    for content in (b"a;", b"a;b;"):
        story = Story()
        story.append(b"a;", 2)
        story.history.begin("append", S, b"b;")
        check(story.history, {S: content})


def test_successive_incarnations_are_valid() -> None:
    story = Story()
    story.missing()
    story.create(b"one;")
    story.append(b"a;", 6)
    story.read(b"one;a;")
    story.delete()
    story.missing()
    story.create(b"two;")
    story.read(b"two;")
    check(story.history, {})


class SlowlyHealthy(Client):
    """Fails in each way before it answers."""

    def __init__(self) -> None:
        self.attempts: list[Exception | int] = [NotSent(), Lost(), TimeoutError(), 503, 200]

    async def request(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        found = self.attempts.pop(0)
        if isinstance(found, Exception):
            raise found
        return Reply(found, {}, b"")


def test_first_and_last_requests_of_a_run_wait_for_a_busy_server() -> None:
    client = SlowlyHealthy()
    assert asyncio.run(answered(client, "GET", "/v1/stream/kept")).status == 200
    assert not client.attempts
