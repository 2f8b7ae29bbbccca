"""Health, readiness, metrics, logs, and responses to internal errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import headwater
from headwater.core import native
from tests.http.protocol import Stream, assert_problem, stream_on
from tests.http.sse_reader import SseReader
from tests.http.subscribing import Subscription, acks_of
from tests.http.watching import samples, wait_for_live_readers, wait_for_sample
from tests.http.webhook_receiver import Reply, receive
from tests.serving import Server, serve, server_environment


@pytest.fixture(scope="module")
def observed() -> Iterator[Server]:
    """A separate server, so that only this module changes its metrics."""
    with serve(DS_SERVER__LONG_POLL_TIMEOUT_SECS="5", DS_SERVER__SSE_RECONNECT_INTERVAL_SECS="0") as running:
        yield running


def total(found: dict[str, float], pattern: str) -> float:
    return sum(value for name, value in found.items() if re.search(pattern, name))


def test_healthz_is_ok(client: httpx.Client) -> None:
    answer = client.get("/healthz")
    assert (answer.status_code, answer.text) == (200, "ok")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["cache-control"] == "no-store"
    head = client.head("/healthz")
    assert (head.status_code, head.content) == (200, b"")


def test_readyz_is_200_when_the_server_serves(client: httpx.Client) -> None:
    assert client.get("/readyz").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_other_methods_on_health_endpoints_are_405(client: httpx.Client, path: str) -> None:
    refused = client.post(path, content="x")
    assert refused.status_code == 405
    assert "GET" in refused.headers["allow"]


def test_metrics_are_prometheus_text(observed: Server) -> None:
    answer = httpx.get(f"{observed.url}/metrics", verify=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    names = {family.name for family in text_string_to_metric_families(answer.text)}
    ours = {name for name in names if name.startswith("headwater_")}
    for topic in ("requests", "append", "bytes", "live_readers", "streams", "commit", "slow"):
        assert any(topic in name for name in ours), f"no metric about {topic}: {sorted(ours)}"


def test_requests_are_counted_by_operation_and_status(observed: Server) -> None:
    before = samples(observed)
    with stream_on(observed, "counted") as stream:
        stream.create()
        for _ in range(7):
            stream.append("x" * 100)
        for _ in range(3):
            stream.get(offset="garbage")
    after = samples(observed)

    def grown(pattern: str) -> float:
        return total(after, pattern) - total(before, pattern)

    requests = r"^headwater_\w*requests\w*_total\{"
    assert grown(requests + r".*operation=append.*status=204") == 7
    assert grown(requests + r".*operation=create.*status=201") == 1
    assert grown(requests + r".*status=400") == 3
    assert grown(r"^headwater_\w*append\w*_bytes\w*_total|^headwater_bytes_appended_total") == 700


def test_live_readers_are_counted_while_they_wait(observed: Server) -> None:
    with stream_on(observed, "watched") as stream:
        stream.create()
        wait_for_live_readers(observed, "sse", 0)
        with SseReader(observed, stream.name) as one, SseReader(observed, stream.name) as two:
            one.until_up_to_date()
            two.until_up_to_date()
            assert samples(observed)["headwater_live_readers{kind=sse}"] == 2
        wait_for_live_readers(observed, "sse", 0)


def test_streams_are_counted(observed: Server) -> None:
    pattern = r"^headwater_(open_)?streams(_open)?(\{|$)"
    before = total(samples(observed), pattern)
    with stream_on(observed, "counted-stream") as stream:
        stream.create()
        assert total(samples(observed), pattern) == before + 1
        stream.delete()
        assert total(samples(observed), pattern) == before


def test_subscriptions_are_counted_with_their_wakes_leases_and_webhooks() -> None:
    with (
        serve(
            moving_time=True, DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS="true", DS_SERVER__IDLE_TIMEOUT_SECS="600000"
        ) as server,
        httpx.Client(base_url=server.url, verify=False) as http,
        receive(Reply(status=500), otherwise=Reply()) as receiver,
    ):
        for name in ("wakes", "hooked", "pulled"):
            Stream(http, name).create()
        Subscription(http, "calls").webhook(receiver.url, "hooked", lease_ttl_ms=600_000)
        pulls = Subscription(http, "pulls").pull("wakes", "pulled", lease_ttl_ms=100_000)
        assert samples(server)["headwater_subscriptions{kind=webhook,phase=idle}"] == 1
        Stream(http, "hooked").append("x")
        Stream(http, "pulled").append("x")
        pulls.claimed()
        wait_for_sample(server, "webhook_calls_total{outcome=accepted}", 1)
        server.pass_time(101)
        wait_for_sample(server, "leases_expired_total", 1)
        found = samples(server)
        assert found["headwater_webhook_calls_total{outcome=failed}"] == 1
        assert found["headwater_wakes_total{kind=webhook}"] == 1
        assert found["headwater_wakes_total{kind=pull-wake}"] == 2, "an expired lease wakes again"
        assert found["headwater_subscriptions{kind=webhook,phase=held}"] == 1
        assert found["headwater_subscriptions{kind=pull-wake,phase=out}"] == 1
        assert found["headwater_subscription_streams_pending"] == 2
        wake = pulls.claimed()
        assert pulls.act("ack", wake, acks=acks_of(wake), done=True).status_code == 200
        assert samples(server)["headwater_subscription_streams_pending"] == 1


def test_metrics_do_not_grow_with_names(observed: Server) -> None:
    """With a label per stream, any client could fill the memory of the scraping Prometheus."""
    with httpx.Client(base_url=observed.url, verify=False) as http:
        # One request of each kind first: the labels of operations and statuses are limited.
        Stream(http, "first-name").create()
        http.get("/nowhere/first")
        http.request("METHOD", "/v1/stream/x")
        samples(observed)  # A request too.
        before = len(samples(observed))
        for number in range(50):
            Stream(http, f"label-{number}").create()
            http.get(f"/nowhere/{number}")
            http.request(f"METHOD{number}", "/v1/stream/x")
        after = samples(observed)
    assert len(after) <= before + 10
    assert not any("label-" in name for name in after)


def test_at_info_no_line_is_logged_per_request() -> None:
    with serve(DS_LOG__RUST_LOG="info") as server, stream_on(server, "quiet") as stream:
        stream.create()
        lines = server.log().count("\n")
        for _ in range(20):
            stream.append("x")
            stream.get(offset="garbage")
    # The server has stopped, so the log is complete.
    assert server.log().count("\n") == lines + len(["draining", "stopped"])


def test_at_debug_one_line_is_logged_per_request() -> None:
    with (
        serve(DS_LOG__RUST_LOG="debug", DS_LOG__FORMAT="json") as server,
        stream_on(server, "talkative") as stream,
    ):
        stream.create()
        stream.append("secret content")
        stream.get(offset="garbage")
    lines = [json.loads(line) for line in server.log().splitlines() if "talkative" in line]
    assert len(lines) == 3
    assert [str(line.get("status")) for line in lines] == ["201", "204", "400"]
    assert "secret content" not in server.log()


# The real server with two bugs: every access to the stream named `bug` raises, and the check of a head for `unread`.
_BUGGY_SERVER = """
import sys
from headwater.engine.engine import Engine
from headwater.http.access import AccessControl

