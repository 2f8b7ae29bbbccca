"""Spans of the pipeline: one for each batch that a task writes to Postgres, and one in the trace of each traced event.

The server stores messages as they are, so the trace of an event is a field of the event: `traceparent`, as in the
distributed tracing extension of CloudEvents. A batch with many traced events has spans for the first of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from opentelemetry.trace import Link, SpanKind, get_current_span
from opentelemetry.util.types import AttributeValue

from headwater.otel.export import TelemetryExport
from headwater.otel.spans import parent_of

SERVICE: Final = "headwater-sync"
TRACED_EVENTS_MAX: Final = 100
"""Events of one batch that get separate spans."""


class _TracedEvent(msgspec.Struct):
    traceparent: str = ""


_decode = msgspec.json.Decoder(_TracedEvent).decode


@functools.lru_cache(maxsize=4)
def batch_spans(endpoint: str, sample_ratio: float) -> BatchSpans:
    """The spans of this process; Python workers of Spark keep it between tasks."""
    return BatchSpans(TelemetryExport(endpoint, SERVICE, sample_ratio))


class BatchSpans:
    def __init__(self, export: TelemetryExport) -> None:
        self._export = export

    def record(
        self, name: str, values: Iterable[bytes], began_ns: int, attributes: Mapping[str, AttributeValue]
    ) -> None:
        """Record a batch that was committed now. `values` are the messages of the batch that may be traced."""
        end_ns = time.time_ns()
        tracer = self._export.tracer
        parents = [parent_of(traceparent) for traceparent in _traceparents(values)]
        links = [Link(get_current_span(parent).get_span_context()) for parent in parents]
        batch = tracer.start_span(name, parent_of(None), SpanKind.CONSUMER, attributes, links, start_time=began_ns)
        batch.end(end_ns)
        own = [Link(batch.get_span_context())]
        for parent in parents:
            tracer.start_span(name, parent, SpanKind.CONSUMER, attributes, own, start_time=began_ns).end(end_ns)


def _traceparents(values: Iterable[bytes]) -> list[str]:
    """The different traces of the messages, the first ones."""
    found: dict[str, None] = {}
    for value in values:
        try:
            traceparent = _decode(value).traceparent
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        if traceparent and get_current_span(parent_of(traceparent)).get_span_context().is_valid:
            found[traceparent] = None
            if len(found) >= TRACED_EVENTS_MAX:
                break
    return list(found)
