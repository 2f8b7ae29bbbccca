"""Sessions of followers: what they remember of streams, and the limits on it."""

from __future__ import annotations

import pytest

from headwater.core.errors import TooManyFollowed
from headwater.engine.follows import FollowRequest
from headwater.http.follow_sessions import GONE, IDLE_S, SENT_MAX, FollowSession, FollowSessions
from headwater.http.scopes import Scope

ANYONE = Scope()


def session(**offsets: str) -> FollowSession:
    return FollowSession("id", FollowRequest(offsets, "p/"), ANYONE)


def test_streams_of_a_prefix_that_are_gone_are_forgotten() -> None:
    """Else a session that lasts for weeks holds the name of every stream that ever was."""
    followed = session()
    for number in range(2 * SENT_MAX):
        followed.sent(f"p/{number}", "1")
        followed.sent(f"p/{number}", GONE)
    last = followed.sent("p/stays", "7")
    assert len(followed._offsets) <= 1
    assert followed.resume_after(last).offsets == {"p/stays": "7"}


def test_what_was_not_received_is_not_forgotten() -> None:
    followed = session(named="5")
    received = followed.sent("p/a", "1")
    followed.sent("p/a", GONE)
    assert followed.resume_after(received).offsets == {"named": "5", "p/a": "1"}


def test_streams_that_sessions_name_together_are_limited() -> None:
    sessions = FollowSessions(limit=10, max_streams=5)
    sessions.add(FollowRequest({"a": "-1", "b": "-1", "c": "-1"}), ANYONE, 0.0)
    with pytest.raises(TooManyFollowed):
        sessions.add(FollowRequest({"d": "-1", "e": "-1", "f": "-1"}), ANYONE, 1.0)
    sessions.add(FollowRequest({"d": "-1", "e": "-1"}), ANYONE, 2.0)
    sessions.add(FollowRequest({"d": "-1", "e": "-1", "f": "-1"}), ANYONE, IDLE_S + 1.0)
