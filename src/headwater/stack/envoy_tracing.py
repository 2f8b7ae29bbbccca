"""Envoy's part of a trace: a span for each request, and `traceparent` for the server."""

from __future__ import annotations

from typing import Any, Final

from headwater.config import OtelSettings

OTEL_CLUSTER: Final = "otel"
SERVICE: Final = "headwater-envoy"


def tracing(settings: OtelSettings) -> dict[str, Any]:
    """The field `tracing` of the connection manager; empty if OpenTelemetry is off."""
    if not settings.endpoint:
        return {}
    receiver = {"uri": f"{settings.endpoint}/v1/traces", "cluster": OTEL_CLUSTER, "timeout": "5s"}
    return {
        "tracing": {
            "provider": {
                "name": "envoy.tracers.opentelemetry",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
                    "service_name": SERVICE,
                    "http_service": {"http_uri": receiver},
                },
            },
            # A request with a `traceparent` follows the decision of its sender.
            "random_sampling": {"value": settings.sample_ratio * 100},
            # The default tag has the query, which may contain a token.
            "max_path_tag_length": 0,
            "custom_tags": [{"tag": "url.path", "value": "%PATH(NQ:PATH)%"}],
        }
    }
