"""Signing keys: made on first need, the same after a restart, and replaced without a gap."""

from __future__ import annotations

import logging

import pytest

from headwater.core.signing import JWKS_MAX_AGE_S, PUBLISHED_AFTER_MS
from headwater.engine.engine import Engine
from headwater.engine.quota import EngineLimits
from headwater.engine.signing_keys import KEY_PREFIX, SECRET_KEY, SigningKeys
from tests.engine.seams import JournalGround, ManualClock, ManualScheduler


class House:
    def __init__(self, rotation_ms: int = 0) -> None:
        self.clock = ManualClock()
        self.ground = JournalGround()
        self.rotation_ms = rotation_ms
        self.open()

    def open(self) -> None:
        self.scheduler = ManualScheduler(self.clock)
        self.engine = Engine(self.ground.open(), self.clock, self.scheduler, EngineLimits(), commit="inline")
        self.engine.start()
        self.keys = SigningKeys(self.engine, self.rotation_ms)
        self.keys.start()

    def restart(self) -> None:
        self.scheduler.settle()
        self.open()

    def kids(self) -> list[str]:
        return [key.kid for key in self.keys.published()]


def test_there_is_no_key_before_one_is_needed() -> None:
    house = House()
    assert house.kids() == []
    assert house.engine.catalog.documents == {}
    kid = house.keys.current().public.kid
    assert house.kids() == [kid]


def test_keys_and_secret_are_the_same_after_a_restart() -> None:
    house = House()
    kid, secret = house.keys.current().public.kid, house.keys.secret()
    house.restart()
    assert house.kids() == [kid]
    assert house.keys.current().public.kid == kid
    assert house.keys.secret() == secret
    assert set(house.engine.catalog.documents) == {KEY_PREFIX + kid, SECRET_KEY}


def test_a_new_key_is_published_first_signs_then_and_the_old_one_goes_last() -> None:
    house = House()
    old = house.keys.current().public.kid
    new = house.keys.rotate().public.kid
    assert house.kids() == [new, old]
    assert house.keys.current().public.kid == old, "receivers may still have the key set without it"
    house.clock.at_ms += JWKS_MAX_AGE_S * 1000
    assert house.keys.current().public.kid == new
    house.restart()
    assert house.keys.current().public.kid == new
    assert house.kids() == [new, old], "what was signed before must still be verified"
    house.clock.at_ms += PUBLISHED_AFTER_MS
    assert house.kids() == [new]
    newest = house.keys.rotate().public.kid
    assert house.kids() == [newest, new]
    assert KEY_PREFIX + old not in house.engine.catalog.documents, "its private half is gone"


def test_keys_are_replaced_by_age_where_the_setting_says_so() -> None:
    house = House(rotation_ms=86_400_000)
    first = house.keys.current().public.kid
    house.clock.at_ms += 86_399_999
    assert house.keys.current().public.kid == first
    assert len(house.kids()) == 1
    house.clock.at_ms += 1
    assert house.keys.current().public.kid == first
    assert len(house.kids()) == 2
    house.clock.at_ms += JWKS_MAX_AGE_S * 1000
    assert house.keys.current().public.kid == house.kids()[0] != first


def test_nothing_private_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    with caplog.at_level(logging.DEBUG):
        house.keys.current().sign(b"x", 1)
        house.keys.rotate()
        house.keys.secret()
        house.restart()
    assert caplog.records == []
