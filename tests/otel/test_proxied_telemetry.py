"""A trace through Envoy to the server: one trace, three spans that are each other's parents, no token in any."""

from __future__ import annotations

import httpx

from tests.otel.receiver import otlp_receiver
from tests.serving import serve
from tests.stack.proxying import proxied

TRACE = "0af7651916cd43dd8448eb211c80319c"
SENDER = "b7ad6b7169203331"


def test_envoy_and_server_are_in_the_trace_of_the_client() -> None:
    with (
        otlp_receiver() as receiver,
        serve(DS_OTEL__ENDPOINT=receiver.url, OTEL_BSP_SCHEDULE_DELAY="50", DS_SERVER__ALLOWED_HOSTS="*") as server,
        proxied(server.port, DS_OTEL__ENDPOINT=receiver.url) as proxy,
    ):
        token = proxy.token()
        target = f"{proxy.url}/v1/stream/proxied?access_token={token}"
        answer = httpx.put(target, headers={"traceparent": f"00-{TRACE}-{SENDER}-01"})
        assert answer.status_code == 201
        envoy = receiver.wait_for_span(
            lambda span: span.service == "headwater-envoy" and span.trace_id == TRACE, "a span of Envoy"
        )
        created = receiver.wait_for_span(
            lambda span: span.service == "headwater" and span.trace_id == TRACE, "a span of the server"
        )
        assert envoy.parent_id == SENDER
        assert created.parent_id == envoy.span_id
        assert envoy.attributes["url.path"] == "/v1/stream/proxied"
        assert not [span for span in receiver.spans if token in str(span.span)]
