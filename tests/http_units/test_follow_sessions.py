"""Sessions of followers: the offsets that they keep, and their limits."""

from __future__ import annotations

import pytest

from headwater.core.errors import FollowNotFound, TooManyFollowed
from headwater.engine.multi_stream_follow import FollowRequest
from headwater.http.follow_sessions import GONE, IDLE_S, SENT_MAX, FollowSession, FollowSessions
from headwater.http.scopes import Scope

ANYONE = Scope()


class Reader:
    def end(self) -> None: ...


def session(**offsets: str) -> FollowSession:
    return FollowSessions(limit=1, max_streams=10).add(FollowRequest(offsets, "p/"), ANYONE, 0.0)


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


def test_sent_events_of_all_sessions_together_are_limited() -> None:
    sessions = FollowSessions(limit=100, max_streams=100, max_sent=1_000)
    quiet = sessions.add(FollowRequest({"quiet": "1"}), ANYONE, 0.0)
    received = quiet.sent("quiet", "2")
    busy = [sessions.add(FollowRequest({}, "p/"), ANYONE, 0.0) for _ in range(20)]
    last = 0
    for number in range(500):
        for each in busy:
            last = each.sent("p/a", str(number))
        assert sessions.kept.events <= 1_000
    assert sessions.kept.events == sum(len(each._sent) for each in (quiet, *busy))
    assert quiet.resume_after(received - 1).offsets == {"quiet": "1"}, "sessions with few events keep them"
    assert busy[-1].resume_after(last).offsets == {"p/a": "499"}
    with pytest.raises(FollowNotFound):
        busy[0].resume_after(1)


def test_sessions_without_a_connection_keep_a_limited_number_of_streams() -> None:
    """Otherwise a client that reconnects with a new id each time leaves the names of all streams in each of them."""
    sessions = FollowSessions(limit=100, max_streams=10)
    ids = []
    for now_s in range(20):
        one = sessions.add(FollowRequest({}, "p/"), ANYONE, float(now_s))
        reader = Reader()
        sessions.attach(one, reader)
        one.resume_after(max(one.sent(f"p/{number}", "1") for number in range(4)))
        sessions.detach(one, reader, float(now_s))
        ids.append(one.id)
    assert len(sessions) == 2
    for gone in ids[:-2]:
        with pytest.raises(FollowNotFound):
            sessions.find(gone, ANYONE, 20.0)
    last = sessions.find(ids[-1], ANYONE, 20.0)
    assert last.resume_after(4).offsets == {f"p/{number}": "1" for number in range(4)}


def test_sent_events_of_an_expired_session_do_not_count() -> None:
    sessions = FollowSessions(limit=100, max_streams=10)
    sessions.add(FollowRequest({}, "p/"), ANYONE, 0.0).sent("p/a", "1")
    sessions.add(FollowRequest({}, "p/"), ANYONE, IDLE_S + 1.0)
    assert sessions.kept.events == 0
