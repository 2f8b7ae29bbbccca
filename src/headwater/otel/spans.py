"""Spans of the server: one for each request that it answers, and one for each webhook call that it makes.

A span of a request ends where the response begins, as in the histogram of request times: a live read may last for days.
A webhook call begins a trace: it reports appends of many requests, and the receiver continues its trace.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from time import perf_counter
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_NO_PARENT: Final = Context()


def parent_of(traceparent: str | None, tracestate: str | None = None) -> Context:
    """The context that a sender describes; without one, or with one that is not valid, a new trace begins."""
    if traceparent is None:
        return _NO_PARENT
    carrier = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
    return _PROPAGATOR.extract(carrier, _NO_PARENT)


def traceparent() -> str:
    """The current span of this program as a `traceparent` header, empty without one; for `headers` of a client."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


class RequestSpans:
    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def record(
        self,
        headers: Mapping[bytes, bytes],
        method: bytes,
        target: bytes,
        operation: str,
        status: int,
        began_s: float,
        client: str,
    ) -> None:
        """Record a request that was answered now. `began_s` is of `perf_counter`."""
        end_ns = time.time_ns()
        start_ns = end_ns - int((perf_counter() - began_s) * 1e9)
        attributes: dict[str, AttributeValue] = {
            "http.request.method": method.decode("latin-1"),
            # Without the query, which may contain a token.
            "url.path": target.partition(b"?")[0].decode("latin-1"),
            "http.response.status_code": status,
            "headwater.operation": operation,
        }
        if client:
            attributes["client.address"] = client.rpartition(":")[0]
        request_id = headers.get(b"x-request-id")
        if request_id is not None:
            attributes["headwater.request_id"] = request_id.decode("latin-1")
        parent = parent_of(_text(headers.get(b"traceparent")), _text(headers.get(b"tracestate")))
        span = self._tracer.start_span(operation, parent, SpanKind.SERVER, attributes, start_time=start_ns)
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_ns)


class CallSpans:
    """Begins the spans of webhook calls."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin(self, url: str) -> WebhookSpan:
        attributes: dict[str, AttributeValue] = {"http.request.method": "POST", "url.full": url.partition("?")[0]}
        return WebhookSpan(self._tracer.start_span("webhook", _NO_PARENT, SpanKind.CLIENT, attributes))


class WebhookSpan:
    def __init__(self, span: Span) -> None:
        self._span = span
        self.headers: dict[str, str] = {}
        _PROPAGATOR.inject(self.headers, set_span_in_context(span))

    def end(self, failure: str) -> None:
        """The call ended; `failure` is empty if the receiver accepted it."""
        if failure:
            self._span.set_status(Status(StatusCode.ERROR, failure))
        self._span.end()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
