"""The sync and dev profiles: Postgres, the sync and the heartbeat as services, each killed and restarted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headwater.stack.heartbeat import Heartbeat
from tests.otel.receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.serving import Server
from tests.stack.stacks import Stack, stack
from tests.stack.test_up import write_and_kill
from tests.waiting import wait_until

MOVES_WITHIN_SECS = 300.0  # Spark on a busy machine needs several attempts to start its workers


def rows(made: Stack, query: str) -> int:
    url = made.run("psql", "--print-url").stdout.strip()
    with psycopg.connect(url, connect_timeout=10) as connection:
        found = connection.execute(query).fetchone()
    assert found is not None
    return int(found[0])


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiving:
        yield receiving


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("dev")
    # As root, Postgres runs as another user, who needs access to its directory.
    for parent in (directory, *directory.parents):
        if parent.is_relative_to(tmp_path_factory.getbasetemp().parent):
            parent.chmod(0o755)
    with stack(
        directory,
        DS_STACK__HEARTBEAT_INTERVAL_SECS="1",
        DS_STACK__START_TIMEOUT_SECS="300",
        DS_SERVER__LONG_POLL_TIMEOUT_SECS="2",
        DS_STACK__RESTART_DELAY_SECS="0.2",
        DS_OTEL__ENDPOINT=receiver.url,
        OTEL_BSP_SCHEDULE_DELAY="50",
    ) as made:
        made.up("--profile", "dev")
        yield made


@pytest.mark.long
@pytest.mark.timeout(900)
def test_all_services_start_or_report_why_not(running: Stack) -> None:
    status = running.status()
    names = [part["name"] for part in status["parts"]]
    assert names == ["server", "envoy", "postgres", "shapes", "sync", "adminer", "heartbeat"]
    for part in status["parts"]:
        if part["name"] == "adminer" and part["state"] == "absent":
            assert "apt-get install" in part["detail"]
        else:
            assert part["state"] == "up", part


@pytest.mark.long
@pytest.mark.timeout(900)
def test_heartbeat_passes_in_both_directions(running: Stack) -> None:
    with running.client(running.token()) as client:

        def arrived() -> tuple[int, int]:
            events = rows(running, "SELECT count(*) FROM session_events WHERE event_type = 'heartbeat'")
            answer = client.get("/v1/stream/pg-items", params={"offset": "-1"})
            items = answer.text.count("heartbeat") if answer.status_code == 200 else 0
            return events, items

        wait_until(arrived, all, limit_s=MOVES_WITHIN_SECS, every_s=0.5)
    jobs = {job["name"]: job["status"] for job in running.status()["jobs"]}
    assert jobs == {"pg-items": "running", "session-events": "running"}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_traced_event_is_followed_through_envoy_and_spark_into_postgres(running: Stack, receiver: OtlpReceiver) -> None:
    trace, sender = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    traceparent = f"00-{trace}-{sender}-01"
    event = {"type": "message", "key": "traced", "traceparent": traceparent}
    with running.client(running.token()) as client:
        answer = client.post("/v1/stream/session-events", json=event, headers={"traceparent": traceparent})
        assert answer.status_code == 204, answer.text
    query = "SELECT count(*) FROM session_events WHERE event_key = 'traced'"
    wait_until(lambda: rows(running, query) == 1, limit_s=MOVES_WITHIN_SECS, every_s=0.5)

    def span_of(service: str) -> ReceivedSpan:
        return receiver.wait_for_span(
            lambda span: span.service == service and span.trace_id == trace, f"a span of {service}"
        )

    spans = {service: span_of(service) for service in ("headwater-envoy", "headwater", "headwater-sync")}
    assert spans["headwater-envoy"].parent_id == sender
    assert spans["headwater"].parent_id == spans["headwater-envoy"].span_id
    assert spans["headwater-sync"].parent_id == sender
    assert spans["headwater-sync"].span.name == "load session_events"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_no_acknowledged_write_is_lost_when_any_service_is_killed(running: Stack) -> None:
    write_and_kill(running, ["heartbeat", "sync", "shapes", "postgres", "envoy", "server"])


def test_failed_heartbeat_is_reported_and_the_next_one_is_sent(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    import httpx

    heartbeat = Heartbeat(server.url, "postgresql://postgres@127.0.0.1:1/nothing")
    heartbeat.beat(1)
    assert "tick 1 failed" in caplog.text
    heartbeat.beat(2)
    heartbeat.close()
    assert "tick 2 failed" not in caplog.text
    events = httpx.get(f"{server.url}/v1/stream/session-events?offset=-1").json()
    assert events[-1]["type"] == "heartbeat"
    assert events[-1]["value"]["tick"] == 2


def test_invalid_settings_prevent_the_start(tmp_path: Path) -> None:
    with stack(tmp_path, DS_PROXY__ENVOY_PATH="/nowhere/envoy") as made:
        done = made.run("up")
        assert done.returncode == 1
        assert "/nowhere/envoy" in done.stderr
