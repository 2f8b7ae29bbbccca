"""The server process: build the components from the settings, listen, and drain on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import uvloop

from headwater.config.quotas import QuotasSettings
from headwater.core.retention import RetentionRule
from headwater.core.subscriptions import SubscriptionLimits
from headwater.engine.background_threads import Threads
from headwater.engine.clock import SteadyClock
from headwater.engine.clock_guard import JumpRule
from headwater.engine.committer import guarded
from headwater.engine.control import ControlServer, open_control_socket
from headwater.engine.descriptors import connections_max, packs_max, raise_limit
from headwater.engine.engine import Engine
from headwater.engine.fences import ClaimFences
from headwater.engine.freed_memory import memory_return
from headwater.engine.interpreter import keep_responsive
from headwater.engine.loop_lag import LoopLag
from headwater.engine.namespaces import NamespaceLimits, NamespaceRule
from headwater.engine.open_storage import Store, open_store
from headwater.engine.pause import StorePause
from headwater.engine.quota import EngineLimits
from headwater.engine.registry import StreamRegistry
from headwater.engine.scheduler import LoopScheduler
from headwater.engine.stream_host import StreamHost
from headwater.engine.subscriptions import Subscriptions
from headwater.engine.webhooks import Webhooks
from headwater.http.access import AccessControl
from headwater.http.compiled_appends import use_compiled_appends
from headwater.http.compression import CompressedChunks
from headwater.http.connection import Connection
from headwater.http.context import Context, HttpLimits
from headwater.http.forwarding import TrustedProxies
from headwater.http.metrics import ServerCollector
from headwater.http.origins import Hosts, Origins
from headwater.http.routes import ROUTES
from headwater.http.routing import Router
from headwater.http.tls import build_tls, handshake_timeout_s, load_tls_files, tls_files_error
from headwater.telemetry import request_id, set_up_logging

if TYPE_CHECKING:
    from headwater.config import Settings
    from headwater.otel.server import ServerTelemetry

log = logging.getLogger("headwater.server")

SWEEP_S: Final = 0.5
BACKLOG: Final = 4096


class Reloader:
    """Applies changed settings to a running server: certificate, client authorities, log levels.

    Invariant: if the settings or the files are wrong, an error is logged and the server keeps the previous ones.
    """

    def __init__(self, load: Callable[[], Settings]) -> None:
        self._load = load
        self._context: Context | None = None
        self._tls: ssl.SSLContext | None = None

    def attach(self, context: Context, tls: ssl.SSLContext | None) -> None:
        self._context, self._tls = context, tls

    def reload(self) -> None:
        if self._context is None:
            return
        try:
            settings = self._load()
            if self._tls is not None:
                load_tls_files(self._tls, settings)
        except ssl.SSLError as error:
            log.error("the settings were not reloaded: %s", tls_files_error(error))
            return
        except Exception as error:
            log.error("the settings were not reloaded: %s", error)
            return
        set_up_logging(settings.log.filter, settings.log.format)
        self._context.request_log.update_level()
        log.info("reloaded certificate, client authorities and log levels; other settings need a restart")


def run(settings: Settings, load: Callable[[], Settings] | None = None, *, can_pause: bool = True) -> None:
    """Serve until SIGTERM or SIGINT. Raises OSError if the address cannot be bound.

    On SIGHUP, `load` reads the settings again. With `can_pause`, local commands can pause the server.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, Reloader(load or (lambda: settings)), StorePause() if can_pause else None))


async def _serve(settings: Settings, reloader: Reloader, pause: StorePause | None) -> None:
    loop = asyncio.get_running_loop()
    open_files_max = raise_limit()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not with `add_signal_handler`: removing such a handler restores the default action for a moment, and a further
        # request to stop would end the process.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(stop.set))
    loop.add_signal_handler(signal.SIGHUP, reloader.reload)
    warn_of_loss(settings)
    try:
        while not stop.is_set():
            async with serving(settings, open_files_max, reloader, pause, lambda: keep_responsive(loop)) as address:
                await first_of(stop.wait(), *(() if pause is None else (pause.requested.wait(),)))
            if pause is not None and pause.requested.is_set() and not stop.is_set():
                log.info("paused: a local command works on %s", settings.storage.data_dir)
                # Keep a port that the system chose.
                settings = with_port(settings, int(address.rpartition(":")[2]))
                await first_of(stop.wait(), pause.hold())
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            # Ignore further signals until the process has ended: they must not change the exit code.
            signal.signal(number, signal.SIG_IGN)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of them is done, and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


