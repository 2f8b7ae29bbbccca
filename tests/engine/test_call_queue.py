"""The order of webhook calls: fair between hosts, with limits for each host and for hosts that do not answer."""

from __future__ import annotations

import random
from collections import Counter

from headwater.engine import call_queue
from headwater.engine.call_queue import CallQueue, HostHealth


def take_all(queue: CallQueue[int]) -> list[str]:
    """Return the hosts of all calls that may be made now."""
    hosts: list[str] = []
    while (taken := queue.take()) is not None:
        hosts.append(taken[0])
    return hosts


def proven(queue: CallQueue[int], *hosts: str) -> None:
    for host in hosts:
        queue.add(host, -1)
        assert queue.take() == (host, -1)
        queue.finished(host, HostHealth.RESPONSIVE)


def test_a_host_gets_one_slot_until_it_answered_and_then_no_more_than_its_limit() -> None:
    queue: CallQueue[int] = CallQueue(64, 8)
    for number in range(20):
        queue.add("a", number)
    assert take_all(queue) == ["a"]
    queue.finished("a", HostHealth.RESPONSIVE)
    assert take_all(queue) == ["a"] * 8
    queue.finished("a", HostHealth.UNRESPONSIVE)
    assert take_all(queue) == [], "seven are running, and its limit is one again"


def test_hosts_take_turns_however_many_calls_each_has() -> None:
    queue: CallQueue[int] = CallQueue(4, 4)
    proven(queue, "a", "b", "c")
    for number in range(50):
        queue.add("a", number)
    queue.add("b", 0)
    queue.add("c", 0)
    assert take_all(queue) == ["a", "b", "c", "a"]


def test_calls_of_one_host_keep_their_order() -> None:
    queue: CallQueue[int] = CallQueue(1, 1)
    for number in range(3):
        queue.add("a", number)
    made = []
    for _ in range(3):
        taken = queue.take()
        assert taken is not None
        made.append(taken[1])
        queue.finished("a", None)
    assert made == [0, 1, 2]


def test_dead_receivers_leave_slots_for_the_others() -> None:
    """With more dead receivers than slots (64, of 30 s each), other receivers are still called without delay."""
    queue: CallQueue[int] = CallQueue(64, 8)
    proven(queue, "alive")
    for dead in range(200):
        for number in range(5):
            queue.add(f"dead-{dead}", number)
    first = take_all(queue)
    assert len(first) == 48, "three quarters for hosts that were never called"
    for number in range(20):
        queue.add("alive", number)
    assert take_all(queue) == ["alive"] * 8
    for host in first:
        queue.finished(host, HostHealth.UNRESPONSIVE)
    for _ in range(10):  # Until all of them were called once.
        for host in (hosts := take_all(queue)):
            queue.finished(host, HostHealth.UNRESPONSIVE)
        if not [host for host in hosts if host != "alive"]:
            break
    stuck = take_all(queue)
    assert len(stuck) <= 16, "a quarter for hosts that did not answer"
    queue.add("new", 0)
    assert take_all(queue)[:1] == ["new"], "a host that was never called does not wait for the dead ones"


def test_every_call_is_eventually_made_and_no_limit_is_exceeded() -> None:
    rng = random.Random(7)
    queue: CallQueue[int] = CallQueue(6, 2)
    hosts = [f"h{number}" for number in range(12)]
    expected: Counter[str] = Counter()
    made: Counter[str] = Counter()
    active: list[str] = []
    for _ in range(3_000):
        if rng.random() < 0.3 and sum(expected.values()) < 500:
            host = rng.choice(hosts)
            queue.add(host, 0)
            expected[host] += 1
        elif active:
            host = active.pop(rng.randrange(len(active)))
            queue.finished(host, rng.choice([None, *HostHealth]))
        while (taken := queue.take()) is not None:
            active.append(taken[0])
            made[taken[0]] += 1
        assert len(active) <= 6
        assert max(Counter(active).values(), default=0) <= 2
    assert made == expected
    assert len(queue) == 0


def test_idle_hosts_are_forgotten_beyond_a_number() -> None:
    queue: CallQueue[int] = CallQueue(2, 2)
    for number in range(call_queue.KNOWN_HOSTS_MAX + 5):
        proven(queue, f"h{number}")
    assert len(queue._hosts) == call_queue.KNOWN_HOSTS_MAX


def test_dropping_queued_calls_leaves_running_calls() -> None:
    queue: CallQueue[int] = CallQueue(1, 1)
    queue.add("a", 0)
    queue.add("a", 1)
    assert queue.take() == ("a", 0)
    queue.clear()
    queue.finished("a", HostHealth.RESPONSIVE)
    assert queue.take() is None