look_up = Engine.look_up

def buggy(self, name, *arguments, **named):
    if name == "bug":
        raise RuntimeError("an internal secret")
    return look_up(self, name, *arguments, **named)

check = AccessControl.refusal

def buggy_check(self, method, target, headers):
    if target.endswith(b"/unread"):
        raise RuntimeError("another secret")
    return check(self, method, target, headers)

Engine.look_up = buggy
AccessControl.refusal = buggy_check
sys.argv = ["headwater", "serve", "--port", "0"]
from headwater.cli import main
main()
"""


@contextmanager
def buggy_server() -> Iterator[Server]:
    process = subprocess.Popen(
        [sys.executable, "-c", _BUGGY_SERVER],
        env=server_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    server = Server(process, Path())
    try:
        server.wait_until_listening()
        yield server
    finally:
        server.stop()


def test_internal_error_is_500_with_a_logged_id_and_no_details() -> None:
    with (
        buggy_server() as server,
        stream_on(server, "bug") as bug,
        stream_on(server, "sound") as sound,
    ):
        sound.create("data")
        with httpx.Client(base_url=server.url, verify=False) as http:
            failed = http.get(bug.path)
            # The connection and the server still work.
            assert http.get(sound.path).content == b"data"
        assert_problem(failed, 500, "internal_error")
        assert failed.headers["x-content-type-options"] == "nosniff"
        assert "secret" not in failed.text
        request_id = failed.headers["x-request-id"]
        again = httpx.get(f"{server.url}{bug.path}?offset=-1&live=sse")
        assert (again.status_code, again.headers["x-request-id"] == request_id) == (500, False)
    line = next(line for line in server.log().splitlines() if request_id in line)
    assert "ERROR" in line
    server.wait_for_log("an internal secret")


def test_internal_error_while_a_request_is_read_is_500_as_well() -> None:
    """It was 400, asked the client to correct its request, and was not logged."""
    with buggy_server() as server, stream_on(server, "unread") as stream, stream_on(server, "sound") as sound:
        failed = httpx.post(f"{server.url}{stream.path}", content=b"x" * 100_000)
        assert_problem(failed, 500, "internal_error")
        assert "secret" not in failed.text
        sound.create("data")
    line = next(line for line in server.log().splitlines() if failed.headers["x-request-id"] in line)
    assert "ERROR" in line
    server.wait_for_log("another secret")


def test_request_times_are_counted_by_operation(observed: Server) -> None:
    with httpx.Client(base_url=observed.url, verify=False) as http:
        before = samples(observed).get("headwater_request_duration_seconds_count{operation=head}", 0)
        Stream(http, "timed").create()
        for _ in range(3):
            http.head("/v1/stream/timed")
    after = samples(observed)
    assert after["headwater_request_duration_seconds_count{operation=head}"] == before + 3
    assert after["headwater_request_duration_seconds_bucket{le=+Inf,operation=head}"] == before + 3
    assert 0 < after["headwater_request_duration_seconds_sum{operation=head}"] < 60


def test_process_and_build_are_described(observed: Server) -> None:
    found = samples(observed)
    assert found["process_resident_memory_bytes"] > 1_000_000
    assert found["process_open_fds"] > 3
    [build] = [name for name in found if name.startswith("headwater_build_info{")]
    assert f"version={headwater.__version__}" in build
    assert f"build={native.BUILD}" in build


def test_root_redirects_to_the_stream_browser(observed: Server) -> None:
    answer = httpx.get(f"{observed.url}/", verify=False)
    assert answer.status_code == 307
    assert httpx.URL(f"{observed.url}/").join(answer.headers["location"]).path == "/ui/"


def test_delivery_lag_is_counted_once_for_all_live_readers(observed: Server) -> None:
    counted = "delivery_lag_seconds_count"
    with stream_on(observed, "delivered") as stream, SseReader(observed, stream.create().name) as events:
        events.until_up_to_date()
        before = samples(observed)[f"headwater_{counted}"]
        stream.append("hello")
        assert events.next().data == "hello"
        wait_for_sample(observed, counted, before + 1)


def test_metric_names_follow_prometheus(observed: Server) -> None:
    page = httpx.get(f"{observed.url}/metrics", verify=False).text
    kinds = dict(re.findall(r"# TYPE (headwater_\S+) (\w+)", page))
    assert len(kinds) > 30
    for name, kind in kinds.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"milliseconds|_ms\b|_kb\b|minutes", name), name
