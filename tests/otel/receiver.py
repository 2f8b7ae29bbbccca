"""A real OTLP/HTTP receiver on loopback: decodes the protobuf of every request, and keeps spans and metrics."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.http_handlers import HandlerServer, QuietHandler
from tests.waiting import wait_until


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    service: str
    span: Span

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, object]:
        return attributes_of(self.span.attributes)


@dataclass(slots=True)
class OtlpReceiver:
    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    metrics: dict[tuple[str, str], Metric] = field(default_factory=dict)
    """The last value of each metric, by service and name."""

    def wait_for_span(self, wanted: Callable[[ReceivedSpan], bool], what: str) -> ReceivedSpan:
        found: list[ReceivedSpan] = []

        def look() -> bool:
            found[:] = [span for span in tuple(self.spans) if wanted(span)]
            return bool(found)

        wait_until(look, what=what)
        return found[0]

    def receive(self, path: str, body: bytes) -> None:
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                service = str(attributes_of(resource.resource.attributes)["service.name"])
                self.spans += [ReceivedSpan(service, span) for scope in resource.scope_spans for span in scope.spans]
        elif path == "/v1/metrics":
            for sent in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                service = str(attributes_of(sent.resource.attributes)["service.name"])
                for scope in sent.scope_metrics:
                    self.metrics |= {(service, metric.name): metric for metric in scope.metrics}
        else:
            raise AssertionError(f"{path} is not a path of OTLP")


def attributes_of(pairs: object) -> dict[str, object]:
    found: dict[str, object] = {}
    for pair in pairs:  # type: ignore[attr-defined]
        assert isinstance(pair, KeyValue)
        found[pair.key] = getattr(pair.value, pair.value.WhichOneof("value") or "string_value")
    return found


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self._body()
            assert self.headers["content-type"] == "application/x-protobuf"
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            receiver.receive(self.path, body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _body(self) -> bytes:
            if self.headers.get("transfer-encoding") != "chunked":
                return self.rfile.read(int(self.headers["content-length"]))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

    with HandlerServer(Handler).running() as server:
        receiver.url = server.url
        yield receiver
