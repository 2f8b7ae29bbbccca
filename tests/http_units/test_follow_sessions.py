"""Sessions of followers: the offsets that they keep, and their limits."""

from __future__ import annotations

import pytest

from headwater.core.errors import TooManyFollowed
from headwater.engine.follows import FollowRequest
from headwater.http.follow_sessions import GONE, IDLE_S, SENT_MAX, FollowSession, FollowSessions
from headwater.http.scopes import Scope

ANYONE = Scope()


def session(**offsets: str) -> FollowSession:
    return FollowSession("id", FollowRequest(offsets, "p/"), ANYONE)


def test_deleted_streams_of_a_prefix_are_removed_from_the_session() -> None:
    """Otherwise a session that lasts for weeks keeps the name of every stream that ever existed."""
    followed = session()
    for number in range(2 * SENT_MAX):
        followed.sent(f"p/{number}", "1")
        followed.sent(f"p/{number}", GONE)
    last = followed.sent("p/stays", "7")
    assert len(followed._offsets) <= 1
    assert followed.resume_after(last).offsets == {"p/stays": "7"}


def test_offsets_of_unreceived_events_are_kept() -> None:
    followed = session(named="5")
    received = followed.sent("p/a", "1")
    followed.sent("p/a", GONE)
    assert followed.resume_after(received).offsets == {"named": "5", "p/a": "1"}


def test_streams_of_all_sessions_together_are_limited() -> None:
    sessions = FollowSessions(limit=10, max_streams=5)
    sessions.add(FollowRequest({"a": "-1", "b": "-1", "c": "-1"}), ANYONE, 0.0)
    with pytest.raises(TooManyFollowed):
        sessions.add(FollowRequest({"d": "-1", "e": "-1", "f": "-1"}), ANYONE, 1.0)
    sessions.add(FollowRequest({"d": "-1", "e": "-1"}), ANYONE, 2.0)
    sessions.add(FollowRequest({"d": "-1", "e": "-1", "f": "-1"}), ANYONE, IDLE_S + 1.0)
