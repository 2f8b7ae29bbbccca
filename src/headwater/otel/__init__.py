"""OpenTelemetry: spans and metrics by OTLP over HTTP. Needs the extra `headwater[otel]`, and is imported only if on."""
