"""Settings for OpenTelemetry: where spans and metrics are sent, and which fraction of traces is recorded."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from headwater.config.values import Seconds, SettingsSection, takes

_ENDPOINT = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?(/[^\s?#]*)?")


class OtelSettings(SettingsSection):
    """Traces and metrics over OTLP/HTTP. Needs the extra `headwater[otel]`."""

    endpoint: str = Field(
        "",
        description="Base URL of an OTLP/HTTP receiver, such as http://localhost:4318; `/v1/traces` and `/v1/metrics`"
        " are added. Empty: OpenTelemetry is disabled.",
        json_schema_extra=takes("empty, or a URL like http://localhost:4318"),
    )
    sample_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Fraction of the traces started here that are recorded. For a request with a `traceparent`, its"
        " sender has decided.",
    )
    metrics_interval_secs: Seconds = Field(60.0, description="Interval at which metrics are sent.")

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, value: str) -> str:
        if value and not _ENDPOINT.fullmatch(value):
            raise ValueError(f"{value!r} is not a valid http or https URL")
        return value.rstrip("/")
