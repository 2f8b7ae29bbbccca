"""Responses that combine the data of all workers: the list of buckets, metrics and readiness.

Metrics are summed over the workers. Some values of each worker are also reported under separate names, with the
worker as a label.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from headwater.cluster.peers import PeerLostError
from headwater.cluster.prepared_responses import PreparedResponse
from headwater.cluster.relay import Relay
from headwater.core.buckets import check_page_limit
from headwater.core.errors import Refusal
from headwater.engine.buckets import BucketPage
from headwater.http import paths
from headwater.http.buckets import BucketMetadata, metadata_of_bucket, render_bucket_listing
from headwater.http.context import Context
from headwater.http.health import not_ready, render_ready
from headwater.http.metrics import ServerCollector, render_metrics
from headwater.http.paths import Address
from headwater.http.request import Request
from headwater.http.responses import Response
from headwater.http.routing import Route

ANSWER_S: Final = 1.0
"""How long metrics and readiness wait for a worker that does not respond."""
_MAXIMUM: Final = frozenset(("headwater_clock_drift_seconds", "headwater_clock_jumps_total", "process_max_fds"))
_MINIMUM: Final = frozenset(("headwater_ready", "process_start_time_seconds"))
_ONCE: Final = frozenset(("headwater_build_info",))
_OF_WORKERS: Final = {
    "process_cpu_seconds_total": ("headwater_worker_cpu_seconds_total", "CPU time of a worker."),
    "process_resident_memory_bytes": ("headwater_worker_resident_memory_bytes", "Memory of a worker."),
    "headwater_appends_total": ("headwater_worker_appends_total", "Appends that a worker accepted."),
    "headwater_connections": ("headwater_worker_connections", "Open connections of a worker."),
    "headwater_streams": ("headwater_worker_streams", "Streams that a worker owns."),
    "headwater_ready": ("headwater_worker_ready", "1 if a worker accepts writes, otherwise 0."),
}


class CombinedResponses:
    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._context: Context | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        relay.peers.answers("buckets", self._buckets_here)
        relay.peers.answers("metrics", self._metrics_here)
        relay.peers.answers("not-ready", self._not_ready_here)

    def attach(self, context: Context) -> None:
        self._context = context

    def routes(self, routes: tuple[Route, ...]) -> tuple[Route, ...]:
        """The routes, with those that combine the data of all workers replaced."""
        makers = {paths.BUCKETS: self._list_buckets, paths.METRICS: self._collect_metrics, paths.READY: self._ready}

        def replaced(route: Route) -> Route:
            maker = makers.get(route.pattern)
            if maker is None or route.method == "OPTIONS":
                return route

            def handle(context: Context, request: Request, address: Address) -> PreparedResponse:
                answers: list[Response] = []

                async def prepare() -> None:
                    answers.append(await maker(context, address))

                return PreparedResponse(prepare, answers.pop, self._run, request)

            return replace(route, handler=handle)

        return tuple(replaced(route) for route in routes)

    def _run(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- buckets ---------------------------------------------------------------------------------------------------

    async def _list_buckets(self, context: Context, address: Address) -> Response:
        limit = check_page_limit(address.query.get("limit"))
        asked = (self._relay.ask(worker, "buckets", (address.query.get("after"), limit)) for worker in self._workers())
        pages = await asyncio.gather(*asked)
        found = [msgspec.convert(bucket, BucketMetadata) for buckets, _ in pages for bucket in buckets]
        found.sort(key=lambda bucket: bucket.bucket_id)
        has_more = len(found) > limit or any(has_more for _, has_more in pages)
        return render_bucket_listing(found[:limit], has_more=has_more)

    async def _buckets_here(self, sender: int, arguments: Any) -> tuple[list[BucketMetadata], bool]:
        after, limit = arguments
        found: asyncio.Future[BucketPage | Refusal] = asyncio.get_running_loop().create_future()

        def done(page: BucketPage | Refusal) -> None:
            if not found.done():
                found.set_result(page)

        assert self._context is not None
        self._context.engine.buckets.all(after, limit, done)
        page = await found
        if isinstance(page, Refusal):
            raise page
        return [metadata_of_bucket(bucket) for bucket in page.buckets], page.has_more

    # -- metrics and readiness -------------------------------------------------------------------------------------

    async def _collect_metrics(self, context: Context, address: Address) -> Response:
        return render_metrics(SummedCollector([await self._text_of(worker) for worker in self._workers()]))

    async def _text_of(self, worker: int) -> str | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                text: str = await self._relay.peers.ask(worker, "metrics")
        except (PeerLostError, TimeoutError):
            return None
        return text

    async def _metrics_here(self, sender: int, arguments: Any) -> str:
        assert self._context is not None
        return render_metrics(ServerCollector(self._context)).body.decode()

    async def _ready(self, context: Context, address: Address) -> Response:
        for worker in self._workers():
            try:
                async with asyncio.timeout(ANSWER_S):
                    reason: str = await self._relay.peers.ask(worker, "not-ready")
            except PeerLostError:
                reason = "it is being restarted"
            except TimeoutError:
                reason = f"it did not respond within {ANSWER_S:g} s"
            if reason:
                return render_ready(f"worker {worker}: {reason}")
        return render_ready("")

    async def _not_ready_here(self, sender: int, arguments: Any) -> str:
        assert self._context is not None
        return not_ready(self._context)

    def _workers(self) -> range:
        return range(self._relay.peers.workers)


class SummedCollector(Collector):
    """The metrics of all workers. The text of a worker that does not respond is None."""

    def __init__(self, texts: Iterable[str | None]) -> None:
        self._workers = [None if text is None else tuple(text_string_to_metric_families(text)) for text in texts]

    def collect(self) -> Iterator[Metric]:
        summed: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for families in self._workers:
            for family in families or ():
                if family.name not in summed:
                    summed[family.name] = Metric(family.name, family.documentation, family.type)
                    values[family.name] = {}
                known = values[family.name]
                for sample in family.samples:
                    key = sample.name, tuple(sorted(sample.labels.items()))
                    known[key] = _joined(sample.name, known[key], sample.value) if key in known else sample.value
        for name, family in summed.items():
            family.samples = [Sample(key[0], dict(key[1]), value) for key, value in values[name].items()]
            yield family
        yield from self._by_worker()

    def _by_worker(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("headwater_worker_up", "1 if a worker runs, otherwise 0.", labels=["worker"])
        for number, families in enumerate(self._workers):
            up.add_metric([str(number)], int(families is not None))
        yield up
        for source, (name, text) in _OF_WORKERS.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, text, labels=["worker"])
            for number, families in enumerate(self._workers):
                for sample in (sample for known in families or () for sample in known.samples):
                    if sample.name == source:
                        family.add_metric([str(number)], sample.value)
            yield family


def _joined(name: str, one: float, other: float) -> float:
    if name in _ONCE:
        return one
    if name in _MAXIMUM:
        return max(one, other)
    return min(one, other) if name in _MINIMUM else one + other
