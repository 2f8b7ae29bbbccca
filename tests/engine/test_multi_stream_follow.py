"""Followers of many streams that do not read: what they keep counts towards the limit."""

from __future__ import annotations

from headwater.core.errors import TooManyFollowed
from headwater.engine.multi_stream_follow import FollowedChunk, FollowProblem, FollowRequest, ManyFollower
from headwater.engine.quota import EngineLimits
from tests.engine.rig import Rig

LIMIT = 10


def followed(rig: Rig, prefix: str = "p/") -> ManyFollower:
    follower = rig.engine.follows.follow(FollowRequest({}, prefix), lambda _: True, lambda: None)
    follower.start()
    rig.scheduler.run_until_idle()
    return follower


def come_and_go(rig: Rig, name: str) -> None:
    rig.created(name, b"x")
    rig.delete(name)
    rig.scheduler.run_until_idle()


def events(follower: ManyFollower) -> list[object]:
    return list(iter(follower.next_event, None))


def test_ends_of_streams_that_a_client_does_not_read_are_limited() -> None:
    rig = Rig(limits=EngineLimits(max_followed_streams=LIMIT))
    silent = followed(rig)
    for number in range(5 * LIMIT):
        come_and_go(rig, f"p/{number}")
        assert len(silent._notices) <= LIMIT
        assert rig.engine.follows.cursors <= LIMIT
    assert isinstance(silent.failure, TooManyFollowed)
    silent.close()
    rig.scheduler.run_until_idle()
    assert rig.engine.follows.cursors == 0


def test_a_client_that_reads_is_not_affected_by_one_that_does_not() -> None:
    rig = Rig(limits=EngineLimits(max_followed_streams=LIMIT))
    silent, reading = followed(rig), followed(rig)
    for number in range(5 * LIMIT):
        come_and_go(rig, f"p/{number}")
        [end] = events(reading)
        assert isinstance(end, FollowProblem)
    assert reading.failure is None
    assert silent.failure is not None


def test_ends_of_many_streams_at_once_are_all_sent() -> None:
    rig = Rig(limits=EngineLimits(max_followed_streams=LIMIT))
    follower = followed(rig)
    for number in range(LIMIT):
        rig.created(f"p/{number}", b"x")
    assert all(isinstance(event, FollowedChunk) for event in events(follower))
    for number in range(LIMIT):
        rig.delete(f"p/{number}")
    rig.scheduler.run_until_idle()
    assert {event.name for event in events(follower) if isinstance(event, FollowProblem)} == {
        f"p/{number}" for number in range(LIMIT)
    }
    assert follower.failure is None
    assert rig.engine.follows.cursors == 0
    rig.created("p/next", b"x")
    assert len(events(follower)) == 1


def test_new_streams_that_wait_to_be_announced_are_limited() -> None:
    rig = Rig(limits=EngineLimits(max_followed_streams=LIMIT))
    follows = rig.engine.follows
    follower = followed(rig)
    follows._is_announcing = True  # An announcement to many followers is in progress.
    for number in range(LIMIT):
        rig.created(f"p/{number:02}", b"x")
    failure = follower.failure
    assert failure is None
    for number in range(LIMIT, 3 * LIMIT):
        rig.created(f"p/{number:02}", b"x")
        assert len(follows._created_names) <= LIMIT
    assert isinstance(follower.failure, TooManyFollowed)
    follower.close()
    follows._announced(None)
    rig.scheduler.run_until_idle()
    again = followed(rig, "p/0")
    assert {event.name for event in events(again) if isinstance(event, FollowedChunk)} == {
        f"p/{number:02}" for number in range(10)
    }
