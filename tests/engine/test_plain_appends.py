"""A plain append has the same effect and result as the same append that takes the usual path."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headwater.core.errors import Refusal
from headwater.core.offsets import parse_token
from headwater.core.records import RetentionPolicy
from headwater.core.rules import CreateRequest
from headwater.engine.engine import Engine
from headwater.engine.namespaces import NamespaceLimits, NamespaceRule
from headwater.engine.quota import EngineLimits
from headwater.engine.results import Appended
from tests.engine.seams import Backing, JournalBacking, ManualClock, ManualScheduler, MemoryBacking

TEXT, JSON = "text/plain", "application/json"
BODIES = (b"x", b"[1,2,3]", b'{"a":"b"}', b"[", b"", b"[]", b"y" * 40_000, b"[" + b"1," * 400 + b"1]")


class EngineHarness:
    """An engine in which appends take one of the two paths."""

    def __init__(self, backing: type[Backing], limits: EngineLimits, *, plain: bool) -> None:
        self.clock = ManualClock()
        self.scheduler = ManualScheduler(self.clock)
        self.storage = backing().open()
        self.engine = Engine(self.storage, self.clock, self.scheduler, limits, commit="inline")
        self.engine.start()
        self._plain = plain
        self.steps = 0
        """Appends that were complete when they returned."""

    def create(self, name: str, content_type: str, **more: Any) -> None:
        request = CreateRequest(
            name, content_type, more.get("ttl_secs"), None, False, b"", retention=more.get("retention")
        )
        self.engine.create(request, lambda _: None)
        self.scheduler.run_until_idle()

    def append(self, name: str, content_type: str | None, body: bytes) -> tuple[object, ...]:
        results: list[Appended | Refusal] = []
        try:
            if self._plain:
                token = self.engine.append_plain(name, content_type, body, results.append)
                if token is not None:
                    assert not results, "a result is reported once"
                    self.steps += 1
                    parsed = parse_token(token.decode())
                    assert parsed is not None
                    assert parsed.incarnation == self.engine.catalog.by_name[name].id
                    return parsed.offset.message_index, parsed.offset.byte_position
            else:
                self.engine.append(name, content_type, body, None, None, False, results.append)
        except Refusal as refusal:
            return type(refusal), refusal.detail
        self.scheduler.run_until_idle()
        [result] = results
        if isinstance(result, Refusal):
            return type(result), result.detail
        return result.tail_index, result.tail_position

    def close(self, name: str) -> None:
        self.engine.append(name, None, b"", None, None, True, lambda _: None)
        self.scheduler.run_until_idle()

    def state(self) -> list[object]:
        """Everything that an append changes, for each stream and in total."""
        engine = self.engine
        seen: list[object] = []
        for stream in engine.catalog:
            durable = stream.durable_index, stream.durable_position, stream.in_flight
            fields = stream.message_index, stream.byte_position, stream.accessed_ms, stream.written_ms, stream.closed
            data: bytes = b""
            runs: list[object] = []
            if stream.byte_position:
                chunk = engine.reader.chunk(stream, engine.reader.resolve(stream, "-1"), 1 << 30)
                data = b"".join(engine.reader.buffers(chunk))
                runs = list(self.storage.arrivals(stream.id, 0, stream.message_index))
            ages = None if stream.ages is None else stream.ages.saved()
            seen.append((stream.name, durable, fields, data, runs, ages))
        quota, metrics = engine.quota, engine.metrics
        seen.append((quota.content_bytes, quota.metadata_bytes, engine.storage_usage()))
        seen.append((metrics.appends, metrics.append_bytes, metrics.appended_messages))
        if quota.namespaces is not None:
            seen.append({name: usage.counts() for name, usage in quota.namespaces.here().items()})
        return seen


class Follower:
    def __init__(self) -> None:
        self.wakes = 0

    def wake(self) -> None:
        self.wakes += 1

    def gone(self, refusal: Refusal) -> None:
        raise AssertionError(refusal)


LIMITS = {
    "none": EngineLimits(),
    "stream": EngineLimits(max_stream_bytes=50_000),
    "total": EngineLimits(max_total_bytes=120_000),
    "namespaces": EngineLimits(namespaces=NamespaceRule(NamespaceLimits(max_bytes=60_000))),
}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("backing", [MemoryBacking, JournalBacking])
def test_both_paths_have_the_same_effect(backing: type[Backing], limits: EngineLimits) -> None:
    harnesses = [EngineHarness(backing, limits, plain=plain) for plain in (True, False)]
    followers = [Follower() for _ in harnesses]
    for harness, follower in zip(harnesses, followers, strict=True):
        for number in range(3):
            harness.create(f"tenant/text{number}", TEXT)
            harness.create(f"json{number}", JSON)
        harness.create("mortal", TEXT, ttl_secs=2)
        harness.create("aged", TEXT, retention=RetentionPolicy(max_age_secs=60))
        harness.create("followed", TEXT)
        harness.create("server", TEXT)
        harness.engine.server_streams.add("server")
        harness.engine.follow(harness.engine.look_up("followed"), follower)
    names = ["missing", *(stream.name for stream in harnesses[0].engine.catalog)]
    choose = random.Random(7)
    for step in range(600):
        name = choose.choice(names)
        content_type = choose.choice((TEXT, JSON, JSON + "; charset=utf-8", "Text/Plain", None))
        body = choose.choice(BODIES)
        passed_ms = choose.choice((0, 0, 1, 500, -300))
        for harness in harnesses:
            harness.clock.at_ms += passed_ms
            if step == 300:
                harness.close("tenant/text0")
                harness.close("json0")
        assert harnesses[0].append(name, content_type, body) == harnesses[1].append(name, content_type, body), (
            step,
            name,
        )
        assert harnesses[0].state() == harnesses[1].state(), (step, name, content_type, body[:20])
    assert followers[0].wakes == followers[1].wakes > 0
    assert (harnesses[0].steps > 20) == (backing is MemoryBacking and limits.namespaces is None)
    assert harnesses[1].steps == 0


def test_append_that_storage_refuses_changes_nothing() -> None:
    harness = EngineHarness(MemoryBacking, EngineLimits(max_total_bytes=10_000), plain=True)
    harness.create("s", TEXT)
    before = harness.state()
    assert harness.append("s", TEXT, b"x" * 20_000)[1]
    assert harness.state() == before
