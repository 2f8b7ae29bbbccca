"""Spans and metrics of the server, as an OTLP/HTTP receiver gets them; off, OpenTelemetry is not even imported."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.http.protocol import Stream
from tests.http.subscribing import Subscription
from tests.http.webhook_receiver import receive
from tests.otel.receiver import OtlpReceiver, ReceivedSpan, attributes_of, otlp_receiver
from tests.ports import free_port
from tests.serving import Server, serve, server_environment
from tests.waiting import wait_until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENDER = "00f067aa0ba902b7"
LONG_TIMEOUT = ("tests.otel.long_export_timeout",)


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def traced(receiver: OtlpReceiver) -> Iterator[Server]:
    with serve(
        DS_OTEL__ENDPOINT=receiver.url,
        DS_OTEL__METRICS_INTERVAL_SECS="0.1",
        DS_SUBSCRIPTIONS__ALLOW_LOCAL_WEBHOOKS="true",
        OTEL_BSP_SCHEDULE_DELAY="50",
    ) as server:
        yield server


def test_request_continues_the_trace_of_its_sender(traced: Server, receiver: OtlpReceiver) -> None:
    url = traced.stream_url("traced")
    with httpx.Client() as http:
        http.put(url, headers={"Content-Type": "text/plain"})
        for _ in range(3):  # Repeated heads take a shorter path through the server.
            headers = {"traceparent": f"00-{TRACE}-{SENDER}-01", "Content-Type": "text/plain"}
            assert http.post(f"{url}?access_token=secret", content="x", headers=headers).status_code == 204

    def appended(span: ReceivedSpan) -> bool:
        return span.trace_id == TRACE and span.span.name == "append"

    found = receiver.wait_for_span(appended, "a span of an append in the trace")
    assert (found.parent_id, found.service) == (SENDER, "headwater")
    assert found.attributes["http.response.status_code"] == 204
    assert found.attributes["url.path"] == "/v1/stream/traced"
    assert "secret" not in str(found.span)
    assert 0 < found.span.end_time_unix_nano - found.span.start_time_unix_nano < 60e9


def test_sender_that_does_not_sample_gets_no_span(traced: Server, receiver: OtlpReceiver) -> None:
    unsampled = TRACE[::-1]
    httpx.get(traced.stream_url("unsampled"), headers={"traceparent": f"00-{unsampled}-{SENDER}-00"})
    # Sent later, and received: the one before would have been received as well.
    httpx.get(traced.stream_url("sampled"))
    receiver.wait_for_span(lambda span: span.attributes.get("url.path") == "/v1/stream/sampled", "the later span")
    assert not [span for span in receiver.spans if span.trace_id == unsampled]


def test_traceparent_that_is_not_valid_begins_a_trace(traced: Server, receiver: OtlpReceiver) -> None:
    httpx.get(traced.stream_url("invalid"), headers={"traceparent": "00-nonsense-01"})
    found = receiver.wait_for_span(
        lambda span: span.attributes.get("url.path") == "/v1/stream/invalid", "a span in a new trace"
    )
    assert found.parent_id == ""
    assert found.attributes["http.response.status_code"] == 404


def test_webhook_call_carries_the_trace_of_its_span(traced: Server, receiver: OtlpReceiver) -> None:
    with httpx.Client(base_url=traced.url) as http, receive() as hook:
        Stream(http, "hooked").create()
        Subscription(http, "calls").webhook(hook.url, "hooked")
        Stream(http, "hooked").append("x")
        call = hook.wait(1)
    _, trace_id, span_id, _ = call.headers["traceparent"].split("-")
    found = receiver.wait_for_span(lambda span: span.span_id == span_id, "the span of the webhook call")
    assert (found.trace_id, found.span.name) == (trace_id, "webhook")


def test_metrics_have_the_names_of_prometheus(traced: Server, receiver: OtlpReceiver) -> None:
    url = traced.stream_url("measured")
    httpx.put(url, headers={"Content-Type": "text/plain"})
    httpx.post(url, content="x" * 10, headers={"Content-Type": "text/plain"})

    def appended_bytes() -> float:
        metric = receiver.metrics.get(("headwater", "headwater_appended_bytes"))
        return metric.sum.data_points[0].as_int if metric is not None else 0

    wait_until(lambda: appended_bytes() >= 10, what="the bytes of the append")
    duration = receiver.metrics["headwater", "headwater_request_duration_seconds"]
    assert duration.unit == "s"
    points = duration.histogram.data_points
    assert "append" in {attributes_of(point.attributes)["operation"] for point in points}
    for point in points:
        assert sum(point.bucket_counts) == point.count > 0
        assert len(point.bucket_counts) == len(point.explicit_bounds) + 1
    appended = receiver.metrics["headwater", "headwater_appended_bytes"]
    assert appended.unit == "By"
    assert appended.sum.is_monotonic
    assert receiver.metrics["headwater", "headwater_streams"].gauge.data_points[0].as_int >= 1
    assert ("headwater", "headwater_build_info") in receiver.metrics


def test_stopping_server_sends_queued_spans() -> None:
    with otlp_receiver() as receiver:
        with serve(program=LONG_TIMEOUT, DS_OTEL__ENDPOINT=receiver.url, OTEL_BSP_SCHEDULE_DELAY="60000") as server:
            httpx.get(server.stream_url("last"))
        assert [span.attributes["url.path"] for span in receiver.spans] == ["/v1/stream/last"]
        assert ("headwater", "headwater_connections") in receiver.metrics


def test_workers_send_spans_too() -> None:
    with otlp_receiver() as receiver:
        with serve(program=LONG_TIMEOUT, DS_OTEL__ENDPOINT=receiver.url, arguments=("--workers", "2")) as server:
            for number in range(4):
                httpx.put(server.stream_url(f"s{number}"), headers={"traceparent": f"00-{TRACE}-{SENDER}-01"})
        created = {str(span.attributes["url.path"]) for span in receiver.spans if span.span.name == "create"}
        assert created == {f"/v1/stream/s{number}" for number in range(4)}


def test_server_starts_and_ends_without_a_receiver() -> None:
    with serve(DS_OTEL__ENDPOINT="http://127.0.0.1:1", DS_OTEL__METRICS_INTERVAL_SECS="0.05") as server:
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert server.stop() == 0


def test_nothing_is_imported_when_it_is_off() -> None:
    script = (
        "import sys, headwater.http.server, headwater.cli.serve;"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], env=server_environment(), check=False).returncode == 0


EXPORTED_TO_NOBODY = """
import logging, sys
import prometheus_client
from headwater.otel.export import TelemetryExport

logging.basicConfig(format="%(name)s %(message)s")
export = TelemetryExport(sys.argv[1], "headwater", 1.0)
for name in ("one", "two"):
    export.tracer.start_span(name).end()
export.close(prometheus_client.REGISTRY.collect())
"""


def test_receiver_that_cannot_be_reached_is_reported_once() -> None:
    # A separate process: in this one, exports of other tests may report their own receivers.
    endpoint = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", EXPORTED_TO_NOBODY, endpoint]
    done = subprocess.run(command, env=server_environment(), capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        f"headwater.otel cannot send traces and metrics to {endpoint}: Connection refused;"
        " they are dropped until it responds (check otel.endpoint)"
    ]


def test_shutdown_with_a_receiver_logs_nothing(receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture) -> None:
    from headwater.otel.export import TelemetryExport

    export = TelemetryExport(receiver.url, "headwater", 1.0)
    export.tracer.start_span("last").end()
    export.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert any(span.span.name == "last" for span in receiver.spans)