def with_port(settings: Settings, port: int) -> Settings:
    return settings.model_copy(update={"server": settings.server.model_copy(update={"port": port})})


@asynccontextmanager
async def serving(
    settings: Settings,
    open_files_max: int,
    reloader: Reloader | None = None,
    pause: StorePause | None = None,
    on_recovered: Callable[[], None] | None = None,
) -> AsyncIterator[str]:
    """Listen within the running event loop; yields the address, and drains at the end.

    It does not change the process: the caller sets limits and signals. `on_recovered` sets the garbage collector; it is
    called when the streams are in memory and no client waits yet, because a full collection takes long.
    """
    loop = asyncio.get_running_loop()
    store = open_store(settings.storage, packs_max(open_files_max), settings.hot_tail_bytes)
    engine = build_engine(settings, store, loop)
    engine.start()
    registry = StreamRegistry(engine, LoopScheduler(loop)) if settings.registry.enabled else None
    if registry is not None:
        registry.start()
    telemetry = open_telemetry(settings)
    subscriptions = build_subscriptions(settings, engine, loop, engine.fences, telemetry)
    if subscriptions is not None:
        subscriptions.start()
    lag = LoopLag(engine.metrics.loop_lag_seconds)
    lag.start(loop)
    control: ControlServer | None = None
    try:
        context = build_context(
            settings, engine, subscriptions, loop, connections_max(settings, open_files_max), telemetry
        )
        router = Router(ROUTES)
        tls = build_tls(settings)
        if tls is not None:
            tls.has_space = context.connections.has_space
        if reloader is not None:
            reloader.attach(context, tls)
        if on_recovered is not None:
            on_recovered()
        server = await loop.create_server(
            lambda: Connection(context, router),
            settings.server.host,
            settings.server.port,
            ssl=tls,
            ssl_handshake_timeout=handshake_timeout_s(settings),
            backlog=BACKLOG,
            reuse_address=True,
        )
        # After the address is bound, because a command that paused the server waits for this socket.
        control = await open_control_socket(engine, store, subscriptions, settings.storage, pause)
        if subscriptions is not None:
            subscriptions.begin()
        warn_of_exposure(settings)
        address = address_of(settings, server.sockets[0].getsockname()[1])
        announce(settings, address)
        sweeping = asyncio.create_task(sweep(context))
        if telemetry is not None:
            telemetry.start(ServerCollector(context).collect)
        try:
            yield address
        finally:
            sweeping.cancel()
            await _drain(context, server, settings.server.drain_timeout_secs)
            if context.compression is not None:
                context.compression.close()
    finally:
        lag.stop()
        if control is not None:
            await control.close()
        if subscriptions is not None:
            await subscriptions.stop()
        if registry is not None:
            registry.stop()
        if telemetry is not None:
            await telemetry.close()
        engine.stop()


async def sweep(context: Context) -> None:
    """Check timeouts of connections, and return memory to the system, twice a second, whether or not that fails."""
    memory = memory_return()
    while True:
        await asyncio.sleep(SWEEP_S)
        guarded(context.sweep)
        if memory is not None:
            guarded(memory.check, context.now_s)


