"""Signing keys: created on first use, kept across restarts, and rotated without a gap."""

from __future__ import annotations

import logging

import pytest

from headwater.core.signing import JWKS_MAX_AGE_S, PUBLISHED_AFTER_MS
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.signing_keys import KEY_PREFIX, SECRET_KEY, SigningKeys
from tests.engine.seams import JournalBacking, ManualClock, ManualScheduler


class SimulatedServer:
    def __init__(self, rotation_ms: int = 0) -> None:
        self.clock = ManualClock()
        self.backing = JournalBacking()
        self.rotation_ms = rotation_ms
        self.open()

    def open(self) -> None:
        self.scheduler = ManualScheduler(self.clock)
        self.engine = Engine(self.backing.open(), self.clock, self.scheduler, EngineLimits(), commit="inline")
        self.engine.start()
        self.keys = SigningKeys(self.engine, self.rotation_ms)
        self.keys.start()

    def restart(self) -> None:
        self.scheduler.run_until_idle()
        self.open()

    def kids(self) -> list[str]:
        return [key.kid for key in self.keys.published()]


def test_there_is_no_key_before_one_is_needed() -> None:
    server = SimulatedServer()
    assert server.kids() == []
    assert server.engine.catalog.documents == {}
    kid = server.keys.current().public.kid
    assert server.kids() == [kid]


def test_keys_and_secret_are_the_same_after_a_restart() -> None:
    server = SimulatedServer()
    kid, secret = server.keys.current().public.kid, server.keys.secret()
    server.restart()
    assert server.kids() == [kid]
    assert server.keys.current().public.kid == kid
    assert server.keys.secret() == secret
    assert set(server.engine.catalog.documents) == {KEY_PREFIX + kid, SECRET_KEY}


def test_new_key_is_published_before_it_signs_and_the_old_one_is_removed_last() -> None:
    server = SimulatedServer()
    old = server.keys.current().public.kid
    new = server.keys.rotate().public.kid
    assert server.kids() == [new, old]
    assert server.keys.current().public.kid == old, "receivers may still have the key set without it"
    server.clock.at_ms += JWKS_MAX_AGE_S * 1000
    assert server.keys.current().public.kid == new
    server.restart()
    assert server.keys.current().public.kid == new
    assert server.kids() == [new, old], "earlier signatures must still verify"
    server.clock.at_ms += PUBLISHED_AFTER_MS
    assert server.kids() == [new]
    newest = server.keys.rotate().public.kid
    assert server.kids() == [newest, new]
    assert KEY_PREFIX + old not in server.engine.catalog.documents, "its private key is deleted"


def test_keys_are_rotated_at_the_configured_age() -> None:
    server = SimulatedServer(rotation_ms=86_400_000)
    first = server.keys.current().public.kid
    server.clock.at_ms += 86_399_999
    assert server.keys.current().public.kid == first
    assert len(server.kids()) == 1
    server.clock.at_ms += 1
    assert server.keys.current().public.kid == first
    assert len(server.kids()) == 2
    server.clock.at_ms += JWKS_MAX_AGE_S * 1000
    assert server.keys.current().public.kid == server.kids()[0] != first


def test_nothing_private_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    server = SimulatedServer()
    with caplog.at_level(logging.DEBUG):
        server.keys.current().sign(b"x", 1)
        server.keys.rotate()
        server.keys.secret()
        server.restart()
    assert caplog.records == []
