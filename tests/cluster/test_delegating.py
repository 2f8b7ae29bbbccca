"""A response that delegates passes its events on as soon as there is something to pass them to."""

from __future__ import annotations

from typing import Any, cast

from headwater.cluster.delegating import DelegatingResponse
from headwater.cluster.prepared_responses import PreparedResponse
from headwater.cluster.shared_reads import SharedRead


class Inner:
    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, channel: object) -> None:
        self.events.append("start")

    def on_writable(self) -> None:
        self.events.append("writable")

    def on_drain(self) -> None:
        self.events.append("drain")

    def on_disconnect(self) -> None:
        self.events.append("disconnect")


def send_events(response: DelegatingResponse) -> None:
    response.on_writable()
    response.on_drain()
    response.on_disconnect()


def test_events_reach_the_inner_response() -> None:
    response, inner = DelegatingResponse(), Inner()
    response._channel, response._inner = cast("Any", object()), inner
    send_events(response)
    assert inner.events == ["writable", "drain", "disconnect"]
    assert response._channel is None, "nothing is sent to a client that has disconnected"


def test_events_before_the_inner_response_exists_are_no_error() -> None:
    response = DelegatingResponse()
    response._channel = cast("Any", object())
    send_events(response)
    assert response._channel is None


def test_responses_that_wait_for_other_workers_delegate() -> None:
    assert issubclass(PreparedResponse, DelegatingResponse)
    assert issubclass(SharedRead, DelegatingResponse)