async def _drain(context: Context, server: asyncio.Server, timeout_s: float) -> None:
    """Accept no new connections, end live reads cleanly, complete running requests, then stop."""
    connections = context.connections
    log.info("draining %d connections", len(connections))
    context.draining = True
    server.close()
    for connection in connections.all():
        connection.drain()
    until_s = context.loop.time() + timeout_s
    while (connections or not context.engine.idle) and context.loop.time() < until_s:  # noqa: ASYNC110 - two owners, once
        await asyncio.sleep(0.01)
    if connections:
        log.warning("aborted %d connections that did not end within %g s", len(connections), timeout_s)
        for connection in connections.all():
            connection.abort()
    log.info("stopped")


def build_engine(settings: Settings, store: Store, loop: asyncio.AbstractEventLoop) -> Engine:
    retention = settings.retention
    return Engine(
        store.storage,
        SteadyClock(),
        LoopScheduler(loop),
        _limits(settings),
        sweep_interval_s=settings.expiry.sweep_interval_secs,
        jumps=JumpRule(int(settings.expiry.clock_jump_secs * 1000), int(settings.expiry.clock_jump_grace_secs * 1000)),
        commit=settings.storage.commit,
        max_batch_bytes=settings.storage.max_batch_bytes,
        blobs=store.blobs,
        background=Threads(loop),
        deferring=store.deferring,
        retention=RetentionRule(int(retention.max_age_secs * 1000), retention.max_bytes, retention.drop_uncovered),
    )


def _limits(settings: Settings) -> EngineLimits:
    """Mode `memory` has one limit for content and metadata; in other modes, the hot tail and the metadata have their
    own."""
    limits = settings.limits
    in_memory = settings.storage.mode == "memory"
    return EngineLimits(
        max_total_bytes=limits.max_memory_bytes if in_memory else 0,
        max_stream_bytes=settings.max_stream_bytes or 0,
        max_producers=limits.max_producers_per_stream,
        producer_idle_days=limits.producer_idle_days,
        max_snapshot_bytes=limits.max_snapshot_bytes,
        max_metadata_bytes=0 if in_memory else limits.max_metadata_bytes,
        max_fork_depth=limits.max_fork_depth,
        max_leases=limits.max_leases,
        max_lease_ms=int(limits.max_lease_secs * 1000),
        max_followed_streams=limits.max_followed_streams,
        namespaces=_namespaces(settings.quotas),
    )


def _namespaces(quotas: QuotasSettings) -> NamespaceRule:
    common = NamespaceLimits(quotas.max_bytes, quotas.max_streams, quotas.max_readers, quotas.max_connections)
    own = {
        name: replace(common, **{f"max_{limit}": value for limit, value in limits.items()})
        for name, limits in quotas.overrides.items()
    }
    return NamespaceRule(common, own)


def open_telemetry(settings: Settings) -> ServerTelemetry | None:
    """Open the exporters of OpenTelemetry, if enabled. Raises ImportError without the extra `headwater[otel]`."""
    otel = settings.otel
    if not otel.endpoint:
        return None
    from headwater.otel.server import ServerTelemetry  # noqa: PLC0415  (costs a second, and needs an extra)

    return ServerTelemetry(otel.endpoint, otel.sample_ratio, otel.metrics_interval_secs)


def build_subscriptions(
    settings: Settings,
    engine: StreamHost,
    loop: asyncio.AbstractEventLoop,
    fences: ClaimFences | None = None,
    telemetry: ServerTelemetry | None = None,
) -> Subscriptions | None:
    """Build the subscriptions, if enabled. With `fences`, their claims can be fenced."""
    wanted = settings.subscriptions
    if not wanted.enabled:
        return None
    return Subscriptions(
        engine,
        LoopScheduler(loop),
        Webhooks(
            concurrency=wanted.webhook_concurrency,
            per_host=wanted.webhook_concurrency_per_host,
            allow_local=bool(wanted.allow_local_webhooks),
            begin_span=telemetry.begin_call if telemetry is not None else None,
        ),
        timeout_s=wanted.webhook_timeout_secs,
        public_url=wanted.public_url or settings.server.public_url,
        key_rotation_s=wanted.key_rotation_secs,
        limits=SubscriptionLimits(
            max_subscriptions=wanted.max_subscriptions,
            max_links=wanted.max_links,
            max_links_per_subscription=wanted.max_links_per_subscription,
            max_streams_per_request=wanted.max_streams_per_request,
            max_pattern_segments=wanted.max_pattern_segments,
            max_description_chars=wanted.max_description_chars,
            max_waiting_requests=wanted.max_waiting_requests,
        ),
        fences=fences,
    )


