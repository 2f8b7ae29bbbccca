"""Writer leases over HTTP: the requests, their refusals, and a server that is killed while a lease is held."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.bucketed import Bucket
from tests.http.protocol import Stream, assert_problem, producer, stream_on
from tests.serving import serve
from tests.waiting import wait_until

LEASE_TYPE = {"Content-Type": "application/vnd.headwater.lease+json"}
HOUR_MS = 3_600_000
LOST = {"type": "error", "errorText": "lost: ü"}


def lease(stream: Stream, action: str, holder: str = "w1", **body: Any) -> httpx.Response:
    content = json.dumps({"holder": holder, **body})
    return stream.http.post(stream.path, params={"lease": action}, headers=LEASE_TYPE, content=content)


@pytest.fixture
def moving_stream(moving_client: httpx.Client, stream_name: Callable[[], str]) -> Stream:
    return Stream(moving_client, stream_name(), "application/json")


def test_a_lease_is_acquired_shown_renewed_and_released(moving_stream: Stream, moving_server: Any) -> None:
    moving_stream.create()
    acquired = lease(moving_stream, "acquire", ttl_ms=HOUR_MS, append=LOST)
    assert acquired.status_code == 200
    left = acquired.json()["expires_in_ms"]
    assert acquired.json() == {"holder": "w1", "ttl_ms": HOUR_MS, "expires_in_ms": left}
    assert 0 < left <= HOUR_MS
    moving_server.pass_time(HOUR_MS / 2000)
    shown = moving_stream.get(lease="show").json()
    assert (shown["holder"], 0 < shown["expires_in_ms"] <= HOUR_MS / 2) == ("w1", True)
    assert HOUR_MS / 2 < lease(moving_stream, "renew").json()["expires_in_ms"] <= HOUR_MS
    assert lease(moving_stream, "release").status_code == 204
    assert_problem(moving_stream.get(lease="show"), 404, "lease_not_found")
    assert_problem(lease(moving_stream, "renew"), 404, "lease_not_found")
    assert moving_stream.content() == b"[]"


def test_the_server_ends_the_stream_of_a_lost_writer(moving_stream: Stream, moving_server: Any) -> None:
    moving_stream.create()
    moving_stream.append('{"n":1}', producer("p", 0, 0))
    lease(moving_stream, "acquire", ttl_ms=HOUR_MS, append=LOST)
    before = moving_stream.tail()
    moving_server.pass_time(HOUR_MS / 1000 + 1)
    woken = moving_stream.long_poll(before)
    assert woken.json() == [LOST]
    assert woken.headers["stream-closed"] == "true"
    assert_problem(moving_stream.post('{"n":2}', producer("p", 0, 1)), 409, "stream_closed")
    assert_problem(lease(moving_stream, "renew"), 409, "stream_closed")
    metrics = moving_stream.http.get("/metrics").text
    assert "headwater_writer_leases_expired_total 1.0" in metrics


def test_a_value_that_is_an_array_is_one_message(moving_stream: Stream, moving_server: Any) -> None:
    moving_stream.create()
    lease(moving_stream, "acquire", ttl_ms=HOUR_MS, append=[1, [2]])
    moving_server.pass_time(HOUR_MS / 1000 + 1)
    wait_until(lambda: moving_stream.get(offset="-1").content == b"[[1, [2]]]", what="the server ends the stream")


def test_another_writer_is_refused_until_it_takes_over(json_stream: Stream) -> None:
    json_stream.create()
    lease(json_stream, "acquire")
    assert_problem(lease(json_stream, "acquire", "w2"), 409, "lease_held")
    assert lease(json_stream, "acquire", "w2", take_over=True).status_code == 200
    assert_problem(lease(json_stream, "renew"), 409, "lease_held")
    assert_problem(lease(json_stream, "release"), 409, "lease_held")


def test_a_text_stream_ends_with_text(stream: Stream) -> None:
    stream.create("x")
    assert_problem(lease(stream, "acquire", append={"no": "text"}), 400, "invalid_lease")
    assert_problem(lease(stream, "acquire", append=""), 400, "invalid_lease")
    assert lease(stream, "acquire", append="the writer was lost").status_code == 200


@pytest.mark.parametrize("body", ["", "{", "[]", '{"holder":1}', '{"holder":"w","ttl_ms":"x"}', '{"holder":""}'])
def test_a_malformed_body_is_400(json_stream: Stream, body: str) -> None:
    json_stream.create()
    answer = json_stream.http.post(json_stream.path, params={"lease": "acquire"}, headers=LEASE_TYPE, content=body)
    assert_problem(answer, 400, "invalid_lease")


def test_unknown_actions_and_other_content_types_are_400(json_stream: Stream) -> None:
    json_stream.create()
    assert_problem(lease(json_stream, "steal"), 400, "invalid_lease")
    plain = json_stream.http.post(json_stream.path, params={"lease": "acquire"}, json={"holder": "w"})
    assert_problem(plain, 400, "invalid_lease")
    assert_problem(lease(json_stream, "acquire", append="x" * 70_000), 413, "payload_too_large")
    assert json_stream.content() == b"[]", "nothing was appended"


def test_a_missing_stream_is_404(json_stream: Stream) -> None:
    for action in ("acquire", "renew", "release"):
        assert_problem(lease(json_stream, action), 404, "stream_not_found")
    assert_problem(json_stream.get(lease="show"), 404, "stream_not_found")


def test_the_registry_has_no_writer_lease() -> None:
    with serve(DS_REGISTRY__ENABLED="true") as server, stream_on(server, "__registry__") as registry:
        assert lease(registry, "acquire").status_code == 405


def test_a_stream_of_a_bucket_has_leases(bucket: Bucket) -> None:
    stream = bucket.stream("s").create()
    answer = stream.http.post(
        stream.path, params={"lease": "acquire"}, headers=LEASE_TYPE, content=json.dumps({"holder": "w1"})
    )
    assert answer.status_code == 200
    assert stream.http.get(stream.path, params={"lease": "show"}).json()["holder"] == "w1"


@pytest.mark.parametrize("mode", ["file-durable", "acid"])
def test_a_lease_survives_kill_nine(tmp_path: Path, mode: str) -> None:
    """The writer disappears with the first server; the second one ends its stream."""
    arguments = ("--mode", mode, "--data-dir", str(tmp_path / "data"))
    with serve(arguments=arguments) as server, stream_on(server, "answer", "application/json") as stream:
        stream.create('[{"n":1}]')
        assert lease(stream, "acquire", ttl_ms=HOUR_MS, append=LOST).status_code == 200
        server.kill()
    with (
        serve(arguments=arguments, moving_time=True) as server,
        stream_on(server, "answer", "application/json") as stream,
    ):
        assert lease(stream, "renew").json()["expires_in_ms"] == HOUR_MS
        server.pass_time(HOUR_MS / 1000 + 1)
        wait_until(lambda: json.loads(stream.content()) == [{"n": 1}, LOST], what="the server ends the stream")
        assert stream.head().headers["stream-closed"] == "true"
