"""The rules of subscriptions: normalized configurations, the state machine, acks and the retry schedule."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import subscriptions as rules
from headwater.core.offsets import Offset
from headwater.core.subscription_errors import AlreadyClaimed, Fenced, InvalidAck, InvalidSubscription, NoPendingWork
from headwater.core.subscriptions import Ack, Config, Phase, Wake, make_config

PULL: dict[str, Any] = {
    "kind": "pull-wake",
    "pattern": "events/*",
    "streams": (),
    "webhook_url": None,
    "wake_stream": "wake/pool",
    "lease_ttl_ms": 30_000,
    "description": None,
    "max_name_bytes": 1024,
}
HOOK = PULL | {"kind": "webhook", "webhook_url": "https://a.example/", "wake_stream": None}


def config(base: dict[str, Any] = PULL, /, **changes: Any) -> Config:
    return make_config(**base | changes)


# -- configuration


def test_equivalent_configurations_are_equal() -> None:
    assert config(streams=["b", "a", "b"]) == config(streams=["/a/", "b"])
    assert config(pattern="/events/*/") == config()
    assert config(pattern="a/**/**") == config(pattern="a/**")


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "other/*"},
        {"streams": ["x"]},
        {"lease_ttl_ms": 30_001},
        {"description": "now with words"},
        {"wake_stream": "wake/other"},
    ],
)
def test_different_configurations_are_not_equal(changes: dict[str, Any]) -> None:
    assert config(**changes) != config()


def test_fields_of_other_kinds_are_dropped() -> None:
    assert config(webhook_url="https://unused.example/").webhook_url is None
    assert config(HOOK, wake_stream="unused").wake_stream is None


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (PULL, {"pattern": None}),
        (PULL, {"pattern": ""}),
        (PULL, {"wake_stream": None}),
        (PULL, {"wake_stream": ""}),
        (PULL, {"wake_stream": "a//b"}),
        (PULL, {"wake_stream": "__ds/x"}),
        (PULL, {"streams": ["ok", ""]}),
        (PULL, {"streams": ["a/../b"]}),
        (PULL, {"streams": ["__ds/x"]}),
        (PULL, {"streams": ["wake/pool"]}),
        (PULL, {"lease_ttl_ms": 999}),
        (PULL, {"lease_ttl_ms": 600_001}),
        (PULL, {"description": "x" * 4097}),
        (HOOK, {"webhook_url": None}),
        (HOOK, {"webhook_url": ""}),
        (HOOK, {"webhook_url": "https://a.example/" + "x" * 2048}),
    ],
)
def test_invalid_configurations_are_refused(base: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSubscription):
        config(base, **changes)


@pytest.mark.parametrize("text", ["", ".", "..", "a\nb", "x" * 257])
def test_subscription_ids_that_are_refused(text: str) -> None:
    with pytest.raises(InvalidSubscription):
        rules.check_subscription_id(text)


def test_subscription_ids_may_be_anything_else() -> None:
    for text in ("a", "sub-1", "with space", "a/b", "ünï", "x" * 256):
        assert rules.check_subscription_id(text) == text


@pytest.mark.parametrize("worker", ["", "x" * 257])
def test_worker_names_are_validated(worker: str) -> None:
    with pytest.raises(InvalidSubscription):
        rules.check_worker(worker)


# -- the state machine

IDLE = Wake()
OUT = rules.wake_up(IDLE, "w_1", "events/a")
HELD = rules.claim(OUT, "worker-1", 1_000)


def test_wake_has_the_next_generation() -> None:
    assert (OUT.phase, OUT.generation, OUT.wake_id, OUT.trigger) == (Phase.OUT, 1, "w_1", "events/a")
    again = rules.wake_up(rules.finish(OUT), "w_2", "events/b")
    assert again.generation == 2


def test_a_claim_holds_until_its_lease_ends() -> None:
    assert (HELD.phase, HELD.holder, HELD.until_ms, HELD.generation) == (Phase.HELD, "worker-1", 1_000, 1)
    with pytest.raises(AlreadyClaimed) as caught:
        rules.check_claimable(HELD, True)
    assert caught.value.members == {"current_holder": "worker-1", "generation": 1}


def test_without_work_there_is_nothing_to_claim() -> None:
    for wake in (IDLE, OUT):
        with pytest.raises(NoPendingWork):
            rules.check_claimable(wake, False)
        rules.check_claimable(wake, True)


def test_request_without_the_current_wake_is_fenced() -> None:
    rules.check_current(HELD, 1, "w_1")
    for generation, wake_id in ((0, "w_1"), (2, "w_1"), (1, "w_2"), (1, "")):
        with pytest.raises(Fenced):
            rules.check_current(HELD, generation, wake_id)
    with pytest.raises(Fenced):
        rules.check_current(rules.finish(HELD), 1, "")


def test_a_failed_delivery_waits_and_is_the_same_wake() -> None:
    waiting = rules.failed(OUT, 10_000, 0.0)
    assert (waiting.phase, waiting.until_ms, waiting.failures) == (Phase.WAITING, 11_000, 1)
    assert (waiting.generation, waiting.wake_id) == (OUT.generation, OUT.wake_id)
    once_more = rules.retry(waiting)
    assert once_more.phase is Phase.OUT
    second = rules.failed(once_more, 20_000, 0.0)
    assert (second.until_ms, second.failures) == (22_000, 2)


def test_success_resets_the_failure_count() -> None:
    failing = rules.retry(rules.failed(OUT, 0, 0.0))
    assert rules.delivered(failing, 5).failures == 0
    assert rules.extend(rules.failed(OUT, 0, 0.0), 5).failures == 0
    assert rules.finish(failing).failures == 0


def test_callback_holds_a_wake_whose_delivery_seemed_to_fail() -> None:
    held = rules.extend(rules.failed(OUT, 0, 0.0), 77)
    assert (held.phase, held.until_ms, held.wake_id) == (Phase.HELD, 77, "w_1")


@given(st.integers(1, 200), st.floats(-1, 1))
def test_retry_delay_doubles_from_one_second_to_a_minute_with_20_percent_jitter(failures: int, jitter: float) -> None:
    base = min(1000 * 2 ** (failures - 1), 60_000)
    assert base * 0.8 - 1 <= rules.retry_delay_ms(failures, jitter) <= base * 1.2 + 1
    assert rules.retry_delay_ms(failures, 0.0) == base


# -- acks


def offset(index: int) -> Offset:
    return Offset(index, index * 10)


def test_an_ack_moves_the_cursor_forward_up_to_the_tail() -> None:
    for index in (2, 3, 5):
        assert rules.advance(offset(2), Ack("s", str(offset(index))), offset(5)) == offset(index)


@pytest.mark.parametrize("token", ["-1", "now", "", "5", str(offset(1)), str(offset(6)), str(offset(2)).upper() + "X"])
def test_backward_too_high_and_malformed_acks_are_refused(token: str) -> None:
    with pytest.raises(InvalidAck):
        rules.advance(offset(2), Ack("s", token), offset(5))


# -- saved state


def test_saved_state_is_loaded() -> None:
    saved = rules.SavedSubscription(config(streams=["a", "b"]), 5, "http://h", "nonce")
    assert rules.decode_subscription(rules.encode_saved(saved)) == saved
    link = rules.SavedLink(True, 7, 1, 2)
    assert rules.decode_link(rules.encode_saved(link)) == link
    for wake in (IDLE, OUT, HELD, rules.failed(OUT, 0, 0.5)):
        back = rules.decode_wake(rules.encode_saved(wake))
        assert back == wake
        assert back.phase is wake.phase