def build_context(
    settings: Settings,
    engine: Engine,
    subscriptions: Subscriptions | None,
    loop: asyncio.AbstractEventLoop,
    max_connections: int,
    telemetry: ServerTelemetry | None = None,
) -> Context:
    server, http, limits = settings.server, settings.http, settings.limits
    context = Context(
        engine,
        HttpLimits(
            max_header_bytes=http.max_header_bytes,
            max_url_bytes=http.max_url_bytes,
            max_body_bytes=http.max_body_bytes,
            max_bodies_bytes=limits.max_request_bodies_bytes,
            max_unread_bytes=limits.max_unread_bytes,
            max_append_messages=limits.max_append_messages,
            max_json_message_bytes=limits.max_json_message_bytes,
            max_chunk_bytes=limits.max_chunk_bytes,
            max_name_bytes=limits.max_name_bytes,
            max_connections=max_connections,
            read_timeout_s=server.read_timeout_secs,
            idle_timeout_s=server.idle_timeout_secs,
            write_timeout_s=server.write_timeout_secs,
            long_poll_timeout_s=server.long_poll_timeout_secs,
            sse_reconnect_s=server.sse_reconnect_interval_secs,
            max_follows=limits.max_follows,
        ),
        loop,
        access=AccessControl(
            Hosts(server.hosts, listens_on_loopback=server.is_loopback, port=server.port),
            Origins(http.origins, allow_loopback=http.loopback_origins),
            settings.auth.token,
        ),
        cache_control=http.cache_control,
        cursor_interval_secs=settings.cursor.interval_secs,
        scheme="https" if settings.tls.cert_path else "http",
        request_id=request_id,
        subscriptions=subscriptions,
        public_url=server.public_url or settings.subscriptions.public_url,
        compression=CompressedChunks(Threads(loop, "headwater-compression", 2), LoopScheduler(loop))
        if http.compression
        else None,
        compresses_events=http.compress_events,
        proxies=TrustedProxies(server.proxies),
        root_aliases=server.root_aliases,
        tracing=telemetry.requests if telemetry is not None else None,
    )
    use_compiled_appends(context, (Connection,))
    return context


def warn_of_exposure(settings: Settings) -> None:
    """Warn about settings that expose the server to others."""
    if not settings.server.is_loopback and not settings.auth.token:
        log.warning(
            "listening on %s without authentication: any client that reaches it can read, write and delete all streams."
            " Put a proxy that checks tokens in front of it, or set auth.token (DS_AUTH__TOKEN).",
            settings.server.host,
        )
    if "*" in settings.http.origins:
        log.warning("http.cors_origins is *: every web page that a user visits can read and write streams")
    if settings.http.cache_control == "public":
        log.warning(
            "http.cache_control is public: shared caches may serve data that was read with a token to others."
            " Use private, unless everybody may read all streams."
        )


def warn_of_loss(settings: Settings) -> None:
    """Warn that mode `memory` loses all streams."""
    if settings.storage.mode == "memory":
        log.warning(
            "storage mode is memory: all streams are lost when the server stops."
            " To keep them, use --mode file-durable --data-dir DIR, or --profile dev"
        )


def announce(settings: Settings, address: str) -> None:
    """Log where the server listens, where it stores data, and where the stream browser is."""
    if settings.storage.mode != "memory":
        log.info("storage mode %s, data in %s", settings.storage.mode, settings.storage.data_dir.absolute())
    log.info("stream browser at %s/ui/", address)
    log.info("headwater listening on %s", address)


def address_of(settings: Settings, port: int) -> str:
    """The URL at which a server with these settings listens."""
    scheme, host = "https" if settings.tls.cert_path else "http", settings.server.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
